"""Scores completions with several rewards; what may hang or crash runs in killable processes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.pool import Call, Pool
from jaxrl_llm.rewards.shaping import Accuracy, Function, Reward
from jaxrl_llm.rewards.verify import POOLED, inline_score
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.types import Completion, Problem

if TYPE_CHECKING:  # a scorer by itself needs no JAX
    from jaxrl_llm.sharding.distributed import Peers

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
    completion counts as unscorable). The second of two rewards of the same name is called ``name_2``. With ``peers``
    each process scores its share, in worker processes of its own, and all get the scores of all.

    Raises:
      InputError: a reward that cannot work, or numbers out of range.
    """

    def __init__(
        self, rewards: tuple[Reward, ...], workers: int = 2, timeout_s: float = 5.0, on_error: float = 0.0,
        peers: "Peers | None" = None,
    ):  # fmt: skip
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                             f"least 1 worker, more than 0 seconds, and a finite on_error or NaN")
        if not rewards:
            raise InputError("there are no rewards; give at least one, such as Accuracy()")
        for reward in rewards:
            shaping.check(reward)
        names = _unique([reward.name for reward in rewards])
        self._rewards: dict[str, Reward] = dict(zip(names, rewards, strict=True))
        self._on_error, self._peers = on_error, peers
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
        if self._peers is None or self._peers.count == 1:
            return self._score(items)
        # What a timeout or a crash made of a score is gathered with it: all processes go on from the same numbers.
        count = self._peers.count
        shares = self._peers.gather(_plain(self._score(items[self._peers.index :: count])))
        return _interleaved([_from_plain(share) for share in shares], len(items))

    def _score(self, items: Sequence[Item]) -> Scores:
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


def _plain(scores: Scores) -> dict[str, Any]:
    """As JSON values; exact."""
    parts = {name: part.tolist() for name, part in scores.parts.items()}
    return vars(scores) | {"reward": scores.reward.tolist(), "accuracy": scores.accuracy.tolist(), "parts": parts}


def _from_plain(data: dict[str, Any]) -> Scores:
    """The inverse of ``_plain``."""
    parts = {name: np.asarray(part, np.float64) for name, part in data["parts"].items()}
    reward, accuracy = (np.asarray(data[name], np.float64) for name in ("reward", "accuracy"))
    return Scores(**data | {"reward": reward, "accuracy": accuracy, "parts": parts})


def _interleaved(shares: Sequence[Scores], count: int) -> Scores:
    """The scores of ``count`` completions, of which share i has those from i on in steps of the number of shares."""

    def whole(columns: Sequence[np.ndarray]) -> np.ndarray:
        out = np.zeros(count)
        for start, column in enumerate(columns):
            out[start :: len(columns)] = column
        return out

    return Scores(
        reward=whole([share.reward for share in shares]),
        accuracy=whole([share.accuracy for share in shares]),
        parts={name: whole([share.parts[name] for share in shares]) for name in shares[0].parts},
        errors=sum(share.errors for share in shares),
        timeouts=sum(share.timeouts for share in shares),
        message=next((share.message for share in shares if share.message), ""),
    )


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
