"""usage: jaxrl-llm generate MODEL_OR_RUN [--prompt TEXT] [--max_new_tokens N] [--temperature T] [--top_p P]

Without --prompt it is a chat, on a terminal: each answer knows what was said before; Ctrl-C ends an answer, Ctrl-D the
chat, /new begins another. From a pipe or a file each line is a prompt by itself, and only the answers are written.
jaxrl-llm generate MODEL --help tells more."""

import dataclasses
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, load_policy
from jaxrl_llm.cli.flags import first, parse, status
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.runs.load import find_run
from jaxrl_llm.system.paths import prepare_libraries
from jaxrl_llm.tasks import Rows, Task
from jaxrl_llm.tasks import encode as encode_problem
from jaxrl_llm.tasks.prompts import unwritable
from jaxrl_llm.tasks.sources import InMemory
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.types import Completion, Message, Problem

SHORTEST_CACHE = 256
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LONGEST_END = 3  # characters of "n't", the longest of those before which some tokenizers take a space away


@dataclasses.dataclass(frozen=True)
class Options:
    """The prompt and how to sample the answer.

    Attributes:
      prompt: the prompt; None is a chat on a terminal, and elsewhere reads a prompt from each line of stdin.
      max_new_tokens: longest answer, in tokens.
      temperature: 0 takes the most likely token each time.
      top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps all.
      min_p: keep the tokens that are at least this share as likely as the most likely one; 0 keeps all.
      seed: another one gives another answer, unless the temperature is 0.
      system: the system message, in place of the run's own.
    """

    prompt: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    system: str | None = None


def generate(arguments: list[str]) -> int:
    """Run ``generate MODEL_OR_RUN [--prompt TEXT] ...``; return the exit code."""
    name = first(
        arguments, __doc__, 'generate needs a model or a run: jaxrl-llm generate smollm2-135m --prompt "Hello"'
    )
    prepare_libraries()
    options = parse(Options, arguments, f"jaxrl-llm generate {name}", "Answer a prompt.")
    if options.prompt is not None and not options.prompt.strip():
        raise InputError("--prompt is empty: give it some text")
    configs.check_seed("--seed", options.seed)
    # Wrong numbers are refused here, before the model is loaded.
    sampling = Sampling(options.temperature, 0, options.top_p, options.max_new_tokens, min_p=options.min_p)
    run = find_run(name)
    status(f"loading {name}")
    policy = load_policy(name, run, writes=True)
    check_tokenizer(policy.tokenizer, name)
    status("")
    task = wording(policy, options.system)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are: ``encode`` refuses them
    if options.prompt is None and sys.stdin.isatty():
        from jaxrl_llm.cli.chat import chat

        chat(policy, task, sampling, options.seed)
        return 0
    lines = (line.strip() for line in sys.stdin) if options.prompt is None else [options.prompt]
    for prompt in filter(None, lines):
        say(policy, encode(policy, [{"role": "user", "content": prompt}], task), options.seed, sampling)
    return 0


def wording(policy: Policy, system: str | None) -> Task:
    """Return the wording of prompts: that of the run's training, else the tokenizer's chat template, else plain text.


    ``system``: the system message, in place of the run's own.
    """
    template = "tokenizer" if policy.tokenizer.chat_template else "plain"
    task = configs.wording(policy.run) or Task(Rows(InMemory(())), template=template)
    return dataclasses.replace(task, system=task.system if system is None else system)


def encode(policy: Policy, messages: Sequence[Message], task: Task) -> Any:
    """Return the token ids of a chat up to the beginning of the answer, int32[T].

    Raises:
      InputError: a text is not valid UTF-8, or the chat template refuses the chat.
    """
    broken = unwritable([task.system, task.suffix, *(message["content"] for message in messages)])
    require(not broken, f"what is asked, or the system message, holds {broken!a}, which is no UTF-8: write it in UTF-8")
    return encode_problem(Problem("prompt", tuple(messages), "", "prompt"), task, policy.tokenizer)


def say(
    policy: Policy, prompt: Any, seed: int, sampling: Sampling, stopped: Callable[[], bool] = lambda: False
) -> Completion:
    """Print an answer to a prompt (token ids) on stdout: on a terminal while it is sampled, elsewhere at its end.

    ``stopped`` is called after each chunk; the answer ends when it returns True.

    Raises:
      InputError: the prompt leaves no room for an answer.
    """
    from jaxrl_llm.engine.backend import backend_for
    from jaxrl_llm.rollout.respond import Requests, respond

    screen = sys.stdout.isatty()
    told = 0

    def tell(text: str) -> None:
        nonlocal told
        if len(text) > told:
            if not told:
                status("")
            print(harmless(text[told:]) if screen else text[told:], end="", flush=True)
            told = len(text)

    status("thinking")
    config = policy.model.config
    longest = config.attention.max_positions
    room = longest - len(prompt)
    require(room > 0, f"the prompt has {len(prompt)} tokens, and the model was made for {longest}: shorten it")
    # Powers of two, so that prompts of about one length share a compiled program.
    budget = min(sampling.max_new_tokens, room)
    length = max(SHORTEST_CACHE, 1 << (len(prompt) + budget - 1).bit_length())
    engine, _ = backend_for(policy.model, None, policy.mesh, policy.mesh, slots=1, max_length=length)
    requests = Requests(engine, dataclasses.replace(sampling, max_new_tokens=budget, stop_ids=config.tokens.eos))
    requests.submit(["answer"], [prompt], [seed])
    done: dict[Any, Completion] = {}
    for over in respond(requests, policy.model):
        done |= over
        for running in requests.running.values() if screen else ():
            tell(settled(running.tokens, policy.tokenizer))
        if requests and stopped():
            requests.abort(requests.keys)
    text = policy.tokenizer.decode(done["answer"].tokens, skip_special_tokens=True)
    tell(text)
    if not told:
        status("")
    print(flush=True)
    return dataclasses.replace(done["answer"], text=text)


def settled(tokens: Any, tokenizer: Any) -> str:
    """Return the beginning of an answer's text that no later token can change.

    The rest waits: the bytes of an incomplete character; bytes that are single tokens, since a tokenizer with byte
    tokens reads a whole row of them as characters, or not at all; and a space near the end, which some tokenizers
    remove before punctuation.
    """
    count = len(tokens)
    while count and _BYTE.fullmatch(tokenizer.convert_ids_to_tokens(int(tokens[count - 1])) or ""):
        count -= 1
    text = tokenizer.decode(tokens[:count], skip_special_tokens=True).rstrip("\ufffd")
    space = text.find(" ", max(len(text) - _LONGEST_END, 0))
    return text if space < 0 else text[:space]


def harmless(text: str) -> str:
    """Replace control characters, which could drive the terminal, by spaces; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)
