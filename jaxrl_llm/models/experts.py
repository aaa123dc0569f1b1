"""Experts: the router's choice, and the products of each token with the MLPs of its experts. Every token is computed by
all of its experts: there is no capacity, and nothing is dropped. The router is float32 whatever the weights are.
``FORMS`` are equal but for rounding; ``dense``, every token by every expert, is the reference for the others.
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
from jaxrl_llm.sharding import BATCH, fit_spec

TOGETHER = 4
"""Blocks in each round of a CPU's loop; their number is a multiple of it."""

COPIES = 2**29
"""Bytes of the copies of experts' matrices that accelerators multiply at one time."""

Gating = Callable[[jax.Array, jax.Array], jax.Array]
"""(products with ``gate``, products with ``up``) -> what ``down`` multiplies."""


class Matrices(NamedTuple):
    """The weights of a layer's experts: gate and up [E, D, I], down [E, I, D]; biases [E, I], [E, I], [E, D] or None.
    ``mixture`` adds the bias of ``down``: each device would, where several have parts of a product.
    """

    gate: Any
    up: Any
    down: Any
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


class Router(NamedTuple):
    """The weights [D, E] of a router; numbers [E] added to its scores, and to the probabilities by which it chooses;
    and factors [E] on the weights of experts.
    """

    weights: Any
    bias: Any = None
    choice_bias: Any = None
    expert_scale: Any = None


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


def sort_by_expert(ids: jax.Array, count: int, block: int) -> Sorted:
    """Sort the pairs of ``ids`` int32[T, k] by expert, of ``count``; those of expert ``count`` come last, unused."""
    tokens, k = ids.shape
    pairs = tokens * k
    flat = ids.reshape(-1)
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
    return Sorted(pair // k, pair, row.reshape(ids.shape), each[:count] * block, owner, ends[count - 1])


@jax.custom_vjp
def gather_rows(x: jax.Array, source: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return rows ``source`` of x, zeros where that is beyond the last. The gradient gathers by ``inverse`` [len(x),
    n], the rows made of each row of x, where JAX's own would scatter.
    """
    return x.at[source].get(mode="fill", fill_value=0)


def _gather_rows_backward(inverse: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(g.at[inverse].get(mode="fill", fill_value=0), axis=1), None, None


gather_rows.defvjp(lambda x, there, back: (gather_rows(x, there, back), back), _gather_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_mlp(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> jax.Array:
    """Compute ``act(x gate, x up) down`` of each block's owner, int32[n], for blocks x [n, b, D]. Blocks from ``used``
    on hold zeros, and their results anything: CPUs, which go block after block, leave those out.
    """
    return _grouped_mlp(act, x, matrices, owner, used)[0]


def expert_forward(act: Gating, x: jax.Array, w: Matrices) -> tuple[jax.Array, ...]:
    """Compute one expert's MLP for x [b, D]; returns the result and what ``act`` was given."""
    pairs = ((w.gate, w.gate_bias), (w.up, w.up_bias))
    inputs = [x @ m if bias is None else x @ m + bias[None] for m, bias in pairs]
    return act(*inputs) @ w.down, *inputs


def expert_backward(
    act: Gating, x: jax.Array, inputs: tuple[jax.Array, ...], g: jax.Array, w: Matrices
) -> tuple[jax.Array, Matrices]:
    """Return the gradients of x and, in float32, of the weights of ``expert_forward`` for its result's gradient g."""
    hidden, act_backward = jax.vjp(act, *inputs)
    gate, up = act_backward(g @ w.down.T)
    biases = [None if bias is None else jnp.sum(d, 0, dtype=jnp.float32)
              for d, bias in ((gate, w.gate_bias), (up, w.up_bias))]  # fmt: skip
    products = [product("bd,bf->df", a, b) for a, b in ((x, gate), (x, up), (hidden, g))]
    return gate @ w.gate.T + up @ w.up.T, Matrices(*products, *biases)


def loop_forward(
    act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array
) -> tuple[jax.Array, ...]:
    """Compute ``expert_forward`` each block after the other, some of them in each round: they take several cores."""

    def body(i: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for at in (TOGETHER * i + step for step in range(TOGETHER)):
            outputs = expert_forward(act, x[at], _select(matrices, owner[at]))
            out = tuple(total.at[at].set(part) for total, part in zip(out, outputs, strict=True))
        return out

    wide = (*x.shape[:2], matrices.gate.shape[2])
    blank = tuple(jnp.zeros(shape, x.dtype) for shape in (x.shape, wide, wide))
    return jax.lax.fori_loop(0, -(-used // TOGETHER), body, blank)


def batched_forward(
    act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array
) -> tuple[jax.Array, ...]:
    """Compute ``loop_forward`` with a copy of the matrices for each block, of some blocks at a time."""

    def each(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        return expert_forward(act, block[0], _select(matrices, block[1]))

    return jax.lax.map(each, (x, owner), batch_size=copied_at_once(matrices))


def loop_backward(
    act: Gating,
    x: jax.Array,
    inputs: tuple[jax.Array, ...],
    g: jax.Array,
    matrices: Matrices,
    owner: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, Matrices]:
    """Compute ``expert_backward`` each block after the other, and sum the gradients of each expert's weights."""

    def body(i: jax.Array, out: tuple[jax.Array, Matrices]) -> tuple[jax.Array, Matrices]:
        d_x, sums = out
        for at in (TOGETHER * i + step for step in range(TOGETHER)):
            expert = owner[at]
            part, change = expert_backward(act, x[at], tuple(t[at] for t in inputs), g[at], _select(matrices, expert))
            d_x = d_x.at[at].set(part)
            sums = jax.tree.map(lambda total, added, expert=expert: total.at[expert].add(added), sums, change)
        return d_x, sums

    blank = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), matrices)
    return jax.lax.fori_loop(0, -(-used // TOGETHER), body, (jnp.zeros_like(x), blank))


def batched_backward(
    act: Gating,
    x: jax.Array,
    inputs: tuple[jax.Array, ...],
    g: jax.Array,
    matrices: Matrices,
    owner: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, Matrices]:
    """Compute ``loop_backward`` as ``batched_forward`` does. A product sums the blocks of an expert: where the order of
    additions is fixed, a GPU's scatter takes many passes over indices as large as all gradients.
    """

    def each(block: tuple[Any, ...]) -> tuple[jax.Array, Matrices]:
        *arrays, expert = block
        return expert_backward(act, *arrays, _select(matrices, expert))

    back, changes = jax.lax.map(each, (x, inputs, g, owner), batch_size=copied_at_once(matrices))
    one_hot = jax.nn.one_hot(owner, len(matrices.gate), dtype=jnp.float32)
    sums = functools.partial(jnp.einsum, "ne,n...->e...", one_hot, precision=jax.lax.Precision.HIGHEST)
    return back, jax.tree.map(sums, changes)


def copied_at_once(matrices: Matrices) -> int:
    """Return how many blocks have copies of an expert's matrices at one time."""
    return max(COPIES // sum(x.size * x.dtype.itemsize // len(x) for x in jax.tree.leaves(matrices)), 1)


def _select(matrices: Matrices, owner: jax.Array) -> Matrices:
    return jax.tree.map(lambda m: m[owner], matrices)


def _grouped_mlp(act: Gating, *arrays: Any) -> tuple[jax.Array, ...]:
    forms = {"cpu": functools.partial(loop_forward, act), "default": functools.partial(batched_forward, act)}
    return jax.lax.platform_dependent(*arrays, **forms)


def _grouped_mlp_forward(act: Gating, x: jax.Array, matrices: Matrices, owner: jax.Array, used: jax.Array) -> Any:
    out, *inputs = _grouped_mlp(act, x, matrices, owner, used)
    return out, (x, tuple(inputs), matrices, owner, used)


def _grouped_mlp_backward(act: Gating, saved: tuple[Any, ...], g: jax.Array) -> tuple[jax.Array, Matrices, None, None]:
    x, inputs, matrices, owner, used = saved
    forms = {"cpu": functools.partial(loop_backward, act), "default": functools.partial(batched_backward, act)}
    back, sums = jax.lax.platform_dependent(x, inputs, g, matrices, owner, used, **forms)
    return back, jax.tree.map(lambda total, m: total.astype(m.dtype), sums, matrices), None, None


grouped_mlp.defvjp(_grouped_mlp_forward, _grouped_mlp_backward)


def block_of(pairs: int, count: int) -> int:
    """Return the tokens of a block: about half of what an expert has on average, so that little is padding. Of few
    tokens more: a copy of an expert's matrices, one for each block, costs as much as some 30 tokens.
    """
    mean = max(pairs // count, 1)
    tokens = max(mean // 2, math.isqrt(64 * mean))
    return min(max(1 << (tokens.bit_length() - 1), 8), 512)


EXPERTS = "experts"
"""Name of the array of the experts that each token took in each layer, uint8 or uint16[T, L, k]."""


def expert_id_dtype(experts: Experts) -> Any:
    """Return the smallest unsigned dtype that holds an expert's number."""
    return jnp.uint8 if experts.count <= 256 else jnp.uint16


def routes_shape(config: ModelConfig, *outer: int) -> jax.ShapeDtypeStruct | None:
    """Return the shape [..., L, k] of the experts that tokens take; None for a dense model."""
    experts = config.experts
    if experts is None:
        return None
    return jax.ShapeDtypeStruct((*outer, len(config.layers_with("experts")), experts.active), expert_id_dtype(experts))


def route(
    router: jax.Array,
    experts: Experts,
    x: jax.Array,
    replayed: jax.Array | None = None,
    bias: jax.Array | None = None,
    choice_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the experts of tokens x [T, D] by a ``Router``. Returns weights float32[T, k]; the experts taken int32[T,
    k]; and the router's own choice, int32[T, k].

    ``replayed`` int[T, k]: experts to take in place of the router's own; a negative number takes its own. The weights
    come from the live probabilities all the same, so the router learns.
    """
    # By default TPUs would round the operands to bfloat16.
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("td,de->te", x.astype(jnp.float32), router.astype(jnp.float32), precision=exact)
    scores = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    probabilities = jax.nn.sigmoid(scores) if experts.sigmoid else jax.nn.softmax(scores, axis=-1)
    compared = jax.lax.stop_gradient(probabilities)
    if choice_bias is not None:
        compared = compared + choice_bias.astype(jnp.float32)[None]
    if experts.groups > 1:
        compared = among_groups(compared, experts)
    if experts.bits:
        compared = jax.lax.reduce_precision(compared, 8, experts.bits)
    _, top_ids = jax.lax.top_k(compared, experts.active)
    ids = top_ids if replayed is None else jnp.where(replayed < 0, top_ids, replayed.astype(jnp.int32))
    weights = jnp.take_along_axis(probabilities, ids, axis=1)
    if experts.renormalise:
        weights /= jnp.sum(weights, axis=1, keepdims=True)
    if expert_scale is not None:
        weights *= expert_scale.astype(jnp.float32)[ids]
    return weights * experts.scaling if experts.scaling != 1.0 else weights, ids, top_ids


def among_groups(compared: jax.Array, experts: Experts) -> jax.Array:
    """Return what experts [T, E] are compared by, -inf outside of the groups that a token takes."""
    grouped = compared.reshape(len(compared), experts.groups, -1)
    best_two = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, active = jax.lax.top_k(best_two, experts.active_groups)
    is_active = jnp.any(active[:, :, None] == jnp.arange(experts.groups)[None, None], axis=1)
    return jnp.where(is_active[:, :, None], grouped, -jnp.inf).reshape(compared.shape)


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
    router_input: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the experts of one layer for x [B, S, D]; returns the output [B, S, D], and the router's choice [B, S,
    k]. ``w`` has ``router`` [D, E], perhaps more of a ``Router``, and the ``Matrices`` by name. ``replayed``: experts
    int[B, S, k] to take in place of the router's, which a negative number takes, or None. ``compute.experts``: the
    form. ``router_input`` [B, S, D]: what the router reads in place of x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    matrices = Matrices(*(getattr(w, name)[...] if hasattr(w, name) else None for name in Matrices._fields))
    names = ("router", "router_bias", "choice_bias", "expert_scale")
    router = Router(*(getattr(w, name)[...] if hasattr(w, name) else None for name in names))
    if config.experts is None:
        raise ValueError(f"a dense model of the family {config.family} has no experts")
    form = FORMS[compute.experts]
    if compute.experts == "megablox" and compute.interpret:
        form = functools.partial(megablox, interpret=True)
    on_device = functools.partial(_device_mixture, settings=config.experts, act=gating(config), form=form)
    if mesh.empty:
        return on_device(router, matrices, x, replayed, router_input)
    rows = fit_spec(x.shape, (BATCH,), mesh)
    wide = fit_spec(matrices.gate.shape, ("expert", None, "tensor"), mesh)
    (experts, _, width) = wide
    local = functools.partial(on_device, rows=rows[0] or (), divided=(experts, width))
    biases = PartitionSpec(experts, width)
    all_specs = Matrices(wide, wide, PartitionSpec(experts, width, None), biases, biases, PartitionSpec(experts, None))
    layout = Matrices(*(None if matrix is None else spec for matrix, spec in zip(matrices, all_specs, strict=True)))
    specs = (PartitionSpec(), layout, rows, rows, rows)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=False)
    return run(router, matrices, x, replayed, router_input)


def _device_mixture(
    router: Router,
    matrices: Matrices,
    x: jax.Array,
    replayed: jax.Array | None,
    router_input: jax.Array | None,
    settings: Experts,
    act: Gating,
    form: Callable[..., jax.Array],
    rows: str | tuple[str, ...] = (),
    divided: tuple[str | None, str | None] = (None, None),
) -> tuple[jax.Array, jax.Array]:
    """Compute one device's part of ``mixture``. ``rows``: mesh axes that divide the batch. ``divided``: the axis that
    divides the experts, and the one that divides their width; None for none. The tokens of devices with different
    experts are gathered, and their sums scattered.
    """
    experts, width = divided
    gathers = experts is not None and experts in rows
    flat = x.reshape(-1, x.shape[-1])
    replayed_ids = None if replayed is None else replayed.reshape(len(flat), -1)
    routed = flat if router_input is None else router_input.reshape(flat.shape)
    weights, ids, top_ids = route(router.weights, settings, routed, replayed_ids, *router[1:])
    if gathers:
        flat, weights, ids = (jax.lax.all_gather(t, experts, tiled=True) for t in (flat, weights, ids))
    count = len(matrices.gate)
    if experts is not None:  # other devices' experts become one more, that nobody computes
        ids = ids - jax.lax.axis_index(experts) * count
        is_local = (ids >= 0) & (ids < count)
        ids = jnp.where(is_local, ids, count)
        weights = jnp.where(is_local, weights, 0)
    out = form(matrices, act, flat, weights, ids)
    if width is not None:
        out = jax.lax.psum(out, width)
    if matrices.down_bias is not None:
        out += product("te,ed->td", dense_weights(weights, ids, count), matrices.down_bias.astype(jnp.float32))
    if gathers:
        out = jax.lax.psum_scatter(out, experts, tiled=True)
    elif experts is not None:
        out = jax.lax.psum(out, experts)
    top_ids = top_ids.reshape(*x.shape[:2], -1).astype(expert_id_dtype(settings))
    return out.astype(x.dtype).reshape(x.shape), top_ids


def dense_weights(weights: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """Return the weight of each of ``count`` experts for each token, float32[T, E]; 0 where it was not taken."""
    return jnp.sum(jax.nn.one_hot(ids, count, dtype=jnp.float32) * weights[..., None], axis=1)


def dense(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Multiply all tokens x [T, D] by all experts, and weigh those that were not taken by 0; float32[T, D]."""
    biases = (None if bias is None else bias[:, None] for bias in (matrices.gate_bias, matrices.up_bias))
    pairs = zip((matrices.gate, matrices.up), biases, strict=True)
    each = jnp.broadcast_to(x, (len(matrices.gate), *x.shape))
    hidden = act(*(_add_bias(jnp.einsum("etd,edi->eti", each, w), bias) for w, bias in pairs))
    weight_of_token = dense_weights(weights, ids, len(matrices.gate)).astype(hidden.dtype).T
    return product("eti,eid->td", hidden * weight_of_token[..., None], matrices.down)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def blocks(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Multiply tokens x [T, D] after sorting them by expert into padded blocks; float32[T, D]."""
    count = len(matrices.gate)
    block = block_of(ids.size, count)
    pairs = sort_by_expert(ids, count, block)
    sorted_x = gather_rows(x, pairs.token, pairs.row).reshape(-1, block, x.shape[1])
    out = grouped_mlp(act, sorted_x, matrices._replace(down_bias=None), pairs.owner, pairs.used)
    return combine_experts(out.reshape(-1, x.shape[1]), weights, pairs)


def combine_experts(out: jax.Array, weights: jax.Array, pairs: Sorted) -> jax.Array:
    """Sum each token's rows of ``out`` [M, D], weighted; float32[T, D]."""
    rows = gather_rows(out, pairs.row.reshape(-1), pairs.pair[:, None]).reshape(*pairs.row.shape, -1)
    return jnp.einsum("tk,tkd->td", weights, rows.astype(jnp.float32))


def megablox(
    matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, ids: jax.Array, interpret: bool = False
) -> jax.Array:
    """Multiply tokens x [T, D], sorted by expert without padding, by JAX's kernel for TPUs; float32[T, D]."""
    # Half a second that programs without it need not wait for.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tile = 128  # rows and columns that the kernel multiplies at a time
    order = sort_by_expert(ids, len(matrices.gate), 1)
    count = len(order.pair)
    sorted_x = jnp.pad(gather_rows(x, order.token, order.row), ((0, -count % tile), (0, 0)))
    # The kernel leaves rows of no expert as they were in memory.
    used = (jnp.arange(len(sorted_x)) < order.used)[:, None]

    def each(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = gmm(x, w, order.sizes, x.dtype, (tile, tile, tile), None, None, False, interpret)
        return jnp.where(used, rows, jnp.zeros_like(rows))

    owner = jnp.pad(order.owner, (0, -count % tile))
    biases = (None if bias is None else bias[owner] for bias in (matrices.gate_bias, matrices.up_bias))
    pairs = zip((matrices.gate, matrices.up), biases, strict=True)
    hidden = act(*(_add_bias(each(sorted_x, w), bias) for w, bias in pairs))
    return combine_experts(each(hidden, matrices.down)[:count], weights, order)


def few(matrices: Matrices, act: Gating, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Multiply the few tokens x [T, D] of a decode step; float32[T, D]. An accelerator, which waits for memory there,
    reads every expert once, for all tokens, where blocks copy an expert for each. A CPU would wait for the products.
    """
    forms = {"cpu": lambda m, *arrays: blocks(m, act, *arrays), "default": lambda m, *arrays: dense(m, act, *arrays)}
    return jax.lax.platform_dependent(matrices, x, weights, ids, **forms)


FORMS = {"blocks": blocks, "dense": dense, "few": few, "megablox": megablox}
"""Ways to compute experts, by name."""
