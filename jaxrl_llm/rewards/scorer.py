"""Scorer of completions with several rewards; calls that may hang or crash run in killable processes."""

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
from jaxrl_llm.rewards.inside import Inside
from jaxrl_llm.rewards.pool import Pool, workers_for_cores
from jaxrl_llm.rewards.references import check_programs, check_references
from jaxrl_llm.rewards.rehearsal import as_episode
from jaxrl_llm.rewards.rubric import OF_JUDGES, Rubric, asks_model, further, on_device
from jaxrl_llm.rewards.scores import (
    Begun,
    Failures,
    Scores,
    at_tokens,
    failures_of,
    interleaved,
    with_environment,
    with_unplayed,
)
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Reward
from jaxrl_llm.rewards.verify import dry_run_completion, verdict
from jaxrl_llm.system.paths import REWARD_ERROR, SANDBOX, new_file, relative_path
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

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes (None: as many as
    this process has cores, up to ``MOST_WORKERS``), started when first needed, each completion for at most
    ``timeout_s`` seconds. Functions that other processes cannot import run in this one. A part with a failed call is
    ``on_error`` (NaN makes the completion unscorable), and its traceback goes to ``folder``. With ``peers`` each
    process scores its share, in worker processes of its own, and all get the scores of all.

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
        self, rewards: Sequence[Reward | Callable[..., Any]], workers: int | None = None, timeout_s: float = 5.0,
        on_error: float = 0.0, peers: "Peers | None" = None, folder: Path | None = None,
        watched: Mapping[str, Any] | None = None, on_request: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        workers = workers_for_cores() if workers is None else workers
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
        self._shown = relative_path(self._errors) if self._errors is not None else ""
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
        return self.begin(items, only)()

    def begin(self, items: Sequence[Item], only: Collection[str] | None = None) -> Callable[[], Scores]:
        """Begin to score, as ``score`` does; return a function that waits for the scores.

        Several may be open at one time. What is measured on the device is measured now. All processes must begin and
        wait in one order.
        """
        beside = {name: one for name, one in self._beside.items() if only is not None and name in only}
        rewards = self._rewards | self._watched if only is None else beside
        played = [place for place, (_, completion) in enumerate(items) if not completion.unplayed]
        waiting = self._divided([items[place] for place in played], rewards)

        def finish() -> Scores:
            scores = waiting()
            scores = scores if len(played) == len(items) else with_unplayed(scores, played, items)
            return with_environment(scores, items)

        return finish

    def verify(self, items: Sequence[Item]) -> np.ndarray:
        """Return ``Scores.accuracy`` without calling any reward. Raises the errors of ``score``."""
        return self.score(items, only=()).accuracy

    def check(
        self, problems: Sequence[Problem], needed: bool = True, note: Callable[[str], None] | None = None
    ) -> list[str]:
        """Refuse problems with tests of programs that cannot be run, and references that most answers cannot reach;
        return a line about the sandbox if there are programs, and one if their reference programs fail; write the
        sandbox's level to the run's directory.

        Args:
          problems: all that will be asked.
          needed: whether the run reads which answers are right.
          note: gets what the references show that are tried in the background; None if only a sample is tried.

        Raises:
          InputError: tests of a row are missing, or not known; programs cannot be confined here; or ``needed``, and
            no answer is right by most references.
        """
        notes, others = check_references(problems, self._pool, self._timeout_s, self.folder, needed)
        if note is not None and self._writes:
            others(note)
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
            return notes
        with as_input_error("the sandbox does not start", "docs/security.md has what it needs"):
            level = sandbox.level()
        require(level != sandbox.LEVELS[0], sandbox.REFUSED)
        if self._writes and self.folder is not None:
            with new_file(self.folder / SANDBOX) as part:
                part.write_text(json.dumps({"level": level}) + "\n")
        programs, others = check_programs(judged, self._pool, self.folder)
        if note is not None and self._writes:
            others(note)
        return [*notes, f"programs run in the sandbox, level {level}", *programs]

    def dry_run(
        self, problem: Problem, tokenizer: Any, tools: Sequence[str] | None = None, judges: bool = False
    ) -> None:
        """Call every function once, in each process, on an invented completion, so that one that always fails does so
        early.

        ``tools``: names of those of a task whose completions are episodes; None for one of single answers. ``judges``:
        ask those on the devices instead, once they are there.

        Raises:
          InputError: a reward raises, runs out of time, or returns something other than a number; the message names the
            place, and the file with the traceback.
        """
        count = 1 if self._peers is None else self._peers.count
        called = self._rewards | self._beside
        chosen = asks_model if judges else lambda base: not on_device(base)
        called = {name: reward for name, reward in called.items() if chosen(self._bases[name])}
        invented = dry_run_completion(problem, tokenizer)
        invented = invented if tools is None else as_episode(invented, tools)
        failures = self._divided([(problem, invented)] * count, called)().failures
        require(not failures.message, failures.message)
        if self._writes:
            self._errors.unlink(missing_ok=True)  # of an earlier attempt

    def _divided(self, items: Sequence[Item], rewards: dict[str, Any]) -> Callable[[], Scores]:
        """Begin the scores of these rewards: by models on the device for all items first; the rest is divided among
        processes.
        """
        bases = {name: self._bases[name] for name in rewards}
        given = {}
        for name, base in bases.items():
            if on_device(base):
                at = places_of(rewards[name], items)
                given[name] = spread(self.models[base]([items[place] for place in at]), at, len(items))
        if self._peers is None or self._peers.count == 1:
            begun = self._begun(items, rewards, given)
            return lambda: self._written(self._scores(begun))
        own = slice(self._peers.index, None, self._peers.count)
        share = self._begun(items[own], rewards, {name: column[own] for name, column in given.items()})

        def gathered() -> Scores:
            # What a timeout or a crash made of a score is gathered with it: all go on from the same numbers.
            parts = self._peers.gather(codec.to_json(self._scores(share), RECORDS))
            return self._written(interleaved([codec.from_json(part, RECORDS) for part in parts], len(items)))

        return gathered

    def _written(self, scores: Scores) -> Scores:
        """Return the scores, with their failures written to the run's directory."""
        largest = np.abs(scores.reward[~np.isnan(scores.reward)]).max(initial=0.0)
        if largest > LARGEST:  # for all processes alike
            told = f"rewards with their weights add up to {largest:g} in size, beyond {LARGEST:g}"
            raise InputError(f"{told}: give them smaller weights")
        failures = scores.failures
        if self._errors is None or not failures.trace:
            return scores
        if self._writes:
            with new_file(self._errors) as part:
                part.write_text(failures.trace, encoding="utf-8", errors="backslashreplace")
        messages = {name: f"{line} (traceback in {self._shown})" for name, line in failures.messages.items()}
        return dataclasses.replace(scores, failures=dataclasses.replace(failures, messages=messages))

    def _begun(self, items: Sequence[Item], rewards: dict[str, Any], given: Mapping[str, Any]) -> Begun:
        """Begin the calls of the verifier and of each base of a reward, as far as it scores the completions in its
        places; what needs no call is computed now.
        """
        columns = {VERIFIED: np.zeros(len(items))}
        places = {name: places_of(reward, items) for name, reward in rewards.items()}
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
        pooled = iter(self._pool.submit([call for *_, call in jobs if call.function is None]))
        coming = [next(pooled) if call.function is None else self._inside.submit(call) for *_, call in jobs]
        return Begun(items, rewards, given, places, columns, list(zip(jobs, coming, strict=True)))

    def _outcomes(self, begun: Begun) -> dict[tuple[str, int], Outcome]:
        """Wait for the calls and put their values into the columns; return the failed ones, with their messages, by
        name and place.
        """
        failed: dict[tuple[str, int], Outcome] = {}
        for (name, at, call), coming in begun.jobs:
            for place, outcome in zip(at, coming.result(), strict=True):
                for also, value in zip(call.also, outcome.also, strict=False):  # of a failed call perhaps none
                    begun.columns[f"{name}/{also}"][place] = value
                if outcome.status == "ok":
                    begun.columns[name][place] = outcome.value
                    continue
                on_error = self._on_error if call.on_error is None else call.on_error
                begun.columns[name][place] = () if call.positions else on_error
                defines = name in self._forms and not outcome.place and defined(_callable(self._bases[name]))
                where = outcome.place or defines or call.path
                failed[name, place] = outcome._replace(message=f"{where}: {outcome.message}")
        return failed

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

    def _scores(self, begun: Begun) -> Scores:
        """Wait for the calls; return the scores."""
        items, rewards, given, places, columns, _ = begun
        failed = self._outcomes(begun)
        bases = {name: self._bases[name] for name in rewards}
        accuracy = columns[VERIFIED].copy()
        accuracy[[place for name, place in failed if name == VERIFIED]] = 0.0
        source = {name: VERIFIED if isinstance(base, Accuracy) else name for name, base in bases.items()}
        stepped = {name: columns[name] for name, base in bases.items() if isinstance(base, OF_STEPS)}
        whole = {name: shaped(rewards[name], columns[source[name]]) for name in rewards if name not in stepped}
        for name in whole.keys() & self._beside.keys():
            lost = [place for column, place in failed if column == source[name]]
            whole[name][lost] = shaped(rewards[name], np.full(len(lost), np.nan))
        counted = {VERIFIED} | {source[name] for name in rewards if name in self._rewards}
        unscored = np.zeros(len(items), bool)
        unscored[[place for column, place in failed if column in counted]] = True
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
            failures=failures_of(failed, source, places),
            failed=unscored,
            steps=at_tokens(items, [(self._bases[name], said) for name, said in stepped.items()], self.tokenizer),
        )


def _callable(reward: Any) -> Callable[..., Any]:
    return reward.function if isinstance(reward, Own) else reward
