"""Recurrent layers: the gated delta rule (arXiv 2412.06464) and short causal convolutions, over packed rows, over the
next tokens of sequences, and for one token of each. States are float32.

The delta rule keeps a matrix S [X, Y] for each head. A token with key k, value v, decay exp(g) and strength b makes it
``exp(g) S + b k (v - exp(g) S^T k)^T`` and reads ``S^T q``. Chunks of tokens are computed by matrix products: with the
changes of its values as unknowns, a chunk is one triangular system (arXiv 2406.06484), here of a tree of tokens: a
token sees those before it on its path.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ModelConfig, Norm
from jaxrl_llm.models.layers import rms_norm, wide_dtype
from jaxrl_llm.sharding import BATCH, activation, fit_spec

CHUNK = 64
"""Tokens of a chunk, a power of two."""

State = dict[str, jax.Array]
"""Of one layer: ``matrix`` [B, M, X, Y] of the delta rule, and the last W - 1 inputs of each convolution [B, heads,
W - 1, width] by its name, the newest last.
"""

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Delta(NamedTuple):
    """What the delta rule reads: q and k [B, S, P, X], v [B, S, P, R, Y], log_decay and strength [B, S, P, R]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    strength: jax.Array


class Chunks(NamedTuple):
    """How the tokens of n chunks follow each other. A chunk begins with A states, and ends with as many.

    Attributes:
      seen: bool[n, B, C, C], the tokens on a token's path, itself included.
      reads: float[n, A, B, C], 1 for the state that a token's path begins with.
      ends: float[n, A, B, C], 1 for the token after which a state is kept; nowhere: it is kept as it was, or zero.
      stays: float[n, A, B], 1 where a state is kept as it was.
    """

    seen: jax.Array
    reads: jax.Array
    ends: jax.Array
    stays: jax.Array


def chunk_size(tokens: int) -> int:
    """Return the tokens of a chunk in rows of so many."""
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def tree_chunks(group: jax.Array, branch: jax.Array, shared: bool) -> Chunks:
    """Return the chunks of packed rows int32[B, S], see ``layers.TokenRows``. The states are that of the newest token,
    and where prompts are ``shared`` that of the end of its group's prompt.
    """
    size = chunk_size(group.shape[1])
    group, branch = (_chunked(x, size) for x in (group, branch))
    before = [jnp.pad(x[:-1, :, -1:], ((1, 0), (0, 0), (0, 0))) for x in (group, branch)]
    same = (group[:, :, :, None] == group[:, :, None]) & (group > 0)[:, :, None]
    on_path = (branch[:, :, None] == 0) | (branch[:, :, :, None] == branch[:, :, None])
    seen = same & on_path & jnp.tri(size, dtype=bool)[None, None]
    continues = (group == before[0]) & (group > 0)
    newest = continues & ((before[1] == branch) | (before[1] == 0))
    prompt = (branch == 0) & (group == group[:, :, -1:])
    columns = jnp.arange(size)[None, None]
    last_prompt = jnp.max(jnp.where(prompt, columns, -1), axis=2, keepdims=True)
    ends = jnp.stack([jnp.broadcast_to(columns == size - 1, group.shape), columns == last_prompt], axis=1)
    stays = jnp.stack([jnp.zeros_like(newest[:, :, 0]), continues[:, :, -1] & (last_prompt[:, :, 0] < 0)], axis=1)
    reads = jnp.stack([newest, continues & ~newest], axis=1)
    return Chunks(seen, *(x[:, : 1 + shared].astype(jnp.float32) for x in (reads, ends, stays)))


def plain_chunks(rows: int, tokens: int) -> Chunks:
    """Return the chunks of sequences that go on, one in each row."""
    size = chunk_size(tokens)
    count = -(-tokens // size)
    seen = jnp.broadcast_to(jnp.tri(size, dtype=bool), (count, rows, size, size))
    ones = jnp.ones((count, 1, rows, size))
    return Chunks(seen, ones, ones.at[..., :-1].set(0), jnp.zeros((count, 1, rows)))


def delta_rule(x: Delta, states: jax.Array, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule to rows of tokens; ``states`` [A, B, P, R, X, Y]. Returns what the tokens read, [B, S,
    P, R, Y], and the states after the last chunk. Each device computes its own rows and heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _delta_rule(x, states, chunks)
    rows, _, heads, _ = fit_spec(x.q.shape, (BATCH, None, "tensor", None), mesh)
    inputs, by_head = PartitionSpec(rows, None, heads), PartitionSpec(None, rows, heads)
    of_rows = PartitionSpec(None, None, rows)
    specs = (Delta._make([inputs] * 5), by_head, Chunks._make([PartitionSpec(None, rows), *[of_rows] * 3]))
    return jax.shard_map(_delta_rule, in_specs=specs, out_specs=(inputs, by_head), check_vma=False)(x, states, chunks)


def _delta_rule(x: Delta, states: jax.Array, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """Compute ``delta_rule`` with rows and heads as one axis of G: with many axes a GPU's compiler tries each tiling of
    each of them, for many minutes.
    """
    rows, tokens, heads, copies, _ = x.v.shape
    size, dtype = chunks.seen.shape[-1], states.dtype

    def chunked(t: jax.Array) -> jax.Array:
        """[B, S, P, R, ...] -> [n, G, C, ...]."""
        t = jnp.moveaxis(t.astype(dtype), 1, 3)
        return _chunked(t.reshape(rows * heads * copies, tokens, *t.shape[4:]), size)

    q, k = (jnp.broadcast_to(t[:, :, :, None], (*x.v.shape[:4], t.shape[-1])) for t in x[:2])
    q, k, v, log_decay, strength = (chunked(t) for t in (q, k, *x[2:]))
    seen = jnp.repeat(chunks.seen, heads * copies, axis=1)
    reads, ends, stays = (jnp.repeat(t.astype(dtype), heads * copies, axis=2) for t in chunks[1:])
    along = _product("ngij,ngj->ngi", seen.astype(dtype), log_decay)
    decay = jnp.exp(jnp.where(seen, along[..., :, None] - along[..., None, :], -jnp.inf))
    reads *= jnp.exp(along)[:, None]
    pairs = _product("ngix,ngjx->ngij", k, k) * decay * strength[..., None]
    solve = triangular_inverse(jnp.tril(pairs, -1))
    mixed = _product("ngix,ngjx->ngij", q, k) * decay
    remaining = _product("nagi,ngij->nagj", ends, decay)
    carried = _product("nagi,nugi->naug", ends, reads)

    @jax.checkpoint
    def step(states: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, strength, solve, mixed, reads, remaining, carried, stays = chunk
        recalled = jnp.sum(reads[..., None] * _product("gix,agxy->agiy", k, states), axis=0)
        change = _product("gij,gjy->giy", solve, strength[..., None] * (v - recalled))
        out = jnp.sum(reads[..., None] * _product("gix,agxy->agiy", q, states), axis=0)
        out += _product("gij,gjy->giy", mixed, change)
        new = _product("aug,ugxy->agxy", carried, states)
        new += _product("gjx,agjy->agxy", k, remaining[..., None] * change[None])
        return new + stays[..., None, None] * states, out

    first = states.reshape(len(states), rows * heads * copies, *states.shape[4:])
    last, out = jax.lax.scan(step, first, (q, k, v, strength, solve, mixed, reads, remaining, carried, stays))
    out = jnp.moveaxis(out, 0, 1).reshape(rows, heads, copies, -1, out.shape[-1])[:, :, :, :tokens]
    return jnp.moveaxis(out, 3, 1), last.reshape(states.shape)


def delta_step(x: Delta, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule to one token of each row; ``state`` [B, P, R, X, Y]."""
    rows, _, heads, copies, _ = x.v.shape
    q, k = (jnp.repeat(t[:, 0].astype(state.dtype), copies, axis=1) for t in x[:2])
    v, log_decay, strength = (t[:, 0].astype(state.dtype).reshape(rows, heads * copies, *t.shape[4:]) for t in x[2:])
    after = state.reshape(rows, heads * copies, *state.shape[3:]) * jnp.exp(log_decay)[..., None, None]
    change = (v - jnp.sum(after * k[..., None], axis=2)) * strength[..., None]
    after += k[..., None] * change[..., None, :]
    return jnp.sum(after * q[..., None], axis=2).reshape(x.v.shape), after.reshape(state.shape)


@jax.custom_vjp
def triangular_inverse(lower: jax.Array) -> jax.Array:
    """Return ``(I + lower)^-1`` of strictly lower triangular matrices [..., C, C], C a power of two: inverted blocks on
    the diagonal make those of twice their size. A series of powers would lose all digits where keys repeat.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for width in (1 << i for i in range(size.bit_length() - 1)):
        block = np.arange(size) // width
        below = (block[:, None] == block[None] + 1) & (block[:, None] % 2 == 1)
        corner = jnp.where(np.expand_dims(below, tuple(range(lower.ndim - 2))), lower, jnp.zeros_like(lower))
        inverse -= corner if width == 1 else _product("...ij,...jk,...kl->...il", inverse, corner, inverse)
    return inverse


def _triangular_inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = triangular_inverse(lower)
    return inverse, inverse


def _triangular_inverse_backward(inverse: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    back = -_product("...ji,...jk,...lk->...il", inverse, g, inverse)
    return (jnp.tril(back, -1),)


triangular_inverse.defvjp(_triangular_inverse_forward, _triangular_inverse_backward)


def _chunked(x: jax.Array, size: int) -> jax.Array:
    """Return rows [B, S, ...] as chunks [n, B, C, ...], after padding with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


class Sequences(Protocol):
    """The tokens that recurrent layers go through, x [B, S, heads, width], and the order in which they do."""

    def before(self, name: str, x: jax.Array) -> list[jax.Array]:
        """Return the inputs 1, 2, ... W - 1 tokens before each, zero where a sequence has none; ``name``: of the
        convolution.
        """
        ...

    def apply_delta(self, x: Delta) -> jax.Array:
        """Return what each token reads by the delta rule, [B, S, P, R, Y]."""
        ...


class PackedSequences:
    """Packed rows int32[B, S]: nothing precedes a group, and a branch goes on from its group's prompt. ``shared``:
    prompts have several branches; otherwise groups are sequences. ``kernel``: W of the convolutions.
    """

    def __init__(self, group: jax.Array, branch: jax.Array, shared: bool, kernel: int):
        self._shared = shared
        self._chunks = tree_chunks(group, branch, shared)
        columns = jnp.broadcast_to(jnp.arange(group.shape[1]), group.shape)
        prompt_ends = jax.lax.cummax(jnp.where(branch == 0, columns, -1), axis=1)
        branch_before = jnp.pad(branch[:, :-1], ((0, 0), (1, 0)))
        previous = jnp.where((branch == 0) | (branch_before == branch), columns - 1, prompt_ends)
        same = jnp.take_along_axis(group, jnp.maximum(previous, 0), axis=1) == group
        previous = jnp.where(same & (previous >= 0), previous, -1)
        # Columns of the inputs 1, 2, ... tokens before each; negative where there is none.
        self._places = [previous]
        while len(self._places) < kernel - 1:
            place = self._places[-1]
            step = jnp.take_along_axis(previous, jnp.maximum(place, 0), axis=1)
            self._places.append(jnp.where(place >= 0, step, -1))

    def before(self, name: str, x: jax.Array) -> list[jax.Array]:
        """Return the inputs before each token; see ``Sequences``."""
        inputs = []
        for count, place in enumerate(self._places, 1):
            if self._shared:
                source = jnp.take_along_axis(x, jnp.maximum(place, 0)[:, :, None, None], axis=1)
            else:
                source = jnp.pad(x, ((0, 0), (count, 0), (0, 0), (0, 0)))[:, : x.shape[1]]
            inputs.append(jnp.where((place >= 0)[:, :, None, None], source, jnp.zeros_like(x)))
        return inputs

    def apply_delta(self, x: Delta) -> jax.Array:
        """Apply the delta rule from states of zero."""
        shape = (self._chunks.reads.shape[1], *x.v.shape[:1], *x.v.shape[2:4], x.k.shape[-1], x.v.shape[-1])
        return delta_rule(x, jnp.zeros(shape, wide_dtype(x.k)), self._chunks)[0]


class Continuation:
    """The next S tokens of each row's sequence, after ``state``, which the first ``valid`` int32[B] of them change.

    Attributes:
      new: the state after them.
    """

    def __init__(self, state: State, valid: jax.Array):
        self._state, self._valid = state, valid
        self.new: State = {}

    def before(self, name: str, x: jax.Array) -> list[jax.Array]:
        """Return the inputs before each token; see ``Sequences``."""
        tail = self._state[name]
        size = tail.shape[2]
        joined = jnp.concatenate([jnp.swapaxes(tail, 1, 2).astype(x.dtype), x], axis=1)
        if x.shape[1] == 1:
            newest = jnp.where((self._valid > 0)[:, None, None, None], joined[:, 1:], joined[:, :-1])
        else:
            columns = self._valid[:, None] + jnp.arange(size)[None]
            newest = jnp.take_along_axis(joined, columns[:, :, None, None], axis=1)
        self.new[name] = jnp.swapaxes(newest, 1, 2).astype(tail.dtype)
        return [joined[:, size - i : joined.shape[1] - i] for i in range(1, size + 1)]

    def apply_delta(self, x: Delta) -> jax.Array:
        """Apply the delta rule from the states of the sequences."""
        state = self._state["matrix"]
        heads = state.reshape(len(state), *x.v.shape[2:4], *state.shape[2:])
        changes = (jnp.arange(x.q.shape[1])[None] < self._valid[:, None])[..., None, None]
        x = x._replace(log_decay=jnp.where(changes, x.log_decay, 0), strength=jnp.where(changes, x.strength, 0))
        if x.q.shape[1] == 1:
            out, after = delta_step(x, heads)
        else:
            out, (after,) = delta_rule(x, heads[None], plain_chunks(*x.q.shape[:2]))
        self.new["matrix"] = after.reshape(state.shape)
        return out


def causal_convolution(x: jax.Array, kernel: jax.Array, inputs: list[jax.Array]) -> jax.Array:
    """Convolve x [B, S, heads, width] by ``kernel`` [heads, width, W], the newest token's weight last; ``inputs``: see
    ``Sequences.before``.
    """
    return sum((t * kernel[None, None, :, :, -1 - i] for i, t in enumerate([x, *inputs])), jnp.zeros_like(x))


Linear = Callable[[str, jax.Array], jax.Array]
"""(name of one of the layer's matrices, x) -> their product."""


def delta_net(w: Any, config: ModelConfig, linear: Linear, h: jax.Array, sequences: Sequences) -> jax.Array:
    """Apply a gated delta net to h [B, S, D]; ``w`` are its weights, of which ``linear`` multiplies by a matrix."""
    settings = config.recurrent
    wide = wide_dtype(h)

    def convolved(name: str) -> jax.Array:
        x = activation(linear(name, h), "heads")
        kernel = getattr(w, f"{name}_conv")[...]
        return jax.nn.silu(causal_convolution(x, kernel, sequences.before(name, x)))

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(wide)
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    q, k, v = (convolved(name) for name in "qkv")
    grouped = lambda x: x.reshape(*x.shape[:2], settings.key_heads, -1, *x.shape[3:])  # noqa: E731
    step = jax.nn.softplus(linear("a", h).astype(wide) + w.decay_bias[...].astype(wide)[None, None])
    log_decay = -jnp.exp(w.decay_log[...].astype(wide))[None, None] * step
    strength = jax.nn.sigmoid(linear("b", h)).astype(wide)
    strength = strength if settings.strength == 1.0 else settings.strength * strength
    scaled = unit(q) * settings.key_dim**-0.5
    out = sequences.apply_delta(Delta(scaled, unit(k), grouped(v), grouped(log_decay), grouped(strength)))
    out = out.reshape(v.shape).astype(h.dtype)
    normed = rms_norm(out, w.norm[...], Norm(settings.norm_eps or config.norm.eps))
    gate = jax.nn.silu(activation(linear("z", h), "heads").astype(wide))
    out = activation((normed.astype(wide) * gate).astype(h.dtype), "heads")
    return activation(linear("o", out), "residual")


def short_convolution(w: Any, linear: Linear, h: jax.Array, sequences: Sequences) -> jax.Array:
    """Apply LFM2's gated convolution to h [B, S, D]: ``o(c * conv(b * x))``."""
    b, c, x = (activation(linear(name, h), "mlp") for name in "bcx")
    gated = (b * x)[:, :, None]
    kernel = w.x_conv[...][None]
    convolved = causal_convolution(gated, kernel, sequences.before("x", gated))
    return activation(linear("o", c * convolved[:, :, 0]), "residual")


def empty_state(config: ModelConfig, rows: int) -> State | None:
    """Return the float32 states of all recurrent layers for so many new sequences, [L, B, ...] each; None for a model
    that has only attention.
    """
    settings = config.recurrent
    if settings is None:
        return None
    heads = {"x": (1, config.width)}
    if settings.kind == "delta":
        key, value = (settings.key_heads, settings.key_dim), (settings.value_heads, settings.value_dim)
        heads = {"q": key, "k": key, "v": value}
    shapes = {name: (count, settings.kernel - 1, width) for name, (count, width) in heads.items()}
    if settings.kind == "delta":
        shapes["matrix"] = (settings.value_heads, settings.key_dim, settings.value_dim)
    return {name: jnp.zeros((sum(settings.layers), rows, *shape), jnp.float32) for name, shape in shapes.items()}
