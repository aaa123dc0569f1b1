"""When to begin another group: pure decisions from counts, so that every process of many makes the same ones."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_llm.rollout.settings import Collect

MEMORY = 256
"""Groups over which the share of informative ones is estimated."""


class Underway(NamedTuple):
    """How far a step is.

    Attributes:
      kept: groups to learn from.
      running: groups of which some completion is being sampled.
      held: groups that have used up their budget for this step.
      waiting: completions that the engine has not given back.
      started: prompts begun in this step.
    """

    kept: int
    running: int
    held: int
    waiting: int
    started: int


@dataclasses.dataclass(frozen=True)
class AdmissionPolicy:
    """What every step wants.

    Attributes:
      needed: P, groups to learn from.
      slots: the engine's.
      longest: tokens of a completion at most, of any task.
      filter_groups: what says which groups are informative, "accuracy" or "reward"; False where all of them count.
      collect: the run's settings.
      limits: tokens of a completion at most by the label of its task; ``longest`` for others.
      left_out: finish reasons of completions that the loss does not count.
    """

    needed: int
    slots: int
    longest: int
    filter_groups: str | bool
    collect: Collect
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def reach(self) -> int:
        """Groups that a step may expect to find of those that it has under way.

        Where the last ones are interrupted, so many more that no slot idles while they run, as far as the next step
        needs them. Where they are finished, more would fill slots too, but with tokens that are learned from a step
        later.
        """
        return 2 * self.needed if self.collect.interrupt else self.needed

    @property
    def partial(self) -> bool:
        """Whether a group may go on in the next step."""
        return self.collect.interrupt or self.collect.token_budget > 0

    @property
    def segments(self) -> int:
        """Steps that the longest completion takes under the token budget."""
        return -(-self.longest // self.collect.token_budget) if self.collect.token_budget else 1

    @property
    def oldest(self) -> float:
        """Steps that a group may be under way for after its first one; a token budget that takes several adds them."""
        return self.collect.max_age + self.segments - 1 if self.collect.max_age else math.inf

    def longest_of(self, task: str) -> int:
        """Tokens of a completion to a problem of this task at most."""
        return self.limits.get(task, self.longest)

    def limit(self, begun: int, task: str) -> int:
        """Tokens that a completion with ``begun`` of them may have at the end of this step."""
        budget = self.collect.token_budget
        longest = self.longest_of(task)
        return min(begun + budget, longest) if budget else longest

    def wants(self, now: Underway, share: float) -> bool:
        """Whether to begin one more group, where ``share`` of them are informative.

        What is certain to be needed is begun at once. Otherwise groups are begun while the step is short and what is
        under
        way is not expected to cover ``reach``, as many as keep every slot busy and as many again waiting: a slot that
          ends
        is then filled at once, and what has waited in vain costs nothing. What is held counts in the steps to come.
        """
        if now.kept >= self.needed or now.started >= self.collect.max_rounds * self.needed:
            return False
        found = now.kept + share * now.running
        if found + share * now.held >= self.segments * self.reach:
            return False
        certain = not self.filter_groups and now.kept + now.running < self.needed
        return certain or (now.waiting < 2 * self.slots and found < self.reach)


def share_of(good: float, seen: float) -> float:
    """The estimated share of informative groups; four of five where nothing was seen, with the weight of two groups.

    A first step that expects less samples more than it needs, and what is left over is learned from in the second, when
    the policy has moved furthest from the one that sampled it.
    """
    return (good + 1.6) / (seen + 2)


def remember(good: float, seen: float, new_good: int, new: int) -> tuple[float, float]:
    """The counts with ``new`` groups added; old ones fade once there are more than ``MEMORY``."""
    good = good + new_good
    seen = seen + new
    fade = min(1.0, MEMORY / max(seen, 1.0))
    return good * fade, seen * fade
