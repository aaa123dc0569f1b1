"""What moves a coefficient of the loss from step to step."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rules.decision import Decision, Row


@dataclasses.dataclass(frozen=True)
class Controlled:
    """The KL coefficient of the next step, from this step's and from the KL that was measured after its last update.

    Attributes:
      controller: ``(coefficient, kl, completions) -> coefficient``; its ``reads`` names the metric that is its KL.
    """

    controller: Callable[[float, float, int], float]

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step that made no update leaves the coefficient as it is."""
        measured = row.get(self.controller.reads, math.nan)
        if math.isnan(measured):
            return Decision(), own
        coefficient = self.controller(row["kl_coef"], measured, int(row["completions"]))
        return Decision(coefficients={"kl_coef": float(coefficient)}), own
