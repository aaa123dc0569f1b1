"""Kinds of training, a file each: where batches come from, and what they teach. The loop knows none of them."""

import importlib
from types import ModuleType

from jaxrl_llm.config import Configuration, Preference, RewardModel, Run, Supervised

STAGES: dict[type, str] = {
    Run: "jaxrl_llm.stages.rl",
    Supervised: "jaxrl_llm.stages.supervised",
    Preference: "jaxrl_llm.stages.preference",
    RewardModel: "jaxrl_llm.stages.reward_model",
}
"""The module of each kind of training, by the type of its configuration."""


def stage_of(run: Configuration) -> ModuleType:
    """The kind of training that a configuration of this type asks for: a module as ``stages/stage.py`` describes."""
    return importlib.import_module(STAGES[type(run)])
