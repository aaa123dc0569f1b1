"""Rollouts: groups of completions, sampled from prompts. Exports the engine's names too."""

from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.rollout.settings import Branching, Collect, EngineOptions, Ptx, Replay, Rollout
from jaxrl_llm.system import attach

__all__ = [
    *("Branching", "Collect", "Engine", "EngineOptions", "Ptx", "Repetition", "Replay", "Rollout", "Sampling"),
    *("first_tokens", "with_tokens"),
]

__getattr__ = attach("jaxrl_llm.engine", {"Engine": "engine", "first_tokens": "requests", "with_tokens": "requests"})
