"""Experts: the router's choice, and the products of each token with the MLPs of its experts.

Every token is computed by all of its experts: there is no capacity, and nothing is dropped. The router is float32
whatever the weights are. ``FORMS`` are equal but for rounding; ``dense`` multiplies every token by every expert and is
the reference for the others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ComputeOptions, Experts, ModelConfig
from jaxrl_llm.models.layers import ACTIVATIONS, product
from jaxrl_llm.sharding import BATCH, fitting

EXPERTS = "experts"
"""Name of the array of the experts that each token took in each layer, uint8 or uint16[T, L, k]."""
TILE = 128
"""Rows and columns that the kernel for TPUs multiplies at a time."""
LEAST_BLOCK, MOST_BLOCK = 8, 512
"""Bounds of the tokens in a block of one expert."""

Activation = Callable[[jax.Array], jax.Array]


def id_dtype(experts: Experts) -> Any:
    """Return the smallest unsigned dtype that holds an expert's number."""
    return jnp.uint8 if experts.count <= 256 else jnp.uint16


def routes_shape(config: ModelConfig, *outer: int) -> jax.ShapeDtypeStruct | None:
    """Return the shape [..., L, k] of the experts that tokens take; None for a dense model."""
    experts = config.experts
    if experts is None:
        return None
    return jax.ShapeDtypeStruct((*outer, config.layers, experts.active), id_dtype(experts))


def route(
    router: jax.Array, experts: Experts, x: jax.Array, replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the experts of tokens x [T, D] by the router's weights [D, E].

    ``replayed`` int[T, k]: experts to take in place of the router's own; a negative number takes its own. The weights
    come from the live probabilities all the same, so the router learns.

    Returns:
      Weights float32[T, k]; the experts taken int32[T, k]; and those of the largest probabilities, int32[T, k].
    """
    # By default TPUs would round the operands to bfloat16.
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("td,de->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=exact)
    probabilities = jax.nn.softmax(scores, axis=-1)
    _, own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), experts.active)
    taken = own if replayed is None else jnp.where(replayed < 0, own, replayed.astype(jnp.int32))
    weights = jnp.take_along_axis(probabilities, taken, axis=1)
    if experts.renormalise:
        weights /= jnp.sum(weights, axis=1, keepdims=True)
    return weights, taken, own


def mixture(
    w: Any,
    config: ModelConfig,
    x: jax.Array,
    replayed: jax.Array | None = None,
    compute: ComputeOptions = ComputeOptions(),
) -> tuple[jax.Array, jax.Array]:
    """Compute the experts of one layer for x [B, S, D].

    Args:
      w: of the layer: ``router`` [D, E], ``gate`` and ``up`` [E, D, I], ``down`` [E, I, D].
      config: of the model.
      x: normalised.
      replayed: experts int[B, S, k] to take in place of the router's own, which a negative number takes, or None.
      compute: has the form, of ``FORMS``.

    Returns:
      The output [B, S, D], and the router's own choice [B, S, k].
    """
    mesh = jax.sharding.get_abstract_mesh()
    matrices = (w.gate[...], w.up[...], w.down[...])
    if config.experts is None:
        raise ValueError(f"a dense model of the family {config.family} has no experts")
    form = FORMS[compute.experts]
    if compute.experts == "megablox" and compute.interpret:
        form = functools.partial(megablox, interpret=True)
    alone = functools.partial(_mixture, settings=config.experts, act=ACTIVATIONS[config.activation], form=form)
    if mesh.empty:
        return alone(w.router[...], matrices, x, replayed)
    rows = fitting(x.shape, (BATCH,), mesh)
    wide = fitting(matrices[0].shape, ("expert", None, "tensor"), mesh)
    local = functools.partial(alone, rows=rows[0] or (), divided=(wide[0], wide[2]))
    specs = (PartitionSpec(), (wide, wide, PartitionSpec(wide[0], wide[2], None)), rows, rows)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=False)
    return run(w.router[...], matrices, x, replayed)


Matrices = tuple[jax.Array, jax.Array, jax.Array]


def _mixture(
    router: jax.Array,
    matrices: Matrices,
    x: jax.Array,
    replayed: jax.Array | None,
    settings: Experts,
    act: Activation,
    form: Callable[..., jax.Array],
    rows: str | tuple[str, ...] = (),
    divided: tuple[str | None, str | None] = (None, None),
) -> tuple[jax.Array, jax.Array]:
    """Compute one device's part of ``mixture``.

    ``rows``: mesh axes that divide the batch. ``divided``: the axis that divides the experts, and the one that divides
    their width; None for none. The tokens of devices with different experts are gathered, and their sums scattered.
    """
    experts, width = divided
    apart = experts is not None and experts in rows
    flat = x.reshape(-1, x.shape[-1])
    given = None if replayed is None else replayed.reshape(len(flat), -1)
    weights, taken, own = route(router, settings, flat, given)
    if apart:
        flat, weights, taken = (jax.lax.all_gather(t, experts, tiled=True) for t in (flat, weights, taken))
    if experts is not None:  # other devices' experts become one more, that nobody computes
        count = len(matrices[0])
        taken = taken - jax.lax.axis_index(experts) * count
        here = (taken >= 0) & (taken < count)
        taken = jnp.where(here, taken, count)
        weights = jnp.where(here, weights, 0)
    out = form(matrices, act, flat, weights, taken)
    if width is not None:
        out = jax.lax.psum(out, width)
    if apart:
        out = jax.lax.psum_scatter(out, experts, tiled=True)
    elif experts is not None:
        out = jax.lax.psum(out, experts)
    own = own.reshape(*x.shape[:2], -1).astype(id_dtype(settings))
    return out.astype(x.dtype).reshape(x.shape), own


def dense(matrices: Matrices, act: Activation, x: jax.Array, weights: jax.Array, taken: jax.Array) -> jax.Array:
    """Multiply all tokens x [T, D] by all experts, and weigh those that were not taken by 0; float32[T, D]."""
    gate, up, down = matrices
    whole = jnp.sum(jax.nn.one_hot(taken, len(gate), dtype=jnp.float32) * weights[..., None], axis=1)
    hidden = act(jnp.einsum("td,edi->tei", x, gate)) * jnp.einsum("td,edi->tei", x, up)
    return jnp.einsum("te,ted->td", whole, product("tei,eid->ted", hidden, down))


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


def blocks(matrices: Matrices, act: Activation, x: jax.Array, weights: jax.Array, taken: jax.Array) -> jax.Array:
    """Multiply tokens x [T, D] after sorting them by expert into padded blocks; float32[T, D]."""
    gate, up, down = matrices
    block = block_of(taken.size, len(gate))
    at = by_expert(taken, len(gate), block)
    inside = moved(x, at.token, at.row).reshape(-1, block, x.shape[1])
    each = functools.partial(grouped, owner=at.owner, used=at.used)
    out = each(act(each(inside, gate)) * each(inside, up), down).reshape(-1, x.shape[1])
    return mixed(out, weights, at)


def mixed(out: jax.Array, weights: jax.Array, at: Sorted) -> jax.Array:
    """Sum each token's rows of ``out`` [M, D], weighted; float32[T, D]."""
    own = moved(out, at.row.reshape(-1), at.pair[:, None]).reshape(*at.row.shape, -1)
    return jnp.einsum("tk,tkd->td", weights, own.astype(jnp.float32))


def megablox(
    matrices: Matrices, act: Activation, x: jax.Array, weights: jax.Array, taken: jax.Array, interpret: bool = False
) -> jax.Array:
    """Multiply tokens x [T, D], sorted by expert without padding, by JAX's kernel for TPUs; float32[T, D]."""
    # Half a second that programs without it need not wait for.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    gate, up, down = matrices
    at = by_expert(taken, len(gate), 1)
    count = len(at.pair)
    inside = jnp.pad(moved(x, at.token, at.row), ((0, -count % TILE), (0, 0)))
    # The kernel leaves rows of no expert as they were in memory.
    used = (jnp.arange(len(inside)) < at.used)[:, None]

    def each(x: jax.Array, w: jax.Array) -> jax.Array:
        found = gmm(x, w, at.sizes, x.dtype, (TILE, TILE, TILE), None, None, False, interpret)
        return jnp.where(used, found, jnp.zeros_like(found))

    return mixed(each(act(each(inside, gate)) * each(inside, up), down)[:count], weights, at)


FORMS = {"blocks": blocks, "dense": dense, "megablox": megablox}
"""Ways to compute experts, by name."""
