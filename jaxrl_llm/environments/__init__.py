"""Environments: worlds that answer the model, and tools that it may call."""

from jaxrl_llm.environments.environment import Environment, Step
