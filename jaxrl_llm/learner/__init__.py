"""From scored completions to a better policy: packing, the update, epochs over a rollout."""

from jaxrl_llm.lazy import attach
from jaxrl_llm.learner.settings import Critic, Learner, Optimiser

__all__ = [
    "Critic",
    "Forward",
    "Layout",
    "Learner",
    "Optimiser",
    "Packed",
    "PolicyGradient",
    "Sample",
    "Training",
    "ValueLoss",
    "create_state",
    "learn",
    "make_update",
    "pack",
    "to_samples",
]

__getattr__ = attach(
    __name__,
    {"Layout": "batch", "Packed": "batch", "Sample": "batch", "pack": "packing"}
    | {"Forward": "forward", "PolicyGradient": "objectives", "ValueLoss": "objectives"}
    | {"Training": "epochs", "learn": "epochs"}
    | {"create_state": "state", "make_update": "update", "to_samples": "samples"},
)
