"""From scored completions to a better policy: packing, the update, epochs over a rollout."""

from jaxrl_llm.lazy import attach
from jaxrl_llm.learner.settings import Learner, Optimiser

__all__ = [
    "Layout",
    "Learner",
    "Optimiser",
    "Packed",
    "Sample",
    "completion_logps",
    "create_state",
    "learn",
    "make_update",
    "pack",
    "to_samples",
]

__getattr__ = attach(
    __name__,
    {"Layout": "batch", "Packed": "batch", "Sample": "batch", "pack": "batch"}
    | {"completion_logps": "epochs", "create_state": "epochs", "learn": "epochs"}
    | {"make_update": "update", "to_samples": "samples"},
)
