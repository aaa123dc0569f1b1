"""What a model is, without its weights: only config.json is read."""

import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import read_config
from jaxrl_llm.models.pretrained import check_name, looks_like_hub_id
from jaxrl_llm.models.weights import read_json


def architecture(name: str) -> tuple[ModelConfig, str]:
    """The architecture of a directory, a .gguf file, a built-in name or a hub id, and where that was read.

    Raises:
      InputError: nothing of that name, or an architecture that is not known here.
    """
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_config(json.loads((path / "config.json").read_text())), str(path / "config.json")
    if name.endswith(".gguf"):
        from jaxrl_llm.models.gguf import read_gguf

        return read_config(read_gguf(path)[0]), name
    if not looks_like_hub_id(name):
        return _builtin(name), "built in"
    return read_config(_fetched(name)), "the hub's config.json"


def attributes_of(name: str) -> dict[str, Any]:
    """What config.json says of a directory or a hub id; nothing of what has none.

    Raises:
      InputError: nothing of that name.
    """
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_json(path / "config.json")
    return _fetched(name) if looks_like_hub_id(name) and not name.endswith(".gguf") else {}


def _builtin(name: str) -> ModelConfig:
    from jaxrl_llm.models import builtin

    return builtin.TINY if name == "tiny-random" else builtin.BUILTIN[name].load("float32")[0].config


def _fetched(name: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
    except Exception as error:  # connection, permission, unknown repository: each library version has its own classes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch config.json of {name} ({reason}); put it into a folder and give --model FOLDER"
        ) from None
