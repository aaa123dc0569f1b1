"""Environments: worlds that answer the model, and tools that it may call."""

from jaxrl_llm.environments.environment import ENDS, Environment, Limits, Message, Step
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.world import Answer, World
