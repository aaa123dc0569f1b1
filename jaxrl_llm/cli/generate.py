"""``jaxrl-llm generate``: one prompt and its answer, or a prompt a line."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, parse, status
from jaxrl_llm.cli.policy import Policy, load_policy
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import prepare_libraries
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.trained import find_run

USAGE = """usage: jaxrl-llm generate MODEL_OR_RUN [--prompt TEXT] [--max_new_tokens N] [--temperature T] [--top_p P]

Without --prompt each line of the standard input is a prompt; Ctrl-D ends.
jaxrl-llm generate MODEL --help tells more."""
SHORTEST_CACHE = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer.

    Attributes:
      prompt: what to answer; None reads a prompt from each line of the standard input.
      max_new_tokens: longest answer, in tokens.
      temperature: 0 takes the most likely token each time.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
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
    """``generate MODEL_OR_RUN [--prompt TEXT] ...``; returns the exit code."""
    name = first(arguments, USAGE, 'generate needs a model or a run: jaxrl-llm generate smollm2-135m --prompt "Hello"')
    if name is None:
        return 0
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
    for prompt in _prompts(options.prompt):
        status("thinking")
        text = answer(policy, prompt, options.system, sampling, options.seed)
        status("")
        print(harmless(text) if sys.stdout.isatty() else text, flush=True)
    return 0


def answer(policy: Policy, prompt: str, system: str | None, sampling: Sampling, seed: int) -> str:
    """The policy's answer; InputError where the prompt leaves no room for one."""
    import jax

    from jaxrl_llm.rollout import Engine

    tokens = encode(policy, prompt, system)
    config = policy.model.config
    room = config.attention.max_positions - len(tokens)
    if room < 1:
        raise InputError(
            f"the prompt has {len(tokens)} tokens, and the model was made for "
            f"{config.attention.max_positions}: shorten it"
        )
    # Powers of two, so that prompts of about one length share a compiled program.
    budget = min(sampling.max_new_tokens, room)
    length = max(SHORTEST_CACHE, 1 << (len(tokens) + budget - 1).bit_length())
    sampling = dataclasses.replace(sampling, max_new_tokens=budget, stop_ids=config.tokens.eos)
    with jax.set_mesh(policy.mesh):
        done = Engine(policy.model, 1, length, mesh=policy.mesh).generate(policy.model, [tokens], [seed], sampling)[0]
    return policy.tokenizer.decode(done.tokens, skip_special_tokens=True)


def encode(policy: Policy, prompt: str, system: str | None) -> Any:
    """Token ids of a prompt as the run was taught on, or by the tokenizer's chat template, or as plain text."""
    from jaxrl_llm.tasks import ReasoningGym, Task, encode
    from jaxrl_llm.types import Problem

    template = "tokenizer" if policy.tokenizer.chat_template else "plain"
    plain = Task(ReasoningGym("prompt"), template=template)
    task = configs.wording(policy.run) or plain
    task = dataclasses.replace(task, system=task.system if system is None else system)
    return encode(Problem("prompt", ({"role": "user", "content": prompt},), "", "prompt"), task, policy.tokenizer)


def harmless(text: str) -> str:
    """The text without control characters, which could drive the terminal; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def _prompts(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    hint = "type a prompt and press Enter; Ctrl-D ends\n> "
    while True:
        status(hint)
        line = sys.stdin.readline()
        if not line:
            status("")
            return
        if line.strip():
            yield line.strip()
        hint = "> "
