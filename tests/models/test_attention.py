"""Every attention back end against scores of a whole row at one time, and what none of them may build."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KINDS, VOCAB, equations, largest_difference, tiny

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import gpu_attention
from jaxrl_llm.models.config import Attention, ComputeOptions
from jaxrl_llm.models.decoder import forward
from jaxrl_llm.models.layers import MAX_CHUNK, PREFIXES, SHORT, TokenRows, attention_over
from jaxrl_llm.plan.machines import describe_devices, parse_topology
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.mesh import without_compilation_cache

slow = pytest.mark.slow

SPLASH = ComputeOptions(attention="splash", interpret=True)
CUDNN = ComputeOptions(attention="cudnn", interpret=True)
TRITON = ComputeOptions(attention="triton", interpret=True)


def packed(width, lengths, shared, rows=2):
    """Rows of groups: each a prompt of a third, then two branches of it where ``shared``; the rest is padding."""
    out = TokenRows(*(np.zeros((rows, width), np.int32) for _ in TokenRows._fields))
    out.tokens[:] = np.random.default_rng(0).integers(0, VOCAB, out.tokens.shape)
    start = 0
    for number, length in enumerate(lengths, start=1):
        own, middle = length // 3, length // 3 + length // 3
        at = np.arange(length)
        later = (at >= middle) & shared
        out.group[:, start : start + length] = number
        out.branch[:, start : start + length] = np.where(at < own, 0, 1 + later)
        out.positions[:, start : start + length] = np.where(later, at - middle + own, at)
        start += length
    return out


def visible(rows, window):
    """What each column may see, by loops: bool[B, S, S]."""
    seen = np.zeros((*rows.group.shape, rows.group.shape[1]), bool)
    for r, column in np.ndindex(rows.group.shape):
        before = np.arange(rows.group.shape[1]) <= column
        path = (rows.group[r] == rows.group[r, column]) & np.isin(rows.branch[r], [0, rows.branch[r, column]])
        near = rows.positions[r, column] - rows.positions[r] < window if window else True
        seen[r, column] = before & path & near & (rows.group[r, column] > 0)
    return seen


def whole(config, seen, q, k, v):
    """All scores of all rows, masked."""
    s = jnp.einsum("bskgh,bkhz->bkgsz", q, k) * (config.scale or config.head_dim**-0.5)
    s = config.softcap * jnp.tanh(s / config.softcap) if config.softcap else s
    return jnp.einsum("bkgsz,bkzh->bskgh", jax.nn.softmax(jnp.where(seen[:, None, None], s, -1e30)), v)


def inputs(config, rows, width):
    keys, (K, H) = jax.random.split(jax.random.key(0), 3), (config.kv_heads, config.head_dim)
    shapes = (rows, width, K, config.heads // K, H), (rows, K, H, width), (rows, K, width, H)
    return [2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def graded(attend, real, q, k, v):
    """Values at real positions, and the gradients of a loss of them."""

    def loss(q, k, v):
        out = jnp.where(real[..., None, None, None], attend(q, k, v), 0)
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)


@pytest.mark.parametrize(
    ("width", "lengths"),
    [pytest.param(40, (7, 21, 9), marks=slow), pytest.param(300, (150, 20, 99), marks=slow), (1100, (700, 353))],
)
def test_parts_of_a_row_equal_the_whole(width, lengths):
    config, rows = Attention(4, 2, 8, softcap=5.0, scale=0.5), packed(width, lengths, True, 1)
    given, real = inputs(config, 1, width), rows.group > 0

    @jax.jit
    def found(q, k, v, window):
        attend = functools.partial(attention_over(rows, config, ComputeOptions()), window=window)
        return graded(attend, real, q, k, v)

    wanted = jax.jit(lambda seen, *given: graded(functools.partial(whole, config, seen), real, *given))
    for window in (0, 5):
        difference = largest_difference(found(*given, jnp.int32(window)), wanted(visible(rows, window), *given))
        assert difference < 1e-5, window


@slow
def test_long_rows_never_hold_all_scores_and_no_row_makes_those_above_the_diagonal():
    config = Attention(2, 1, 8)
    for width in (1024, 4096):
        rows = jax.tree.map(jnp.asarray, packed(width, (width,), False, 1))
        given = jax.eval_shape(functools.partial(inputs, config, 1, width))
        loss = lambda rows, *given: jnp.sum(attention_over(rows, config, ComputeOptions())(*given, jnp.int32(0)))
        traced = jax.make_jaxpr(jax.grad(loss, argnums=(1, 2, 3)))(rows, *given)
        made = [v.aval.size for e in equations(traced.jaxpr) for v in e.outvars]
        assert max(made) <= config.heads * width * (MAX_CHUNK if width > SHORT else width // PREFIXES), width
    assert_half_is_made(config, 1024)


def assert_half_is_made(config, width):
    rows, given = packed(width, (width,), False, 1), jax.eval_shape(functools.partial(inputs, config, 1, width))
    traced = jax.make_jaxpr(functools.partial(attention_over(rows, config, ComputeOptions()), window=jnp.int32(0)))(
        *given
    )
    products = [e.outvars[0].aval for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    scores = sum(x.size for x in products if config.head_dim not in x.shape)
    assert 0.5 <= scores / (config.heads * width**2) < 0.6


@slow
@pytest.mark.parametrize(("kind", "compute"), [("gemma", SPLASH), ("windows", CUDNN)], ids=["splash", "cudnn"])
def test_kernels_equal_xla_through_a_model(kind, compute):
    model, rows = tiny(kind), packed(128, (30, 51, 20), compute is CUDNN)
    real = (rows.group > 0)[..., None]

    @functools.partial(jax.jit, static_argnums=1)
    def graded(model, compute):
        def loss(model):
            hidden = jnp.where(real, forward(model, rows, compute), 0)
            return jnp.sum(jnp.sin(hidden)), hidden

        return jax.value_and_grad(loss, has_aux=True)(model)

    assert largest_difference(graded(model, compute), graded(model, ComputeOptions())) < 1e-5


def test_kernels_of_gpus_equal_the_whole_with_shared_prompts_and_windows_on_a_mesh():
    config, rows = Attention(4, 2, 8, softcap=5.0, scale=0.5), packed(384, (150, 20, 99), True, 4)
    given, real = inputs(config, 4, 384), rows.group > 0

    @jax.jit
    def found(q, k, v, window):
        attend = functools.partial(attention_over(rows, config, TRITON), window=window)
        return graded(attend, real, q, k, v)

    whole_scores = jax.jit(lambda seen, *given: graded(functools.partial(whole, config, seen), real, *given))
    for window in (0, 70):
        wanted = whole_scores(visible(rows, window), *given)
        with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
            assert largest_difference(found(*given, jnp.int32(window)), wanted) < 1e-5


@slow
def test_kernels_of_gpus_read_the_blocks_that_are_seen_and_few_others():
    """Queries of a completion read the prompt's blocks and their own, not those of the completions between."""
    rows = packed(1024, (900, 60), True, 1)
    tiles = gpu_attention.BACKWARD

    @jax.jit
    def tables(*given):
        seen = gpu_attention.spans(*given, 0)
        reach = gpu_attention.reach_of(seen, tiles)
        return seen, reach, gpu_attention.readers_of(reach, 16)

    seen, reach, readers = map(np.asarray, tables(rows.group, rows.branch, rows.positions))
    column = np.arange(1024)
    first, last, own = seen[0][..., None]
    pairs = ((first <= column) & (column < last)) | ((own <= column) & (column <= column[:, None]))
    blocks = pairs.reshape(16, tiles.queries, 16, tiles.keys).any(axis=(1, 3))
    number = np.arange(16)
    low, high, begin, end = np.moveaxis(reach[0], 1, 0)[..., None]
    read = ((low <= number) & (number < high)) | ((begin <= number) & (number < end))
    assert (read >= blocks).all() and read.sum() == blocks.sum() < 0.8 * 16 * 17 / 2
    begins, ends = np.moveaxis(readers[0], 1, 0)[..., None]
    asked = (begins <= number) & (number < ends)
    assert (asked >= read.T).all() and asked.sum() < 1.2 * 16 * 17 / 2


@slow
@pytest.mark.compilers
def test_a_gpus_program_has_no_array_of_two_sequence_axes():
    """Nor a mask, nor its gradient: 1,408 columns occur once in a shape."""
    [device] = describe_devices(parse_topology("h100:1"))
    place, columns = jax.sharding.SingleDeviceSharding(device), 1408
    config, rows = Attention(10, 2, 128), TokenRows(*(np.ones((1, columns), np.int32) for _ in TokenRows._fields))
    shapes = (1, columns, 2, 5, 128), (1, 2, 128, columns), (1, 2, columns, 128)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    compute = ComputeOptions("bfloat16", attention="triton")

    def loss(rows, *given):
        return jnp.sum(jnp.square(attention_over(rows, config, compute)(*given, jnp.int32(0)).astype(jnp.float32)))

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), rows)
    with without_compilation_cache():
        text = jax.jit(jax.grad(loss, argnums=(1, 2, 3))).lower(rows, *given).compile().as_text()
    shapes = [sizes.split(",") for sizes in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert text.count("gpu.triton") >= 3 and max(sizes.count(str(columns)) for sizes in shapes) == 1


@slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)])
def test_splash_attention_divides_over_a_mesh(shape):
    model, rows = tiny("gemma"), packed(128, (30, 51, 20), False, 4)
    run = jax.jit(lambda model, rows: forward(model, rows, SPLASH))
    mesh = make_mesh(MeshShape(*shape))
    with jax.set_mesh(mesh):
        found = run(jax.device_put(model, shardings(model, mesh)), rows)
    real = (rows.group > 0)[..., None]
    assert largest_difference(np.where(real, found, 0), np.where(real, run(model, rows), 0)) < 1e-5


@slow
def test_rows_that_splash_attention_cannot_divide():
    attend = attention_over(packed(96, (96,), False), KINDS["plain"].attention, SPLASH)
    with pytest.raises(
        InputError, match=r"learner.compute.row_tokens 96 must be a multiple of 128 for splash attention"
    ):
        attend(*inputs(KINDS["plain"].attention, 2, 96), jnp.int32(0))
