"""Tokens in, tokens out: slots that are refilled between compiled chunks of decode steps.

It knows no task and no reward.
"""

from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.lazy import attach

__all__ = ["Engine", "Repetition", "Sampling", "first_tokens", "with_tokens"]

__getattr__ = attach(__name__, {"Engine": "engine", "first_tokens": "requests", "with_tokens": "requests"})
