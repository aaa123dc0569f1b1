"""Groups from prompts: admission, collection, what is carried over. The engine's names are here too."""

from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.lazy import attach
from jaxrl_llm.rollout.settings import Collect, Ptx, Replay, Rollout

__all__ = ["Collect", "Engine", "Ptx", "Repetition", "Replay", "Rollout", "Sampling", "first_tokens", "with_tokens"]

__getattr__ = attach("jaxrl_llm.engine", {"Engine": "engine", "first_tokens": "requests", "with_tokens": "requests"})
