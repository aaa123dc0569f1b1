"""What scores completions: functions on the host's processors, or models on the devices, behind one call."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.failures import Failures
from jaxrl_llm.rewards.forms import Item
from jaxrl_llm.rewards.scorer import Scores
from jaxrl_llm.rewards.steps import added


class Judge(Protocol):
    """Scores completions, in order.

    Every process of a run calls it with the same items and gets the same scores. How the work is divided is its own
    affair: a ``Scorer`` gives each process a share and gathers; a model on the devices sees all items on all of them.
    """

    def score(self, items: Sequence[Item]) -> Scores:
        """The scores of these completions."""

    def close(self) -> None:
        """Ends what it has started."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """Several judges as one: rewards are added up, parts stand beside each other.

    Attributes:
      judges: at least one; the first one's accuracy is the panel's.
    """

    judges: tuple[Judge, ...]

    def score(self, items: Sequence[Item]) -> Scores:
        """The sum of all judges' rewards, NaN where one of them is, and that of their step rewards at each token.

        Raises:
          InputError: two judges have a part of the same name.
        """
        found = [judge.score(items) for judge in self.judges]
        parts: dict[str, np.ndarray] = {}
        for scores in found:
            twice = sorted(parts.keys() & scores.parts.keys())
            if twice:
                raise InputError(f"two judges call a reward {twice[0]!r}: give one of them another name")
            parts |= scores.parts
        failures = sum((scores.failures for scores in found), Failures())
        stepped = [scores.steps for scores in found if scores.steps]
        steps = tuple(added(columns) for columns in zip(*stepped, strict=True))
        return Scores(np.sum([scores.reward for scores in found], axis=0), found[0].accuracy, parts, failures, steps)

    def close(self) -> None:
        """Closes all of them."""
        for judge in self.judges:
            judge.close()
