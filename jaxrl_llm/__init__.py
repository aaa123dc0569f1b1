"""Reinforcement learning for language models in JAX: one program from a laptop to a pod."""

import importlib
from typing import Any

__version__ = "0.1.0"

HOMES = {
    "Engine": "rollout",
    "PRESETS": "algorithms",
    "RECIPES": "recipes",
    "Run": "config",
    "Sampling": "rollout",
    "Task": "tasks",
    "load_pretrained": "models",
    "policy_loss": "algorithms",
    "train": "launch",
}
"""Where the names that most programs need live; each is imported when it is first used, so that this takes no time."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    """One of the names in ``HOMES``."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What ``dir`` and a notebook's completion offer."""
    return sorted({*globals(), *HOMES})
