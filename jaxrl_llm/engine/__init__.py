"""Sampling engine, tokens in and tokens out: slots are refilled between compiled chunks of decode steps. It is
independent of tasks and rewards.
"""

from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.system import attach

__all__ = ["Engine", "Sampling"]

__getattr__ = attach(__name__, {"Engine": "engine"})
