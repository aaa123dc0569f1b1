"""The sampler: prompts in, completions with their log-probabilities out."""

from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

__all__ = ["Engine", "Sampling"]
