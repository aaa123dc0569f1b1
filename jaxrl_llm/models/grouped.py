"""Products of rows with one of several matrices each: rows are sorted by their matrix into padded blocks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers import product

LEAST_BLOCK, MOST_BLOCK = 8, 512
"""Bounds of the tokens in a block of one expert."""


class Sorted(NamedTuple):
    """The pairs of a token and its expert in the order of experts, each expert's from a multiple of ``block`` rows on.

    Attributes:
      token: int32[M], the token of each row; T for padding.
      pair: int32[M], its pair, counted through [T, k]; T k for padding.
      row: int32[T, k], the row of each pair.
      sizes: int32[E], rows of each expert, padding included.
      owner: int32[M / block], the expert of each block; any for the blocks after the last.
      used: int32[], blocks with a pair.
    """

    token: jax.Array
    pair: jax.Array
    row: jax.Array
    sizes: jax.Array
    owner: jax.Array
    used: jax.Array


def by_expert(taken: jax.Array, count: int, block: int) -> Sorted:
    """Sort the pairs of ``taken`` int32[T, k] by expert, of ``count``; those of expert ``count`` come last, unused."""
    tokens, k = taken.shape
    pairs = tokens * k
    flat = taken.reshape(-1)
    blocks = min(pairs, (pairs + (count + 1) * (block - 1)) // block)
    order = jnp.argsort(flat, stable=True)
    numbers = jnp.zeros(count + 1, jnp.int32).at[flat].add(1)
    each = -(-numbers // block)
    ends = jnp.cumsum(each)
    first = (ends - each) * block - (jnp.cumsum(numbers) - numbers)
    rows = first[flat[order]] + jnp.arange(pairs, dtype=jnp.int32)
    pair = jnp.full(blocks * block, pairs, jnp.int32).at[rows].set(order.astype(jnp.int32), unique_indices=True)
    row = jnp.zeros(pairs, jnp.int32).at[order].set(rows, unique_indices=True)
    owner = jnp.sum(ends[None, : count - 1] <= jnp.arange(blocks)[:, None], axis=1, dtype=jnp.int32)
    return Sorted(pair // k, pair, row.reshape(taken.shape), each[:count] * block, owner, ends[count - 1])


@jax.custom_vjp
def moved(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """Return rows ``there`` of x, zeros where that is beyond the last.

    ``back`` [len(x), n]: the rows of the result that are made of each row of x. The gradient reads them, where JAX's
    own would scatter.
    """
    return x.at[there].get(mode="fill", fill_value=0)


def _moved_back(back: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(g.at[back].get(mode="fill", fill_value=0), axis=1), None, None


moved.defvjp(lambda x, there, back: (moved(x, there, back), back), _moved_back)


@jax.custom_vjp
def grouped(x: jax.Array, w: jax.Array, owner: jax.Array, used: jax.Array) -> jax.Array:
    """Multiply blocks x [n, b, D] by the matrices w [E, D, F] of their owners int32[n].

    Blocks from ``used`` on hold zeros. CPUs multiply block after block and leave those out; others all at one time.
    """
    return _grouped(x, w, owner, used)


def in_turn(x: jax.Array, w: jax.Array, owner: jax.Array, used: jax.Array) -> jax.Array:
    """Compute ``grouped`` block after block."""

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        return out.at[i].set(x[i] @ w[owner[i]])

    return jax.lax.fori_loop(0, used, one, jnp.zeros((*x.shape[:2], w.shape[2]), x.dtype))


def at_once(x: jax.Array, w: jax.Array, owner: jax.Array, used: jax.Array) -> jax.Array:
    """Compute ``grouped`` with a copy of the matrix for each block."""
    return jnp.einsum("nbd,ndf->nbf", x, w[owner])


def sums_in_turn(x: jax.Array, g: jax.Array, owner: jax.Array, used: jax.Array, count: int) -> jax.Array:
    """Sum the products of blocks x [n, b, D] and g [n, b, F] by owner, float32[count, D, F], block after block."""

    def one(i: jax.Array, sums: jax.Array) -> jax.Array:
        return sums.at[owner[i]].add(product("bd,bf->df", x[i], g[i]))

    return jax.lax.fori_loop(0, used, one, jnp.zeros((count, x.shape[2], g.shape[2]), jnp.float32))


def sums_at_once(x: jax.Array, g: jax.Array, owner: jax.Array, used: jax.Array, count: int) -> jax.Array:
    """Compute ``sums_in_turn`` with a product for each block."""
    return jnp.zeros((count, x.shape[2], g.shape[2]), jnp.float32).at[owner].add(product("nbd,nbf->ndf", x, g))


def _grouped(x: jax.Array, w: jax.Array, owner: jax.Array, used: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, w, owner, used, cpu=in_turn, default=at_once)


def _grouped_back(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    x, w, owner, used = saved
    forms = (functools.partial(form, count=len(w)) for form in (sums_in_turn, sums_at_once))
    sums = jax.lax.platform_dependent(x, g, owner, used, **dict(zip(("cpu", "default"), forms, strict=True)))
    return _grouped(g, w.swapaxes(1, 2), owner, used), sums.astype(w.dtype), None, None


grouped.defvjp(lambda *given: (_grouped(*given), given), _grouped_back)


def block_of(pairs: int, count: int) -> int:
    """Return the tokens of a block: about half of what an expert has on average, so that little is padding."""
    mean = max(pairs // (2 * count), 1)
    return min(max(1 << (mean.bit_length() - 1), LEAST_BLOCK), MOST_BLOCK)
