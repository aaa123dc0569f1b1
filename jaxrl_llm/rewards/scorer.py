"""Scorer of completions with several rewards; calls that may hang or crash run in killable processes. References that
no answer reaches, and reference programs that fail their own tests: each is tried, a sample before the first step, all
behind it.
"""

import bisect
import collections
import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError, as_input_error, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rewards import sandbox, shaping
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.functions import (
    LARGEST,
    OF_STEPS,
    ON_DEVICE,
    Item,
    ModelReward,
    RewardCall,
    RewardOutcome,
    UserFunction,
    as_reward,
    definition_of,
    form_of,
)
from jaxrl_llm.rewards.pool import InProcessCalls, Pool, workers_for_cores
from jaxrl_llm.rewards.rubric import OF_JUDGES, Rubric, asks_model, extra_columns, on_device
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Gate, Reward, inner_reward, places_of, reward_values, spread
from jaxrl_llm.rewards.verify import POOLED, dry_run_completion, verdict
from jaxrl_llm.system.paths import REWARD_ERROR, SANDBOX, new_file, relative_path
from jaxrl_llm.tasks.extract import extract, wrap_answer
from jaxrl_llm.tasks.task import note_unreachable
from jaxrl_llm.types import DISAGREEMENT, Completion, Episode, Problem, Turn

if TYPE_CHECKING:
    from jaxrl_llm.sharding.distributed import Peers


@dataclasses.dataclass(frozen=True)
class Failures:
    """Record of the completions that rewards failed to score: ``errors`` raised or lost their process, ``timeouts`` ran
    past their deadline. ``of``: by reward, the number it was called for, and of those that it failed. ``messages``: by
    reward, its first failure in one line: ``my_rewards.py:7: ZeroDivisionError: division by zero``; the verifier's
    under the empty name, even without an ``Accuracy``. ``trace``: those messages with their tracebacks, if any.
    """

    errors: int = 0
    timeouts: int = 0
    of: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    messages: dict[str, str] = dataclasses.field(default_factory=dict)
    trace: str = ""

    @property
    def message(self) -> str:
        """Message of the reward that failed most often; empty without failures."""
        return self.messages[max(self.messages, key=self.fraction)] if self.messages else ""

    def fraction(self, name: str) -> float:
        """Return the share of completions that a reward failed to score."""
        calls, failures = self.of.get(name, (0, 0))
        return failures / calls if failures else 0.0

    def __add__(self, other: "Failures") -> "Failures":
        """Add up two records; the earlier messages are kept."""
        of = {}
        for name in self.of | other.of:
            (calls, failures), (other_calls, other_failures) = (record.of.get(name, (0, 0)) for record in (self, other))
            of[name] = calls + other_calls, failures + other_failures
        messages = self.messages | other.messages | self.messages
        return Failures(
            self.errors + other.errors, self.timeouts + other.timeouts, of, messages, self.trace or other.trace
        )

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a step; a reward that never failed has no entry."""
        metrics: dict[str, Any] = {"reward/errors": self.errors, "reward/timeouts": self.timeouts}
        metrics |= {
            f"reward/{name}/failed_fraction": self.fraction(name) for name, (_, failed) in self.of.items() if failed
        }
        return metrics | ({"event/reward_failed": self.message} if self.messages else {})


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of n completions.

    Attributes:
      reward: float64[n], the weighted sum of the parts that are rewards of whole completions; NaN where one of them is.
      accuracy: float64[n], the verifier's score: 1 or more is correct, 0 where it failed, NaN without a verifier.
      parts: float64[n] for each reward by name, unweighted, and for watched rewards; for a step reward the mean over
        the steps. An ensemble of reward models also has ``<name>/disagreement``.
      failed: bool[n], whether a reward, the verifier or the environment failed.
      steps: for each completion float32[t], the weighted sum of step rewards where steps end, else NaN; may be empty.
    """

    reward: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    failures: Failures
    failed: np.ndarray
    steps: tuple[np.ndarray, ...] = ()


def merge_shares(shares: Sequence[Scores], count: int) -> Scores:
    """Merge the scores of ``count`` completions; share i of s has the completions i, i + s, i + 2 s, ..."""
    parts = {name: np.zeros(count) for name in shares[0].parts}
    failures = sum((share.failures for share in shares), Failures())
    merged = Scores(np.zeros(count), np.zeros(count), parts, failures, np.zeros(count, bool))
    for start, share in enumerate(shares):
        at = slice(start, None, len(shares))
        merged.reward[at], merged.accuracy[at], merged.failed[at] = share.reward, share.accuracy, share.failed
        for name, column in parts.items():
            column[at] = share.parts[name]
    has_steps = any(share.steps for share in shares)  # one without items has none
    if not has_steps:
        return merged
    steps = tuple(shares[at % len(shares)].steps[at // len(shares)] for at in range(count))
    return dataclasses.replace(merged, steps=steps)


def token_index(text: str, tokens: Sequence[int], end: int, tokenizer: Any) -> int:
    """Return the index of the token in which the first ``end`` characters (1 to all) of a completion are complete.
    Bisects over its prefixes, decoded as it was: a character of several tokens appears with the last one.
    """
    return bisect.bisect_left(
        range(1, len(tokens)), True, key=lambda count: text_of(tokenizer, tokens[:count]).startswith(text[:end])
    )


def steps_at_tokens(items: Sequence[Any], parts: Sequence[tuple[Any, Any]], tokenizer: Any) -> tuple[np.ndarray, ...]:
    """Place step rewards at their tokens, float32[t] for each completion; empty without any, or without a tokenizer."""
    if not parts or tokenizer is None:
        return ()
    step_rewards = []
    for at, (_, completion) in enumerate(items):
        tokens = completion.tokens.tolist()
        columns = []
        for reward, steps in parts:
            values = np.full(len(tokens), np.nan, np.float32)
            for position, value in steps[at]:
                if reward.positions == "characters":
                    position = token_index(completion.text, tokens, position, tokenizer)
                values[position] = np.nansum([values[position], reward.weight * value])
            columns.append(values)
        stacked = np.stack(columns)
        step_rewards.append(np.where(np.isnan(stacked).all(axis=0), np.float32(np.nan), np.nansum(stacked, axis=0)))
    return tuple(step_rewards)


ENVIRONMENT = "environment"
"""Name of the part of a reward that the environment of an episode gives."""


def with_unplayed(scores: Scores, played: Sequence[int], items: Sequence[tuple[Any, Any]]) -> Scores:
    """Return the scores of all completions from those of the ``played`` ones: the others are wrong, and worth 0."""

    def spread(values: np.ndarray, filler: Any) -> np.ndarray:
        column = np.full(len(items), filler, np.float64)
        column[played] = values
        return column

    wrong = [math.nan if problem.verifier == "none" else 0.0 for problem, _ in items]
    parts = {name: spread(values, math.nan) for name, values in scores.parts.items()}
    accuracy = spread(scores.accuracy, wrong)
    failed = spread(scores.failed, False).astype(bool)
    return dataclasses.replace(scores, reward=spread(scores.reward, 0.0), accuracy=accuracy, parts=parts, failed=failed)


def with_environment(scores: Scores, items: Sequence[tuple[Any, Any]]) -> Scores:
    """Add the rewards of environments to episodes, with weight 1; one whose environment failed is unscorable."""
    episodes = {place: completion.episode for place, (_, completion) in enumerate(items) if completion.episode}
    if not episodes:
        return scores
    errors = {place: episode.error for place, episode in episodes.items() if episode.error}
    failed = scores.failed.copy()
    failed[[*errors]] = True
    of = {ENVIRONMENT: (len(episodes), len(errors))}
    failures = Failures(len(errors), 0, of, {ENVIRONMENT: next(iter(errors.values()))} if errors else {})
    scores = dataclasses.replace(scores, failed=failed, failures=scores.failures + failures)
    column = np.full(len(items), math.nan)
    column[[*episodes]] = [episode.reward for episode in episodes.values()]
    reward = scores.reward.copy()
    reward[[*episodes]] += column[[*episodes]]
    return dataclasses.replace(scores, reward=reward, parts=scores.parts | {ENVIRONMENT: column})


class ScoringBatch(NamedTuple):
    """Completions that are being scored. ``rewards``: by the names of their parts; ``places``: the completions that
    each scores. ``device_scores``: by models on the device. ``columns``: float64[n] of the verifier and of each base of
    a reward, by name, filled as outcomes come. ``jobs``: the name and places that each call fills, the call, and its
    outcomes to come.
    """

    items: Sequence[Item]
    rewards: dict[str, Any]
    device_scores: Mapping[str, Any]
    places: Mapping[str, Sequence[int]]
    columns: dict[str, np.ndarray]
    jobs: list[tuple[tuple[str, Sequence[int], RewardCall], Any]]


def collect_failures(
    failed: dict[tuple[str, int], RewardOutcome], source: dict[str, str], places: Mapping[str, Sequence[int]]
) -> Failures:
    """Collect the failures of rewards that score the completions in their ``places``."""
    first: dict[str, RewardOutcome] = {}
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


REFERENCE_SAMPLE = 256
"""Number of references that are tried before the first step."""
REFERENCES_FILE = "references.json"
"""File in a run's directory with the notes about its references, by a digest of them."""
SOLUTION = "solution"
"""Column of the rows with their reference programs."""


def check_references(
    problems: Iterable[Problem], pool: Pool, timeout_s: float, folder: Path | None, needed: bool
) -> tuple[list[str], Callable[..., None]]:
    """Try the references of the verifier ``math`` and keep the result in ``folder``; others are tried as they are read.
    ``needed``: whether the run reads which answers are right; then InputError if most of the sample miss theirs.
    """
    distinct = {(problem.extractor, problem.answer): problem for problem in problems if problem.verifier == "math"}
    tries = {}
    for key, problem in distinct.items():
        answer = extract(wrap_answer(problem.answer, problem.extractor), problem.extractor) or ""
        tries[json.dumps(key)] = problem, RewardCall(POOLED["math"], [(answer, problem)], timeout_s=timeout_s)

    def make_notes(lost: Sequence[tuple[Problem, float]], count: int, sample: bool) -> list[str]:
        return note_unreachable([problem for problem, _ in lost], count, needed and sample)

    return _try_references(tries, make_notes, pool, None if folder is None else folder / REFERENCES_FILE)


def check_programs(
    judged: Iterable[tuple[CodeTests, Sequence[Problem]]], pool: Pool, folder: Path | None
) -> tuple[list[str], Callable[..., None]]:
    """Run rows' reference programs, if any, through their own tests, and keep the result in ``folder``."""
    tries = {}
    for judge, problems in judged:
        for problem in problems:
            program = problem.metadata.get(SOLUTION)
            if isinstance(program, str) and program.strip():
                has_beginning = judge.before is not None and problem.metadata[judge.before].strip() in program
                strict = dataclasses.replace(judge, all_or_nothing=True, before=None if has_beginning else judge.before)
                tries[repr((strict, program, problem.metadata[judge.column]))] = problem, strict.call(problem, program)
    return _try_references(tries, _failing_programs_note, pool, None if folder is None else folder / "solutions.json")


def _failing_programs_note(lost: Sequence[tuple[Problem, float]], count: int, sample: bool) -> list[str]:
    """Return the note about reference programs that fail, or that nobody can judge."""
    parts = []
    for ends, failure in ((False, "fail their own tests"), (True, "cannot be told by their own tests")):
        rows = [str(problem.metadata.get("row", problem.id)) for problem, score in lost if math.isnan(score) == ends]
        first_rows = ", ".join(rows[:3]) + (", ..." if len(rows) > 3 else "")
        parts += [f"{len(rows)} {failure}: {first_rows}"] if rows else []
    remedy = "no answer can earn its reward there; correct these tests or leave the rows out (docs/security.md)"
    return [f"of {count} reference programs (column {SOLUTION}), {'; '.join(parts)}; {remedy}"] if parts else []


def _try_references(
    tries: Mapping[str, tuple[Problem, RewardCall]],
    make_notes: Callable[..., list[str]],
    pool: Pool,
    path: Path | None,
) -> tuple[list[str], Callable[..., None]]:
    """Try a sample of references; return notes, and a function that tries the rest behind the run and gives its
    argument further notes. ``make_notes`` gets the unmet references, the number of those that were tried, and whether
    they are a sample.
    """
    by_digest = {codec.digest(key, 64): attempt for key, attempt in tries.items()}
    ordered = [by_digest[key] for key in sorted(by_digest)]
    digest = codec.digest("".join(sorted(by_digest)))
    saved = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if not ordered or digest in saved:
        return saved.get(digest, []), lambda note: None
    lost = _unmet_references(ordered[:REFERENCE_SAMPLE], pool)
    notes = make_notes(lost, len(ordered[:REFERENCE_SAMPLE]), True)

    def finish(note: Callable[[str], None]) -> None:
        unmet = list(lost)
        try:
            for begin in range(REFERENCE_SAMPLE, len(ordered), 4):  # few at one time, since rewards wait behind them
                unmet += _unmet_references(ordered[begin : begin + 4], pool)
        except (CancelledError, RuntimeError):  # the run ends; or its rewards cannot be scored, and say so
            return
        all_notes = make_notes(unmet, len(ordered), False)
        for line in all_notes if len(unmet) > len(lost) else ():
            note(line)
        if path is not None:
            with new_file(path) as part:
                part.write_text(json.dumps({digest: all_notes}))

    return notes, lambda note: threading.Thread(target=finish, args=[note], name="references", daemon=True).start()


def _unmet_references(tries: Sequence[tuple[Problem, RewardCall]], pool: Pool) -> list[tuple[Problem, float]]:
    outcomes = [future.result()[0] for future in pool.submit([call for _, call in tries])]
    scores = [outcome.value if outcome.status == "ok" else math.nan for outcome in outcomes]
    return [(problem, score) for (problem, _), score in zip(tries, scores, strict=True) if not score >= 1.0]


def two_turn_episode(answer: Completion, tools: Sequence[str]) -> Completion:
    """Return an episode of two turns that ends with this answer; the first turn calls one of the ``tools``, if any. Its
    tokens are those of the answer three times: for each turn, and for the environment's words between them.
    """
    size = len(answer.tokens)
    reply = {"role": "assistant", "content": answer.text}
    calls = [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}} for name in tools[:1]]
    observation = {"role": "tool", "name": tools[0], "tool_call_id": "call_0"} if calls else {"role": "user"}
    first = Turn(
        size,
        reply | ({"tool_calls": calls} if calls else {}),
        (observation | {"content": answer.text},),
        calls=len(calls),
    )
    thrice = {name: np.tile(getattr(answer, name), 3) for name in ("tokens", "sampler_logp", "version", "mask")}
    thrice["mask"][size : 2 * size] = False
    episode = Episode((first, Turn(3 * size, reply)), "completed", tools=len(tools))
    return dataclasses.replace(answer, **thrice, episode=episode)


SCORE_RECORDS = (Scores, Failures)
"""Types that processes send to each other."""
VERIFIED = ""
"""Name of the verifier's own column, which exists without an ``Accuracy`` reward too; no reward has this name."""


class Scorer(contextlib.AbstractContextManager):
    """Rewards with their workers; close it, or use ``with``. InputError: a reward cannot work, or a number is out of
    range.

    ``Function`` rewards and the verifiers ``math`` and ``reasoning_gym`` run in ``workers`` processes (None: as many as
    this process has cores, up to 32), started when first needed, each completion for at most ``timeout_s`` seconds;
    functions that other processes cannot import run in this one. A part with a failed call is ``on_error`` (NaN makes
    the completion unscorable), and its traceback goes to ``folder``, the run's. With ``peers`` each process scores its
    share in workers of its own, and all get all scores. ``watched``: rewards by the names of their parts that do not
    count in the sum (``Gate``, costs of constraints); NaN if their call fails, since a placeholder could look harmless.
    ``on_request``: others like these that ``score`` skips.

    Attributes:
      tokenizer: that wrote the texts, to turn positions in characters into tokens; without it ``Scores.steps`` is
        empty.
      models: functions, by reward, that return the scores of a ``ModelReward``, float64[n, m] by its m models, of a
        ``StepReward``, or of what asks a ``JudgeModel``: they see all completions on every process.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | Callable[..., Any]],
        workers: int | None = None,
        timeout_s: float = 5.0,
        on_error: float = 0.0,
        peers: "Peers | None" = None,
        folder: Path | None = None,
        watched: Mapping[str, Any] | None = None,
        on_request: Mapping[str, Any] | None = None,
    ):
        workers = workers_for_cores() if workers is None else workers
        if workers < 1 or not 0 < timeout_s < math.inf or math.isinf(on_error):
            raise InputError(
                f"rewards have {workers} workers, timeout_s {timeout_s}, on_error {on_error}; give at "
                f"least 1 worker, more than 0 seconds, and a finite on_error or NaN"
            )
        self._rewards = shaping.name_rewards([as_reward(reward) for reward in rewards])
        beside = {**(watched or {}), **(on_request or {})}
        self._beside = {name: extra if isinstance(extra, Gate) else as_reward(extra) for name, extra in beside.items()}
        self._watched = {name: extra for name, extra in self._beside.items() if name not in (on_request or {})}
        for reward in (*self._rewards.values(), *self._beside.values()):
            shaping.check_reward(reward)
        self._bases = {name: inner_reward(reward) for name, reward in (self._rewards | self._beside).items()}
        without_function = (Accuracy, CodeTests, *BUILT_IN, *ON_DEVICE)
        self._forms = {
            name: form_of(_function_of(base), base.batch if isinstance(base, UserFunction) else None)
            for name, base in self._bases.items()
            if not isinstance(base, without_function)
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
        self._inside = InProcessCalls()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
        self._inside.close()

    def score(self, items: Sequence[Item], only: Collection[str] | None = None) -> Scores:
        """Score each completion; the order is kept, and a failing call costs its own part only. The reward of an
        episode's environment is the part ``environment``; an episode without a token (its prompt was too long) is wrong
        and worth 0. ``only``: names of watched or requested parts; these, if they exist, and the accuracy alone are
        scored. InputError: an unknown extractor or verifier, or a sum of rewards beyond ``LARGEST``. RuntimeError: the
        workers do not start.
        """
        return self.begin(items, only)()

    def begin(self, items: Sequence[Item], only: Collection[str] | None = None) -> Callable[[], Scores]:
        """Begin to score, as ``score`` does; return a function that waits for the scores. Several may be open at one
        time; all processes must begin and wait in one order.
        """
        beside = {name: reward for name, reward in self._beside.items() if only is not None and name in only}
        rewards = self._rewards | self._watched if only is None else beside
        played = [place for place, (_, completion) in enumerate(items) if not completion.unplayed]
        waiting = self._begin_shares([items[place] for place in played], rewards)

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
        """Refuse problems with tests that cannot be run, and references that most answers cannot reach; return notes on
        the sandbox and reference programs, and write the sandbox's level to the run's directory. ``problems``: all that
        will be asked. ``needed``: whether the run reads which answers are right. ``note``: gets the notes about
        references that are tried in the background; None tries only a sample.
        """
        notes, try_rest = check_references(problems, self._pool, self._timeout_s, self.folder, needed)
        if note is not None and self._writes:
            try_rest(note)
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
        programs, try_rest = check_programs(judged, self._pool, self.folder)
        if note is not None and self._writes:
            try_rest(note)
        return [*notes, f"programs run in the sandbox, level {level}", *programs]

    def dry_run(
        self, problem: Problem, tokenizer: Any, tools: Sequence[str] | None = None, judges: bool = False
    ) -> None:
        """Call every function once, in each process, on an invented completion, so that one that always fails does so
        early. ``tools``: names of those of a task whose completions are episodes; None for one of single answers.
        ``judges``: ask those on the devices instead, once they are there. InputError: a reward raises, runs out of
        time, or returns something other than a number; the message names the place, and the file with the traceback.
        """
        count = 1 if self._peers is None else self._peers.count
        called = self._rewards | self._beside
        chosen = asks_model if judges else lambda base: not on_device(base)
        called = {name: reward for name, reward in called.items() if chosen(self._bases[name])}
        invented = dry_run_completion(problem, tokenizer)
        invented = invented if tools is None else two_turn_episode(invented, tools)
        failures = self._begin_shares([(problem, invented)] * count, called)().failures
        require(not failures.message, failures.message)
        if self._writes:
            self._errors.unlink(missing_ok=True)  # of an earlier attempt

    def _begin_shares(self, items: Sequence[Item], rewards: dict[str, Any]) -> Callable[[], Scores]:
        """Begin the scores of these rewards: by models on the device first; processes divide the rest."""
        bases = {name: self._bases[name] for name in rewards}
        device_scores = {}
        for name, base in bases.items():
            if on_device(base):
                at = places_of(rewards[name], items)
                device_scores[name] = spread(self.models[base]([items[place] for place in at]), at, len(items))
        if self._peers is None or self._peers.count == 1:
            pending = self._begin_calls(items, rewards, device_scores)
            return lambda: self._write_failures(self._collect_scores(pending))
        shard = slice(self._peers.index, None, self._peers.count)
        device_scores = {name: column[shard] for name, column in device_scores.items()}
        share = self._begin_calls(items[shard], rewards, device_scores)

        def gathered() -> Scores:
            # What a timeout or a crash made of a score is gathered with it: all go on from the same numbers.
            parts = self._peers.gather(codec.to_json(self._collect_scores(share), SCORE_RECORDS))
            shares = [codec.from_json(part, SCORE_RECORDS) for part in parts]
            return self._write_failures(merge_shares(shares, len(items)))

        return gathered

    def _write_failures(self, scores: Scores) -> Scores:
        """Return the scores, with their failures written to the run's directory."""
        largest = np.abs(scores.reward[~np.isnan(scores.reward)]).max(initial=0.0)
        if largest > LARGEST:  # for all processes alike
            problem = f"rewards with their weights add up to {largest:g} in size, beyond {LARGEST:g}"
            raise InputError(f"{problem}: give them smaller weights")
        failures = scores.failures
        if self._errors is None or not failures.trace:
            return scores
        if self._writes:
            with new_file(self._errors) as part:
                part.write_text(failures.trace, encoding="utf-8", errors="backslashreplace")
        messages = {name: f"{line} (traceback in {self._shown})" for name, line in failures.messages.items()}
        return dataclasses.replace(scores, failures=dataclasses.replace(failures, messages=messages))

    def _begin_calls(self, items: Sequence[Item], rewards: dict[str, Any], device_scores: dict) -> ScoringBatch:
        """Begin the calls of the verifier and of each reward's base in its places; compute now what needs no call."""
        columns = {VERIFIED: np.zeros(len(items))}
        places = {name: places_of(reward, items) for name, reward in rewards.items()}
        jobs: list[tuple[str, Sequence[int], RewardCall]] = []  # what each call fills
        for place, (problem, completion) in enumerate(items):
            score = verdict(problem, completion)
            if isinstance(score, RewardCall):
                limit = score.timeout_s if problem.verifier == "code" else self._timeout_s
                jobs.append((VERIFIED, [place], score._replace(timeout_s=limit)))
            else:
                columns[VERIFIED][place] = score
        for name, at in places.items():
            base = self._bases[name]
            if isinstance(base, ON_DEVICE):
                scores = device_scores[name]
                columns[name] = base.combined(scores) if isinstance(base, ModelReward) else scores
            elif isinstance(base, BUILT_IN):
                columns[name] = spread(np.array([base(*items[place]) for place in at], np.float64), at, len(items))
            elif isinstance(base, CodeTests):
                columns[name] = np.zeros(len(items))
                jobs += [(name, [place], base.call(items[place][0], items[place][1].text)) for place in at]
            elif not isinstance(base, Accuracy):
                columns[name] = np.zeros(len(items), object if isinstance(base, OF_STEPS) else np.float64)
                columns |= {f"{name}/{extra}": np.full(len(items), np.nan) for extra in extra_columns(base)}
                jobs += [(name, share, call) for share, call in self._calls(name, items, at, device_scores.get(name))]
        pooled = iter(self._pool.submit([call for *_, call in jobs if call.function is None]))
        coming = [next(pooled) if call.function is None else self._inside.submit(call) for *_, call in jobs]
        return ScoringBatch(items, rewards, device_scores, places, columns, list(zip(jobs, coming, strict=True)))

    def _collect_outcomes(self, pending: ScoringBatch) -> dict[tuple[str, int], RewardOutcome]:
        """Wait for the calls, fill the columns, and return the failed ones, with their messages, by name and place."""
        failed: dict[tuple[str, int], RewardOutcome] = {}
        for (name, at, call), coming in pending.jobs:
            for place, outcome in zip(at, coming.result(), strict=True):
                # A call that failed may have no extra values.
                for extra, value in zip(call.extra_names, outcome.extra_values, strict=False):
                    pending.columns[f"{name}/{extra}"][place] = value
                if outcome.status == "ok":
                    pending.columns[name][place] = outcome.value
                    continue
                on_error = self._on_error if call.on_error is None else call.on_error
                pending.columns[name][place] = () if call.positions else on_error
                defines = name in self._forms and not outcome.place and definition_of(_function_of(self._bases[name]))
                where = outcome.place or defines or call.path
                failed[name, place] = outcome._replace(message=f"{where}: {outcome.message}")
        return failed

    def _calls(
        self, name: str, items: Sequence[Item], places: Sequence[int], verdicts: Any
    ) -> Iterator[tuple[Sequence[int], RewardCall]]:
        """Yield the calls of a function after the places that each fills; ``verdicts``: of a judge on the devices."""
        reward, form = self._bases[name], self._forms[name]
        user_function = reward if isinstance(reward, UserFunction) else None
        path, positions = getattr(user_function, "path", None), getattr(user_function, "positions", "")
        importable = isinstance(path, str)
        seconds = self._timeout_s * (60 if form.batch else 1)
        seconds = seconds if verdicts is not None else getattr(reward, "timeout_s", None) or seconds
        function = None if importable else _function_of(reward)
        if verdicts is not None:
            function = lambda problems, completions: [verdicts[at] for at in places]  # noqa: E731
        extra_names = extra_columns(reward)
        on_error = math.nan if isinstance(reward, OF_JUDGES) else None
        for share in [places] if places and (form.batch or form.waits) else [[place] for place in places]:
            bare = [(items[at][0], dataclasses.replace(items[at][1], extras={}, prompt_extras={})) for at in share]
            label = path if importable else name
            yield share, RewardCall(label, bare, form, seconds, positions, function, on_error, extra_names)

    def _collect_scores(self, pending: ScoringBatch) -> Scores:
        """Wait for the calls; return the scores."""
        items, rewards, device_scores, places, columns, _ = pending
        failed = self._collect_outcomes(pending)
        bases = {name: self._bases[name] for name in rewards}
        accuracy = columns[VERIFIED].copy()
        accuracy[[place for name, place in failed if name == VERIFIED]] = 0.0
        source = {name: VERIFIED if isinstance(base, Accuracy) else name for name, base in bases.items()}
        stepped = {name: columns[name] for name, base in bases.items() if isinstance(base, OF_STEPS)}
        values = {name: reward_values(rewards[name], columns[source[name]]) for name in rewards if name not in stepped}
        for name in values.keys() & self._beside.keys():
            lost = [place for column, place in failed if column == source[name]]
            values[name][lost] = reward_values(rewards[name], np.full(len(lost), np.nan))
        counted = {VERIFIED} | {source[name] for name in rewards if name in self._rewards}
        unscored = np.zeros(len(items), bool)
        unscored[[place for column, place in failed if column in counted]] = True
        reward = np.zeros(len(items))
        for name in (name for name in values if name in self._rewards):
            at = places[name]
            reward[at] += rewards[name].weight * values[name][at]
            values[name] = spread(values[name][at], at, len(items))
        if math.isnan(self._on_error):
            reward[[place for column, place in failed if column in stepped]] = np.nan
        means = {
            name: np.array([sum(value for _, value in steps) / len(steps) if steps else math.nan for steps in column])
            for name, column in stepped.items()
        }
        differing = {
            f"{name}/{DISAGREEMENT}": scores.std(axis=1)
            for name, scores in device_scores.items()
            if name in self._rewards and isinstance(bases[name], ModelReward) and scores.shape[1:] > (1,)
        }
        beside = {
            f"{name}/{extra}": columns[f"{name}/{extra}"]
            for name, base in bases.items()
            if name in self._rewards
            for extra in extra_columns(base)
        }
        return Scores(
            reward=reward,
            accuracy=accuracy,
            parts={name: (means | values)[name] for name in rewards} | differing | beside,
            failures=collect_failures(failed, source, places),
            failed=unscored,
            steps=steps_at_tokens(items, [(bases[name], column) for name, column in stepped.items()], self.tokenizer),
        )


def _function_of(reward: Any) -> Callable[..., Any]:
    return reward.function if isinstance(reward, UserFunction) else reward
