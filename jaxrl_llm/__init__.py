"""Reinforcement learning for language models in JAX: one program from a laptop to a pod."""

import importlib
from typing import Any

__version__ = "0.1.0"

HOMES = {
    "Distillation": "config",
    "Engine": "rollout",
    "Environment": "environments",
    "PRESETS": "algorithms",
    "RECIPES": "recipes",
    "Run": "config",
    "Sampling": "rollout",
    "Step": "environments",
    "Task": "tasks",
    "load_pretrained": "models",
    "policy_loss": "algorithms",
    "train": "trainer.launch",
}
"""The modules of the names that most programs need; each is imported on first use, so that ``import jaxrl_llm`` is
fast.
"""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    """Import one of the names in ``HOMES``."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names for ``dir`` and for completion in a notebook."""
    return sorted({*globals(), *HOMES})
