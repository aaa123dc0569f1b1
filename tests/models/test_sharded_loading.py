"""Weights are born in their layout: by slice, once, and with no whole array on the host."""

import functools
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from models.loading import load_counted
from safetensors.numpy import save_file
from tiny import KINDS

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig
from jaxrl_llm.models.families import axis_sizes, our_shape, tensors_of
from jaxrl_llm.models.gguf import read_gguf
from jaxrl_llm.models.hf import write_config
from jaxrl_llm.models.weights import StoredTensor, hf_shape, read_part
from jaxrl_llm.sharding import MeshShape, from_parts, layout_of, make_mesh, shardings

pytestmark = pytest.mark.slow

OPTIMISED = True

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
SHAPES = [(1, 8, 1), (2, 2, 2), (1, 1, 8), (1, 2, 4)]
LOADER = Path(__file__).with_name("loading.py")


@functools.cache
def mesh_of(shape):
    return make_mesh(MeshShape(*shape))


def assert_born_on(mesh, model, whole):
    for (path, found), wanted, layout in zip(
        jax.tree.leaves_with_path(model), jax.tree.leaves(whole), jax.tree.leaves(shardings(whole, mesh)), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert found.sharding.is_equivalent_to(layout, found.ndim) and found.committed, name
        assert found.dtype == wanted.dtype and np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["olmo2", "gemma3_text", "qwen2", "qwen3"])
def test_a_directory_gives_the_same_bits_on_every_mesh(name, shape):
    dtype = "bfloat16" if shape == (2, 2, 2) else "float32"
    model, _ = load_pretrained(FIXTURES / name, dtype, mesh_of(shape))
    assert_born_on(mesh_of(shape), model, load_pretrained(FIXTURES / name, dtype)[0])


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.gguf")))
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_gguf_file_gives_the_same_bits_on_every_mesh(name, shape):
    model, _ = load_pretrained(FIXTURES / name, "float32", mesh_of(shape))
    assert_born_on(mesh_of(shape), model, load_pretrained(FIXTURES / name)[0])


def test_a_built_in_model_too():
    mesh = mesh_of((1, 2, 4))
    assert_born_on(
        mesh, load_pretrained("tiny-random", "bfloat16", mesh)[0], load_pretrained("tiny-random", "bfloat16")[0]
    )


@pytest.mark.parametrize("name", [FIXTURES / "olmo2", next(FIXTURES.glob("*.gguf")), "tiny-random"])
def test_an_abstract_mesh_gives_shapes(name):
    mesh = mesh_of((2, 2, 2))
    whole = load_pretrained(name, "bfloat16", mesh)[0]
    shapes = load_pretrained(name, "bfloat16", mesh.abstract_mesh)[0]
    assert jax.tree.structure(shapes) == jax.tree.structure(whole)
    for found, wanted in zip(jax.tree.leaves(shapes), jax.tree.leaves(whole), strict=True):
        assert isinstance(found, jax.ShapeDtypeStruct) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert found.sharding.spec == wanted.sharding.spec


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.gguf")))
def test_quantised_tensors_are_read_in_part(name):
    """Also where a part begins or ends within a block."""
    for key, tensor in read_gguf(FIXTURES / name)[1].items():
        whole, half = tensor.read(), tensor.shape[0] // 2
        place = (slice(half, tensor.shape[0]), *(slice(3, size - 5) for size in tensor.shape[1:]))
        np.testing.assert_array_equal(tensor.part(place), whole[place], err_msg=key)


@pytest.mark.parametrize("kind", ["bias", "full_norm", "gemma"])
def test_any_part_can_be_read(kind):
    """Also one that cuts within merged axes, which no rule asks for."""
    config, random = KINDS[kind], np.random.default_rng(0)
    for tensor in tensors_of(config):
        shape = our_shape(tensor, config)
        names = [tensor.name.format(i) for i in range(config.layers if tensor.layered else 1)]
        arrays = {n: random.normal(size=hf_shape(tensor, axis_sizes(config))).astype(np.float32) for n in names}
        stored = {n: StoredTensor(a.shape, a.__getitem__) for n, a in arrays.items()}
        read = functools.partial(read_part, config, tensor, stored, np.dtype("float32"))
        whole = read(tuple(slice(0, size) for size in shape))
        assert whole.shape == shape
        part = tuple(slice(size // 3, max(size // 3 + 1, size - 1)) for size in shape)
        np.testing.assert_array_equal(read(part), whole[part], err_msg=tensor.path)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_read_once_in_parts_of_a_layer(shape):
    assert not load_counted(FIXTURES / "qwen3", mesh_of(shape).abstract_mesh)[1]
    parameters, reads = load_counted(FIXTURES / "qwen3", mesh_of(shape))
    leaves = jax.tree.leaves_with_path(parameters)
    assert sum(reads) == sum(leaf.size for _, leaf in leaves)
    layer = lambda path, leaf: leaf.addressable_shards[0].data.size // (leaf.shape[0] if "blocks" in str(path) else 1)
    assert max(reads) == max(layer(path, leaf) for path, leaf in leaves)


def test_a_part_that_several_devices_hold_is_read_once():
    mesh, asked = mesh_of((2, 2, 2)), []
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    layout = layout_of("head", values.shape, mesh)
    array = from_parts(values.shape, values.dtype, layout, lambda place: asked.append(place) or values[place])
    np.testing.assert_array_equal(array, values)
    assert len(asked) == 4 == len(set(map(str, layout.addressable_devices_indices_map(values.shape).values())))
    values[:] = 0
    assert float(array.sum()) == 64 * 63 / 2, "the array has memory of its own"


def start(*arguments, devices):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, str(LOADER), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def answer(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)


def test_a_process_reads_only_what_its_devices_hold():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = [answer(p) for p in [start("count", FIXTURES / "qwen3", rank, port, devices=4) for rank in range(2)]]
    for one in found:
        assert one["read"] == one["all"] - one["divided"] // 2
        assert one["divided"] > 0.95 * one["all"]
    parameters, _ = load_counted(FIXTURES / "qwen3", mesh_of((1, 8, 1)))
    shards = [[float(s.data.sum()) for s in leaf.addressable_shards] for leaf in jax.tree.leaves(parameters)
              if not leaf.sharding.is_fully_replicated]  # fmt: skip
    assert found[0]["values"] == [x for leaf in shards for x in leaf[:4]]
    assert found[1]["values"] == [x for leaf in shards for x in leaf[4:]]


def large_model(directory):
    """71 million weights in bfloat16, 138 MB; returns the bytes of the largest stacked leaf in float32."""
    config = ModelConfig("llama", 8192, 1024, 4, 4096, Attention(16, 4, 64), embeddings=Embeddings(tied=True))
    sizes, arrays = axis_sizes(config), {}
    for tensor in tensors_of(config):
        for layer in range(config.layers if tensor.layered else 1):
            arrays[tensor.name.format(layer)] = np.ones(hf_shape(tensor, sizes), ml_dtypes.bfloat16)
    (directory / "config.json").write_text(json.dumps(write_config(config, "bfloat16")))
    save_file(arrays, directory / "model.safetensors")
    return max(4 * math.prod(our_shape(tensor, config)) for tensor in tensors_of(config))


def test_loading_takes_little_more_than_the_arrays(tmp_path):
    largest = large_model(tmp_path)
    found = answer(start("memory", tmp_path, FIXTURES / "llama", devices=8))
    assert found["arrays"] > 270e6
    # An eighth of a leaf is read at a time, and two such parts exist at most; an allocator keeps some of what it had.
    assert found["arrays"] <= found["peak"] <= found["arrays"] + largest / 2
