"""Planning without the machine: whether a run fits it, how fast the run can be, and which resource limits it."""

from jaxrl_llm.plan.machines import CHIPS, Chip, Machine, parse_topology

__all__ = ["CHIPS", "Chip", "Machine", "parse_topology"]
