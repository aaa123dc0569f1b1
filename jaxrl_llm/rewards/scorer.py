"""Scorer of completions with several rewards; calls that may hang or crash run in killable processes."""

import collections
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError, as_input_error, require
from jaxrl_llm.rewards import sandbox, shaping
from jaxrl_llm.rewards.bounds import Gate, base_of, places_of, shaped, spread
from jaxrl_llm.rewards.calls import LARGEST, Call, Outcome, defined
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.functions import OF_STEPS, ON_DEVICE, Item, ModelReward, Own, as_reward, form_of
from jaxrl_llm.rewards.pool import Inside, Pool
from jaxrl_llm.rewards.rubric import OF_JUDGES, Rubric, asks_model, further
from jaxrl_llm.rewards.scores import Failures, Scores, at_tokens, interleaved, with_environment, with_unplayed
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Reward
from jaxrl_llm.rewards.verify import dry_run_completion, verdict
from jaxrl_llm.system.paths import REWARD_ERROR, SANDBOX, new_file
from jaxrl_llm.types import DISAGREEMENT, Problem

if TYPE_CHECKING:  # a scorer by itself needs no JAX
    from jaxrl_llm.sharding.distributed import Peers

RECORDS = (Scores, Failures)
"""Types that processes send to each other."""
BATCH_TIMES = 60
"""Factor by which the time limit of a call of a whole batch exceeds that of one completion."""
VERIFIED = ""
"""Name of the verifier's own column, which exists without an ``Accuracy`` reward too; no reward has this name."""


class Scorer(contextlib.AbstractContextManager):
    """Rewards with their workers; close it, or use it in a ``with`` block.

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes, started when
    first needed, each completion for at most ``timeout_s`` seconds. Functions that other processes cannot import run in
    this one. A part with a failed call is ``on_error`` (NaN makes the completion unscorable), and its traceback goes to
    ``folder``. With ``peers`` each process scores its share, in worker processes of its own, and all get the scores of
    all.

    ``watched``: rewards by the names of their parts that do not count in the sum (``Gate``, costs of constraints). If
    their call fails they are NaN, since a placeholder could look harmless. ``on_request``: others like these that
    ``score`` skips.

    Attributes:
      folder: the run's; None for none.
      tokenizer: that wrote the texts. Positions in characters become tokens by it: without it ``Scores.steps`` is
        empty, which is enough without training.
      models: functions, by reward, that return the scores of a ``ModelReward``, float64[n, m] by its m models, of a
        ``StepReward``, or of what asks a ``JudgeModel``: they see all completions on every process.

    Raises:
      InputError: a reward cannot work, or a number is out of range.
    """

    def __init__(
        self, rewards: Sequence[Reward | Callable[..., Any]], workers: int = 2, timeout_s: float = 5.0,
        on_error: float = 0.0, peers: "Peers | None" = None, folder: Path | None = None,
        watched: Mapping[str, Any] | None = None, on_request: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(
                f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                f"least 1 worker, more than 0 seconds, and a finite on_error or NaN"
            )
        self._rewards = shaping.named([as_reward(reward) for reward in rewards])
        beside = {**(watched or {}), **(on_request or {})}
        self._beside = {name: one if isinstance(one, Gate) else as_reward(one) for name, one in beside.items()}
        self._watched = {name: one for name, one in self._beside.items() if name not in (on_request or {})}
        for reward in (*self._rewards.values(), *self._beside.values()):
            shaping.check(reward)
        self._bases = {name: base_of(reward) for name, reward in (self._rewards | self._beside).items()}
        known = (Accuracy, CodeTests, *BUILT_IN, *ON_DEVICE)
        self._forms = {
            name: form_of(_callable(base), base.batch if isinstance(base, Own) else None)
            for name, base in self._bases.items()
            if not isinstance(base, known)
        }
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
        self._inside.close()

    def score(self, items: Sequence[Item], only: Collection[str] | None = None) -> Scores:
        """Score each completion; the order is kept, and a failing call costs its own part only.

        The reward of an episode's environment is the part ``environment``. An episode without a token, whose prompt was
        too long, is wrong and worth 0, whatever a reward would make of no text.

        ``only``: names of watched or requested parts; these, as far as they exist, and the accuracy alone are scored.

        Raises:
          InputError: a problem names an unknown extractor or verifier, or a sum of rewards is beyond ``LARGEST``.
          RuntimeError: the worker processes do not start.
        """
        beside = {name: one for name, one in self._beside.items() if only is not None and name in only}
        rewards = self._rewards | self._watched if only is None else beside
        played = [place for place, (_, completion) in enumerate(items) if not completion.unplayed]
        scores = self._divided([items[place] for place in played], rewards)
        scores = scores if len(played) == len(items) else with_unplayed(scores, played, items)
        return with_environment(scores, items) if only is None else scores

    def verify(self, items: Sequence[Item]) -> np.ndarray:
        """Return ``Scores.accuracy`` without calling any reward. Raises the errors of ``score``."""
        return self.score(items, only=()).accuracy

    def check(self, problems: Sequence[Problem]) -> list[str]:
        """Refuse problems with tests of programs that cannot be run; return a line about the sandbox if there are some,
        and write its level to the run's directory.

        Raises:
          InputError: tests of a row are missing, or not known; or programs cannot be confined here.
        """
        items: list[Any] = [(problem, None) for problem in problems]
        judged = [(CodeTests(), [problem for problem in problems if problem.verifier == "code"])]
        for name, reward in (self._rewards | self._beside).items():
            if isinstance(base := self._bases[name], CodeTests):
                judged.append((base, [problems[place] for place in places_of(reward, items)]))
            elif isinstance(base, Rubric):
                base.check_problems([problems[place] for place in places_of(reward, items)])
        for judge, share in judged:
            judge.check(share)
        if not any(share for _, share in judged):
            return []
        with as_input_error("the sandbox does not start", "docs/security.md has what it needs"):
            level = sandbox.level()
        require(level != sandbox.LEVELS[0], sandbox.REFUSED)
        if self._writes and self.folder is not None:
            with new_file(self.folder / SANDBOX) as part:
                part.write_text(json.dumps({"level": level}) + "\n")
        return [f"programs run in the sandbox, level {level}"]

    def dry_run(self, problem: Problem, tokenizer: Any) -> None:
        """Call every function once, in each process, on an invented completion, so that one that always fails does so
        early.

        Raises:
          InputError: a reward raises, runs out of time, or returns something other than a number; the message names the
            place, and the file with the traceback.
        """
        count = 1 if self._peers is None else self._peers.count
        called = self._rewards | self._beside
        called = {name: reward for name, reward in called.items() if not _on_device(self._bases[name])}
        failures = self._divided([(problem, dry_run_completion(problem, tokenizer))] * count, called).failures
        require(not failures.message, failures.message)
        if self._writes:
            self._errors.unlink(missing_ok=True)  # of an earlier attempt

    def _divided(self, items: Sequence[Item], rewards: dict[str, Any]) -> Scores:
        """Compute the scores of these rewards: by models on the device for all items first; the rest is divided among
        processes.
        """
        bases = {name: self._bases[name] for name in rewards}
        given = {}
        for name, base in bases.items():
            if _on_device(base):
                at = places_of(rewards[name], items)
                given[name] = spread(self.models[base]([items[place] for place in at]), at, len(items))
        if self._peers is None or self._peers.count == 1:
            scores = self._score(items, rewards, given)
        else:
            # What a timeout or a crash made of a score is gathered with it: all go on from the same numbers.
            own = slice(self._peers.index, None, self._peers.count)
            share = self._score(items[own], rewards, {name: column[own] for name, column in given.items()})
            gathered = self._peers.gather(codec.to_json(share, RECORDS))
            scores = interleaved([codec.from_json(part, RECORDS) for part in gathered], len(items))
        largest = np.abs(scores.reward[~np.isnan(scores.reward)]).max(initial=0.0)
        if largest > LARGEST:  # for all processes alike
            raise InputError(
                f"rewards with their weights add up to {largest:g} in size, and advantages are made of {LARGEST:g} at "
                "most: give them smaller weights"
            )
        failures = scores.failures
        if self._errors is None or not failures.trace:
            return scores
        if self._writes:
            with new_file(self._errors) as part:
                part.write_text(failures.trace, encoding="utf-8", errors="backslashreplace")
        messages = {name: f"{line} (traceback in {self._errors})" for name, line in failures.messages.items()}
        return dataclasses.replace(scores, failures=dataclasses.replace(failures, messages=messages))

    def _columns(
        self, items: Sequence[Item], places: Mapping[str, Sequence[int]], given: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[tuple[str, int], Outcome]]:
        """Return the values of the verifier and of each base of a reward, by name, float64[n], as far as it scores the
        completions in its ``places``; and the failed calls, with their messages, by name and place.
        """
        columns = {VERIFIED: np.zeros(len(items))}
        jobs: list[tuple[str, Sequence[int], Call]] = []  # what each call fills
        for place, (problem, completion) in enumerate(items):
            found = verdict(problem, completion)
            if isinstance(found, Call):
                limit = found.timeout_s if problem.verifier == "code" else self._timeout_s
                jobs.append((VERIFIED, [place], found._replace(timeout_s=limit)))
            else:
                columns[VERIFIED][place] = found
        for name, at in places.items():
            base = self._bases[name]
            if isinstance(base, ON_DEVICE):
                columns[name] = base.combined(given[name]) if isinstance(base, ModelReward) else given[name]
            elif isinstance(base, BUILT_IN):
                columns[name] = spread(np.array([base(*items[place]) for place in at], np.float64), at, len(items))
            elif isinstance(base, CodeTests):
                columns[name] = np.zeros(len(items))
                jobs += [(name, [place], base.call(items[place][0], items[place][1].text)) for place in at]
            elif not isinstance(base, Accuracy):
                columns[name] = np.zeros(len(items), object if isinstance(base, OF_STEPS) else np.float64)
                columns |= {f"{name}/{one}": np.full(len(items), np.nan) for one in further(base)}
                jobs += [(name, share, call) for share, call in self._calls(name, items, at, given.get(name))]
        pooled = iter(self._pool.map([call for *_, call in jobs if call.function is None]))
        failed: dict[tuple[str, int], Outcome] = {}
        for name, at, call in jobs:
            outcomes = next(pooled) if call.function is None else self._inside.run(call)
            for place, outcome in zip(at, outcomes, strict=True):
                if outcome.status == "ok":
                    columns[name][place] = outcome.value
                    for also, value in zip(call.also, outcome.also, strict=True):
                        columns[f"{name}/{also}"][place] = value
                    continue
                on_error = self._on_error if call.on_error is None else call.on_error
                columns[name][place] = () if call.positions else on_error
                defines = name in self._forms and not outcome.place and defined(_callable(self._bases[name]))
                where = outcome.place or defines or call.path
                failed[name, place] = outcome._replace(message=f"{where}: {outcome.message}")
        return columns, failed

    def _calls(
        self, name: str, items: Sequence[Item], places: Sequence[int], known: Any
    ) -> Iterator[tuple[Sequence[int], Call]]:
        """Yield the calls of a function, of one completion each or of all, after the places that each fills.

        ``known``: what a judge on the devices has said of each completion; None for other rewards.
        """
        reward, form = self._bases[name], self._forms[name]
        own = reward if isinstance(reward, Own) else None
        path, positions = getattr(own, "path", None), getattr(own, "positions", "")
        named = isinstance(path, str)
        seconds = self._timeout_s * (BATCH_TIMES if form.batch else 1)
        seconds = seconds if known is not None else getattr(reward, "timeout_s", None) or seconds
        function = None if named else _callable(reward)
        if known is not None:
            function = lambda problems, completions: [known[at] for at in places]  # noqa: E731
        also = further(reward)
        on_error = math.nan if isinstance(reward, OF_JUDGES) else None
        for share in [places] if places and (form.batch or form.waits) else [[place] for place in places]:
            bare = [(items[at][0], dataclasses.replace(items[at][1], extras={}, prompt_extras={})) for at in share]
            yield share, Call(path if named else name, bare, form, seconds, positions, function, on_error, also)

    def _score(self, items: Sequence[Item], rewards: dict[str, Any], given: Mapping[str, Any]) -> Scores:
        bases = {name: self._bases[name] for name in rewards}
        places = {name: places_of(reward, items) for name, reward in rewards.items()}
        columns, failed = self._columns(items, places, given)
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
            at = places[name]
            reward[at] += rewards[name].weight * whole[name][at]
            whole[name] = spread(whole[name][at], at, len(items))
        if math.isnan(self._on_error):
            reward[[place for column, place in failed if column in stepped]] = np.nan
        means = {
            name: np.array([sum(value for _, value in steps) / len(steps) if steps else math.nan for steps in column])
            for name, column in stepped.items()
        }
        differing = {
            f"{name}/{DISAGREEMENT}": scores.std(axis=1)
            for name, scores in given.items()
            if name in self._rewards and isinstance(bases[name], ModelReward) and scores.shape[1:] > (1,)
        }
        beside = {
            f"{name}/{one}": columns[f"{name}/{one}"]
            for name, base in bases.items()
            if name in self._rewards
            for one in further(base)
        }
        return Scores(
            reward=reward,
            accuracy=accuracy,
            parts={name: (means | whole)[name] for name in rewards} | differing | beside,
            failures=_failures(failed, source, places),
            steps=at_tokens(items, [(self._bases[name], said) for name, said in stepped.items()], self.tokenizer),
        )


def _failures(
    failed: dict[tuple[str, int], Outcome], source: dict[str, str], places: Mapping[str, Sequence[int]]
) -> Failures:
    """Collect the failures of rewards that score the completions in their ``places``."""
    first: dict[str, Outcome] = {}
    for (column, _), outcome in failed.items():
        first.setdefault(column, outcome)
    names = {column: name for name, column in reversed(source.items())}
    statuses = collections.Counter(outcome.status for outcome in failed.values())
    return Failures(
        errors=statuses["error"],
        timeouts=statuses["timeout"],
        of={
            name: (len(places[name]), sum((column, at) in failed for at in places[name]))
            for name, column in source.items()
        },
        messages={names.get(column, ""): outcome.message for column, outcome in first.items()},
        trace="\n".join(f"{outcome.message}\n{outcome.trace}" for outcome in first.values() if outcome.trace),
    )


def _on_device(base: Any) -> bool:
    return isinstance(base, ON_DEVICE) or asks_model(base)


def _callable(reward: Any) -> Callable[..., Any]:
    return reward.function if isinstance(reward, Own) else reward
