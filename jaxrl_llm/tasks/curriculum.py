"""Which problems are asked, by how often each was solved: prioritised, from easy to hard, and without those that teach
nothing.

A curriculum is a value whose parts go together: ``drop`` says which problems are left, ``easy_to_hard`` how many of
those are open, ``prioritised`` how they are drawn.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.types import Problem

BY_SUCCESS = "success"
"""In place of a column: a problem is the easier the more of its answers were right."""


@dataclasses.dataclass(frozen=True)
class Prioritised:
    """Problems are drawn with ``p ~ (1 - success) ** power``: Kimi k1.5 (arXiv 2501.12599, section 2.3.4), power 1.

    Drawn anew for each prompt, so that one problem may come twice before another comes once.

    >>> weights = Prioritised()(np.array([0.9, 0.5, 0.1]))
    >>> (weights / weights.sum()).round(6).tolist()
    [0.066667, 0.333333, 0.6]

    Attributes:
      power: above 0.
    """

    power: float = 1.0

    def __call__(self, success: np.ndarray) -> np.ndarray:
        """What each problem is drawn in proportion to, [N], from its estimated success."""
        return (1 - success) ** self.power


@dataclasses.dataclass(frozen=True)
class EasyToHard:
    """Only the easiest problems are open at first; their share grows evenly until all are.

    ``start + (1 - start) * n / over`` of those that are not dropped are open to prompt n of the task. What is equally
    easy is in an order of the seed's.

    Attributes:
      by: a column of the rows with a number for each problem (a dot reaches into a nested record); "success": how often
        it was solved so far, where a problem that was never asked counts as ``Curriculum.prior``.
      over: prompts of the task after which all problems are open; in a later phase from its first one on.
      start: the share that is open to the first prompt; above 0, at most 1.
      rising: the larger a column's number, the harder the problem; False the other way round.
    """

    by: str
    over: int
    start: float = 0.2
    rising: bool = True

    def share(self, number: int) -> float:
        """The share that is open to prompt ``number`` of the task, counted from 0."""
        return min(1.0, self.start + (1 - self.start) * number / self.over)

    def __call__(self, difficulty: np.ndarray, left: np.ndarray, number: int, ties: np.ndarray) -> np.ndarray:
        """Which problems are open, bool[N].

        Args:
          difficulty: [N].
          left: bool[N], those that are not dropped.
          number: of the prompt.
          ties: int[N], a permutation: of equally easy problems those with smaller numbers come first.
        """
        total = int(left.sum())
        count = math.ceil(self.share(number) * total - 1e-9)  # a share's rounding opens no further problem
        if count >= total:
            return left
        hardest = np.partition(difficulty[left], count - 1)[count - 1]
        found = left & (difficulty < hardest)
        equal = np.flatnonzero(left & (difficulty == hardest))
        more = count - int(found.sum())
        found[equal[np.argpartition(ties[equal], more - 1)[:more]]] = True
        return found


@dataclasses.dataclass(frozen=True)
class Dropping:
    """Problems that were always, or never, solved are dropped: groups of theirs teach nothing.

    Attributes:
      solved: a problem is dropped once all its answers were right in so many visits in a row; 0 for never.
      unsolved: or none of them, not even in part; 0 for never.
      again: epochs, of as many prompts as there are problems, after which it is visited once more: one that is solved
        in part then is back, another waits as long again. 0 for never.
    """

    solved: int = 3
    unsolved: int = 3
    again: int = 0

    def __call__(self, streak: np.ndarray, last: np.ndarray, number: int) -> np.ndarray:
        """Which problems are dropped, bool[N].

        Args:
          streak: int[N], visits in a row in which all answers were right; below 0, in which none was, not even in part.
          last: int[N], the prompt that last asked it; -1 for none.
          number: of the prompt that is asked now.
        """
        dropped = np.zeros(len(streak), bool)
        if self.solved:
            dropped |= streak >= self.solved
        if self.unsolved:
            dropped |= streak <= -self.unsolved
        if self.again:
            dropped &= number - last < self.again * len(streak)
        return dropped


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Which problems are asked. Without any part all are, in epochs, and how often each is solved is kept all the same.

    A problem's success is ``(solved + prior * strength) / (tries + strength)``: the mean accuracy of its answers, which
    is 0.75 for one that follows three of four instructions.

    Attributes:
      prioritised: how problems are drawn; None: all that are open once, in an order of the seed's, then all again.
      easy_to_hard: how many are open; None for all.
      drop: which are asked no more; None for none.
      prior: the success that is expected of a problem before it was asked.
      strength: as how many answers that expectation counts.
      fade: what earlier answers count for once a problem is answered again, above 0; 1 counts all alike.
      statistics: RUN or RUN@STEP, another run of a curriculum over the same problems, whose counts this one begins
        with; None begins without any.
    """

    prioritised: Prioritised | None = None
    easy_to_hard: EasyToHard | None = None
    drop: Dropping | None = None
    prior: float = 0.5
    strength: float = 1.0
    fade: float = 1.0
    statistics: str | None = None

    @property
    def reads_success(self) -> bool:
        """Whether what is asked depends on which answers were right."""
        measured = self.easy_to_hard is not None and self.easy_to_hard.by == BY_SUCCESS
        return measured or self.prioritised is not None or self.drop is not None


def check_curriculum(curriculum: Curriculum, name: str) -> None:
    """Refuse numbers out of range, before anything is loaded; ``name`` is the field.

    Raises:
      InputError: names field, value and remedy.
    """
    easy, drop, drawn = curriculum.easy_to_hard, curriculum.drop, curriculum.prioritised
    rules = {
        "prior": (0 <= curriculum.prior <= 1, "from 0 to 1", curriculum.prior),
        "strength": (0 <= curriculum.strength < math.inf, "at least 0", curriculum.strength),
        "fade": (0 < curriculum.fade <= 1, "above 0 and at most 1", curriculum.fade),
    }
    if drawn is not None:
        rules["prioritised.power"] = (0 < drawn.power < math.inf, "above 0", drawn.power)
    if easy is not None:
        rules["easy_to_hard.by"] = (bool(easy.by), "a column of the rows, or success", repr(easy.by))
        rules["easy_to_hard.over"] = (easy.over >= 1, "at least 1 prompt", easy.over)
        rules["easy_to_hard.start"] = (0 < easy.start <= 1, "above 0 and at most 1", easy.start)
        turned = easy.by == BY_SUCCESS and not easy.rising
        rules["easy_to_hard.rising"] = (not turned, "left out where by is success", easy.rising)
    if drop is not None:
        for part in ("solved", "unsolved", "again"):
            rules[f"drop.{part}"] = (getattr(drop, part) >= 0, "at least 0", getattr(drop, part))
        rules["drop.solved and unsolved"] = (bool(drop.solved or drop.unsolved), "above 0 in one of them", 0)
    for field, (fine, rule, value) in rules.items():
        require(fine, f"{name}.{field} must be {rule}, got {value}")
    require(
        curriculum.statistics is None or curriculum.reads_success,
        f"{name}.statistics {curriculum.statistics} has nothing to order: set prioritised, drop, or easy_to_hard by "
        "success, or leave it out",
    )


def difficulties(easy: EasyToHard, problems: Sequence[Problem]) -> np.ndarray:
    """The number in the column of each problem, turned so that larger is harder, float64[N].

    Raises:
      InputError: a problem has none; the columns that there are are named.
    """
    found = np.empty(len(problems))
    for index, problem in enumerate(problems):
        value: Any = problem.metadata
        for part in [easy.by] if easy.by in problem.metadata else easy.by.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or math.isnan(value):
            columns = ", ".join(numbers_in(problem.metadata)) or "none"
            raise InputError(
                f"easy_to_hard.by {easy.by!r} is {value!r:.40} in problem {problem.metadata.get('row', problem.id)}, "
                f"and it takes a number for each: give a column that has them (there: {columns}), or success"
            )
        found[index] = value
    return found if easy.rising else -found


def numbers_in(record: dict[str, Any], prefix: str = "") -> list[str]:
    """Names of the fields that hold numbers, as ``EasyToHard.by`` has them."""
    names = []
    for name, value in record.items():
        if isinstance(value, dict):
            names += numbers_in(value, f"{prefix}{name}.")
        elif isinstance(value, int | float | np.number) and not isinstance(value, bool):
            names.append(prefix + name)
    return names
