"""Learning from scored completions: packing, the update, epochs over a rollout."""

from jaxrl_llm.learner.settings import Compute, Critic, Learner, Moments, Optimiser
from jaxrl_llm.system import attach

__getattr__ = attach(
    __name__,
    {"Layout": "batch", "Packed": "batch", "Sample": "batch", "pack": "batch"}
    | {"Forward": "forward", "PolicyGradient": "objectives", "ValueLoss": "objectives"}
    | {"Training": "update", "learn": "update"}
    | {"create_state": "update", "make_update": "update", "to_samples": "samples"},
)
