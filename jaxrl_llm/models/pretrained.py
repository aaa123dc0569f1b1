"""One entrance for every place a model can come from."""

import difflib
import os
import re
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.builtin import BUILTIN, Builtin

_EXPERTS = re.compile(r"(?i:(?<![a-z0-9])\d+(?:\.\d+)?[BT]-A\d+(?:\.\d+)?[BM](?![a-z0-9])|\d+x\d+B|Mixtral)|MoE")
"""How models of the hub are named that are mixtures of experts: 30B-A3B, 8x7B."""
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def load_pretrained(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None
) -> tuple[Any, Any | None]:
    """(model, tokenizer or None) of a Hugging Face directory, a ``.gguf`` file, a built-in name or a hub id.

    ``dtype`` ("float32", "bfloat16", "float16") is that of every parameter. With a mesh every array is born in its
    layout there, and each process reads only what its devices hold; otherwise all are on the default device.
    InputError, in one line, for whatever cannot be found, read or obeyed; for a reward model too.
    """
    place = _found(path_or_name, dtype)
    if _gives_scores(place):
        raise InputError(
            f"{path_or_name} is a reward model, which scores text and writes none: give a language model, or read it "
            "with load_scalar"
        )
    return _load(place, dtype, mesh)


def load_scalar(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None, fresh: bool = False
) -> tuple[Any, Any | None]:
    """(``ScalarModel``, tokenizer or None) of a reward model: a directory or hub id of a sequence classifier.

    The other arguments are those of ``load_pretrained``. With ``fresh`` a language model is taken too, with a head
    whose every score is 0 in place of its own; without it InputError.
    """
    from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
    from jaxrl_llm.sharding import laid_out, shardings

    place = _found(path_or_name, dtype)
    if not fresh and not _gives_scores(place):
        raise InputError(
            f"{path_or_name} is a language model, which has no score: give a reward model, a directory of "
            "...ForSequenceClassification with one label, or begin a new one with fresh=True"
        )
    model, tokenizer = _load(place, dtype, mesh)
    if isinstance(model, ScalarModel):
        return model, tokenizer
    model = with_scalar_head(model)
    return model if mesh is None else laid_out(model, shardings(model, mesh)), tokenizer


def load_either(path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None) -> tuple[Any, Any | None]:
    """What there is: a ``Decoder`` as ``load_pretrained`` gives it, or a ``ScalarModel`` as ``load_scalar`` does."""
    return _load(_found(path_or_name, dtype), dtype, mesh)


def _found(path_or_name: str | os.PathLike, dtype: str) -> Path | Builtin:
    """Where a model is read from: a directory, a .gguf file, or what is built in; one of the hub is fetched."""
    from jaxrl_llm.models.hf import check_dtype

    check_dtype(dtype)
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if path.is_dir() or name.endswith(".gguf"):
        return path
    if name in BUILTIN:
        return BUILTIN[name]
    if path.exists():
        raise InputError(f"{path} is neither a model directory nor a .gguf file; give one of these with --model")
    if looks_like_hub_id(name):
        _check_hub_id(name)
        return _fetch(name)
    raise InputError(_unknown(name))


def _gives_scores(place: Path | Builtin) -> bool:
    from jaxrl_llm.models.hf_config import gives_scores
    from jaxrl_llm.models.weights import read_json

    return isinstance(place, Path) and place.is_dir() and gives_scores(read_json(place / "config.json"))


def _load(place: Path | Builtin, dtype: str, mesh: Any) -> tuple[Any, Any | None]:
    from jaxrl_llm.models.gguf import load_gguf
    from jaxrl_llm.models.hf import load_directory

    if isinstance(place, Builtin):
        return place.load(dtype, mesh)
    return load_directory(place, dtype, mesh) if place.is_dir() else load_gguf(place, dtype, mesh)


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
    elif name not in BUILTIN:
        if not looks_like_hub_id(name):
            raise InputError(_unknown(name))
        _check_hub_id(name)


def looks_like_hub_id(name: str) -> bool:
    """Whether a name that is no file here reads as OWNER/MODEL rather than as a path."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", name)
    return match is not None and not Path(match[1]).is_dir()


def _check_hub_id(name: str) -> None:
    """Refuse what no family could load, before anything waits for a network.

    Raises:
      InputError: it is a mixture of experts, by its name.
    """
    if found := _EXPERTS.search(name):
        raise InputError(
            f"{name} is a mixture of experts ({found[0]} in its name), which cannot be loaded yet: give a dense model, "
            "such as --model Qwen/Qwen3-1.7B-Base"
        )


def _unknown(name: str) -> str:
    if "://" in name:
        return f"no such model: {name}; one of the hub is named OWNER/MODEL, without the address"
    if os.sep in name or name.startswith((".", "~")):
        return f"no such model directory: {name}"
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"did you mean {near[0]}? Else" if near else f"built in are {', '.join(BUILTIN)}; else"
    return f"no such model: {name}; {hint} give a directory, a .gguf file or OWNER/MODEL"


def _fetch(name: str) -> Path:
    """The local snapshot of a hub repository: configuration, safetensors and tokenizer, never code or pickles.

    The configuration comes first: what cannot be loaded is refused before its weights are fetched.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    from jaxrl_llm.models.hf_config import read_config
    from jaxrl_llm.models.weights import read_json

    try:
        read_config(read_json(Path(hf_hub_download(name, "config.json"))))
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except InputError:
        raise
    except Exception as error:  # connection, permission, unknown repository: each library version has its own classes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch {name} from the model hub ({reason}); use a local model: --model PATH"
        ) from None
