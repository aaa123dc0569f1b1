"""Kinds of training, a file each: where batches come from, and what they teach. The loop knows none of them."""

import importlib
from types import ModuleType

from jaxrl_llm.config import Run

STAGES: dict[type, str] = {Run: "jaxrl_llm.stages.rl"}
"""The module of each kind of training, by the type of its configuration."""


def stage_of(run: Run) -> ModuleType:
    """The kind of training that a configuration of this type asks for: a module as ``stages/stage.py`` describes."""
    return importlib.import_module(STAGES[type(run)])
