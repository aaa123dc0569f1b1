"""What moves a coefficient of the loss from step to step."""

import dataclasses
import math
from typing import Any, Protocol

from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.rules.decision import Decision, Row

OF_ENTROPY = "entropy"
"""The name of the rule that moves the entropy's coefficient."""


class Controller(Protocol):
    """Moves a KL coefficient towards its target.

    Attributes:
      reads: the metric that is its KL.
    """

    @property
    def reads(self) -> str:
        """A name in a step's row."""
        ...

    def __call__(self, coefficient: float, kl: float, completions: int, /) -> float:
        """The next step's coefficient."""
        ...


@dataclasses.dataclass(frozen=True)
class Controlled:
    """The KL coefficient of the next step, from this step's and from the KL that was measured after its last update.

    Attributes:
      controller: says what the next one is.
    """

    controller: Controller

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step that made no update leaves the coefficient as it is."""
        measured = row.get(self.controller.reads, math.nan)
        if math.isnan(measured):
            return Decision(), own
        coefficient = self.controller(row["kl_coef"], measured, int(row["completions"]))
        return Decision(coefficients={"kl_coef": float(coefficient)}), own


@dataclasses.dataclass(frozen=True)
class EntropyControlled:
    """The coefficient of the entropy bonus in the next step, from the entropy of this one."""

    controller: AdaptiveEntropy

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers what the controller moves, which is more than the coefficient while the bonus is off.

        A step that measured no entropy leaves all as it is.
        """
        entropy = row.get("entropy", math.nan)
        if math.isnan(entropy):
            return Decision(), own
        moved, coefficient = self.controller(own.get("moved", row["entropy_coef"]), entropy)
        return Decision(coefficients={"entropy_coef": coefficient}), {"moved": moved}


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """``lam <- max(0, lam + rate * (mean cost - limit))``: the multiplier of a constraint for the next step.

    Attributes:
      cost: the metric that is the step's mean cost.
      coefficient: what lam is called.
      limit: of the mean cost.
      rate: of lam.
    """

    cost: str
    coefficient: str
    limit: float
    rate: float

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step without a cost leaves lam as it is."""
        cost = row.get(self.cost, math.nan)
        if math.isnan(cost):
            return Decision(), own
        moved = max(0.0, row[self.coefficient] + self.rate * (cost - self.limit))
        return Decision(coefficients={self.coefficient: moved}), own
