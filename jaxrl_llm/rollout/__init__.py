"""The sampler: prompts in, completions with their log-probabilities out."""

from jaxrl_llm.lazy import attach
from jaxrl_llm.rollout.settings import Collect, Repetition, Rollout, Sampling

__all__ = ["Collect", "Engine", "Repetition", "Rollout", "Sampling", "first_tokens", "with_tokens"]

__getattr__ = attach(__name__, {"Engine": "engine", "first_tokens": "requests", "with_tokens": "requests"})
