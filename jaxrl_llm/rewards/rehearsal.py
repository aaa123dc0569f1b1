"""The invented completion of a task with an environment or tools, on which rewards are called before a run begins."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.types import Completion, Episode, Turn


def as_episode(answer: Completion, tools: Sequence[str]) -> Completion:
    """Return an episode of two turns that ends with this answer: the environment replies to the first, which calls a
    tool if there are ``tools`` (their names).

    Its tokens are those of the answer three times: for each turn, and for the environment's words, which no policy
    sampled.
    """
    size = len(answer.tokens)
    said = {"role": "assistant", "content": answer.text}
    calls = [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}} for name in tools[:1]]
    heard = {"role": "tool", "name": tools[0], "tool_call_id": "call_0"} if calls else {"role": "user"}
    first = Turn(
        size, said | ({"tool_calls": calls} if calls else {}), (heard | {"content": answer.text},), calls=len(calls)
    )
    thrice = {name: np.tile(getattr(answer, name), 3) for name in ("tokens", "sampler_logp", "version", "mask")}
    thrice["mask"][size : 2 * size] = False
    episode = Episode((first, Turn(3 * size, said)), "completed", tools=len(tools))
    return dataclasses.replace(answer, **thrice, episode=episode)
