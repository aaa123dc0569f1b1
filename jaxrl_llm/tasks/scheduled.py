"""The stream of a curriculum: what is counted of each problem, and which one a prompt asks."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.tasks.curriculum import BY_SUCCESS, Curriculum, difficulties
from jaxrl_llm.tasks.stream import COUNTED, OTHERS, Memory, permutation, problem_index
from jaxrl_llm.types import Group, Problem

NONE = -1
"""In place of a prompt's number: there was none."""
PLACES = (COUNTED, "begun", "asked", "since")
"""What is remembered of a task's prompts, beside what came of them."""


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """The stream of a curriculum.

    It remembers, as arrays with an entry for each problem: ``tries`` and ``solved``, float32, faded counts of answers
    that were verified and of how much of them was right; ``streak`` and ``last`` as ``Dropping`` reads them; and
    besides ``asked``, prompts so far, ``since``, the number of the first one of ``easy_to_hard``, ``begun``, where the
    present round began, and ``problems``, a digest of their ids. Where only the places of prompts are remembered
    (``PLACES``), the counts begin anew; what was asked without a curriculum was asked in epochs.

    Attributes:
      curriculum: what decides.
      problems: all of them, N.
      seed: of every draw, with the prompt's number.
      known: what another run's stream remembered; empty for nothing.
    """

    curriculum: Curriculum
    problems: Sequence[Problem]
    seed: int
    known: Memory = dataclasses.field(default_factory=dict)

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """The problem that is drawn for this prompt."""
        number -= memory.get(OTHERS, 0)
        if number and not memory.keys() - {OTHERS}:
            memory = memory | in_epochs(self.seed, len(self.problems), number)
        memory = self.kept(memory)
        if memory.get("since", 0) == NONE:
            memory = memory | {"since": number}
        asked = self.active(number, memory)
        begun = memory["begun"]
        if self.curriculum.prioritised is not None:
            weights = np.where(asked, self.curriculum.prioritised(self.success(memory)), 0.0)
            weights = weights if weights.any() else asked.astype(float)
        else:
            unasked = asked & (memory["last"] < begun)
            if not unasked.any():
                begun = number
                unasked = asked
            weights = unasked.astype(float)
        index = drawn(weights, self.seed, number)
        last = memory["last"].copy()
        last[index] = number
        return self.problems[index], memory | {"last": last, "begun": begun, "asked": number + 1}

    def told(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """With the answers counted whose accuracy is known, each for as much of it as is right."""
        memory = self.kept(memory)
        tries, solved, streak = (memory[name].copy() for name in ("tries", "solved", "streak"))
        for group in groups:
            index = self._index.get(group.problem.id)
            known = group.credit[~np.isnan(group.credit)]
            if index is None or not len(known):
                continue
            tries[index] = tries[index] * np.float32(self.curriculum.fade) + np.float32(len(known))
            solved[index] = solved[index] * np.float32(self.curriculum.fade) + np.float32(known.sum())
            if (known == 1).all():
                streak[index] = max(streak[index], 0) + 1
            else:
                streak[index] = 0 if known.any() else min(streak[index], 0) - 1
        return memory | {"tries": tries, "solved": solved, "streak": streak}

    def measured(self, before: Memory, after: Memory) -> dict[str, Any]:
        """How many problems may be asked next, how many are dropped, and the mean success of those that were tried.

        An event where nothing but dropped ones was left.
        """
        before, after = self.kept(before), self.kept(after)
        dropped = self.dropped(after["asked"], after)
        seen = after["tries"] > 0
        rates = after["solved"][seen] / after["tries"][seen]
        found: dict[str, Any] = {
            "curriculum/active": int(self.active(after["asked"], after).sum()),
            "curriculum/dropped_solved": int((dropped & (after["streak"] > 0)).sum()),
            "curriculum/dropped_unsolved": int((dropped & (after["streak"] < 0)).sum()),
            "curriculum/success": float(rates.mean(dtype=np.float64)) if seen.any() else math.nan,
        }
        if dropped.all() and not self.dropped(before["asked"], before).all():
            found["event/curriculum_exhausted"] = f"all {len(dropped)} problems are dropped, so all are asked on"
        return found

    def kept(self, memory: Memory) -> Memory:
        """What is remembered, where it is about these problems; else what is known before the first prompt."""
        if memory.get("problems") == self.first["problems"]:
            return memory
        stays = {OTHERS}
        if "problems" not in memory and len(memory.get(COUNTED, ())) == len(self.problems):
            stays |= set(PLACES)
        return self.first | {name: value for name, value in memory.items() if name in stays}

    def success(self, memory: Memory) -> np.ndarray:
        """The estimate for each problem, float64[N]; with ``strength`` 0 that of a problem never tried is ``prior``."""
        given = self.curriculum
        tries = memory["tries"].astype(np.float64)
        counted = tries + given.strength
        estimate = (memory["solved"] + given.prior * given.strength) / np.where(counted > 0, counted, 1.0)
        return np.where(counted > 0, estimate, given.prior)

    def dropped(self, number: int, memory: Memory) -> np.ndarray:
        """Which problems are dropped, bool[N]."""
        drop = self.curriculum.drop
        return np.zeros(len(self.problems), bool) if drop is None else drop(memory["streak"], memory["last"], number)

    def active(self, number: int, memory: Memory) -> np.ndarray:
        """Which problems prompt ``number`` may ask, bool[N]: never none."""
        left = ~self.dropped(number, memory)
        left = left if left.any() else ~left
        easy = self.curriculum.easy_to_hard
        if easy is None:
            return left
        hard = 1 - self.success(memory) if easy.by == BY_SUCCESS else self._difficulty
        since = memory.get("since", 0)
        number = 0 if since == NONE else number - since
        return easy(hard, left, number, self._shuffled)

    @functools.cached_property
    def first(self) -> Memory:
        """What it remembers before the first prompt."""
        size = len(self.problems)
        counts = {
            "tries": np.zeros(size, np.float32),
            "solved": np.zeros(size, np.float32),
            "streak": np.zeros(size, np.int32),
        }
        known = {name: array for name, array in self.known.items() if name in counts}
        places = {"last": np.full(size, NONE, np.int64), "begun": 0, "asked": 0, "since": NONE}
        return counts | known | places | {"problems": digest(self.problems)}

    @functools.cached_property
    def _shuffled(self) -> np.ndarray:
        return permutation(self.seed, 0, len(self.problems))

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {problem.id: index for index, problem in enumerate(self.problems)}

    @functools.cached_property
    def _difficulty(self) -> np.ndarray:
        return difficulties(self.curriculum.easy_to_hard, self.problems)


def in_epochs(seed: int, size: int, number: int) -> Memory:
    """The places of so many prompts, had they been asked as ``Shuffled`` asks."""
    begun = number - number % size
    last = np.full(size, NONE, np.int64)
    for place in range(begun, number):
        last[problem_index(seed, place, size)] = place
    return {COUNTED: last, "begun": begun, "asked": number}


def drawn(weights: np.ndarray, seed: int, number: int) -> int:
    """An index with probability in proportion to its weight, a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number))).random_raw()
    total = np.cumsum(weights)
    # Rounding may reach the total itself, and what has no weight is never drawn.
    found = int(np.searchsorted(total, (bits >> 11) * 2.0**-53 * total[-1], side="right"))
    return min(found, int(np.flatnonzero(weights)[-1]))


def digest(problems: Sequence[Problem]) -> str:
    """Tells one sequence of problems from another, by their ids, which are made of their prompts."""
    return hashlib.sha256("\n".join(problem.id for problem in problems).encode()).hexdigest()[:16]
