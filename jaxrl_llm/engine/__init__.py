"""Sampling engine, tokens in and tokens out: slots are refilled between compiled chunks of decode steps.

It is independent of tasks and rewards.
"""

from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.system import attach

__all__ = ["Engine", "Repetition", "Sampling", "first_tokens", "with_tokens"]

__getattr__ = attach(__name__, {"Engine": "engine", "first_tokens": "requests", "with_tokens": "requests"})
