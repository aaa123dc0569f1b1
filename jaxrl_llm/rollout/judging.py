"""Scores of a step's groups: begun when a group ends, and waited for once something depends on them."""

import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.groups import (
    AdmissionPolicy,
    Carryover,
    GroupSource,
    PartialGroup,
    informative,
)
from jaxrl_llm.rollout.replay import replay
from jaxrl_llm.types import Group

PROGRESS = (
    *("good", "seen", "stream", "successes", "unscored"),
    *("kept", "sampled", "replaced", "failures", "seconds"),
)
"""The attributes of a ``Judging`` that change while a step is filled."""


MEMORY = 256
"""Number of groups over which the share of informative ones is estimated."""


class Judging:
    """Owner of a step's groups from their end on: their scores, and what is kept of them.

    Scores are taken in the order in which groups ended, whenever they come: no decision depends on the clock.

    Args:
      source: of the scores.
      admission: which groups can teach.
      version: of the weights.
      left: carryover of the step before, with the step's progress if it was stopped.

    Attributes:
      good, seen, stream, successes: as in ``Carryover``, after the scores taken so far.
      unscored: groups that ended together and whose scores are not taken yet, in the order in which they ended.
      kept: groups that can teach, by number.
      sampled: groups scored, by number.
      replaced: numbers of the groups with a replayed success.
      failures: of rewards.
      seconds: in which nothing was sampled, since scores were waited for or measured on the device.
    """

    def __init__(self, source: GroupSource, admission: AdmissionPolicy, version: int, left: Carryover):
        self._source = source
        self._admission = admission
        self._version = version
        self.good, self.seen, self.stream = left.good, left.seen, left.stream
        self.successes = left.successes
        self.unscored: list[list[PartialGroup]] = []
        self.kept: dict[int, Group] = {}
        self.sampled: dict[int, Group] = {}
        self.replaced: list[int] = []
        self.failures = Failures()
        self.seconds = 0.0
        vars(self).update({name: left.underway[name] for name in PROGRESS if name in left.underway})
        self.unscored = [list(groups) for groups in self.unscored]
        self._coming = [source.score(groups) for groups in self.unscored]

    def progress(self) -> dict[str, Any]:
        """Return the progress, from which another ``Judging`` resumes; it asks for missing scores again."""
        return {name: getattr(self, name) for name in PROGRESS}

    def begin(self, groups: list[PartialGroup]) -> None:
        """Begin to score groups that ended together."""
        began = time.perf_counter()
        self.unscored.append(groups)
        self._coming.append(self._source.score(groups))
        self.seconds += time.perf_counter() - began

    def decide(self, holds: Callable[[int, float], bool]) -> bool:
        """Return ``holds(kept, share)``: the number of groups kept of all that ended, and the share that can teach.

        Scores are waited for only as long as the result depends on them: while it would differ if no open group or
        every one could teach. ``holds`` must be monotone in both arguments.
        """
        while True:
            found = [holds(*self.expected(many)) for many in (False, True)]
            if found[0] == found[1]:
                return found[0]
            self.take()

    def expected(self, many: bool) -> tuple[int, float]:
        """Return the number kept and the share, if no group whose score is open can teach, or if ``many`` do."""
        kept, good, seen = len(self.kept), self.good, self.seen
        for groups in self.unscored:
            played = sum(any(not one.unplayed for one in group.completions) for group in groups)
            new = played if many or not self._admission.filter_groups else 0
            kept += new
            good, seen = remember(good, seen, new, len(groups))
        return kept, share_of(good, seen) if self._admission.filter_groups else 1.0

    def take(self, most: int = 1) -> None:
        """Wait for the oldest open scores, up to ``most`` batches of them.

        Successes are replayed in groups that failed; groups that can teach and were sampled are kept.
        """
        for _ in range(min(most, len(self.unscored))):
            began = time.perf_counter()
            scored, failures = self._coming[0]()
            self.seconds += time.perf_counter() - began
            del self.unscored[0], self._coming[0]
            self.failures += failures
            self._keep(scored)

    def current(self) -> dict[str, Any]:
        """Return the memory of the stream of prompts, after all scores that the next prompt depends on."""
        if self._source.stream.learns(self.stream):
            self.take(len(self.unscored))
        return self.stream

    def _keep(self, scored: dict[int, Group]) -> None:
        admission, source = self._admission, self._source
        found = source.shaped(scored, self._version, admission.longest_of)
        replaced: dict[int, Group] = {}
        if admission.collect.replay is not None:
            settings = admission.collect.replay
            self.successes, replaced = replay(settings, self.successes, scored, source.seed, admission.left_out)
            self.replaced += replaced
        learned = found | source.shaped(replaced, self._version, admission.longest_of)
        reads = admission.filter_groups
        good = {
            number: group
            for number, group in learned.items()
            if not all(one.unplayed for one in group.completions) and (not reads or informative(group, reads))
        }
        self.stream = source.stream.observe(self.stream, list(found.values()))
        self.sampled |= found
        self.kept |= good
        self.good, self.seen = remember(self.good, self.seen, len(good), len(found))


def share_of(good: float, seen: float) -> float:
    """Estimate the share of informative groups; the prior is four of five, with the weight of two groups.

    A first step that expects less samples more than it needs, and the surplus is learned from in the second, when the
    policy has moved furthest from the one that sampled it.
    """
    return (good + 1.6) / (seen + 2)


def remember(good: float, seen: float, new_good: int, new: int) -> tuple[float, float]:
    """Return the counts with ``new`` groups added; old ones fade once there are more than ``MEMORY``."""
    good = good + new_good
    seen = seen + new
    fade = min(1.0, MEMORY / max(seen, 1.0))
    return good * fade, seen * fade
