"""Loading of a model from any source: directory, GGUF file, built-in name or hub id."""

import contextlib
import json
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError, as_input_error, did_you_mean, require
from jaxrl_llm.models.builtin import BUILTIN
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import gives_scores, read_config
from jaxrl_llm.models.peft import MERGED, base_named, is_adapter, read_adapter
from jaxrl_llm.models.weights import read_json
from jaxrl_llm.system import storage

DTYPES = ("float32", "bfloat16", "float16")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def load_pretrained(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None
) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) from a Hugging Face directory, a ``.gguf`` file, a built-in name or a hub id.

    Those at an address (``gs://``, ``s3://``) are copied to the cache. The directory of an adapter in PEFT's format
    gives its base with the adapter added to the weights.
    ``dtype`` ("float32", "bfloat16", "float16") is that of every parameter. With a mesh every array is created in its
    layout, and each process reads only the parts of its devices; with an abstract mesh (``mesh.abstract_mesh``) only
    the shapes are read; with None all arrays are on the default device.
    InputError, in one line, if the model cannot be found, read or obeyed, and for a reward model.
    """
    return load_either(path_or_name, dtype, mesh, scores=False)


def load_scalar(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None, fresh: bool = False
) -> tuple[Any, Any | None]:
    """Load (``ScalarModel``, tokenizer or None) of a reward model: a directory or hub id of a sequence classifier.

    The other arguments are those of ``load_pretrained``. With ``fresh`` a language model is accepted too, and gets a
    scalar head of zeros in place of its LM head; otherwise it raises InputError.
    """
    from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
    from jaxrl_llm.sharding import laid_out, shardings

    model, tokenizer = load_either(path_or_name, dtype, mesh, scores=None if fresh else True)
    if isinstance(model, ScalarModel):
        return model, tokenizer
    model = with_scalar_head(model)
    return model if mesh is None else laid_out(model, shardings(model, mesh)), tokenizer


def load_either(
    path_or_name: str | os.PathLike, dtype: str = "float32", mesh: Any = None, scores: bool | None = None
) -> tuple[Any, Any | None]:
    """Load either kind of model: a ``Decoder`` like ``load_pretrained``, or a ``ScalarModel`` like ``load_scalar``.

    ``scores``: refuse one that gives no scores (True), or one that does (False), before its weights are read.
    """
    from jaxrl_llm.models.gguf import load_gguf
    from jaxrl_llm.models.heads import split
    from jaxrl_llm.models.hf import load_directory
    from jaxrl_llm.models.tokenizer import within

    require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    name = os.fspath(path_or_name)
    path = storage.folder(name)
    if is_adapter(path):
        return load_adapted(path, dtype, mesh, scores)
    if not path.is_dir() and not name.endswith(".gguf") and name not in BUILTIN:
        check_name(name)
        from huggingface_hub import hf_hub_download, snapshot_download

        with as_input_error(f"cannot fetch {name} from the model hub", "use a local model: --model PATH"):
            # The configuration first: a model that cannot be loaded is refused before its weights are fetched.
            read_config(read_json(Path(hf_hub_download(name, "config.json"))))
            path = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    found = path.is_dir() and gives_scores(read_json(path / "config.json"))
    require(
        not found or scores is not False,
        f"{name} is a reward model, which scores text and writes none: give a language model, or read it with "
        "load_scalar",
    )
    require(
        found or not scores,
        f"{name} is a language model, which has no score: give a reward model, a directory of "
        "...ForSequenceClassification with one label, or begin a new one with fresh=True",
    )
    if path.is_dir():
        model, tokenizer = load_directory(path, dtype, mesh)
    else:
        model, tokenizer = load_gguf(path, dtype, mesh) if name.endswith(".gguf") else BUILTIN[name].load(dtype, mesh)
    return model, None if tokenizer is None else within(tokenizer, split(model)[0].config.vocab_size)


def load_adapted(folder: Path, dtype: str, mesh: Any, scores: bool | None) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) of an adapter's directory: the sum of base and adapter, in ``dtype``.

    The tokenizer is the directory's own, with its chat template and end of text, or else the base's.
    """
    import jax

    from jaxrl_llm.models.decoder import Decoder, to_parameters
    from jaxrl_llm.models.heads import split, with_scalar_head
    from jaxrl_llm.models.hf import with_special_ids
    from jaxrl_llm.models.lora import attached, merge
    from jaxrl_llm.models.tokenizer import load_tokenizer, within
    from jaxrl_llm.sharding import laid_out, only_shapes, shardings

    with of_adapter(folder) as base:
        model, tokenizer = load_either(base, dtype, mesh, scores)
    decoder, head = split(model)
    adapter = read_adapter(folder, decoder.config)
    own = load_tokenizer(folder)
    if own is not None:
        own = within(own, decoder.config.vocab_size)
        decoder = Decoder(with_special_ids(decoder.config, {}, own), to_parameters(decoder))
    if mesh is not None:
        adapter = laid_out(adapter, shardings(adapter, mesh))
    layout = None if mesh is None else shardings(decoder, mesh)
    add = jax.jit(lambda base, adapter: merge(attached(base, adapter)), donate_argnums=0, out_shardings=layout)
    summed = add.eval_shape(decoder, adapter) if only_shapes(mesh) else add(decoder, adapter)
    return summed if head is None else with_scalar_head(summed, head), own or tokenizer


@contextlib.contextmanager
def of_adapter(folder: Path) -> Generator[str]:
    """Yield the name of an adapter's base; an InputError about the base names the adapter, too."""
    base = base_named(folder)
    require(not is_adapter(storage.folder(base)), f"{folder}: its base {base} is an adapter too: {MERGED}")
    try:
        yield base
    except InputError as error:
        raise InputError(f"the base_model_name_or_path of the adapter {folder}: {error}") from None


def check_name(name: str) -> None:
    """Refuse, without reading anything or any network access, a name that ``load_pretrained`` cannot resolve.

    Raises:
      InputError: not a directory with a config.json, an adapter that can be read, a .gguf file, a built-in name or a
        hub id.
    """
    path = storage.folder(name)
    if is_adapter(path):
        with of_adapter(path) as base:
            check_name(base)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path} holds no config.json: give a Hugging Face model directory, an adapter's directory "
                "(adapter_config.json), or a run with its checkpoints"
            )
    elif path.exists():
        if path.suffix != ".gguf":
            raise InputError(f"{path} is neither a model directory nor a .gguf file; give one of these with --model")
    elif storage.split(name):
        raise InputError(f"no model at {name}: give a folder with config.json, or a .gguf file")
    elif name.endswith(".gguf"):
        raise InputError(f"no such file: {name}")
    elif looks_like_hub_id(name):
        return
    elif os.sep in name or name.startswith((".", "~")):
        raise InputError(f"no such model directory: {name}")
    elif name not in BUILTIN:
        hint = did_you_mean(name, BUILTIN)
        hint = f"{hint} Else" if hint else f"built in are {', '.join(BUILTIN)}; else"
        raise InputError(f"no such model: {name}; {hint} give a directory, a .gguf file or OWNER/MODEL")


def looks_like_hub_id(name: str) -> bool:
    """Whether a name looks like OWNER/MODEL rather than a local path."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", name)
    return match is not None and not Path(match[1]).is_dir()


def architecture(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a directory, a .gguf file, a built-in name or a hub id, and its source.

    Raises:
      InputError: no such model, or an unknown architecture.
    """
    path = storage.folder(name)
    if is_adapter(path):
        with of_adapter(path) as base:
            config, source = architecture(base)
        return config, f"of the base {base}: {source}"
    attributes = attributes_of(name)
    if path.is_dir():
        return read_config(attributes), str(path / "config.json")
    if name.endswith(".gguf"):
        from jaxrl_llm.models.gguf import read_gguf

        return read_config(read_gguf(path)[0]), name
    if not looks_like_hub_id(name):
        return BUILTIN[name].config or BUILTIN[name].load("float32", None)[0].config, "built in"
    return read_config(attributes), "the hub's config.json"


def generation_of(name: str) -> dict[str, Any]:
    """Return the content of generation_config.json of a directory, or of a hub id whose files are here; else {}.

    That of an adapter is its base's.
    """
    from huggingface_hub import try_to_load_from_cache

    path = storage.folder(name)
    if is_adapter(path):
        return generation_of(base_named(path))
    found = path / "generation_config.json" if path.is_dir() else None
    if found is None and looks_like_hub_id(name):
        cached = try_to_load_from_cache(name, "generation_config.json")
        found = Path(cached) if isinstance(cached, str) else None
    return read_json(found) if found is not None and found.is_file() else {}


def attributes_of(name: str) -> dict[str, Any]:
    """Return the content of config.json of a directory or a hub id; {} for a GGUF file or a built-in name.

    That of an adapter is its base's.

    Raises:
      InputError: no such model.
    """
    check_name(name)
    path = storage.folder(name)
    if is_adapter(path):
        with of_adapter(path) as base:
            return attributes_of(base)
    if path.is_dir():
        return read_json(path / "config.json")
    if name.endswith(".gguf") or not looks_like_hub_id(name):
        return {}
    from huggingface_hub import hf_hub_download

    with as_input_error(f"cannot fetch config.json of {name}", "put it into a folder and give --model FOLDER"):
        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
