"""Kinds of training, one file each, which make batches and define the learning; the loop is independent of them."""

import importlib
from types import ModuleType

from jaxrl_llm.config import Configuration, Preference, RewardModel, Run, Supervised

STAGES: dict[type, str] = {
    Run: "jaxrl_llm.stages.rl",
    Supervised: "jaxrl_llm.stages.dataset",
    Preference: "jaxrl_llm.stages.preference",
    RewardModel: "jaxrl_llm.stages.reward_model",
}
"""The module of each kind of training, by the type of its configuration."""


def stage_of(run: Configuration) -> ModuleType:
    """Return the module of this configuration's kind of training; ``stages/stage.py`` describes its functions."""
    return importlib.import_module(STAGES[type(run)])
