"""What moves a coefficient of the loss from step to step."""

import dataclasses
import math
from typing import Any, Protocol

from jaxrl_llm.rules.decision import Decision, Row


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
