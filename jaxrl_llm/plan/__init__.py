"""Will a run fit a machine that is not at hand, how fast can it be, and what holds it back."""

from jaxrl_llm.plan.machines import CHIPS, Chip, Machine, parse_topology

__all__ = ["CHIPS", "Chip", "Machine", "parse_topology"]
