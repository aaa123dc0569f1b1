"""Checkpoints in fewer bits: read as the numbers that they stand for, and kept bit for bit below an adapter."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from learner.rollouts import one_device
from models.loading import example_of, read, write_safetensors
from models.test_quantised import codes_of
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, logits
from jaxrl_llm.models.config import Lora
from jaxrl_llm.models.decoder import parameter_shapes
from jaxrl_llm.models.hf import read_config, save_pretrained
from jaxrl_llm.models.lora import BasePacker
from jaxrl_llm.models.pretrained import load_either
from jaxrl_llm.models.quantised import QuantisedMatrix, widen
from jaxrl_llm.models.weights import to_stored
from jaxrl_llm.sharding import MeshShape, make_mesh

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS, PUBLISHED = FIXTURES / "models", FIXTURES / "packed" / "bitsandbytes"
"""A llama with NF4 matrices but for the MLP of its second layer, written by transformers 5.24 and bitsandbytes 0.50.2,
and the logits that transformers computes in float32 of bitsandbytes' dequantised numbers.
"""


def packed(directory, base, mesh=None):
    packer = BasePacker(Lora(2, base=base))
    return load_either(directory, "bfloat16", mesh or one_device(), pack=packer)[0], packer


def layer_of(matrix, layer):
    return np.asarray(widen(jax.tree.map(lambda x: x[layer], matrix), jnp.float32))


def test_four_bits_of_bitsandbytes_are_read():
    example = example_of(PUBLISHED)
    for mesh in (None, make_mesh(MeshShape(2, 2, 2))):
        model, _ = load_pretrained(PUBLISHED, "float32", mesh)
        np.testing.assert_allclose(logits(model, example["tokens"]), example["logits"], atol=1e-4)


@pytest.mark.slow
def test_four_bits_of_bitsandbytes_are_kept():
    """Layers that are stored wide beside packed ones are packed here."""
    stored = load_file(PUBLISHED / "model.safetensors")
    wide = read(PUBLISHED)[1]["blocks"]
    model, packer = packed(PUBLISHED, "nf4")
    blocks = model.weights.blocks
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        codes = np.stack([stored[name] >> 4, stored[name] & 15], -1).reshape(64, 64)
        np.testing.assert_array_equal(codes_of(blocks.attn.o.nibbles[layer]), codes.T)
        np.testing.assert_array_equal(blocks.attn.o.scales[layer].ravel(), stored[f"{name}.absmax"])
        np.testing.assert_allclose(layer_of(blocks.attn.o, layer), wide["attn"]["o"][layer], atol=1e-6)
        np.testing.assert_allclose(layer_of(blocks.attn.k, layer), wide["attn"]["k"][layer], atol=1e-6)
    np.testing.assert_allclose(layer_of(blocks.mlp.up, 0), wide["mlp"]["up"][0], atol=1e-6)
    assert 0.005 < np.abs(layer_of(blocks.mlp.up, 1) - wide["mlp"]["up"][1]).mean() < 0.02
    assert packer.form == "bfloat16 nf4" and {"blocks/mlp/up", "blocks/mlp/up/nibbles"} <= packer.checksums.keys()
    again = packed(PUBLISHED, "nf4", make_mesh(MeshShape(2, 2, 2)))
    assert again[1].digest() == packer.digest()
    jax.tree.map(np.testing.assert_array_equal, again[0], model)
    other, packer = packed(PUBLISHED, "int8")
    assert other.weights.blocks.attn.o.kind == "int8" and packer.form == "bfloat16"
    assert {"attn/o", "mlp/up"} <= packer.repacked, "which is said"


@pytest.fixture
def fp8(tmp_path):
    """The full model's sizes, with random codes and scales for its matrices; returns (directory, wide by name)."""
    attributes = json.loads((PUBLISHED / "config.json").read_text())
    attributes |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    random, tensors, wide = np.random.default_rng(0), {}, {}
    save_pretrained(load_pretrained(PUBLISHED)[0], None, tmp_path / "wide")
    for name, array in load_file(tmp_path / "wide" / "model.safetensors").items():
        tensors[name] = array
        if "proj" in name:
            codes = random.integers(0, 256, array.shape).astype(np.uint8)
            codes[codes & 127 == 127] = 0  # not a number
            scales = random.uniform(1e-4, 2e-4, [-(-size // 128) for size in array.shape]).astype(np.float32)
            tensors[name] = codes.view(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            exponent, mantissa = codes >> 3 & 15, codes & 7
            number = np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + mantissa / 8), mantissa / 512)
            each = np.array([[scales[i // 128, j // 128] for j in range(array.shape[1])] for i in range(len(array))])
            wide[name] = np.where(codes >> 7, -number, number) * each
    write_safetensors(tmp_path, tensors)
    return tmp_path, wide


def test_fp8_by_blocks_is_read_and_kept(fp8):
    directory, wide = fp8
    name = "model.layers.1.mlp.{}_proj.weight"
    for mesh in (None, make_mesh(MeshShape(2, 2, 2))):
        model, _ = load_pretrained(directory, "float32", mesh)
        np.testing.assert_allclose(model.weights.blocks.mlp.up[1].T, wide[name.format("up")], rtol=1e-6)
        np.testing.assert_allclose(model.weights.blocks.mlp.down[1].T, wide[name.format("down")], rtol=1e-6)
    model, packer = packed(directory, "fp8")
    assert model.weights.blocks.mlp.up.codes.dtype == jnp.float8_e4m3fn and packer.form == "bfloat16 fp8"
    np.testing.assert_allclose(layer_of(model.weights.blocks.mlp.up, 1).T, wide[name.format("up")], rtol=1e-6)
    q = layer_of(model.weights.blocks.attn.q, 0).reshape(64, 64).T
    np.testing.assert_allclose(q, wide["model.layers.0.self_attn.q_proj.weight"], rtol=1e-6)


@pytest.mark.slow
def test_experts_in_mxfp4_are_read_and_kept(tmp_path):
    """Packed here, number by number, from patterns of bits by the format's definition."""
    directory = Path(shutil.copytree(MODELS / "gpt_oss", tmp_path / "packed"))
    attributes = json.loads((directory / "config.json").read_text())
    attributes |= {"quantization_config": {"quant_method": "mxfp4"}, "hidden_size": 64, "intermediate_size": 64}
    (directory / "config.json").write_text(json.dumps(attributes))
    random, wanted, tensors = np.random.default_rng(0), {}, {}
    config = read_config(attributes)
    zeros = {path: np.zeros(shape, np.float32) for path, shape in parameter_shapes(config).items()}
    for name, tensor in to_stored(config, traverse_util.unflatten_dict(zeros, sep=".")).items():
        tensors[name] = tensor.read()
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = tensors.pop(name).shape
        bits = random.integers(0, 16, (experts, outputs, inputs // 32, 32))
        scales = random.integers(118, 130, bits.shape[:3])
        value = lambda b: (-1) ** (b >> 3) * (2.0 ** ((b >> 1 & 3) - 1) * (1 + (b & 1) / 2) if b & 6 else (b & 1) / 2)
        whole = np.vectorize(value)(bits) * 2.0 ** (scales[..., None] - 127)
        wanted[name] = whole.reshape(experts, outputs, inputs).swapaxes(1, 2)
        tensors[f"{name}_blocks"] = (bits[..., ::2] + 16 * bits[..., 1::2]).astype(np.uint8)
        tensors[f"{name}_scales"] = scales.astype(np.uint8)
    write_safetensors(directory, tensors)
    _, parameters = read(directory)
    found = parameters["blocks"]["experts"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        np.testing.assert_array_equal(found["gate"][layer], wanted[prefix + "gate_up_proj"][:, :, ::2])
        np.testing.assert_array_equal(found["up"][layer], wanted[prefix + "gate_up_proj"][:, :, 1::2])
        np.testing.assert_array_equal(found["down"][layer], wanted[prefix + "down_proj"])
    model, _ = load_pretrained(directory, "float32", make_mesh(MeshShape(1, 4, 2)))
    np.testing.assert_array_equal(model.weights.blocks.experts.down[...], found["down"])
    for mesh in (one_device(), make_mesh(MeshShape(2, 2, 1, expert=2))):
        model, packer = packed(directory, "mxfp4", mesh)
        kept = model.weights.blocks.experts
        assert packer.form == "bfloat16 mxfp4" and not isinstance(model.weights.blocks.attn.q, QuantisedMatrix)
        np.testing.assert_array_equal(kept.down.scales[1], tensors[prefix + "down_proj_scales"])
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(layer_of(getattr(kept, name), 1), found[name][1])
    write_safetensors(directory, tensors | {prefix + "down_proj_scales": np.zeros((4, 64, 3), np.uint8)})
    with pytest.raises(InputError, match="fetch the checkpoint again"):
        load_pretrained(directory)


def test_what_cannot_be_read_is_refused(fp8, tmp_path):
    attributes = json.loads((PUBLISHED / "config.json").read_text())
    with pytest.raises(InputError, match="quantization_config of 'gptq', which is not read: take the model in 16 bits"):
        read_config(attributes | {"quantization_config": {"quant_method": "gptq"}})
    directory = Path(shutil.copytree(PUBLISHED, tmp_path / "model"))
    stored = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"

    def refusal(change):
        save_file(stored | change, directory / "model.safetensors")
        with pytest.raises(InputError) as refused:
            load_pretrained(directory)
        return str(refused.value)

    assert "do not fit: fetch the checkpoint again" in refusal({f"{name}.absmax": np.zeros(3, np.uint8)})
    assert "bnb_4bit_quant_storage" in refusal({name: stored[name].view(np.int8)})
    assert "do not fit" in refusal({name: stored[name].reshape(1, -1)})
    for settings in ({"load_in_8bit": True}, {"quant_method": "fp8", "weight_block_size": [96, 96]}):
        changed = {"quantization_config": attributes["quantization_config"] | settings}
        with pytest.raises(InputError, match="of 8 bits of bitsandbytes, or of blocks other than"):
            read_config(attributes | changed)
    state = f"{name}.quant_state.bitsandbytes__nf4"
    assert f"description of {name} cannot be read" in refusal({state: np.zeros(9, np.uint8)})
    codes = {"model.layers.1.mlp.up_proj.weight": np.zeros((192, 64), np.int8)}
    assert "model.layers.1.mlp.up_proj.weight is stored as I8" in refusal(codes)
    fewer = load_file(PUBLISHED / "model.safetensors")
    for part in [part for part in fewer if part.startswith(f"{name}.")]:
        del fewer[part]
    save_file(fewer, directory / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} is stored as U8, which cannot be read alone"):
        load_pretrained(directory)
