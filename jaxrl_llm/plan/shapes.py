"""What a model is, without its weights and mostly without a network."""

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl_llm.config import Configuration, Run, split_step, without_step
from jaxrl_llm.config.origin import SAVED_RUNS
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.architecture import architecture
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import read_config
from jaxrl_llm.stages.critic import Architectures
from jaxrl_llm.stages.judges import paths_of
from jaxrl_llm.trained import find_run


def model_config(name: str) -> tuple[ModelConfig, str]:
    """The architecture of a directory, a .gguf file, a built-in name, a hub id or RUN[@STEP], and where that was read.

    Of well-known models a copy of config.json is in this package, so that planning needs no network.

    Raises:
      InputError: nothing of that name, or an architecture that is not known here.
    """
    if name in published() and not Path(name).is_dir():
        return read_config(published()[name]), "the published config.json, copied into this package"
    trained = find_run(name)
    if trained is None:
        return architecture(name)
    config, source = model_config(without_step(trained.run.model))
    return config, f"of run {name}: {source}"


def architectures(run: Configuration, policy: ModelConfig) -> tuple[Architectures, tuple[str, ...]]:
    """From the names of the models that a run has beside its policy to what they are, and what was assumed.

    A run that is yet to be trained has no directory: it is planned as if it were of the policy's architecture.

    Raises:
      InputError: a model that is there, and cannot be read.
    """
    found = {}
    notes = []
    for name in beside(run):
        directory, _ = split_step(name)
        # Where there is no folder of runs yet, its name would read as a hub id.
        there = directory.parent.name != SAVED_RUNS or directory.exists()
        try:
            config = model_config(name)[0] if there else None
        except InputError:
            if directory.exists():
                raise
            config = None
        if config is None:
            notes.append(f"{name} is not there: planned as a model of the policy's architecture")
        found[name] = config or policy
    return found.__getitem__, tuple(notes)


def beside(run: Configuration) -> list[str]:
    """The models that a run names beside its policy: a critic's, reward models, each once."""
    if not isinstance(run, Run):
        return []
    critic = run.recipe.critic
    named = [] if critic is None or critic.model is None else [critic.model]
    return list(dict.fromkeys((*named, *paths_of(run))))


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """config.json of well-known models by hub id; attributes that change no shape are left out."""
    text = (resources.files("jaxrl_llm.plan") / "published.json").read_text()
    return {name: entry["config"] for entry in json.loads(text) for name in entry["names"]}
