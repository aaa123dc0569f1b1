"""Scores completions with several rewards; what may hang or crash runs in killable processes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.calls import Call, Outcome, defined
from jaxrl_llm.rewards.failures import Failures
from jaxrl_llm.rewards.forms import Form, Item, form_of
from jaxrl_llm.rewards.functions import Function, Local, as_reward
from jaxrl_llm.rewards.inside import Inside
from jaxrl_llm.rewards.pool import Pool
from jaxrl_llm.rewards.rehearsal import invented
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Reward
from jaxrl_llm.rewards.verify import POOLED, inline_score
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.types import Completion, Problem

if TYPE_CHECKING:  # a scorer by itself needs no JAX
    from jaxrl_llm.sharding.distributed import Peers

REWARD_ERROR = "reward_error.txt"
"""In the run's directory: the traceback of a reward that failed."""

BATCH_TIMES = 60
"""A call of a whole batch may take so many times what one completion may."""

_VERIFIED = ""  # the verifier's own column, which is there without an Accuracy reward too; no reward has this name


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    Attributes:
      reward: float64[n], the weighted sum of the parts; NaN where a part is.
      accuracy: float64[n], the verifier's score; 1 or more is correct, 0 where the verifier failed, NaN where there is none.
      parts: float64[n] for each reward by name, unweighted.
      failures: what could not be scored.
    """

    reward: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    failures: Failures


class _Job(NamedTuple):
    """A call, the column and the places in it that it fills, and the function where no other process has it."""

    column: str
    places: Sequence[int]
    call: Call
    function: Callable[..., Any] | None = None


class Scorer:
    """Rewards with their workers; close it, or use it in a ``with`` block.

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes, started when
    first needed, each completion for at most ``timeout_s`` seconds. What other processes cannot import runs in this one.
    A part whose call fails is ``on_error`` (NaN where that completion counts as unscorable), and its traceback goes to
    ``folder``. With ``peers`` each process scores its share, in worker processes of its own, and all get the scores of
    all.

    Raises:
      InputError: a reward that cannot work, or numbers out of range.
    """

    def __init__(
        self, rewards: Sequence[Reward | Callable[..., Any]], workers: int = 2, timeout_s: float = 5.0,
        on_error: float = 0.0, peers: "Peers | None" = None, folder: Path | None = None,
    ):  # fmt: skip
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                             f"least 1 worker, more than 0 seconds, and a finite on_error or NaN")
        if not rewards:
            raise InputError("there are no rewards; give at least one, such as Accuracy()")
        self._rewards = shaping.named([as_reward(reward) for reward in rewards])
        for reward in self._rewards.values():
            shaping.check(reward)
        self._forms = {name: _form(reward) for name, reward in self._rewards.items()}
        self._timeout_s, self._on_error, self._peers, self._folder = timeout_s, on_error, peers, folder
        self._pool, self._inside = Pool(workers), Inside()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()
        self._inside.close()

    def score(self, items: Sequence[Item]) -> Scores:
        """Scores each completion; the order is kept, and a failing call costs its own part only.

        Raises:
          InputError: a problem names an unknown extractor or verifier.
          RuntimeError: the worker processes do not start.
        """
        return self._divided(items, self._rewards)

    def verify(self, items: Sequence[Item]) -> np.ndarray:
        """``Scores.accuracy`` alone: no reward is called. It raises what ``score`` does."""
        return self._divided(items, {}).accuracy

    def rehearse(self, problem: Problem, tokenizer: Any) -> None:
        """Calls every reward once, in each process, on an invented completion: what always fails should do so early.

        Raises:
          InputError: a reward raises, runs out of time, or returns no number; the line says where, and where to read on.
        """
        count = 1 if self._peers is None else self._peers.count
        failures = self.score([(problem, invented(problem, tokenizer))] * count).failures
        if failures.message:
            raise InputError(failures.message)
        if self._writes:
            (self._folder / REWARD_ERROR).unlink(missing_ok=True)  # of an earlier attempt

    @property
    def _writes(self) -> bool:
        return self._folder is not None and (self._peers is None or self._peers.leads)

    def _divided(self, items: Sequence[Item], rewards: dict[str, Reward]) -> Scores:
        if self._peers is None or self._peers.count == 1:
            scores = self._score(items, rewards)
        else:
            # What a timeout or a crash made of a score is gathered with it: all go on from the same numbers.
            share = self._score(items[self._peers.index :: self._peers.count], rewards)
            scores = _interleaved([_from_plain(part) for part in self._peers.gather(_plain(share))], len(items))
        return dataclasses.replace(scores, failures=self._written(scores.failures))

    def _written(self, failures: Failures) -> Failures:
        """The failures with the place of their traceback in the message."""
        if self._folder is None or not failures.trace:
            return failures
        if self._writes:
            (self._folder / REWARD_ERROR).write_text(failures.trace)
        told = {name: f"{line} (traceback in {self._folder / REWARD_ERROR})" for name, line in failures.told.items()}
        return dataclasses.replace(failures, told=told)

    def _score(self, items: Sequence[Item], rewards: dict[str, Reward]) -> Scores:
        columns, jobs = _verified(items, self._timeout_s)
        for name, reward in rewards.items():
            if isinstance(reward, BUILT_IN):
                columns[name] = np.array([reward(*item) for item in items], np.float64)
            elif not isinstance(reward, Accuracy):
                columns[name] = np.zeros(len(items))
                jobs += self._jobs(name, reward, items)
        failed = self._fill(columns, jobs)
        accuracy = columns[_VERIFIED].copy()
        accuracy[[place for name, place in failed if name == _VERIFIED]] = 0.0
        source = {name: _VERIFIED if isinstance(reward, Accuracy) else name for name, reward in rewards.items()}
        parts = {name: columns[column] for name, column in source.items()}
        return Scores(
            reward=sum((rewards[name].weight * parts[name] for name in parts), np.zeros(len(items))),
            accuracy=accuracy,
            parts=parts,
            failures=_failures(failed, source, len(items)),
        )

    def _jobs(self, name: str, reward: Any, items: Sequence[Item]) -> list[_Job]:
        """The calls of a function, of one completion each or of all."""
        form, function = self._forms[name], None if isinstance(reward, Function) else _callable(reward)
        seconds = getattr(reward, "timeout_s", None) or self._timeout_s * (BATCH_TIMES if form.batch else 1)
        path = reward.path if isinstance(reward, Function) else name
        bare = [(problem, dataclasses.replace(completion, extras={})) for problem, completion in items]
        every = range(len(items))
        shares = [every] if items and (form.batch or form.waits) else [[place] for place in every]
        return [_Job(name, share, Call(path, [bare[at] for at in share], form, seconds), function) for share in shares]

    def _fill(self, columns: dict[str, np.ndarray], jobs: Sequence[_Job]) -> dict[tuple[str, int], Outcome]:
        """Makes the calls and fills their places; returns those that failed, with what is said of them."""
        pooled = iter(self._pool.map([job.call for job in jobs if job.function is None]))
        failed: dict[tuple[str, int], Outcome] = {}
        for job in jobs:
            outcomes = next(pooled) if job.function is None else self._inside.run(job.function, job.call)
            for place, outcome in zip(job.places, outcomes, strict=True):
                columns[job.column][place] = outcome.value if outcome.status == "ok" else self._on_error
                if outcome.status != "ok":
                    failed[job.column, place] = outcome._replace(message=self._line(job, outcome))
        return failed

    def _line(self, job: _Job, outcome: Outcome) -> str:
        """``my_rewards.py:7: ZeroDivisionError: division by zero``."""
        reward = self._rewards.get(job.column)
        place = outcome.place or (defined(_callable(reward)) if reward is not None else "") or job.call.path
        return f"{place}: {outcome.message}"


def _form(reward: Reward) -> Form | None:
    """How it is called; None where that is known."""
    if isinstance(reward, (Function, Local)):
        return reward.form
    return None if isinstance(reward, (Accuracy, *BUILT_IN)) else form_of(reward)


def _callable(reward: Any) -> Callable[..., Any]:
    return reward.function if isinstance(reward, (Function, Local)) else reward


def _verified(items: Sequence[Item], timeout_s: float) -> tuple[dict[str, np.ndarray], list[_Job]]:
    """The verifier's column as far as it can be computed here, and the calls that fill the rest."""
    column, jobs = np.zeros(len(items)), []
    for place, (problem, completion) in enumerate(items):
        scored = _verify(problem, completion)
        if isinstance(scored, str):
            answer = extract(completion.text, problem.extractor)
            jobs.append(_Job(_VERIFIED, [place], Call(scored, [(answer, problem)], timeout_s=timeout_s)))
        else:
            column[place] = scored
    return {_VERIFIED: column}, jobs


def _verify(problem: Problem, completion: Completion) -> float | str:
    """The accuracy, or the path of the function that computes it; NaN where nothing is verified."""
    if problem.verifier == "none":
        return math.nan
    answer = extract(completion.text, problem.extractor)
    if answer is None:
        return 0.0
    score = inline_score(answer, problem)
    return POOLED[problem.verifier] if score is None else score


def _failures(failed: dict[tuple[str, int], Outcome], source: dict[str, str], count: int) -> Failures:
    lost = [column for column, _ in failed]
    first = {column: outcome for (column, _), outcome in reversed(failed.items())}
    names = {column: name for name, column in reversed(source.items())}
    return Failures(
        errors=sum(outcome.status == "error" for outcome in failed.values()),
        timeouts=sum(outcome.status == "timeout" for outcome in failed.values()),
        of={name: (count, lost.count(column)) for name, column in source.items()},
        told={names.get(column, ""): first[column].message for column in dict.fromkeys(lost)},
        trace="\n".join(f"{first[column].message}\n{first[column].trace}" for column in dict.fromkeys(lost) if first[column].trace),
    )


def _plain(scores: Scores) -> dict[str, Any]:
    """As JSON values; exact."""
    parts = {name: part.tolist() for name, part in scores.parts.items()}
    arrays = {"reward": scores.reward.tolist(), "accuracy": scores.accuracy.tolist(), "parts": parts}
    return arrays | {"failures": vars(scores.failures)}


def _from_plain(data: dict[str, Any]) -> Scores:
    """The inverse of ``_plain``."""
    parts = {name: np.asarray(part, np.float64) for name, part in data["parts"].items()}
    reward, accuracy = (np.asarray(data[name], np.float64) for name in ("reward", "accuracy"))
    return Scores(reward, accuracy, parts, Failures(**data["failures"]))


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
        failures=sum((share.failures for share in shares), Failures()),
    )
