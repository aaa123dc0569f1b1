"""From scored completions to a better policy: packing, the update, epochs over a rollout."""

from jaxrl_llm.learner.batch import Layout, Packed, Sample, pack
from jaxrl_llm.learner.learn import Learner, abstract_state, create_state, learn
from jaxrl_llm.learner.optimiser import Optimiser, build, learning_rate
from jaxrl_llm.learner.update import make_update

__all__ = [
    "Layout",
    "Learner",
    "Optimiser",
    "Packed",
    "Sample",
    "abstract_state",
    "build",
    "create_state",
    "learn",
    "learning_rate",
    "make_update",
    "pack",
]
