"""MLPs of which each row has one of several: rows are sorted by it into padded blocks of one MLP."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers import product

LEAST_BLOCK, MOST_BLOCK = 8, 512
"""Bounds of the tokens in a block of one expert."""
TOGETHER = 4
"""Blocks in each round of a CPU's loop; their number is a multiple of it."""

Gating = Callable[[jax.Array, jax.Array], jax.Array]
"""(products with ``gate``, products with ``up``) -> what ``down`` multiplies."""


class Matrices(NamedTuple):
    """The weights of a layer's experts: gate and up [E, D, I], down [E, I, D]; biases [E, I], [E, I], [E, D] or None.

    The bias of ``down`` is added by ``experts.mixture``: each device would, where several have parts of a product.
    """

    gate: Any
    up: Any
    down: Any
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


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
    blocks += -blocks % TOGETHER
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> jax.Array:
    """Compute the MLP of each block's owner for blocks x [n, b, D]: ``act(x gate, x up) down``.

    ``owner`` int32[n]; blocks from ``used`` on hold zeros, and their results anything. CPUs compute block after block
    and leave those out; others all at one time.
    """
    return _grouped(act, x, matrices, owner, used)[0]


def forward_of(act: Gating, x: jax.Array, w: Matrices) -> tuple[jax.Array, ...]:
    """Compute one expert's MLP for x [b, D]; returns the result and what ``act`` was given."""
    pairs = ((w.gate, w.gate_bias), (w.up, w.up_bias))
    given = [x @ m if bias is None else x @ m + bias[None] for m, bias in pairs]
    return act(*given) @ w.down, *given


def backward_of(
    act: Gating, x: jax.Array, given: tuple[jax.Array, ...], g: jax.Array, w: Matrices
) -> tuple[jax.Array, Matrices]:
    """Return the gradients of x and, in float32, of the weights of ``forward_of``, for a gradient g of its result."""
    hidden, back = jax.vjp(act, *given)
    gate, up = back(g @ w.down.T)
    biases = [None if bias is None else jnp.sum(d, 0, dtype=jnp.float32)
              for d, bias in ((gate, w.gate_bias), (up, w.up_bias))]  # fmt: skip
    products = [product("bd,bf->df", a, b) for a, b in ((x, gate), (x, up), (hidden, g))]
    return gate @ w.gate.T + up @ w.up.T, Matrices(*products, *biases)


def in_turn(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> tuple[jax.Array, ...]:
    """Compute ``forward_of`` each block after the other, some of them in each round: they take several cores."""

    def one(i: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for at in (TOGETHER * i + step for step in range(TOGETHER)):
            found = forward_of(act, x[at], _of(matrices, owner[at]))
            out = tuple(whole.at[at].set(part) for whole, part in zip(out, found, strict=True))
        return out

    wide = (*x.shape[:2], matrices.gate.shape[2])
    blank = tuple(jnp.zeros(shape, x.dtype) for shape in (x.shape, wide, wide))
    return jax.lax.fori_loop(0, -(-used // TOGETHER), one, blank)


def at_once(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> tuple[jax.Array, ...]:
    """Compute ``in_turn`` with a copy of the matrices for each block."""
    return jax.vmap(functools.partial(forward_of, act))(x, _of(matrices, owner))


def back_in_turn(
    act: Gating,
    x: jax.Array,
    given: tuple[jax.Array, ...],
    g: jax.Array,
    matrices: Matrices,
    owner: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, Matrices]:
    """Compute ``backward_of`` each block after the other, and sum the gradients of each expert's weights."""

    def one(i: jax.Array, out: tuple[jax.Array, Matrices]) -> tuple[jax.Array, Matrices]:
        whole, sums = out
        for at in (TOGETHER * i + step for step in range(TOGETHER)):
            own = owner[at]
            part, change = backward_of(act, x[at], tuple(t[at] for t in given), g[at], _of(matrices, own))
            whole = whole.at[at].set(part)
            sums = jax.tree.map(lambda total, added, own=own: total.at[own].add(added), sums, change)
        return whole, sums

    blank = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), matrices)
    return jax.lax.fori_loop(0, -(-used // TOGETHER), one, (jnp.zeros_like(x), blank))


def back_at_once(
    act: Gating,
    x: jax.Array,
    given: tuple[jax.Array, ...],
    g: jax.Array,
    matrices: Matrices,
    owner: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, Matrices]:
    """Compute ``back_in_turn`` with a copy of the matrices for each block.

    The blocks of an expert are summed by a product: where the order of additions is fixed, a GPU's compiler makes of a
    scatter many passes over indices as large as all gradients.
    """
    back, changes = jax.vmap(functools.partial(backward_of, act))(x, given, g, _of(matrices, owner))
    mine = jax.nn.one_hot(owner, len(matrices.gate), dtype=jnp.float32)
    sums = functools.partial(jnp.einsum, "ne,n...->e...", mine, precision=jax.lax.Precision.HIGHEST)
    return back, jax.tree.map(sums, changes)


def _of(matrices: Matrices, owner: jax.Array) -> Matrices:
    return jax.tree.map(lambda m: m[owner], matrices)


def _grouped(act: Gating, *given: Any) -> tuple[jax.Array, ...]:
    forms = {"cpu": functools.partial(in_turn, act), "default": functools.partial(at_once, act)}
    return jax.lax.platform_dependent(*given, **forms)


def _forward(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> Any:
    out, *given = _grouped(act, x, matrices, owner, used)
    return out, (x, tuple(given), matrices, owner, used)


def _backward(act: Gating, saved: tuple[Any, ...], g: jax.Array) -> tuple[jax.Array, Matrices, None, None]:
    x, given, matrices, owner, used = saved
    forms = {"cpu": functools.partial(back_in_turn, act), "default": functools.partial(back_at_once, act)}
    back, sums = jax.lax.platform_dependent(x, given, g, matrices, owner, used, **forms)
    return back, jax.tree.map(lambda total, m: total.astype(m.dtype), sums, matrices), None, None


grouped.defvjp(_forward, _backward)


def block_of(pairs: int, count: int) -> int:
    """Return the tokens of a block: about half of what an expert has on average, so that little is padding.

    Of few tokens more: a copy of an expert's matrices, one for each block, costs as much as some 30 tokens.
    """
    mean = max(pairs // count, 1)
    tokens = max(mean // 2, math.isqrt(64 * mean))
    return min(max(1 << (tokens.bit_length() - 1), LEAST_BLOCK), MOST_BLOCK)
