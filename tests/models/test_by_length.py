"""The kernels of decoding against a plain loop, and compiled for chips that need not be there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import Attention
from jaxrl_llm.models.decode_kernels import (
    ByLength,
    ChunkColumns,
    ColumnRange,
    attend_by_length,
    columns_read,
    form_for,
    read_plan,
    whole_blocks,
)
from jaxrl_llm.models.decoding import Cache, stored
from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.machines import describe_devices, parse_topology
from jaxrl_llm.sharding.mesh import without_compilation_cache

slow = pytest.mark.slow

LAYERS, ROWS, HEADS, QUERIES, WIDTH, COLUMNS, CHUNK = 2, 5, 2, 3, 16, 384, 16
CONFIG = Attention(6, HEADS, WIDTH, softcap=3.0)
OWN = ColumnRange(np.array([0, 0, 140, 383]), np.array([0, 131, 300, 384]))
LANES = np.array([[-1, -1, -1], [2, -1, 0], [-1, -1, -1], [-1, 3, -1], [-1, -1, -1]])
SHARED = ColumnRange(np.array([5, 0, 150, 0]), np.array([300, 0, 300, 64]))
"""Columns that rows 0 to 3 see of their own row of the cache, and of the block that their lane is in."""


def arrays(dtype):
    """Queries, a cache of more rows than they are, in which everything that nobody may see is NaN in dead blocks of
    128 columns, and a chunk; of int8 the queries are float32."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    cache = Cache(draw(LAYERS, ROWS, HEADS, WIDTH, COLUMNS), draw(LAYERS, ROWS, HEADS, COLUMNS, WIDTH))
    chunk = Cache(draw(4, HEADS, WIDTH, CHUNK), draw(4, HEADS, CHUNK, WIDTH))
    q = draw(4, HEADS, QUERIES, WIDTH)
    if dtype == jnp.int8:
        layers = [stored(*(jnp.asarray(x[layer]) for x in cache[:2]), dtype) for layer in range(LAYERS)]
        return (
            jnp.asarray(q),
            jax.tree.map(lambda *x: jnp.stack(x), *layers),
            stored(*map(jnp.asarray, chunk[:2]), dtype),
        )
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, cache, chunk))


def numbers(cache):
    """Keys and values, float64."""
    k, v = (np.asarray(x, np.float64) for x in cache[:2])
    scales = np.ones((*k.shape[:-2], 2, k.shape[-1])) if cache.scales is None else np.asarray(cache.scales)
    return k * scales[..., :1, :], v * scales[..., 1, :, None]


def plain(q, k, v, visible):
    """Attention by its definition, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = 3 * np.tanh(np.einsum("bkmh,bkhs->bkms", q, k) * WIDTH**-0.5 / 3)
    weights = np.exp(scores) * visible[:, None, None]
    return np.einsum("bkms,bksh->bkmh", weights / weights.sum(-1, keepdims=True), v)


def between(seen, columns):
    """The columns of each row."""
    return (np.arange(columns) >= seen.least[:, None]) & (np.arange(columns) < seen.limit[:, None])


def whole(parts):
    """One result of partial ones."""
    top = functools.reduce(jnp.maximum, [part.top for part in parts])
    mass, mixed = (sum(jnp.exp(p.top - top) * x for p, x in zip(parts, given, strict=True)) for given in zip(
        *((p.mass, p.mixed) for p in parts), strict=True))  # fmt: skip
    return np.asarray(mixed / mass)


def with_dead_blocks(cache, seen, rows):
    """The cache with NaN in every block of 128 columns of which none is seen."""
    floats = cache[:2] if cache.scales is None else [jnp.swapaxes(cache.scales, -1, -2)]
    dead = [np.array(x, np.float32) for x in floats]
    for row in range(ROWS):
        live = rows.get(row, [])
        for at in range(0, COLUMNS, 128):
            if not any(seen.least[i] < at + 128 and seen.limit[i] > at and seen.limit[i] > seen.least[i] for i in live):
                for x in dead:
                    axis = -1 if x is dead[0] and len(dead) == 2 else -2
                    np.moveaxis(x, axis, 0)[at : at + 128, :, row] = np.nan
    if cache.scales is not None:
        return cache._replace(scales=jnp.swapaxes(jnp.asarray(dead[0]), -1, -2))
    return Cache(*(jnp.asarray(x, cache.k.dtype) for x in dead))


@pytest.mark.slow(but=("tpu-bfloat16-0.00390625", "gpu-int8-4e-06"))
# float32: sums of 400 terms around 1 round by some 1e-6. bfloat16: a weight is rounded by up to 2**-9 of itself, and so
# the mean of values around 1, of either sign.
@pytest.mark.parametrize("dtype, tolerance", [
    (jnp.float32, 4e-6), (jnp.int8, 4e-6), (jnp.bfloat16, 2.0**-8),
])  # fmt: skip
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_rows_and_shared_blocks_are_read_as_by_a_loop(platform, dtype, tolerance):
    form = ByLength(platform, interpret=True)
    q, cache, chunk = arrays(dtype)
    int32 = lambda seen: ColumnRange(*(jnp.asarray(x, jnp.int32) for x in seen))
    served = jnp.asarray(LANES, jnp.int32)
    of_lanes = ColumnRange(*(np.where(LANES >= 0, x[LANES], 0) for x in SHARED))

    @jax.jit
    def found(own, blocks):
        mine = read_plan(form, ColumnRange(*(x[:, None] for x in int32(OWN))), COLUMNS)
        theirs = read_plan(form, int32(of_lanes), COLUMNS, served, jnp.asarray(SHARED.limit > SHARED.least))
        near = ChunkColumns(*chunk[:3], jnp.array([2, 9], jnp.int32)) if platform == "gpu" else None
        layer = jnp.int32(1)
        return attend_by_length(form, CONFIG, q, own, layer, mine, near), attend_by_length(
            form, CONFIG, q, blocks, layer, theirs
        )

    rows = {row: [row] for row in range(4)}
    blocks = {row: [lane for lane in LANES[row] if lane >= 0] for row in range(ROWS)}
    own, shared = found(with_dead_blocks(cache, OWN, rows), with_dead_blocks(cache, SHARED, blocks))
    k, v = (x[1] for x in numbers(cache))
    near = (
        between(ColumnRange(np.full(4, 2), np.full(4, 9)), CHUNK) if platform == "gpu" else np.zeros((4, CHUNK), bool)
    )
    new_keys, new_values = numbers(chunk)
    keys, values = np.concatenate([k[:4], new_keys], -1), np.concatenate([v[:4], new_values], -2)
    some = slice(None) if platform == "gpu" else slice(1, None)  # row 0 sees nothing of its own
    wanted = plain(q[some], keys[some], values[some], np.concatenate([between(OWN, COLUMNS), near], 1)[some])
    np.testing.assert_allclose(whole(own)[some], wanted, rtol=0, atol=tolerance)
    entry, some = np.array([1, 1, 1, 3]), np.array([0, 2, 3])
    wanted = plain(q[some], k[entry][some], v[entry][some], between(SHARED, COLUMNS)[some])
    np.testing.assert_allclose(whole(shared)[some], wanted, rtol=0, atol=tolerance)
    assert all(np.all(part.mass[1] == 0) and np.all(part.top[1] < -1e29) for part in shared)


@slow
@pytest.mark.compilers
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5p:1x1x1", "h100:1"])
@pytest.mark.parametrize("width, queries", [(64, 7), (128, 5)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_the_kernels_compile_and_copy_nothing_of_the_cache(topology, width, queries, dtype):
    machine = parse_topology(topology)
    place = jax.sharding.SingleDeviceSharding(describe_devices(machine)[0])
    layers, rows, columns, lanes = 3, 16, 4096, 4
    some = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    form, config = ByLength(machine.chip.platform), Attention(2 * queries, 2, width)

    def both(q, cache, near, own, shared, served):
        mine, theirs = read_plan(form, own, columns), read_plan(form, shared, columns, served, own.limit[:, 0] > 0)
        seen = jnp.stack([own.least[0, 0], own.limit[0, 0]])
        chunk = ChunkColumns(*near[:3], seen) if form.platform == "gpu" else None
        parts = attend_by_length(form, config, q, cache, jnp.int32(1), mine, chunk)
        return parts + attend_by_length(form, config, q, cache, jnp.int32(1), theirs)

    def keys_and_values(columns, *outer):
        scales = some(jnp.float32, *outer, 2, 2, columns) if dtype == jnp.int8 else None
        return Cache(*(some(dtype, *outer, 2, *x) for x in ((width, columns), (columns, width))), scales)

    cache, near = keys_and_values(columns, layers, rows), keys_and_values(16, rows)
    bounds = [ColumnRange(*[some(jnp.int32, rows, count)] * 2) for count in (1, lanes)]
    q = some(jnp.bfloat16, rows, 2, queries, width)
    with without_compilation_cache():
        done = jax.jit(both).lower(q, cache, near, *bounds, some(jnp.int32, rows, lanes)).compile()
    size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert done.memory_analysis().temp_size_in_bytes < 0.1 * size
    program = hlo.parse_hlo(done.as_text(), 1)
    kernels = [one for one in program.computations[program.entry].values() if one.operation == "custom-call"]
    assert len([one for one in kernels if "attention_by_length" in one.rest or "triton" in one.rest]) == 2


@slow
def test_whole_blocks_are_read():
    tpu, gpu = ByLength("tpu"), ByLength("gpu")
    assert [columns_read(tpu, live, 4096) for live in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert columns_read(tpu, 129, 384) == 256 and columns_read(gpu, 129, 4096) == 192
    assert [whole_blocks(columns) for columns in (1, 300, 2049, 4097)] == [128, 384, 2304, 4608]


@slow
def test_what_has_no_kernel_keeps_the_plain_form():
    assert form_for(CONFIG, 8, None) is None  # a CPU
    mesh = lambda platform, parts: jax.sharding.AbstractMesh(
        (1, parts, 1), ("data", "fsdp", "tensor"), abstract_device=jax.sharding.AbstractDevice(platform, None, platform)
    )
    assert form_for(CONFIG, 8, mesh("tpu", 4)) == ByLength("tpu") and form_for(CONFIG, 6, mesh("tpu", 4)) is None
    assert form_for(Attention(4, 2, 64), 8, mesh("gpu", 1)) == ByLength("gpu")
    assert form_for(Attention(4, 2, 80), 8, mesh("gpu", 1)) is None
