"""An adaptive coefficient of the entropy bonus, which steers the entropy towards a target."""

import dataclasses
from typing import Annotated

from jaxrl_llm.algorithms.contracts import ABOVE_0, AT_LEAST_0, FINITE, within_bounds


@dataclasses.dataclass(frozen=True)
class AdaptiveEntropy:
    """Adaptive entropy control of Skywork-OR1 (arXiv 2505.22312): the coefficient rises below the target entropy and
    falls above it; the bonus is applied only while the entropy is at most the target.

    ``c <- clip(c + rate [e < target] - rate [e > target], 0, largest)``, ``coefficient = c [e <= target]``

    Here e is the step's ``entropy``, and c starts as the algorithm's ``entropy_coef``, which the first step uses. A
    later step uses the coefficient computed from the entropy of the step before it; c is updated even while the bonus
    is off. ``largest`` is our addition: it bounds the growth of c during a long time below the target.

    Attributes:
      target: nats per token, at the sampling temperature; the paper's is 0.2.
      rate: change of c in a step; the paper's is 0.005.
      largest: upper bound of c.
    """

    target: Annotated[float, AT_LEAST_0, FINITE] = 0.2
    rate: Annotated[float, ABOVE_0, FINITE] = 0.005
    largest: Annotated[float, ABOVE_0, FINITE] = 0.1

    __post_init__ = within_bounds

    def __call__(self, coef: float, entropy: float) -> tuple[float, float]:
        """Return the next c, from this one and the measured entropy, and the coefficient for the next step."""
        moved = coef + self.rate * ((entropy < self.target) - (entropy > self.target))
        moved = min(max(moved, 0.0), self.largest)
        return moved, moved if entropy <= self.target else 0.0
