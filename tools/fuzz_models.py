"""Readers of models for ``fuzz.py``: directories, GGUF files, adapters, tokenizers."""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_inputs import changed_bytes, json_text

MODELS = Path(__file__).parents[1] / "tests" / "fixtures" / "models"


@functools.cache
def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with a small chat template."""
    from jaxrl_llm.models.builtin import BUILTIN  # noqa: F401  imports what the tokenizer needs
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet

    tokens = (*byte_alphabet(), "<eos>")
    named = (("eos_token", "<eos>"), ("pad_token", "<eos>"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return build_tokenizer(BytePairs(tokens, (), ("<eos>",), chat_template=template, named=named))


def _files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((MODELS / folder).iterdir()) if path.suffix != ".npz"}


def make_directory(draws: random.Random) -> dict[str, bytes]:
    """Return the files of a model, of which one or two are changed."""
    files = dict(_files(draws.choice(("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2"))))
    files |= dict(_tokenizer_files())
    for name in draws.sample(sorted(files), draws.randint(1, 2)):
        if name.endswith(".json") and draws.random() < 0.8:
            files[name] = json_text(json.loads(files[name]), draws).encode("utf-8", "surrogatepass")
        else:
            files[name] = changed_bytes(files[name], draws, 4000)
    return files


@functools.cache
def _tokenizer_files() -> tuple[tuple[str, bytes], ...]:
    from jaxrl_llm.models.tokenizer import save_tokenizer

    with tempfile.TemporaryDirectory() as place:
        save_tokenizer(byte_tokenizer(), Path(place))
        return tuple((path.name, path.read_bytes()) for path in Path(place).iterdir())


def read_directory(case: Any, folder: Path) -> Any:
    """Read a Hugging Face directory: attributes, tokenizer, each tensor."""
    from jaxrl_llm.models.families import tensors_of
    from jaxrl_llm.models.hf import with_special_ids
    from jaxrl_llm.models.hf_config import gives_scores, read_config
    from jaxrl_llm.models.pretrained import check_name
    from jaxrl_llm.models.tokenizer import load_tokenizer
    from jaxrl_llm.models.weights import check_tensors, open_checkpoint, read_json, read_part, split_tensors
    from jaxrl_llm.models.weights import our_shape as shape_of

    for name, data in case.items():
        (folder / name).write_bytes(data)
    check_name(str(folder))
    attributes = read_json(folder / "config.json")
    config = read_config(attributes)
    generation = folder / "generation_config.json"
    tokenizer = load_tokenizer(folder)
    config = with_special_ids(config, read_json(generation) if generation.is_file() else {}, tokenizer)
    scalar = gives_scores(attributes)
    stored = split_tensors(config, open_checkpoint(folder))
    check_tensors(config, stored, scalar)
    for tensor in tensors_of(config, scalar):
        place = tuple(slice(0, size) for size in shape_of(tensor, config))
        read_part(config, tensor, stored, np.dtype("float32"), place)
    if tokenizer is not None:
        tokenizer("some text")


def read_gguf_file(case: Any, folder: Path) -> Any:
    """Read a GGUF file: attributes, tokenizer, each tensor."""
    from jaxrl_llm.models.gguf import _as_input_error, read_gguf
    from jaxrl_llm.models.hf import with_special_ids
    from jaxrl_llm.models.hf_config import read_config
    from jaxrl_llm.models.weights import check_tensors

    path = folder / "model.gguf"
    path.write_bytes(case)
    attributes, stored, tokenizer = read_gguf(path)
    with _as_input_error(path):
        config = with_special_ids(read_config(attributes), {}, tokenizer)
        check_tensors(config, stored)
        for tensor in stored.values():
            tensor.read()


def make_gguf(draws: random.Random) -> bytes:
    """Return a GGUF file with changes in its head."""
    return changed_bytes((MODELS / f"{draws.choice(('llama', 'qwen2', 'gemma2'))}.gguf").read_bytes(), draws, 6000)


ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "llama",
    "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "task_type": "CAUSAL_LM",
}  # fmt: skip


def read_adapter_of(case: Any, folder: Path) -> Any:
    """Read a PEFT adapter."""
    from jaxrl_llm.models.peft import base_named, read_adapter

    (folder / "adapter_config.json").write_bytes(case[0])
    (folder / "adapter_model.safetensors").write_bytes(case[1])
    base_named(folder)
    return read_adapter(folder, _llama())


@functools.cache
def _llama() -> Any:
    from jaxrl_llm.models.pretrained import architecture

    return architecture(str(MODELS / "llama"))[0]


def make_adapter(draws: random.Random) -> tuple[bytes, bytes]:
    """Return the two files of an adapter, changed or not."""
    described = json_text(ADAPTER, draws) if draws.random() < 0.6 else json.dumps(ADAPTER)
    weights = changed_bytes(_factors(), draws, 3000) if draws.random() < 0.6 else _factors()
    return described.encode("utf-8", "surrogatepass"), weights


@functools.cache
def _factors() -> bytes:
    from safetensors.numpy import save

    config = _llama()
    inner = config.attention.heads * config.attention.head_dim
    at = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, config.width), "B": (inner, 2)}
    return save(
        {at.format(i, k): np.zeros(shape, np.float32) for i in range(config.layers) for k, shape in shapes.items()}
    )


def import_all() -> None:
    """Import what reading models needs, before the limits hold."""
    import gguf  # noqa: F401
    import jax  # noqa: F401
    import safetensors  # noqa: F401
    import transformers  # noqa: F401

    byte_tokenizer()
    _tokenizer_files()
    read_directory(_files("llama") | dict(_tokenizer_files()), _scratch())
    read_gguf_file((MODELS / "llama.gguf").read_bytes(), _scratch())
    _llama()


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz"))
