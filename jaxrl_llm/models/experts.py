"""Experts: the router's choice, and the products of each token with the MLPs of its experts.

Every token is computed by all of its experts: there is no capacity, and nothing is dropped. The router is float32
whatever the weights are. ``FORMS`` are equal but for rounding; ``dense`` multiplies every token by every expert and is
the reference for the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ComputeOptions, Experts, ModelConfig
from jaxrl_llm.models.layers import ACTIVATIONS, product
from jaxrl_llm.sharding import BATCH, fitting

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


EXPERTS = "experts"
"""Name of the array of the experts that each token took in each layer, uint8 or uint16[T, L, k]."""
TILE = 128
"""Rows and columns that the kernel for TPUs multiplies at a time."""


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
    router: jax.Array,
    experts: Experts,
    x: jax.Array,
    replayed: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the experts of tokens x [T, D] by the router's weights [D, E], and its ``bias`` [E].

    ``replayed`` int[T, k]: experts to take in place of the router's own; a negative number takes its own. The weights
    come from the live probabilities all the same, so the router learns.

    Returns:
      Weights float32[T, k]; the experts taken int32[T, k]; and those of the largest probabilities, int32[T, k].
    """
    # By default TPUs would round the operands to bfloat16.
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("td,de->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=exact)
    scores = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    probabilities = jax.nn.softmax(scores, axis=-1)
    compared = jax.lax.stop_gradient(probabilities)
    if experts.bits:
        compared = jax.lax.reduce_precision(compared, 8, experts.bits)
    _, own = jax.lax.top_k(compared, experts.active)
    taken = own if replayed is None else jnp.where(replayed < 0, own, replayed.astype(jnp.int32))
    weights = jnp.take_along_axis(probabilities, taken, axis=1)
    if experts.renormalise:
        weights /= jnp.sum(weights, axis=1, keepdims=True)
    return weights, taken, own


def gating(config: ModelConfig) -> Gating:
    """Return ``activation(gate) * up``, or GPT-OSS's clamped form where the experts have a limit."""
    act = ACTIVATIONS[config.activation]
    limit, alpha = (0.0, 1.0) if config.experts is None else (config.experts.limit, config.experts.alpha)
    if not limit:
        return lambda gate, up: act(gate) * up

    def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)

    return clamped


def mixture(
    w: Any,
    config: ModelConfig,
    x: jax.Array,
    replayed: jax.Array | None = None,
    compute: ComputeOptions = ComputeOptions(),
) -> tuple[jax.Array, jax.Array]:
    """Compute the experts of one layer for x [B, S, D].

    Args:
      w: of the layer: ``router`` [D, E], perhaps ``router_bias`` [E], and the ``Matrices`` by name.
      config: of the model.
      x: normalised.
      replayed: experts int[B, S, k] to take in place of the router's own, which a negative number takes, or None.
      compute: has the form, of ``FORMS``.

    Returns:
      The output [B, S, D], and the router's own choice [B, S, k].
    """
    mesh = jax.sharding.get_abstract_mesh()
    matrices = Matrices(*(getattr(w, name)[...] if hasattr(w, name) else None for name in Matrices._fields))
    router = (w.router[...], w.router_bias[...] if hasattr(w, "router_bias") else None)
    if config.experts is None:
        raise ValueError(f"a dense model of the family {config.family} has no experts")
    form = FORMS[compute.experts]
    if compute.experts == "megablox" and compute.interpret:
        form = functools.partial(megablox, interpret=True)
    alone = functools.partial(_mixture, settings=config.experts, act=gating(config), form=form)
    if mesh.empty:
        return alone(router, matrices, x, replayed)
    rows = fitting(x.shape, (BATCH,), mesh)
    wide = fitting(matrices.gate.shape, ("expert", None, "tensor"), mesh)
    (experts, _, width) = wide
    local = functools.partial(alone, rows=rows[0] or (), divided=(experts, width))
    biases = PartitionSpec(experts, width)
    whole = Matrices(wide, wide, PartitionSpec(experts, width, None), biases, biases, PartitionSpec(experts, None))
    layout = Matrices(*(None if given is None else spec for given, spec in zip(matrices, whole, strict=True)))
    specs = (PartitionSpec(), layout, rows, rows)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=False)
    return run(router, matrices, x, replayed)


def _mixture(
    router: tuple[jax.Array, jax.Array | None],
    matrices: Matrices,
    x: jax.Array,
    replayed: jax.Array | None,
    settings: Experts,
    act: Gating,
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
    weights, taken, own = route(router[0], settings, flat, given, router[1])
    if apart:
        flat, weights, taken = (jax.lax.all_gather(t, experts, tiled=True) for t in (flat, weights, taken))
    count = len(matrices.gate)
    if experts is not None:  # other devices' experts become one more, that nobody computes
        taken = taken - jax.lax.axis_index(experts) * count
        here = (taken >= 0) & (taken < count)
        taken = jnp.where(here, taken, count)
        weights = jnp.where(here, weights, 0)
    out = form(matrices, act, flat, weights, taken)
    if width is not None:
        out = jax.lax.psum(out, width)
    if matrices.down_bias is not None:
        out += product("te,ed->td", by_token(weights, taken, count), matrices.down_bias.astype(jnp.float32))
    if apart:
        out = jax.lax.psum_scatter(out, experts, tiled=True)
    elif experts is not None:
        out = jax.lax.psum(out, experts)
    own = own.reshape(*x.shape[:2], -1).astype(id_dtype(settings))
    return out.astype(x.dtype).reshape(x.shape), own


def by_token(weights: jax.Array, taken: jax.Array, count: int) -> jax.Array:
    """Return the weight of each of ``count`` experts for each token, float32[T, E]; 0 where it was not taken."""
    return jnp.sum(jax.nn.one_hot(taken, count, dtype=jnp.float32) * weights[..., None], axis=1)


def dense(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, taken: jax.Array) -> jax.Array:
    """Multiply all tokens x [T, D] by all experts, and weigh those that were not taken by 0; float32[T, D]."""
    biases = (None if bias is None else bias[:, None] for bias in (matrices.gate_bias, matrices.up_bias))
    pairs = zip((matrices.gate, matrices.up), biases, strict=True)
    each = jnp.broadcast_to(x, (len(matrices.gate), *x.shape))
    hidden = act(*(_biased(jnp.einsum("etd,edi->eti", each, w), bias) for w, bias in pairs))
    whole = by_token(weights, taken, len(matrices.gate)).astype(hidden.dtype).T
    return product("eti,eid->td", hidden * whole[..., None], matrices.down)


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def blocks(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, taken: jax.Array) -> jax.Array:
    """Multiply tokens x [T, D] after sorting them by expert into padded blocks; float32[T, D]."""
    count = len(matrices.gate)
    block = block_of(taken.size, count)
    at = by_expert(taken, count, block)
    inside = moved(x, at.token, at.row).reshape(-1, block, x.shape[1])
    out = grouped(act, inside, matrices._replace(down_bias=None), at.owner, at.used)
    return mixed(out.reshape(-1, x.shape[1]), weights, at)


def mixed(out: jax.Array, weights: jax.Array, at: Sorted) -> jax.Array:
    """Sum each token's rows of ``out`` [M, D], weighted; float32[T, D]."""
    own = moved(out, at.row.reshape(-1), at.pair[:, None]).reshape(*at.row.shape, -1)
    return jnp.einsum("tk,tkd->td", weights, own.astype(jnp.float32))


def megablox(
    matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, taken: jax.Array, interpret: bool = False
) -> jax.Array:
    """Multiply tokens x [T, D], sorted by expert without padding, by JAX's kernel for TPUs; float32[T, D]."""
    # Half a second that programs without it need not wait for.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    at = by_expert(taken, len(matrices.gate), 1)
    count = len(at.pair)
    inside = jnp.pad(moved(x, at.token, at.row), ((0, -count % TILE), (0, 0)))
    # The kernel leaves rows of no expert as they were in memory.
    used = (jnp.arange(len(inside)) < at.used)[:, None]

    def each(x: jax.Array, w: jax.Array) -> jax.Array:
        found = gmm(x, w, at.sizes, x.dtype, (TILE, TILE, TILE), None, None, False, interpret)
        return jnp.where(used, found, jnp.zeros_like(found))

    owner = jnp.pad(at.owner, (0, -count % TILE))
    biases = (None if bias is None else bias[owner] for bias in (matrices.gate_bias, matrices.up_bias))
    pairs = zip((matrices.gate, matrices.up), biases, strict=True)
    hidden = act(*(_biased(each(inside, w), bias) for w, bias in pairs))
    return mixed(each(hidden, matrices.down)[:count], weights, at)


def few(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, taken: jax.Array) -> jax.Array:
    """Multiply the few tokens x [T, D] of a decode step; float32[T, D].

    Blocks copy an expert's matrices for each block. An accelerator waits for memory there: it reads every expert once
    and multiplies all tokens by it. A CPU would wait for the products.
    """
    forms = {"cpu": lambda m, *given: blocks(m, act, *given), "default": lambda m, *given: dense(m, act, *given)}
    return jax.lax.platform_dependent(matrices, x, weights, taken, **forms)


FORMS = {"blocks": blocks, "dense": dense, "few": few, "megablox": megablox}
"""Ways to compute experts, by name."""
