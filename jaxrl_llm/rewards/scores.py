"""Scores of completions, and the failures to score them."""

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rewards.calls import Call, Outcome
from jaxrl_llm.rewards.functions import Item
from jaxrl_llm.rewards.inside import Coming


@dataclasses.dataclass(frozen=True)
class Failures:
    """Record of the completions that rewards failed to score.

    Attributes:
      errors: number that raised, or lost their process.
      timeouts: number that ran past their deadline.
      of: by reward, the number of completions it was called for, and of those that it failed to score.
      messages: by reward that failed, its first failure, in one line: ``my_rewards.py:7: ZeroDivisionError: division by
        zero``. The verifier's is included even without an ``Accuracy``, under the empty name.
      trace: those messages with their tracebacks, where they have one.
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
        asked, failed = self.of.get(name, (0, 0))
        return failed / asked if failed else 0.0

    def __add__(self, other: "Failures") -> "Failures":
        """Add up two records; the earlier messages are kept."""
        of = {}
        for name in self.of | other.of:
            (asked, failed), (more_asked, more_failed) = (one.of.get(name, (0, 0)) for one in (self, other))
            of[name] = asked + more_asked, failed + more_failed
        messages = self.messages | other.messages | self.messages
        return Failures(
            self.errors + other.errors, self.timeouts + other.timeouts, of, messages, self.trace or other.trace
        )

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a step; a reward that never failed has no entry."""
        found: dict[str, Any] = {"reward/errors": self.errors, "reward/timeouts": self.timeouts}
        found |= {
            f"reward/{name}/failed_fraction": self.fraction(name) for name, (_, failed) in self.of.items() if failed
        }
        return found | ({"event/reward_failed": self.message} if self.messages else {})


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of n completions.

    Attributes:
      reward: float64[n], the weighted sum of the parts that are rewards of whole completions; NaN where one of them is.
      accuracy: float64[n], the verifier's score; 1 or more is correct, 0 where the verifier failed, NaN without a
        verifier.
      parts: float64[n] for each reward by name, unweighted, and for watched rewards; for a step reward the mean over
        the steps. An ensemble of reward models also has ``<name>/disagreement``.
      failures: record of the completions that could not be scored.
      failed: bool[n], whether a reward, the verifier or the environment failed.
      steps: for each completion float32[t], the weighted sum of the step rewards at the tokens in which steps end, NaN
        elsewhere; empty without step rewards.
    """

    reward: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]
    failures: Failures
    failed: np.ndarray
    steps: tuple[np.ndarray, ...] = ()


def interleaved(shares: Sequence[Scores], count: int) -> Scores:
    """Merge the scores of ``count`` completions; share i of s has the completions i, i + s, i + 2 s, ..."""
    parts = {name: np.zeros(count) for name in shares[0].parts}
    failures = sum((share.failures for share in shares), Failures())
    whole = Scores(np.zeros(count), np.zeros(count), parts, failures, np.zeros(count, bool))
    for start, share in enumerate(shares):
        at = slice(start, None, len(shares))
        whole.reward[at], whole.accuracy[at], whole.failed[at] = share.reward, share.accuracy, share.failed
        for name, column in parts.items():
            column[at] = share.parts[name]
    stepped = any(share.steps for share in shares)  # one without items has none
    if not stepped:
        return whole
    steps = tuple(shares[at % len(shares)].steps[at // len(shares)] for at in range(count))
    return dataclasses.replace(whole, steps=steps)


def last_token(text: str, tokens: Sequence[int], end: int, tokenizer: Any) -> int:
    """Return the index of the token in which the first ``end`` characters of a completion are complete.

    Bisects over its prefixes, decoded as the whole was: a character of several tokens appears with the last of them.

    Args:
      text: of the whole completion.
      tokens: of it.
      end: 1 to ``len(text)``.
      tokenizer: that wrote the text.
    """
    return bisect.bisect_left(
        range(1, len(tokens)),
        True,
        key=lambda count: text_of(tokenizer, tokens[:count]).startswith(text[:end]),
    )


def at_tokens(items: Sequence[Any], stepped: Sequence[tuple[Any, Any]], tokenizer: Any) -> tuple[np.ndarray, ...]:
    """Place the step rewards of completions at their tokens, float32[t] each; empty without any, or without a
    tokenizer.

    Args:
      items: problems with completions.
      stepped: step rewards, each with its steps of each completion.
      tokenizer: that wrote the texts.
    """
    if not stepped or tokenizer is None:
        return ()
    found = []
    for at, (_, completion) in enumerate(items):
        tokens = completion.tokens.tolist()
        columns = []
        for reward, steps in stepped:
            values = np.full(len(tokens), np.nan, np.float32)
            for position, value in steps[at]:
                if reward.positions == "characters":
                    position = last_token(completion.text, tokens, position, tokenizer)
                values[position] = np.nansum([values[position], reward.weight * value])
            columns.append(values)
        stacked = np.stack(columns)
        found.append(np.where(np.isnan(stacked).all(axis=0), np.float32(np.nan), np.nansum(stacked, axis=0)))
    return tuple(found)


ENVIRONMENT = "environment"
"""Name of the part of a reward that the environment of an episode gives."""


def with_unplayed(scores: Scores, played: Sequence[int], items: Sequence[tuple[Any, Any]]) -> Scores:
    """Return the scores of all completions from those of the ``played`` ones: the others are wrong, and worth 0; their
    parts are NaN.
    """

    def spread(values: np.ndarray, others: Any) -> np.ndarray:
        column = np.full(len(items), others, np.float64)
        column[played] = values
        return column

    wrong = [math.nan if problem.verifier == "none" else 0.0 for problem, _ in items]
    parts = {name: spread(values, math.nan) for name, values in scores.parts.items()}
    accuracy = spread(scores.accuracy, wrong)
    failed = spread(scores.failed, False).astype(bool)
    return dataclasses.replace(scores, reward=spread(scores.reward, 0.0), accuracy=accuracy, parts=parts, failed=failed)


def with_environment(scores: Scores, items: Sequence[tuple[Any, Any]]) -> Scores:
    """Add the rewards that environments give to episodes, with weight 1; an episode whose environment failed is
    unscorable.
    """
    episodes = {place: completion.episode for place, (_, completion) in enumerate(items) if completion.episode}
    if not episodes:
        return scores
    errors = {place: episode.error for place, episode in episodes.items() if episode.error}
    failed = scores.failed.copy()
    failed[[*errors]] = True
    of = {ENVIRONMENT: (len(episodes), len(errors))}
    failures = Failures(len(errors), 0, of, {ENVIRONMENT: next(iter(errors.values()))} if errors else {})
    scores = dataclasses.replace(scores, failed=failed, failures=scores.failures + failures)
    given = np.array([episodes[place].reward if place in episodes else math.nan for place in range(len(items))])
    lacking = [place for place in range(len(items)) if place not in episodes]
    added = given.copy()
    added[lacking] = 0.0
    return dataclasses.replace(scores, reward=scores.reward + added, parts=scores.parts | {ENVIRONMENT: given})


class Begun(NamedTuple):
    """Completions that are being scored.

    Attributes:
      items: pairs of problem and completion.
      rewards: that score them, by the names of their parts.
      given: scores by models on the device.
      places: of the completions that each reward scores.
      columns: float64[n] of the verifier and of each base of a reward, by name, filled as outcomes come.
      jobs: the name and the places that each call fills, the call, and its outcomes to come.
    """

    items: Sequence[Item]
    rewards: dict[str, Any]
    given: Mapping[str, Any]
    places: Mapping[str, Sequence[int]]
    columns: dict[str, np.ndarray]
    jobs: list[tuple[tuple[str, Sequence[int], Call], Coming]]


def failures_of(
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
