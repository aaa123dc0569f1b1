"""Scores completions with several rewards; what may hang or crash runs in killable processes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.pool import Call, Pool
from jaxrl_llm.rewards.shaping import Accuracy, Function, Reward
from jaxrl_llm.rewards.verify import POOLED, inline_score
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.types import Completion, Problem

Item = tuple[Problem, Completion]

_VERIFIED = ""  # the verifier's own column, which is there without an Accuracy reward too; no reward has this name


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    Attributes:
      reward: float64[n], the weighted sum of the parts; NaN where a part is.
      accuracy: float64[n], the verifier's score; 1 or more is correct, and 0 where the verifier failed.
      parts: float64[n] for each reward by name, unweighted.
      errors: calls that raised or whose process died.
      timeouts: calls that ran past the deadline.
      message: of the first of those, empty where there is none.
    """

    reward: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    errors: int
    timeouts: int
    message: str = ""


class Scorer:
    """Rewards with their workers; close it, or use it in a ``with`` block.

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes, started when
    first needed, each call for at most ``timeout_s`` seconds. A part whose call fails is ``on_error`` (NaN where that
    completion counts as unscorable). The second of two rewards of the same name is called ``name_2``.

    Raises:
      InputError: a reward that cannot work, or numbers out of range.
    """

    def __init__(self, rewards: tuple[Reward, ...], workers: int = 2, timeout_s: float = 5.0, on_error: float = 0.0):
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                             f"least 1 worker, more than 0 seconds, and a finite on_error or NaN")
        if not rewards:
            raise InputError("there are no rewards; give at least one, such as Accuracy()")
        for reward in rewards:
            shaping.check(reward)
        names = _unique([reward.name for reward in rewards])
        self._rewards: dict[str, Reward] = dict(zip(names, rewards, strict=True))
        self._on_error = on_error
        self._pool = Pool(workers, timeout_s)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def score(self, items: Sequence[Item]) -> Scores:
        """Scores each completion; the order is kept, and a failing call costs its own part only.

        Raises:
          InputError: a problem names an unknown extractor or verifier.
          RuntimeError: the worker processes do not start.
        """
        columns, calls = self._inline(items)
        outcomes = dict(zip(calls, self._pool.map(list(calls.values())), strict=True))
        failed = {spot: outcome for spot, outcome in outcomes.items() if outcome.status != "ok"}
        for (name, index), outcome in outcomes.items():
            columns[name][index] = outcome.value if outcome.status == "ok" else self._on_error
        accuracy = columns[_VERIFIED].copy()
        accuracy[[index for name, index in failed if name == _VERIFIED]] = 0.0
        parts = {name: columns[_VERIFIED if isinstance(reward, Accuracy) else name]
                 for name, reward in self._rewards.items()}
        return Scores(
            reward=sum((self._rewards[name].weight * parts[name] for name in parts), np.zeros(len(items))),
            accuracy=accuracy,
            parts=parts,
            errors=sum(outcome.status == "error" for outcome in failed.values()),
            timeouts=sum(outcome.status == "timeout" for outcome in failed.values()),
            message=next((f"{calls[spot].path}: {outcome.message}" for spot, outcome in failed.items()), ""),
        )

    def _inline(self, items: Sequence[Item]) -> tuple[dict[str, np.ndarray], dict[tuple[str, int], Call]]:
        """The columns that can be computed here, and the calls that fill the rest."""
        columns: dict[str, np.ndarray] = {_VERIFIED: np.zeros(len(items))}
        calls: dict[tuple[str, int], Call] = {}
        for index, (problem, completion) in enumerate(items):
            scored = _verify(problem, completion)
            if isinstance(scored, Call):
                calls[_VERIFIED, index] = scored
            else:
                columns[_VERIFIED][index] = scored
        for name, reward in self._rewards.items():
            if isinstance(reward, Function):
                columns[name] = np.zeros(len(items))
                for index, (problem, completion) in enumerate(items):
                    calls[name, index] = Call(reward.path, (problem, dataclasses.replace(completion, extras={})))
            elif not isinstance(reward, Accuracy):
                columns[name] = np.array([reward(*item) for item in items], np.float64)
        return columns, calls


def _verify(problem: Problem, completion: Completion) -> float | Call:
    """The accuracy, or the call that computes it."""
    answer = extract(completion.text, problem.extractor)
    if answer is None:
        return 0.0
    score = inline_score(answer, problem)
    return Call(POOLED[problem.verifier], (answer, problem)) if score is None else score


def _unique(names: list[str]) -> list[str]:
    unique = [f"{name}_{names[:at].count(name) + 1}" if name in names[:at] else name for at, name in enumerate(names)]
    if len(set(unique)) < len(names):
        raise InputError(f"rewards are named {', '.join(names)}; rename a function so that no two names clash")
    return unique
