"""Sampling engine, tokens in and tokens out: slots are refilled between compiled chunks of decode steps.

It is independent of tasks and rewards.
"""

from jaxrl_llm.engine.settings import Sampling

__all__ = ["Sampling"]
