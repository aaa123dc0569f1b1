"""Prefill and decode are the forward pass, whatever lies in the columns that do not count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import KINDS, VOCAB, tiny

from jaxrl_llm.models import decoding
from jaxrl_llm.models.decoder import causal_rows, forward, unstack_layers
from jaxrl_llm.models.decoding import (
    Cache,
    decode,
    empty_cache,
    extend,
    flush,
    insert,
    insert_divided,
    joined_sequence,
    move_rows,
    shared_prefix,
    take_rows,
    with_columns,
)  # fmt: skip
from jaxrl_llm.sharding import MeshShape, make_mesh

PROMPTS, LENGTH, CHUNKS = (1, 4, 6), 14, (3, 3)
"""Prompt lengths of the rows, columns of the cache, and decode steps of two calls."""


@functools.partial(jax.jit, static_argnames="steps")
def run(model, cache, tokens, lengths, steps):
    """Decode ``tokens`` [steps, B]; returns hidden states [steps, B, D] and the cache."""

    def one(chunk, inputs):
        hidden, chunk, _ = decode(model, cache, chunk, *inputs, lengths)
        return chunk, hidden

    chunk = empty_cache(model.config, tokens.shape[1], steps, cache.k.dtype)._replace(state=cache.state)
    chunk, states = jax.lax.scan(one, chunk, (jnp.arange(steps, dtype=jnp.int32), tokens))
    return states, flush(cache, chunk, lengths)


def by_position(*caches):
    """Keys of each cache, then its values, all as [L, B, K, S, H]."""
    return [np.swapaxes(c.k, 3, 4) for c in caches], [np.asarray(c.v) for c in caches]


@jax.jit
def prefill(model, tokens, state_tokens=None):
    """Keys and values of whole rows."""
    return extend(model, None, jnp.zeros(len(tokens), jnp.int32), tokens, None, state_tokens)[0]


@jax.jit
def append(model, cache, lengths, piece):
    """The cache with the keys, values and states of more tokens."""
    return flush(cache, extend(model, cache, lengths, piece)[0], lengths)


full_forward = jax.jit(lambda model, tokens: forward(model, causal_rows(tokens)))


def decoded(model, tokens, cache):
    """Hidden states of every row's 6 positions from its last prompt token on, [6, B, D]."""
    prompts = np.zeros((3, 6), np.int32)
    for row, length in enumerate(PROMPTS):
        prompts[row, :length] = tokens[row, :length]
    filled = prefill(model, prompts, jnp.array(PROMPTS) - 1)
    cache = insert(cache, filled, jnp.arange(3), jnp.zeros(3, jnp.int32))
    lengths, states = np.array(PROMPTS) - 1, []
    for steps in CHUNKS:
        columns = np.stack([tokens[row, lengths[row] : lengths[row] + steps] for row in range(3)], axis=1)
        hidden, cache = run(model, cache, columns.astype(np.int32), lengths.astype(np.int32), steps)
        states, lengths = [*states, hidden], lengths + steps
    return np.concatenate(states)


@pytest.mark.slow(but=("gemma", "sinks"))
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_equal_the_full_forward(kind):
    model = tiny(kind)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, LENGTH))
    whole = np.asarray(full_forward(model, tokens))
    found = decoded(model, tokens, empty_cache(KINDS[kind], 3, LENGTH, jnp.float32))
    for row, length in enumerate(PROMPTS):
        np.testing.assert_allclose(found[:, row], whole[row, length - 1 : length + 5], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gemma"])
def test_what_earlier_requests_left_in_the_cache_changes_no_bit(kind):
    model = tiny(kind)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, LENGTH))
    clean = empty_cache(KINDS[kind], 3, LENGTH, jnp.float32)
    used = Cache(*(100 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(clean[:2])))
    np.testing.assert_array_equal(decoded(model, tokens, used), decoded(model, tokens, clean))


def test_prefill_ignores_padding_bit_for_bit():
    model = tiny("gemma")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 6)).astype(np.int32)
    other = tokens.copy()
    other[:, 4:] = 3
    for a, b in by_position(prefill(model, tokens), prefill(model, other)):
        np.testing.assert_array_equal(a[:, :, :, :4], b[:, :, :, :4])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "windows", "gemma"])
def test_rows_that_read_their_beginning_from_a_block_get_what_those_with_a_copy_get(kind, parts):
    """Rows 0, 1 and 3 begin with one sequence and row 2 with another; the blocks of two parts hold the first twice."""
    model, tokens = tiny(kind), np.random.default_rng(2).integers(0, VOCAB, (4, 9)).astype(np.int32)
    tokens[[1, 3], :5] = tokens[0, :5]
    lengths, last = jnp.array([5, 5, 3, 5]), jnp.full(4, 7)
    whole, chunk = prefill(model, tokens), empty_cache(model.config, 4, 2, jnp.float32)
    step = functools.partial(decode, model, chunk=chunk, step=jnp.int32(0), tokens=last)
    wanted, new, _ = jax.jit(lambda: step(whole, lengths=lengths + 4))()

    own = insert(empty_cache(model.config, 4, 6, jnp.float32), whole, jnp.arange(4), lengths)
    blocks = with_columns(take_rows(whole, jnp.array([2, 0, 2, 0])), 8)
    lanes = jnp.array([4, 3, 1, 5] if parts == 1 else [4, 3, 1, 3])
    before = shared_prefix(blocks, lengths, lanes, parts, 3)
    found, same, _ = jax.jit(lambda: step(own, lengths=jnp.full(4, 4), prefix=before))()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
    for a, b in zip(same[:2], new[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_sequence_is_put_together_from_its_block_and_its_row():
    own, blocks = random_cache(3, 4, 0), random_cache(2, 5, 9)
    for got, row, block in by_position(joined_sequence(own, 2, blocks, 1, 3), own, blocks):
        np.testing.assert_array_equal(got[:, 0, :, :3], block[:, 1, :, :3])
        np.testing.assert_array_equal(got[:, 0, :, 3:7], row[:, 2])


@pytest.mark.slow
def test_insert_takes_columns_from_the_start_named():
    old, new = random_cache(2, 4, 0), random_cache(2, 7, 9)
    for got, was, put in by_position(insert(old, new, jnp.array([1, -1]), jnp.array([5, 2])), old, new):
        np.testing.assert_array_equal(got[:, 0, :, :2], put[:, 1, :, 5:])
        np.testing.assert_array_equal(got[:, 1], was[:, 1])


@pytest.mark.slow
def test_insert_replaces_the_rows_named_and_no_others():
    old, new = random_cache(4, 8, 0), random_cache(2, 5, 9)
    for got, was, put in by_position(insert(old, new, jnp.array([-1, 1, 0, 1]), jnp.zeros(4, jnp.int32)), old, new):
        np.testing.assert_array_equal(got[:, 0], was[:, 0])
        np.testing.assert_array_equal(got[:, 1:, :, :5], put[:, [1, 0, 1]])


def random_cache(rows, columns, seed):
    shapes = empty_cache(KINDS["plain"], rows, columns, jnp.float32)
    return Cache(*(jax.random.normal(jax.random.key(seed + i), x.shape) for i, x in enumerate(shapes[:2])))


@pytest.mark.slow
def test_flush_writes_each_row_at_its_own_length():
    old, chunk = random_cache(3, 8, 0), random_cache(3, 2, 9)
    for got, was, put in by_position(flush(old, chunk, jnp.array([0, 5, 6])), old, chunk):
        wanted = np.array(was)
        for row, at in ((0, 0), (1, 5), (2, 6)):
            wanted[:, row, :, at : at + 2] = put[:, row]
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow(but="pieces0-plain")
@pytest.mark.parametrize("kind", ["plain", "windows", "gemma", "delta", "conv"])
@pytest.mark.parametrize("pieces", [(2, 4), (1, 3, 2)])
def test_a_sequence_may_be_computed_in_pieces(kind, pieces):
    model = tiny(kind)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 6)).astype(np.int32)
    cache, done = empty_cache(KINDS[kind], 2, 9, jnp.float32), 0
    for piece in pieces:
        cache = append(model, cache, jnp.full(2, done, jnp.int32), tokens[:, done : done + piece])
        done += piece
    whole = prefill(model, tokens)
    for got, wanted in by_position(cache, whole):
        np.testing.assert_allclose(got[:, :, :, :6], wanted, rtol=1e-4, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), cache.state, whole.state)


@pytest.mark.slow
def test_rows_and_columns_are_taken_and_added():
    old = random_cache(3, 8, 0)
    for got, was in by_position(with_columns(take_rows(old, jnp.array([2, 0])), 5), old):
        np.testing.assert_array_equal(got, was[:, [2, 0], :, :5])
    for got, was in by_position(with_columns(old, 11), old):
        np.testing.assert_array_equal(got[:, :, :, :8], was)
        assert got.shape[3] == 11 and not got[:, :, :, 8:].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gemma", "delta"])
def test_layers_written_out_compute_what_their_loop_does(kind):
    model = tiny(kind)
    tokens = np.arange(1, 7, dtype=np.int32).reshape(1, -1) % VOCAB

    @jax.jit
    def both(model):
        none = jnp.zeros(1, jnp.int32)
        cache = flush(empty_cache(model.config, 1, 8, jnp.float32), extend(model, None, none, tokens)[0], none)
        chunk = empty_cache(model.config, 1, 2, jnp.float32)
        return cache, decode(model, cache, chunk, jnp.int32(0), jnp.array([5]), jnp.array([6]))[:2]

    expected = both(model)
    found = both(unstack_layers(model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.slow
def test_a_call_reads_the_first_rows_and_columns_of_a_larger_cache():
    model = tiny("plain")
    lengths = jnp.array([4, 2])
    tokens = jnp.array([5, 7])

    @functools.partial(jax.jit, static_argnames="width")
    def run(cache, width=None):
        chunk = empty_cache(model.config, 2, 2, jnp.float32)
        found, chunk, _ = decode(model, cache, chunk, jnp.int32(0), tokens, lengths, width=width)
        return found, flush(cache, chunk, lengths)

    key = jax.random.key(0)
    small = jax.tree.map(lambda x: jax.random.normal(key, x.shape), empty_cache(model.config, 2, 8, jnp.float32))
    more = [(0, 0), (0, 3), (0, 0)]
    large = Cache(
        jnp.pad(small.k, [*more, (0, 0), (0, 5)], constant_values=np.nan),
        jnp.pad(small.v, [*more, (0, 5), (0, 0)], constant_values=np.nan),
    )
    hidden, after = run(small)
    found, whole = run(large, width=8)
    np.testing.assert_array_equal(found, hidden)
    np.testing.assert_array_equal(whole.v[:, :2, :, :8], after.v)
    assert np.isnan(whole.v[:, 2:]).all() and np.isnan(whole.v[:, :2, :, 8:]).all()


def test_rows_are_moved_in_their_cache():
    cache = jax.tree.map(
        lambda x: jnp.arange(6.0).reshape(1, 6, 1, 1, 1) + jnp.zeros_like(x),
        empty_cache(tiny("plain").config, 6, 4, jnp.float32),
    )
    moved = jax.jit(move_rows)(cache, None, jnp.array([-1, 5, -1, 4]))
    np.testing.assert_array_equal(moved.k[0, :, 0, 0, 0], [0, 5, 2, 4, 4, 5])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("data",), ("data", "fsdp")])
def test_rows_that_are_divided_reach_every_device_that_needs_them(axes):
    """As ``insert`` of all of them would do it."""
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=1), jax.devices()[:4])
    config = tiny("plain").config
    cache = empty_cache(config, 8, 6, jnp.float32)
    key = jax.random.key(1)
    given = jax.tree.map(lambda x: jax.random.normal(key, x.shape), empty_cache(config, 4, 6, jnp.float32))
    source = jnp.array([3, -1, 0, 3, -1, -1, 2, 0])
    start = jnp.array([0, 0, 2, 1, 0, 0, 0, 3])
    needed = jnp.array([0, 2, 3, -1])
    rows = P(None, ("data", "fsdp"))
    inside = (Cache(rows, rows), Cache(P(None, axes), P(None, axes)), P(rows[1]), P(rows[1]), P())
    divided = jax.shard_map(
        functools.partial(insert_divided, axes=axes), mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows),
        check_vma=False,
    )  # fmt: skip
    found = jax.jit(divided)(cache, given, source, start, needed)
    expected = jax.jit(insert)(cache, given, source, start)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_latent_vectors_in_int8_have_the_scale_of_their_keys():
    config = KINDS["latent"]
    k = np.random.default_rng(0).normal(size=(2, 1, 10, 5)).astype(np.float32)
    weights = np.random.default_rng(1).random((2, 1, 4, 5)).astype(np.float32)
    cache = decoding.stored(jnp.asarray(k), jnp.zeros((2, 1, 5, 0)), jnp.int8)
    scaled, codes = decoding._weighted(config.attention, jnp.asarray(weights), cache, jnp.float32)
    vectors = k[:, :, : config.attention.latent.rank]
    found, expected = jnp.einsum("bkgz,bkzh->bkgh", scaled, codes), np.einsum("bkgz,bkhz->bkgh", weights, vectors)
    np.testing.assert_allclose(found, expected, atol=5 * np.abs(k).max() / 127)
