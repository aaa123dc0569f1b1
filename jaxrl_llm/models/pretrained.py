"""One entrance for every place a model can come from."""

import difflib
import os
import re
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.builtin import BUILTIN

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def load_pretrained(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None
) -> tuple[Any, Any | None]:
    """(model, tokenizer or None) of a Hugging Face directory, a ``.gguf`` file, a built-in name or a hub id.

    ``dtype`` ("float32", "bfloat16", "float16") is that of every parameter. With a mesh every array is born in its
    layout there, and each process reads only what its devices hold; otherwise all are on the default device.
    InputError, in one line, for whatever cannot be found, read or obeyed.
    """
    from jaxrl_llm.models.gguf import load_gguf
    from jaxrl_llm.models.hf import check_dtype, load_directory

    check_dtype(dtype)
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if path.is_dir():
        return load_directory(path, dtype, mesh)
    if name.endswith(".gguf"):
        return load_gguf(path, dtype, mesh)
    if name in BUILTIN:
        return BUILTIN[name].load(dtype, mesh)
    if path.exists():
        raise InputError(f"{path} is neither a model directory nor a .gguf file; give one of these with --model")
    if looks_like_hub_id(name):
        return load_directory(_fetch(name), dtype, mesh)
    raise InputError(_unknown(name))


def check_name(name: str) -> None:
    """Refuse, without reading anything, a name that ``load_pretrained`` has no place to look for.

    Raises:
      InputError: it is no directory with a config.json, no .gguf file, no built-in name and no hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path} holds no config.json: give a Hugging Face model directory, or a run with its checkpoints"
            )
    elif path.exists():
        if path.suffix != ".gguf":
            raise InputError(f"{path} is neither a model directory nor a .gguf file; give one of these with --model")
    elif name.endswith(".gguf"):
        raise InputError(f"no such file: {name}")
    elif name not in BUILTIN and not looks_like_hub_id(name):
        raise InputError(_unknown(name))


def looks_like_hub_id(name: str) -> bool:
    """Whether a name that is no file here reads as OWNER/MODEL rather than as a path."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", name)
    return match is not None and not Path(match[1]).is_dir()


def _unknown(name: str) -> str:
    if os.sep in name or name.startswith((".", "~")):
        return f"no such model directory: {name}"
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"did you mean {near[0]}? Else" if near else f"built in are {', '.join(BUILTIN)}; else"
    return f"no such model: {name}; {hint} give a directory, a .gguf file or OWNER/MODEL"


def _fetch(name: str) -> Path:
    """The local snapshot of a hub repository: configuration, safetensors and tokenizer, never code or pickles."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # connection, permission, unknown repository: each library version has its own classes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch {name} from the model hub ({reason}); use a local model: --model PATH"
        ) from None
