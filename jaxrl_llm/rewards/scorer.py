"""Scores completions with several rewards; what may hang or crash runs in killable processes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.bounds import Gate, base_of, check_bound, shaped
from jaxrl_llm.rewards.by_task import places_of, spread
from jaxrl_llm.rewards.calls import LARGEST, Outcome
from jaxrl_llm.rewards.failures import Failures
from jaxrl_llm.rewards.forms import Item
from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rewards.inside import Inside
from jaxrl_llm.rewards.jobs import VERIFIED, Job, form_of_reward, jobs_of, told, verified
from jaxrl_llm.rewards.models import DISAGREEMENT, OF_STEPS, ON_DEVICE, ModelReward
from jaxrl_llm.rewards.pool import Pool
from jaxrl_llm.rewards.rehearsal import invented
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Reward
from jaxrl_llm.rewards.steps import StepFunction, at_tokens, mean_value
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a scorer by itself needs no JAX
    from jaxrl_llm.sharding.distributed import Peers

REWARD_ERROR = "reward_error.txt"
"""In the run's directory: the traceback of a reward that failed."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    Attributes:
      reward: float64[n], the weighted sum of the parts that are rewards of whole completions; NaN where one is.
      accuracy: float64[n], the verifier's score; 1 or more is correct, 0 where the verifier failed, NaN where there is
        none.
      parts: float64[n] for each reward by name, unweighted, and for what is only watched; of a step reward the mean
        over the steps. Of an ensemble of reward models also ``<name>/disagreement``.
      failures: what could not be scored.
      steps: for each completion float32[t], the weighted sum of the step rewards at the tokens in which steps end, NaN
        elsewhere; empty where there is no step reward.
    """

    reward: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    failures: Failures
    steps: tuple[np.ndarray, ...] = ()


class Scorer:
    """Rewards with their workers; close it, or use it in a ``with`` block.

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes, started when
    first needed, each completion for at most ``timeout_s`` seconds. What other processes cannot import runs in this
    one. A part whose call fails is ``on_error`` (NaN where that completion counts as unscorable), and its traceback
    goes to ``folder``. With ``peers`` each process scores its share, in worker processes of its own, and all get the
    scores of all.

    ``watched``: rewards by the names of their parts that are no part of the sum (``Gate``, costs of constraints). Where
    their call fails they are NaN: a placeholder could pass for harmless. ``asked``: such that ``score`` passes over.

    Attributes:
      folder: the run's; None for none.
      tokenizer: that wrote the texts. Positions in characters become tokens by it: without it ``Scores.steps`` is
        empty, which is enough where nothing is learned.
      models: what gives the scores of ``ModelReward``, float64[n, m] by its m models, and of ``StepReward``, by those
        rewards: they see all completions on every process.

    Raises:
      InputError: a reward that cannot work, or numbers out of range.
    """

    def __init__(
        self, rewards: Sequence[Reward | Callable[..., Any]], workers: int = 2, timeout_s: float = 5.0,
        on_error: float = 0.0, peers: "Peers | None" = None, folder: Path | None = None,
        watched: Mapping[str, Any] | None = None, asked: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(
                f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                f"least 1 worker, more than 0 seconds, and a finite on_error or NaN"
            )
        if not rewards:
            raise InputError("there are no rewards; give at least one, such as Accuracy()")
        self._rewards = shaping.named([as_reward(reward) for reward in rewards])
        given = dict(watched or {}) | dict(asked or {})
        beside = {name: one if isinstance(one, Gate) else as_reward(one) for name, one in given.items()}
        self._watched = {name: one for name, one in beside.items() if name not in (asked or {})}
        self._beside = beside
        for reward in self._rewards.values():
            shaping.check(reward)
        for reward in beside.values():
            check_bound(reward, shaping.check) if isinstance(reward, Gate) else shaping.check(reward)
        self._bases = {name: base_of(reward) for name, reward in (self._rewards | beside).items()}
        self._forms = {name: form_of_reward(base) for name, base in self._bases.items()}
        self.tokenizer: Any = None
        self.models: Mapping[Any, Callable[[Sequence[Item]], Any]] = {}
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._peers = peers
        self.folder = folder
        self._errors = None if folder is None else folder / REWARD_ERROR
        self._writes = self._errors is not None and (peers is None or peers.leads)
        self._pool = Pool(workers)
        self._inside = Inside()

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
          InputError: a problem names an unknown extractor or verifier, or a sum of rewards is beyond ``LARGEST``.
          RuntimeError: the worker processes do not start.
        """
        return self._divided(items, self._rewards | self._watched)

    def only(self, items: Sequence[Item], names: Collection[str]) -> Scores:
        """``Scores.accuracy``, and of what is watched or asked the parts of these names, as far as they are there.

        It raises what ``score`` does.
        """
        return self._divided(items, {name: one for name, one in self._beside.items() if name in names})

    def verify(self, items: Sequence[Item]) -> np.ndarray:
        """``Scores.accuracy`` alone: no reward is called. It raises what ``score`` does."""
        return self.only(items, ()).accuracy

    def rehearse(self, problem: Problem, tokenizer: Any) -> None:
        """Calls every function once, in each process, on an invented completion: what always fails should do so early.

        Raises:
          InputError: a reward raises, runs out of time, or returns no number; the line says where, and where to read
            on.
        """
        count = 1 if self._peers is None else self._peers.count
        called = self._rewards | self._beside
        called = {name: reward for name, reward in called.items() if not isinstance(self._bases[name], ON_DEVICE)}
        failures = self._divided([(problem, invented(problem, tokenizer))] * count, called).failures
        if failures.message:
            raise InputError(failures.message)
        if self._writes:
            self._errors.unlink(missing_ok=True)  # of an earlier attempt

    def _divided(self, items: Sequence[Item], rewards: dict[str, Any]) -> Scores:
        """The scores of these rewards: of models on the device first, of all items; the others are shared out."""
        bases = {name: self._bases[name] for name in rewards}
        given = {
            name: _where(places_of(rewards[name], items), items, self.models[base])
            for name, base in bases.items()
            if isinstance(base, ON_DEVICE)
        }
        if self._peers is None or self._peers.count == 1:
            scores = self._score(items, rewards, given)
        else:
            # What a timeout or a crash made of a score is gathered with it: all go on from the same numbers.
            own = slice(self._peers.index, None, self._peers.count)
            share = self._score(items[own], rewards, {name: column[own] for name, column in given.items()})
            scores = _interleaved([_from_plain(part) for part in self._peers.gather(_plain(share))], len(items))
        _check_sums(scores.reward)
        failures = scores.failures
        if self._errors is None or not failures.trace:
            return scores
        if self._writes:
            with new_file(self._errors) as part:
                part.write_text(failures.trace, encoding="utf-8", errors="backslashreplace")
        return dataclasses.replace(scores, failures=failures.explained_in(self._errors))

    def _score(self, items: Sequence[Item], rewards: dict[str, Any], given: Mapping[str, Any]) -> Scores:
        columns, jobs = verified(items, self._timeout_s)
        bases = {name: self._bases[name] for name in rewards}
        places = {name: places_of(reward, items) for name, reward in rewards.items()}
        for name, base in bases.items():
            if name in given:
                columns[name] = base.combined(given[name]) if isinstance(base, ModelReward) else given[name]
            elif isinstance(base, BUILT_IN):
                columns[name] = _where(places[name], items, functools.partial(_called, base))
            elif not isinstance(base, Accuracy):
                columns[name] = np.zeros(len(items), object if isinstance(base, StepFunction) else np.float64)
                jobs += jobs_of(name, base, self._forms[name], items, self._timeout_s, places[name])
        pooled = iter(self._pool.map([job.call for job in jobs if job.function is None]))
        said = [next(pooled) if job.function is None else self._inside.run(job.function, job.call) for job in jobs]
        failed = _fill(columns, jobs, said, self._on_error, self._bases)
        accuracy = columns[VERIFIED].copy()
        accuracy[[place for name, place in failed if name == VERIFIED]] = 0.0
        source = {name: VERIFIED if isinstance(base, Accuracy) else name for name, base in bases.items()}
        stepped = {name: columns[name] for name, base in bases.items() if isinstance(base, OF_STEPS)}
        whole = {name: shaped(rewards[name], columns[source[name]]) for name in rewards if name not in stepped}
        for name in whole.keys() & self._beside.keys():
            lost = [place for column, place in failed if column == source[name]]
            whole[name][lost] = shaped(rewards[name], np.full(len(lost), np.nan))
        reward = np.zeros(len(items))
        for name in (name for name in whole if name in self._rewards):
            at = slice(None) if places[name] is None else places[name]
            reward[at] += rewards[name].weight * whole[name][at]
            whole[name] = spread(whole[name][at], places[name], len(items))
        if math.isnan(self._on_error):
            reward[[place for column, place in failed if column in stepped]] = np.nan
        means = {name: np.array([mean_value(steps) for steps in column]) for name, column in stepped.items()}
        return Scores(
            reward=reward,
            accuracy=accuracy,
            parts={name: (means | whole)[name] for name in rewards} | _disagreements(self._rewards, given),
            failures=_failures(
                failed, source, {n: range(len(items)) if at is None else at for n, at in places.items()}
            ),
            steps=at_tokens(items, [(self._bases[name], said) for name, said in stepped.items()], self.tokenizer),
        )


def _disagreements(rewards: Mapping[str, Reward], given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By how much the models of each ensemble among the rewards differ about each completion: their deviations.

    ``given``: what the models give the completions, by the reward's name.
    """
    of_models = {name: given[name] for name in given if isinstance(base_of(rewards.get(name)), ModelReward)}
    several = {name: scores for name, scores in of_models.items() if scores.shape[1:] > (1,)}
    return {f"{name}/{DISAGREEMENT}": scores.std(axis=1) for name, scores in several.items()}


def _check_sums(rewards: np.ndarray) -> None:
    """Refuse sums of which no advantages could be made; all processes see the same ones."""
    largest = np.abs(rewards[~np.isnan(rewards)]).max(initial=0.0)
    if largest > LARGEST:
        raise InputError(
            f"rewards with their weights add up to {largest:g} in size, and advantages are made of {LARGEST:g} at "
            "most: give them smaller weights"
        )


def _where(
    places: Sequence[int] | None, items: Sequence[Item], score: Callable[[Sequence[Item]], np.ndarray]
) -> np.ndarray:
    """The scores of the completions in these places; NaN elsewhere."""
    return score(items) if places is None else spread(score([items[at] for at in places]), places, len(items))


def _called(reward: Any, items: Sequence[Item]) -> np.ndarray:
    return np.array([reward(*item) for item in items], np.float64)


def _fill(
    columns: dict[str, np.ndarray],
    jobs: Sequence[Job],
    said: Sequence[Sequence[Outcome]],
    on_error: float,
    rewards: Mapping[str, Any],
) -> dict[tuple[str, int], Outcome]:
    """Fills the places of calls with what came of them; returns those that failed, with what is said of them."""
    failed: dict[tuple[str, int], Outcome] = {}
    for job, outcomes in zip(jobs, said, strict=True):
        for place, outcome in zip(job.places, outcomes, strict=True):
            instead = () if job.call.positions else on_error
            columns[job.column][place] = outcome.value if outcome.status == "ok" else instead
            if outcome.status != "ok":
                message = told(job, rewards.get(job.column), outcome)
                failed[job.column, place] = outcome._replace(message=message)
    return failed


def _failures(
    failed: dict[tuple[str, int], Outcome], source: dict[str, str], places: Mapping[str, Sequence[int]]
) -> Failures:
    """What went wrong, of rewards that score the completions in their ``places``."""
    lost = [column for column, _ in failed]
    first = {column: outcome for (column, _), outcome in reversed(failed.items())}
    names = {column: name for name, column in reversed(source.items())}
    return Failures(
        errors=sum(outcome.status == "error" for outcome in failed.values()),
        timeouts=sum(outcome.status == "timeout" for outcome in failed.values()),
        of={
            name: (len(places[name]), sum((column, at) in failed for at in places[name]))
            for name, column in source.items()
        },
        told={names.get(column, ""): first[column].message for column in dict.fromkeys(lost)},
        trace="\n".join(
            f"{first[column].message}\n{first[column].trace}" for column in dict.fromkeys(lost) if first[column].trace
        ),
    )


def _plain(scores: Scores) -> dict[str, Any]:
    """As JSON values; exact."""
    parts = {name: part.tolist() for name, part in scores.parts.items()}
    arrays = {"reward": scores.reward.tolist(), "accuracy": scores.accuracy.tolist(), "parts": parts}
    return arrays | {"failures": vars(scores.failures), "steps": [codec.pack(steps) for steps in scores.steps]}


def _from_plain(data: dict[str, Any]) -> Scores:
    """The inverse of ``_plain``."""
    parts = {name: np.asarray(part, np.float64) for name, part in data["parts"].items()}
    reward, accuracy = (np.asarray(data[name], np.float64) for name in ("reward", "accuracy"))
    steps = tuple(codec.unpack(packed) for packed in data["steps"])
    return Scores(reward, accuracy, parts, Failures(**data["failures"]), steps)


def _interleaved(shares: Sequence[Scores], count: int) -> Scores:
    """The scores of ``count`` completions, of which share i has those from i on in steps of the number of shares."""

    def whole(columns: Sequence[np.ndarray]) -> np.ndarray:
        out = np.zeros(count)
        for start, column in enumerate(columns):
            out[start :: len(columns)] = column
        return out

    stepped = any(share.steps for share in shares)  # one without items has none
    return Scores(
        reward=whole([share.reward for share in shares]),
        accuracy=whole([share.accuracy for share in shares]),
        parts={name: whole([share.parts[name] for share in shares]) for name in shares[0].parts},
        failures=sum((share.failures for share in shares), Failures()),
        steps=tuple(shares[at % len(shares)].steps[at // len(shares)] for at in range(count if stepped else 0)),
    )
