"""Rewards of the steps of a completion, and the tokens in which these end."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.rewards.forms import Form, form_of
from jaxrl_llm.rewards.functions import Lost, importable, of_this_program
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.types import Completion


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """A function of your own that values each step of a completion: it returns ``[(position, value), ...]``.

    It is called as ``Function`` is (in a batch it returns a list of such lists), and where another process cannot
    import it as ``Local`` is. A position is where a step ends: in ``characters`` of ``completion.text`` the one after
    its last character, 1 to ``len(text)``; in ``tokens`` the index of its last token, 0 to T - 1. Their order does not
    matter; values of steps that end in one token are added up. Anything else (a position outside, a value that is not
    finite) is a failure: the completion has no steps from this function then, and is unscorable where
    ``scoring.on_error`` is NaN.

    Steps are no part of the sum of the rewards: estimators that read ``step_rewards`` see them. Of several step rewards
    each token gets the weighted sum.

    Attributes:
      path: ``module:function``, or the function.
      weight: in that sum.
      positions: what positions count.
      batch: whether it takes lists, where the names of its parameters do not say it.
      timeout_s: as that of ``Function``.
      name: of its column in metrics and samples, the mean over a completion's steps, NaN where it has none.
    """

    path: str | Callable[..., Any]
    weight: float = 1.0
    positions: Literal["characters", "tokens"] = "characters"
    batch: bool | None = None
    timeout_s: float | None = None
    name: str = "steps"

    def __post_init__(self):
        function = of_this_program(self.path) if isinstance(self.path, str) else self.path
        if callable(function):
            object.__setattr__(self, "path", importable(function)[0] or function)

    @property
    def function(self) -> Callable[..., Any]:
        """What is called, imported."""
        return resolve(self.path) if isinstance(self.path, str) else self.path

    @property
    def form(self) -> Form:
        """How it is called."""
        return form_of(self.function, self.batch)

    def to_save(self) -> "StepFunction | Lost":
        """What config.json holds in its place where no other process can import it."""
        if isinstance(self.path, str) or dataclasses.is_dataclass(self.path):
            return self
        return Lost(self.name, self.weight, importable(self.path)[1])


def last_token(text: str, tokens: Sequence[int], end: int, tokenizer: Any) -> int:
    """The index of the token in which the first ``end`` characters of a completion are complete.

    Found by halves among its prefixes, decoded as the whole was, without special tokens: a character of several tokens
    is there once the last of them is.

    Args:
      text: of the whole completion.
      tokens: of it.
      end: 1 to ``len(text)``.
      tokenizer: that wrote the text.
    """

    def holds(count: int) -> bool:
        return tokenizer.decode(tokens[:count], skip_special_tokens=True).startswith(text[:end])

    return bisect.bisect_left(range(1, len(tokens)), True, key=holds)


def by_token(
    steps: Sequence[tuple[int, float]], completion: Completion, reward: StepFunction, tokenizer: Any
) -> np.ndarray:
    """The weighted values of steps at their last tokens, float32[t]; NaN where none ends."""
    values = np.full(len(completion.tokens), np.nan, np.float32)
    tokens = completion.tokens.tolist()
    for position, value in steps:
        at = position
        if reward.positions == "characters":
            at = last_token(completion.text, tokens, position, tokenizer)
        values[at] = np.nansum([values[at], reward.weight * value])
    return values


def added(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of several rewards of one completion's steps, float32[t]; NaN where none has one."""
    stacked = np.stack(columns)
    return np.where(np.isnan(stacked).all(axis=0), np.float32(np.nan), np.nansum(stacked, axis=0))


def mean_value(steps: Sequence[tuple[int, float]]) -> float:
    """The mean over a completion's steps; NaN where it has none."""
    return sum(value for _, value in steps) / len(steps) if steps else math.nan


def at_tokens(
    items: Sequence[Any], said: Sequence[tuple[Any, Sequence[Any]]], tokenizer: Any
) -> tuple[np.ndarray, ...]:
    """What step rewards said of completions, float32[t] each; empty without any, or without a tokenizer.

    Args:
      items: problems with completions.
      said: step rewards, each with its steps of each completion.
      tokenizer: that wrote the texts.
    """
    if not said or tokenizer is None:
        return ()
    return tuple(
        added([by_token(steps[at], completion, reward, tokenizer) for reward, steps in said])
        for at, (_, completion) in enumerate(items)
    )
