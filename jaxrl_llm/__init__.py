"""Reinforcement learning for language models in JAX: one program from a laptop to a pod."""

__version__ = "0.1.0"
