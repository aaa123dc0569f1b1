"""Keeping entropy: a coefficient of the entropy bonus that moves towards a target."""

import dataclasses

from jaxrl_llm.algorithms.contracts import finite, nonnegative, positive


@dataclasses.dataclass(frozen=True)
class AdaptiveEntropy:
    """Skywork-OR1's rule (arXiv 2505.22312, adaptive entropy control): up where the entropy is below the target, down
    where it is above; the bonus itself acts only while the entropy is not above it.

    ``c <- clip(c + rate [e < target] - rate [e > target], 0, largest)``, ``coefficient = c [e <= target]``

    with e the step's ``entropy`` and c first the algorithm's ``entropy_coef``, which the first step has. A coefficient
    is thus made of the entropy of the step before it, and c itself goes on while the bonus is off. The paper has no
    ``largest``; it bounds what a long time below the target adds up to.

    Attributes:
      target: nats per token, at the sampling temperature; the paper's is 0.2.
      rate: of c in a step; the paper's is 0.005.
      largest: of c.
    """

    target: float = 0.2
    rate: float = 0.005
    largest: float = 0.1

    def __post_init__(self):
        nonnegative(self, "target")
        positive(self, "rate", "largest")
        finite(self, "target", "rate", "largest")

    def __call__(self, coef: float, entropy: float) -> tuple[float, float]:
        """The next c, from this one and the entropy just measured; and the coefficient that the next step has."""
        moved = coef + self.rate * ((entropy < self.target) - (entropy > self.target))
        moved = min(max(moved, 0.0), self.largest)
        return moved, moved if entropy <= self.target else 0.0
