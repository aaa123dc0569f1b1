"""A completion now and then, with the end of its prompt and its reward: what the policy does, while it learns."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.telemetry.columns import short
from jaxrl_llm.telemetry.lines import ELLIPSIS, abridge, harmless, tail
from jaxrl_llm.types import Group

EVERY_S = 10.0
"""One is shown for at least this long, so that it can be read; where steps take longer each has its own."""
KEPT = 2000
"""Characters of either end: no terminal shows more in a line."""


class Example(NamedTuple):
    """A completion to look at.

    Attributes:
      step: that learned from it.
      which: ``best``, ``lowest``, or empty where all of its step are worth the same.
      reward: what it is worth.
      prompt: its end, on one line.
      completion: on one line.
    """

    step: int
    which: str
    reward: float
    prompt: str
    completion: str

    def lines(self, width: int, mark: str = ELLIPSIS) -> list[str]:
        """Where it is from and what it answers, then itself, each in ``width`` columns; ``mark`` where they are cut."""
        worth = f"step {self.step}  {f'{self.which} reward'.lstrip()} {short(self.reward)}  "
        return [
            worth + tail(self.prompt, width - len(worth), mark),
            f"  {abridge(self.completion, width - 2, mark) or '(nothing)'}",
        ]


class Examples:
    """Chooses them: in turn one of the best and one of the worst of a step.

    Args:
      clock: seconds.

    Attributes:
      shown: the one to look at now; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.shown: Example | None = None
        self._clock = clock
        self._turn = 0
        self._since = -math.inf

    def see(self, step: int, groups: Sequence[Group]) -> None:
        """Take one of what ``step`` learned from, if it is time for another."""
        if self._clock() - self._since < EVERY_S or (example := chosen(step, groups, self._turn)) is None:
            return
        self.shown = example
        self._turn += 1
        self._since = self._clock()


def chosen(step: int, groups: Sequence[Group], turn: int) -> Example | None:
    """Of the best, or in every other turn of the worst, now this one and now that; None where none has a reward."""
    scored = [
        (float(reward), group, i) for group in groups for i, reward in enumerate(group.rewards) if math.isfinite(reward)
    ]
    if not scored:
        return None
    best = max(reward for reward, _, _ in scored)
    worst = min(reward for reward, _, _ in scored)
    wanted = worst if turn % 2 else best
    alike = [one for one in scored if one[0] == wanted]
    reward, group, i = alike[turn // 2 % len(alike)]
    which = "" if best == worst else ("lowest" if turn % 2 else "best")
    prompt = harmless(group.problem.prompt[-1]["content"][-KEPT:])
    text = group.completions[i].text
    text = text if len(text) <= 2 * KEPT else f"{text[:KEPT]} {text[-KEPT:]}"
    return Example(step, which, reward, prompt, harmless(text))
