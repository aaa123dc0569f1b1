"""One answer to a chat: sampled chunk by chunk, and told as far as no later token changes what was told."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import status
from jaxrl_llm.cli.policy import Policy
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import require
from jaxrl_llm.tasks import Rows, Task
from jaxrl_llm.tasks import encode as encode_problem
from jaxrl_llm.tasks.rows import unwritable
from jaxrl_llm.types import Completion, Message, Problem

SHORTEST_CACHE = 256
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LONGEST_END = 3  # characters of "n't", the longest of those before which some tokenizers take a space away


def wording(policy: Policy, system: str | None) -> Task:
    """How prompts are written: as the run was taught on, or by the tokenizer's chat template, or as plain text.

    ``system``: the system message, in place of the run's own.
    """
    template = "tokenizer" if policy.tokenizer.chat_template else "plain"
    task = configs.wording(policy.run) or Task(Rows(()), template=template)
    return dataclasses.replace(task, system=task.system if system is None else system)


def encode(policy: Policy, messages: Sequence[Message], task: Task) -> Any:
    """Token ids of a chat up to where the answer begins, int32[T].

    Raises:
      InputError: it holds bytes that are no text, or the chat template refuses it.
    """
    broken = unwritable([task.system, task.suffix, *(message["content"] for message in messages)])
    require(not broken, f"what is asked, or the system message, holds {broken!a}, which is no UTF-8: write it in UTF-8")
    return encode_problem(Problem("prompt", tuple(messages), "", "prompt"), task, policy.tokenizer)


def say(
    policy: Policy, prompt: Any, seed: int, sampling: Sampling, stopped: Callable[[], bool] = lambda: False
) -> Completion:
    """Answer a prompt (token ids) on the standard output: on a terminal as it is sampled, elsewhere when it is whole.

    ``stopped`` is asked after each chunk whether the answer ends there.

    Raises:
      InputError: the prompt leaves no room for an answer.
    """
    screen = sys.stdout.isatty()
    told = 0

    def tell(text: str) -> None:
        nonlocal told
        if len(text) > told:
            if not told:
                status("")
            print(harmless(text[told:]) if screen else text[told:], end="", flush=True)
            told = len(text)

    def hear(tokens: Any) -> None:
        if screen:
            tell(settled(tokens, policy.tokenizer))

    status("thinking")
    done = sample(policy, prompt, seed, sampling, hear, stopped)
    text = policy.tokenizer.decode(done.tokens, skip_special_tokens=True)
    tell(text)
    if not told:
        status("")
    print(flush=True)
    return dataclasses.replace(done, text=text)


def sample(
    policy: Policy,
    prompt: Any,
    seed: int,
    sampling: Sampling,
    hear: Callable[[Any], None],
    stopped: Callable[[], bool],
) -> Completion:
    """The policy's completion; ``hear`` gets its tokens so far after each chunk.

    Raises:
      InputError: the prompt leaves no room for one.
    """
    from jaxrl_llm.rollout import Engine

    config = policy.model.config
    longest = config.attention.max_positions
    room = longest - len(prompt)
    require(room > 0, f"the prompt has {len(prompt)} tokens, and the model was made for {longest}: shorten it")
    # Powers of two, so that prompts of about one length share a compiled program.
    budget = min(sampling.max_new_tokens, room)
    length = max(SHORTEST_CACHE, 1 << (len(prompt) + budget - 1).bit_length())
    engine = Engine(policy.model, 1, length, mesh=policy.mesh)
    engine.start(dataclasses.replace(sampling, max_new_tokens=budget, stop_ids=config.tokens.eos))
    (handle,) = engine.submit([prompt], [seed])
    while engine.busy:
        if stopped():
            engine.abort([handle])
            break
        engine.step(policy.model)
        for _, running in engine.running:
            hear(running.tokens)
    return dict(engine.collect())[handle]


def settled(tokens: Sequence[int], tokenizer: Any) -> str:
    """The beginning of an answer's text that stays as it is, whatever tokens follow.

    What waits for later tokens: the bytes of a character that is not whole; bytes that are tokens of their own, since
    a tokenizer that has such ones reads all that stand in a row as characters, or none; and a space near the end, which
    some tokenizers take away before punctuation.
    """
    count = len(tokens)
    while count and _BYTE.fullmatch(tokenizer.convert_ids_to_tokens(int(tokens[count - 1])) or ""):
        count -= 1
    text = tokenizer.decode(tokens[:count], skip_special_tokens=True).rstrip("\ufffd")
    space = text.find(" ", max(len(text) - _LONGEST_END, 0))
    return text if space < 0 else text[:space]


def harmless(text: str) -> str:
    """The text without control characters, which could drive the terminal; line breaks and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)
