"""Recurrent layers: chunks are what token after token computes, in rows, trees and pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.recurrent import (
    Continuation,
    Delta,
    PackedSequences,
    delta_rule,
    delta_step,
    plain_chunks,
    triangular_inverse,
)

ROWS, HEADS, EACH, KEY, VALUE = 2, 2, 2, 4, 6


def inputs(tokens, seed=0, rows=ROWS):
    """Random inputs with keys of length 1, as the layer gives them."""
    random = np.random.default_rng(seed)
    q, k = (random.normal(size=(rows, tokens, HEADS, KEY)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = random.normal(size=(rows, tokens, HEADS, EACH, VALUE))
    decay, strength = -random.random((rows, tokens, HEADS, EACH)), random.random((rows, tokens, HEADS, EACH))
    return Delta(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, strength)))


def by_token(x, state):
    """The rule as it is defined, one token after the other, by NumPy in float64."""
    q, k, v, decay, strength = (np.asarray(t, np.float64) for t in x)
    state, out = np.asarray(state, np.float64).copy(), np.zeros(v.shape)
    for t in range(q.shape[1]):
        for row, head, copy in np.ndindex(*strength[:, 0].shape):
            s = state[row, head, copy]
            s *= np.exp(decay[row, t, head, copy])
            change = strength[row, t, head, copy] * (v[row, t, head, copy] - s.T @ k[row, t, head])
            s += np.outer(k[row, t, head], change)
            out[row, t, head, copy] = s.T @ q[row, t, head]
    return out, state


def random_state(seed=1, rows=ROWS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, HEADS, EACH, KEY, VALUE)), jnp.float32)


@pytest.mark.slow(but="150")
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_chunks_compute_what_token_after_token_does(tokens):
    x, state = inputs(tokens), random_state()
    found, (after,) = jax.jit(lambda x, s: delta_rule(x, s[None], plain_chunks(ROWS, tokens)))(x, state)
    out, end = by_token(x, state)
    np.testing.assert_allclose(found, out, atol=2e-5)
    np.testing.assert_allclose(after, end, atol=2e-5)


@pytest.mark.slow
def test_gradients_of_chunks_are_those_of_token_after_token():
    x, state = inputs(100), random_state()

    def plain(x, state):
        step = lambda s, t: delta_step(Delta(*(y[:, None] for y in t)), s)[::-1]
        state, out = jax.lax.scan(step, state, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x))
        return jnp.moveaxis(out[:, :, 0], 0, 1), state

    def chunked(x, state):
        out, (state,) = delta_rule(x, state[None], plain_chunks(ROWS, 100))
        return out, state

    def gradient(rule):
        return jax.jit(jax.grad(lambda x, s: sum(jnp.sum(jnp.sin(y)) for y in rule(x, s)), (0, 1)))(x, state)

    for a, b in zip(*(jax.tree.leaves(gradient(rule)) for rule in (chunked, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max())


def test_keys_that_repeat_lose_no_digits():
    """A series of powers of this matrix would reach 1e17 before it ends."""
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_array_equal(triangular_inverse(lower) @ (lower + jnp.eye(64)), jnp.eye(64))
    x = inputs(128)
    same = x._replace(k=jnp.broadcast_to(x.k[:, :1], x.k.shape), strength=jnp.ones_like(x.strength))
    found, _ = delta_rule(same, random_state()[None], plain_chunks(ROWS, 128))
    np.testing.assert_allclose(found, by_token(same, random_state())[0], atol=2e-5)


TREE = ((30, (5, 130, 7)), (1, (90,)), (40, (3, 3)))
"""For each group the tokens of its prompt, and of each branch; one fills a chunk, so that another begins two later."""


def tree_rows():
    """Groups and branches of the columns of one row, and the columns of each path; chunks end anywhere in it."""
    group, branch, paths = [], [], []
    for number, (prompt, branches) in enumerate(TREE, 1):
        first = len(group)
        sizes = [prompt, *branches]
        for index, size in enumerate(sizes):
            paths += [[*range(first, first + prompt), *range(len(group), len(group) + size)]] if index else []
            group += [number] * size
            branch += [index] * size
    pad = [0] * 5
    return jnp.asarray([group + pad], jnp.int32), jnp.asarray([branch + pad], jnp.int32), paths


def test_a_branch_goes_on_from_its_prompt():
    group, branch, paths = tree_rows()
    x = inputs(group.shape[1], rows=1)
    sequences = PackedSequences(group, branch, True, 4)
    # In NumPy, since each path has its own length, for which JAX would compile every look-up.
    found, before = jax.device_get(jax.jit(lambda x: (sequences.apply_delta(x), sequences.before("q", x.q)))(x))
    x = jax.device_get(x)
    for path in paths:
        alone = Delta(*(t[:, path] for t in x))
        zero = np.zeros((1, HEADS, EACH, KEY, VALUE))
        np.testing.assert_allclose(found[:, path], by_token(alone, zero)[0], atol=2e-5)
        for count, inputs_before in enumerate(before, 1):
            expected = np.pad(alone.q, ((0, 0), (count, 0), (0, 0), (0, 0)))[:, : len(path)]
            np.testing.assert_array_equal(inputs_before[:, path], expected)


@pytest.mark.slow
def test_without_shared_prompts_a_group_is_a_sequence():
    group, _, _ = tree_rows()
    x = inputs(group.shape[1], rows=1)
    results = []
    for shared in (True, False):
        sequences = PackedSequences(group, jnp.zeros_like(group), shared, 3)
        results.append([jax.jit(sequences.apply_delta)(x), *sequences.before("q", x.q)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a[group > 0], b[group > 0], atol=1e-6)


@pytest.mark.slow(but="pieces2")
@pytest.mark.parametrize("pieces", [(70, 70), (1,) * 9, (64, 1, 30)])
def test_padding_changes_no_state(pieces):
    """The next tokens of two sequences, in pieces; of each the second row uses one token less, and pads."""
    state = {"matrix": random_state().reshape(ROWS, -1, KEY, VALUE), "q": jnp.zeros((ROWS, HEADS, 3, KEY))}
    states, done = state, np.zeros(ROWS, int)
    x = jax.device_get(inputs(sum(pieces)))
    outputs = [[], []]
    for size in pieces:
        valid = np.array([size, max(size - 1, 1)])
        taken = [np.minimum(done[row] + np.arange(size), sum(pieces) - 1) for row in range(ROWS)]
        piece = Delta(*(np.stack([t[row, taken[row]] for row in range(ROWS)]) for t in x))

        def run(states, piece, valid):
            sequences = Continuation(states, valid)
            tails = sequences.before("q", piece.q)
            return sequences.apply_delta(piece), tails, sequences.new

        out, tails, states = jax.device_get(jax.jit(run)(states, piece, jnp.asarray(valid, jnp.int32)))
        for row in range(ROWS):
            outputs[row] += [(out[row, i], [tail[row, i] for tail in tails]) for i in range(valid[row])]
        done += valid
    for row in range(ROWS):
        count = int(done[row])
        alone = Delta(*(t[row : row + 1, :count] for t in x))
        expected, end = by_token(alone, random_state()[row : row + 1])
        np.testing.assert_allclose(np.stack([out for out, _ in outputs[row]]), expected[0], atol=2e-5)
        np.testing.assert_allclose(states["matrix"][row], end.reshape(-1, KEY, VALUE), atol=2e-5)
        padded = np.pad(alone.q[0], ((3, 0), (0, 0), (0, 0)))
        for i in range(3):
            found = np.stack([tails[i] for _, tails in outputs[row]])
            np.testing.assert_array_equal(found, padded[2 - i : 2 - i + count])
        np.testing.assert_array_equal(states["q"][row], np.swapaxes(padded[-3:], 0, 1))
