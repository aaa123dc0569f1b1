"""Loading of a model from any source: directory, GGUF file, built-in name or hub id."""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.builtin import BUILTIN, TINY, Builtin
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import gives_scores, read_config
from jaxrl_llm.models.weights import read_json

DTYPES = ("float32", "bfloat16", "float16")
_EXPERTS = re.compile(r"(?i:(?<![a-z0-9])\d+(?:\.\d+)?[BT]-A\d+(?:\.\d+)?[BM](?![a-z0-9])|\d+x\d+B|Mixtral)|MoE")
"""Pattern of hub names that mark mixtures of experts: 30B-A3B, 8x7B."""
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def load_pretrained(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None
) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) from a Hugging Face directory, a ``.gguf`` file, a built-in name or a hub id.

    ``dtype`` ("float32", "bfloat16", "float16") is that of every parameter. With a mesh every array is created in its
    layout, and each process reads only the parts of its devices; otherwise all are on the default device.
    InputError, in one line, if the model cannot be found, read or obeyed, and for a reward model.
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
    """Load (``ScalarModel``, tokenizer or None) of a reward model: a directory or hub id of a sequence classifier.

    The other arguments are those of ``load_pretrained``. With ``fresh`` a language model is accepted too, and gets a
    scalar head of zeros in place of its LM head; otherwise it raises InputError.
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
    """Load either kind of model: a ``Decoder`` like ``load_pretrained``, or a ``ScalarModel`` like ``load_scalar``."""
    return _load(_found(path_or_name, dtype), dtype, mesh)


def _found(path_or_name: str | os.PathLike, dtype: str) -> Path | Builtin:
    """Return the source of a model: a directory, a .gguf file or a built-in model.

    Of a hub model it fetches configuration, safetensors and tokenizer, no code or pickles.
    """
    require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if path.is_dir() or name.endswith(".gguf"):
        return path
    if name in BUILTIN:
        return BUILTIN[name]
    check_name(name)
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        # The configuration first: a model that cannot be loaded is refused before its weights are fetched.
        read_config(read_json(Path(hf_hub_download(name, "config.json"))))
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001
        # Connection, permission, unknown repository: each library version has its own classes.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch {name} from the model hub ({reason}); use a local model: --model PATH"
        ) from None


def _gives_scores(place: Path | Builtin) -> bool:
    return isinstance(place, Path) and place.is_dir() and gives_scores(read_json(place / "config.json"))


def _load(place: Path | Builtin, dtype: str, mesh: Any) -> tuple[Any, Any | None]:
    from jaxrl_llm.models.gguf import load_gguf
    from jaxrl_llm.models.hf import load_directory

    if isinstance(place, Builtin):
        return place.load(dtype, mesh)
    return load_directory(place, dtype, mesh) if place.is_dir() else load_gguf(place, dtype, mesh)


def check_name(name: str) -> None:
    """Refuse, without reading anything, a name that ``load_pretrained`` cannot resolve.

    Raises:
      InputError: not a directory with a config.json, a .gguf file, a built-in name or a hub id.
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
        _check_hub_id(name)


def looks_like_hub_id(name: str) -> bool:
    """Whether a name looks like OWNER/MODEL rather than a local path."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", name)
    return match is not None and not Path(match[1]).is_dir()


def _check_hub_id(name: str) -> None:
    """Refuse, before any network access, names that are not hub ids and models that no family can load.

    Raises:
      InputError: no such model, or a mixture of experts, by its name.
    """
    if looks_like_hub_id(name):
        if found := _EXPERTS.search(name):
            raise InputError(
                f"{name} is a mixture of experts ({found[0]} in its name), which cannot be loaded yet: give a dense "
                "model, such as --model Qwen/Qwen3-1.7B-Base"
            )
        return
    if "://" in name:
        raise InputError(f"no such model: {name}; one of the hub is named OWNER/MODEL, without the address")
    if os.sep in name or name.startswith((".", "~")):
        raise InputError(f"no such model directory: {name}")
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"did you mean {near[0]}? Else" if near else f"built in are {', '.join(BUILTIN)}; else"
    raise InputError(f"no such model: {name}; {hint} give a directory, a .gguf file or OWNER/MODEL")


def architecture(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a directory, a .gguf file, a built-in name or a hub id, and its source.

    Raises:
      InputError: no such model, or an unknown architecture.
    """
    attributes = attributes_of(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_config(attributes), str(path / "config.json")
    if name.endswith(".gguf"):
        from jaxrl_llm.models.gguf import read_gguf

        return read_config(read_gguf(path)[0]), name
    if not looks_like_hub_id(name):
        return TINY if name == "tiny-random" else BUILTIN[name].load("float32")[0].config, "built in"
    return read_config(attributes), "the hub's config.json"


def attributes_of(name: str) -> dict[str, Any]:
    """Return the content of config.json of a directory or a hub id; {} for a GGUF file or a built-in name.

    Raises:
      InputError: no such model.
    """
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_json(path / "config.json")
    if name.endswith(".gguf") or not looks_like_hub_id(name):
        return {}
    from huggingface_hub import hf_hub_download

    try:
        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
    except Exception as error:  # noqa: BLE001
        # Connection, permission, unknown repository: each library version has its own classes.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch config.json of {name} ({reason}); put it into a folder and give --model FOLDER"
        ) from None
