"""One completion for each prompt, with its text."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.types import Completion

Status = Callable[[str], None]
Watch = Callable[[Mapping[int, Completion]], Mapping[int, int]]
"""From completions with their texts, by number, to how many first tokens are enough of those that should not go on."""


def complete(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    sampling: Sampling,
    version: int = 0,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> list[Completion]:
    """One completion with its text for each prompt (token ids) and seed, in order.

    ``status`` hears how far it is. ``watch`` is asked after each chunk about all that run, numbered as the prompts are,
    and at the end about all: what it ends has the reason "aborted".
    """
    engine.start(sampling)
    return drain(engine, model, tokenizer, engine.submit(prompts, seeds), version, status, watch)


def drain(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    handles: Sequence[int],
    version: int = 0,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> list[Completion]:
    """The completions of all requests that the engine has, with their texts, in the order of their handles."""
    done: dict[int, Completion] = {}
    tokens = 0
    while engine.busy:
        status(f"sampling {len(done)}/{len(handles)} completions, {tokens} tokens")
        tokens += engine.step(model, version)
        if watch is not None:
            end_early(engine, tokenizer, handles, watch)
        done |= dict(engine.collect())
    found = with_texts([done[handle] for handle in handles], tokenizer)
    if watch is None:
        return found
    ends = watch(dict(enumerate(found)))
    cut = with_texts([first_tokens(found[number], end) for number, end in ends.items()], tokenizer)
    for number, completion in zip(ends, cut, strict=True):
        found[number] = completion
    return found


def end_early(engine: Engine, tokenizer: Any, handles: Sequence[int], watch: Watch) -> None:
    """Abort those of the running requests that should not go on."""
    numbers = {handle: number for number, handle in enumerate(handles)}
    running = engine.running
    made = with_texts([completion for _, completion in running], tokenizer)
    ended = watch({numbers[handle]: c for (handle, _), c in zip(running, made, strict=True)})
    if ended:  # the chunk that is being computed has to be waited for
        engine.abort([handles[number] for number in ended])


def with_texts(completions: Sequence[Completion], tokenizer: Any) -> list[Completion]:
    """The completions with what their tokens say."""
    if not completions:  # of no text at all tokenizers make one that is empty
        return []
    texts = tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
    return [dataclasses.replace(c, text=text) for c, text in zip(completions, texts, strict=True)]
