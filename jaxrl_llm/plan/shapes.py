"""What a model is, without its weights and mostly without a network."""

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl_llm.models.architecture import architecture
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import read_config


def model_config(name: str) -> tuple[ModelConfig, str]:
    """The architecture of a directory, a .gguf file, a built-in name or a hub id, and where that was read.

    Of well-known models a copy of config.json is in this package, so that planning needs no network.

    Raises:
      InputError: nothing of that name, or an architecture that is not known here.
    """
    if name in published() and not Path(name).is_dir():
        return read_config(published()[name]), "the published config.json, copied into this package"
    return architecture(name)


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """config.json of well-known models by hub id; attributes that change no shape are left out."""
    text = (resources.files("jaxrl_llm.plan") / "published.json").read_text()
    return {name: entry["config"] for entry in json.loads(text) for name in entry["names"]}
