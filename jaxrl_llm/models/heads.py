"""The last layers of a model: the LM head, as log-probabilities of chosen tokens, or a critic's and a reward model's
scalar head. Log-probability and entropy never hold all logits, by a custom backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.algorithms.kl import JensenShannon, spread_slopes, top_classes
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import layers
from jaxrl_llm.models.config import ComputeOptions, ModelConfig
from jaxrl_llm.models.decoder import Decoder, Weights, causal_rows, forward
from jaxrl_llm.sharding import BATCH, constrain


class ScalarModel(nnx.Module):
    """A decoder with one number for each position; build it with ``with_scalar_head``. Its ``decoder`` has no LM head,
    except embeddings that were tied to one; ``weights`` has ``scalar`` [D].
    """

    def __init__(self, decoder: Decoder, parameters: dict[str, Any]):
        self.decoder = decoder
        self.weights = Weights(parameters)

    @property
    def config(self) -> ModelConfig:
        """Return the decoder's configuration."""
        return self.decoder.config


def with_scalar_head(decoder: Decoder, scalar: Any = None) -> ScalarModel:
    """Return a scalar model with this head [D], or zeros, and the decoder's own arrays; its LM head is dropped."""
    weights = decoder.weights
    if scalar is None:
        scalar = jnp.zeros(decoder.config.width, weights.embed.dtype)
    if hasattr(weights, "head"):
        # Not by way of plain arrays, which would lose an attached adapter.
        parts = {
            name: value if isinstance(value, nnx.Module) else value.get_value()
            for name, value in vars(weights).items()
            if isinstance(value, (nnx.Module, nnx.Param)) and name != "head"
        }
        decoder = Decoder(decoder.config, parts)
    return ScalarModel(decoder, {"scalar": scalar})


def random_scalar_head(decoder: Decoder, seed: int) -> jax.Array:
    """Draw the first head [D] of a new reward model by the seed: normal numbers with the deviation of transformers and
    TRL. Scores begin near 0; models of an ensemble differ, though they learn from the same rows in the same order.
    """
    key = jax.random.fold_in(jax.random.key(seed), 2)  # a run draws its adapters by the seed itself, and by 1
    head = 0.02 * jax.random.normal(key, (decoder.config.width,), jnp.float32)
    return head.astype(decoder.weights.embed.dtype)


def split_head(model: Decoder | ScalarModel) -> tuple[Decoder, Any]:
    """Return a scalar model's decoder and its head [D], or a language model and None."""
    if isinstance(model, ScalarModel):
        return model.decoder, model.weights.scalar.get_value()
    return model, None


def scalars(model: ScalarModel, hidden: jax.Array) -> jax.Array:
    """Return float32 numbers [...] of final hidden states [..., D]."""
    weights = model.weights.scalar[...]
    return jnp.einsum("...d,d->...", hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)


def scores(model: ScalarModel, tokens: Any, lengths: Any) -> jax.Array:
    """Compute a reward model's scores, the numbers at the last tokens, of right-padded sequences: array-like int[B, T],
    int[B] -> float32[B]. For tests and tools; InputError for a length outside 1 to T.
    """
    tokens = np.asarray(tokens, np.int32)
    lengths = np.asarray(lengths, np.int32)
    if np.any(lengths < 1) or np.any(lengths > tokens.shape[1]):
        raise InputError(f"lengths {lengths.tolist()} must be from 1 to {tokens.shape[1]}; give each row's own")
    return _scores_at_ends(model, tokens, lengths)


@jax.jit
def _scores_at_ends(model: ScalarModel, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    hidden = forward(model.decoder, causal_rows(tokens))
    return scalars(model, hidden[jnp.arange(len(tokens)), lengths - 1])


CHUNK = ComputeOptions().head_chunk
"""Positions of each part that have logits in memory at one time, where nothing else is said."""
MAX_SAVED_LOGITS = 2**28
"""Most bytes of a part's logits that the forward pass keeps for the backward pass, if they are a single chunk."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Static options of the last layer.

    Attributes:
      letters: of the product with the weights.
      layout: mesh axes of the weights while they are used: only ``tensor`` divides their vocabulary, gathered once,
        since ``fsdp`` divides the positions.
      keep: whether all positions are one chunk, whose logits the forward pass keeps for the backward pass.
      frozen: whether the weights get no gradient, as below an adapter: one of all of them would be held and added to.
    """

    letters: str
    layout: tuple[str | None, str | None]
    cap: float | None
    chunk: int
    entropy_gradient: bool
    keep: bool = False
    frozen: bool = False


class Targets(NamedTuple):
    """The tokens to compute log-probabilities of, P parts of N positions: ``targets`` int32[P, N]; ``kept_tokens`` as
    in ``token_logprobs``; ``temperature``, of the logits' dtype; ``chunks`` int32[], leading ones of each part to
    compute.
    """

    targets: Any
    kept_tokens: Any
    temperature: Any
    chunks: Any


def token_logprobs(
    model: Decoder,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    chunk: int = CHUNK,
    kept_tokens: jax.Array | None = None,
    count: jax.Array | int | None = None,
    entropy_gradient: bool = True,
    keep: int = MAX_SAVED_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-probability of each target and the entropy of the full distribution, at the sampling temperature:
    ``logp`` and ``entropy``, float32[P, N], in nats.

    Where the sampler truncated its distribution, ``kept_tokens`` marks the tokens it kept: the log-probability is then
    that of the target among those (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), for policies that have moved too. The
    entropy remains that of the full distribution, as the sampler reports it: it compares between runs, and a bonus on
    it can bring back truncated tokens.

    The LM head runs over ``chunk`` positions of each part at a time, and once more in the backward pass, which forms
    the logits' gradient ``g (onehot - p) - h p (log p + H)`` from the saved logsumexp. Memory does not grow with N * V
    above ``keep`` bytes; up to there the logits of a single chunk are kept and computed once. The parts are what a mesh
    divides: each sums the head's gradient by itself, and the sums meet once at the end.

    Args:
      model: gives the LM head.
      hidden: final hidden states [P, N, D] of the positions that predict the targets.
      targets: int32[P, N].
      temperature: logits are divided by it; above 0, not differentiated.
      chunk: positions at a time.
      kept_tokens: uint32[P, N, ceil(V / 32)], token v as bit v % 32 of word v // 32; zeros or None keep everything.
      count: int32[]; positions from there on in every part are not computed and give 0. None computes all.
      entropy_gradient: whether the entropy is differentiated; if not, its gradient is 0 and costs nothing.
      keep: the most bytes of a part's logits that are kept for the backward pass.
    """
    total = hidden.shape[1]
    saves = saves_logits(total, chunk, model.config.vocab_size, keep)
    arrays = hidden, jnp.asarray(targets), kept_tokens
    (hidden, targets, kept_tokens), size, chunks = _pad_to_chunks(arrays, chunk, count)
    head, static = _head_and_options(model, hidden.dtype, size, entropy_gradient, saves)
    spec = Targets(targets, kept_tokens, jnp.asarray(temperature, layers.wide_dtype(hidden)), chunks)
    logp, entropy = _logprobs(static, hidden, head, spec)
    return logp[:, :total], entropy[:, :total]


def saves_logits(positions: int, chunk: int, vocab: int, most: int = MAX_SAVED_LOGITS) -> bool:
    """Whether a part's logits, float32, are kept: those of a single chunk, of at most so many bytes."""
    return positions <= chunk and 4 * positions * vocab <= most


def _pad_to_chunks(arrays: Any, chunk: int, count: Any = None) -> tuple[Any, int, jax.Array]:
    """Pad arrays [P, N, ...] to equal chunks; return them, a chunk's size, and how many hold the first ``count``."""
    total = arrays[0].shape[1]
    # A whole number of equal chunks: at most a few positions more than there are.
    pieces = -(-total // min(chunk, total))
    size = -(-total // pieces)
    room = (0, pieces * size - total)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), room, *[(0, 0)] * (x.ndim - 2))), arrays)
    count = jnp.asarray(total if count is None else count, jnp.int32)
    return padded, size, -(-jnp.minimum(count, pieces * size) // size)


def _head_and_options(
    model: Decoder, dtype: Any, size: int, entropy_gradient: bool = False, keep: bool = False
) -> tuple[jax.Array, Head]:
    """Return the weights of the LM head in a dtype, and how it is computed."""
    weights, letters, layout = model.weights, "pcd,dv->pcv", (None, "tensor")
    if model.config.embeddings.tied:
        letters, layout = "pcd,vd->pcv", ("tensor", None)
    head = weights.embed[...] if model.config.embeddings.tied else weights.head[...]
    cap, frozen = model.config.embeddings.logit_softcap, hasattr(getattr(weights, "blocks", None), "adapter")
    return head.astype(dtype), Head(letters, layout, cap, size, entropy_gradient, keep, frozen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(static: Head, hidden: jax.Array, head: jax.Array, spec: Targets) -> tuple[jax.Array, jax.Array]:
    return _logprobs_forward(static, hidden, head, spec)[0]


def _logprobs_forward(
    static: Head, hidden: jax.Array, head: jax.Array, spec: Targets
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    head = constrain(head, *static.layout)

    def body(index: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, targets, words = take_chunk(index, static.chunk, (hidden, spec.targets, spec.kept_tokens))
        capped = layers.softcap(layers.product(static.letters, h, head), static.cap)
        scaled = capped / spec.temperature
        # Differences from the largest logit: the logits' mean subtracted from logsumexp would lose the digits both have
        # in common.
        top = jnp.max(scaled, axis=-1, keepdims=True)
        shifted = scaled - top
        weights = jnp.exp(shifted)
        # Both sums in one pass: CPUs computed the exponentials of two passes twice, and not as vectors.
        zero = np.zeros((), scaled.dtype)
        mass, moment = jax.lax.reduce(
            (weights, weights * shifted), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (2,)
        )
        total = among = jnp.log(mass) + top[..., 0]
        if words is not None:
            in_kept = unpack_kept(words, scaled.shape[-1])
            among = jax.nn.logsumexp(jnp.where(in_kept, scaled, -jnp.inf), axis=-1)
        logit = jnp.take_along_axis(scaled, targets[..., None], axis=-1)[..., 0]
        outputs = (logit - among, jnp.log(mass) - moment / mass, total, among)
        return put_chunk(index, static.chunk, out, (*outputs, *[capped] * static.keep))

    zeros = jnp.zeros(spec.targets.shape, layers.wide_dtype(hidden))
    wide_shape = (*zeros.shape, head.shape[static.letters[4:6].index("v")])
    logits = [constrain(jnp.zeros(wide_shape, zeros.dtype), BATCH, None, "tensor")] if static.keep else []
    logp, entropy, total, among, *logits = over_chunks(static, spec.chunks, body, (*[zeros] * 4, *logits))
    return (logp, entropy), (hidden, head, spec, total, among, entropy, logits)


def _logprobs_back(
    static: Head, saved: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None, None]:
    hidden, head, spec, total, among, entropy, logits = saved
    aux = (*cotangents, total, among, entropy, spec.targets, spec.kept_tokens)

    def slopes(scaled: jax.Array, inputs: Any) -> jax.Array:
        g_logp, g_entropy, total, among, entropy, targets, words = inputs
        share = jnp.exp(scaled - among[..., None])
        if words is not None:
            share = jnp.where(unpack_kept(words, scaled.shape[-1]), share, 0)
        target = jnp.arange(scaled.shape[-1], dtype=jnp.int32)[None, None] == targets[..., None]
        slope = g_logp[..., None] * (target.astype(share.dtype) - share)
        if static.entropy_gradient:
            logp = scaled - total[..., None]
            slope = slope - g_entropy[..., None] * jnp.exp(logp) * (logp + entropy[..., None])
        return slope

    return *head_gradients(static, hidden, head, spec.temperature, spec.chunks, aux, slopes, logits), None


_logprobs.defvjp(_logprobs_forward, _logprobs_back)


def head_gradients(
    static: Head,
    hidden: jax.Array,
    head: jax.Array,
    temperature: jax.Array,
    chunks: jax.Array,
    aux: Any,
    slopes: Callable[[jax.Array, Any], jax.Array],
    logits: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradients to hidden states [P, N, D] and to the head, a chunk of positions at a time. ``slopes`` maps
    a chunk's logits over the temperature [P, C, V], and its part of ``aux`` [P, N, ...], to the derivatives by those.
    ``logits``: [P, N, V] in a list if the forward pass kept them; else they are computed again.
    """
    letters = static.letters[4:6]

    def body(index: jax.Array, out: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        h, inputs = take_chunk(index, static.chunk, (hidden, aux))
        if logits:
            capped = jax.lax.dynamic_slice_in_dim(logits[0], index * static.chunk, static.chunk, axis=1)
        else:
            capped = layers.softcap(layers.product(static.letters, h, head), static.cap)
        slope = slopes(capped / temperature, inputs) / temperature
        slope = slope if static.cap is None else slope * (1 - jnp.square(capped / static.cap))
        slope = slope.astype(h.dtype)
        up = layers.product(f"pcv,{letters}->pcd", slope, head).astype(h.dtype)
        d_hidden = put_chunk(index, static.chunk, out[0], up)
        if static.frozen:
            return d_hidden, None
        down = layers.product(f"pcv,pcd->p{letters}", slope, h)
        return d_hidden, out[1] + constrain(down, BATCH, *static.layout)

    parts = None
    if not static.frozen:
        parts = jnp.zeros((hidden.shape[0], *head.shape), layers.wide_dtype(hidden))
        parts = constrain(parts, BATCH, *static.layout)
    d_hidden, d_head = over_chunks(static, chunks, body, (jnp.zeros_like(hidden), parts))
    return d_hidden, None if d_head is None else jnp.sum(d_head, axis=0).astype(head.dtype)


def over_chunks(static: Head, chunks: jax.Array, body: Callable[[Any, Any], Any], out: Any) -> Any:
    """Run ``body(index, out)`` for the leading chunks; a loop over a kept one would copy its logits on CPUs."""
    if static.keep:
        return jax.lax.cond(chunks > 0, functools.partial(body, 0), lambda out: out, out)
    return jax.lax.fori_loop(0, chunks, body, out)


def take_chunk(index: jax.Array, size: int, arrays: Any) -> Any:
    """Slice chunk ``index`` of every part."""
    return jax.tree.map(lambda x: constrain(jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1), BATCH), arrays)


def put_chunk(index: jax.Array, size: int, out: Any, values: Any) -> Any:
    """Write the values of chunk ``index`` of every part."""
    return jax.tree.map(lambda o, v: jax.lax.dynamic_update_slice_in_dim(o, v, index * size, axis=1), out, values)


def unpack_kept(words: jax.Array, vocab: int) -> jax.Array:
    """Unpack kept sets uint32[..., ceil(V / 32)] to bool[..., V]; zeros alone, of an unsampled position, keep all."""
    places = jnp.arange(32, dtype=jnp.uint32)[(None,) * words.ndim]
    bits = ((words[..., None] >> places) & jnp.uint32(1)) > 0
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab] | jnp.all(words == 0, axis=-1, keepdims=True)


class TeacherStates(NamedTuple):
    """A teacher of whole distributions: its final ``hidden`` states [P, N, D'], and ``model`` with its LM head. Tokens
    that both models have are compared, so that one vocabulary may be padded.
    """

    model: Decoder
    hidden: Any


class TopTokens(NamedTuple):
    """A teacher's most likely tokens at each position: different ``ids`` int32[P, N, k]; ``logp`` float32[P, N, k + 1]
    of these, and of all others together.
    """

    ids: Any
    logp: Any


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """What is static of a comparison: both heads, the teacher's None with ``TopTokens``, and the divergence."""

    head: Head
    teacher: Head | None
    divergence: JensenShannon


class _Frozen(NamedTuple):
    """What no gradient reaches: arrays [P, N, ...] of the teacher, its head or None, the temperature, the chunks."""

    positions: Any
    head: Any
    temperature: Any
    chunks: Any


def token_divergence(
    divergence: JensenShannon,
    model: Decoder,
    hidden: jax.Array,
    teacher: TeacherStates | TopTokens,
    temperature: jax.Array | float,
    chunk: int = CHUNK,
    count: jax.Array | int | None = None,
) -> jax.Array:
    """Compute the divergence from the teacher at each position, float32[P, N], nats. The gradient reaches ``model``,
    which gives the LM head, and ``hidden``, and nothing of the teacher. Both LM heads run over ``chunk`` positions of
    each part at a time, and once more in the backward pass: memory does not grow with N * V.

    Args:
      divergence: which one, and whether over all tokens or the teacher's most likely ones.
      hidden: final hidden states [P, N, D].
      teacher: ``TopTokens`` where ``divergence.top_k`` is above 0.
      temperature: the logits of both are divided by it.
      count: int32[]; positions from there on in every part are not computed and give 0. None computes all.
    """
    total = hidden.shape[1]
    whole_states = isinstance(teacher, TeacherStates)
    positions: Any = (teacher.hidden,) if whole_states else tuple(teacher)
    (hidden, positions), size, chunks = _pad_to_chunks((hidden, positions), chunk, count)
    head, static = _head_and_options(model, hidden.dtype, size)
    theirs, other = _head_and_options(teacher.model, teacher.hidden.dtype, size) if whole_states else (None, None)
    frozen = _Frozen(positions, theirs, jnp.asarray(temperature, layers.wide_dtype(hidden)), chunks)
    return _divergence(_Comparison(static, other, divergence), hidden, head, frozen)[:, :total]


def top_tokens(model: Decoder, hidden: jax.Array, k: int, temperature: jax.Array | float, limit: int) -> TopTokens:
    """Return a teacher's k most likely tokens at each position, of those below ``limit`` that the student has too."""
    total = hidden.shape[1]
    (hidden,), size, _ = _pad_to_chunks((hidden,), CHUNK)
    head, static = _head_and_options(model, hidden.dtype, size)
    head = constrain(head, *static.layout)

    def body(index: jax.Array, out: tuple[jax.Array, jax.Array]) -> Any:
        logp = jax.nn.log_softmax(_head_logits(static, take_chunk(index, size, hidden), head, temperature)[..., :limit])
        ids = jax.lax.top_k(logp, k)[1].astype(jnp.int32)
        return put_chunk(index, size, out, (ids, top_classes(logp, ids)))

    shape = hidden.shape[:2]
    blank = jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k + 1), layers.wide_dtype(hidden))
    ids, logp = jax.lax.fori_loop(0, hidden.shape[1] // size, body, blank)
    return TopTokens(ids[:, :total], logp[:, :total])


def _head_logits(static: Head, hidden: jax.Array, head: jax.Array, temperature: Any) -> jax.Array:
    return layers.softcap(layers.product(static.letters, hidden, head), static.cap) / temperature


def _class_logp(
    static: _Comparison, scaled: jax.Array, inputs: Any, frozen: _Frozen
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log-probabilities of both over the classes that are compared, [P, C, ...], and the model's of tokens."""
    if static.teacher is None:
        ids, theirs = inputs
        logp = jax.nn.log_softmax(scaled)
        return top_classes(logp, ids), theirs.astype(scaled.dtype), logp
    other = _head_logits(
        static.teacher, inputs[0], frozen.head, frozen.temperature.astype(layers.wide_dtype(inputs[0]))
    )
    both = min(scaled.shape[-1], other.shape[-1])
    logp = jax.nn.log_softmax(scaled[..., :both])
    return logp, jax.nn.log_softmax(other[..., :both]).astype(scaled.dtype), logp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(static: _Comparison, hidden: jax.Array, head: jax.Array, frozen: _Frozen) -> jax.Array:
    return _divergence_forward(static, hidden, head, frozen)[0]


def _divergence_forward(
    static: _Comparison, hidden: jax.Array, head: jax.Array, frozen: _Frozen
) -> tuple[jax.Array, Any]:
    head = constrain(head, *static.head.layout)
    if static.teacher is not None:
        frozen = frozen._replace(head=constrain(frozen.head, *static.teacher.layout))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        h, inputs = take_chunk(index, static.head.chunk, (hidden, frozen.positions))
        ours, theirs, _ = _class_logp(static, _head_logits(static.head, h, head, frozen.temperature), inputs, frozen)
        return put_chunk(index, static.head.chunk, out, static.divergence(ours, theirs))

    blank = jnp.zeros(hidden.shape[:2], layers.wide_dtype(hidden))
    return jax.lax.fori_loop(0, frozen.chunks, body, blank), (hidden, head, frozen)


def _divergence_backward(
    static: _Comparison, saved: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    hidden, head, frozen = saved

    def slopes(scaled: jax.Array, inputs: Any) -> jax.Array:
        g, of_teacher = inputs
        ours, theirs, logp = _class_logp(static, scaled, of_teacher, frozen)
        by_class = g[..., None] * static.divergence.slopes(ours, theirs)
        if static.teacher is None:
            return spread_slopes(by_class, logp, ours, of_teacher[0])
        return jnp.pad(by_class, ((0, 0), (0, 0), (0, scaled.shape[-1] - by_class.shape[-1])))

    aux = cotangent, frozen.positions
    return *head_gradients(static.head, hidden, head, frozen.temperature, frozen.chunks, aux, slopes), None


_divergence.defvjp(_divergence_forward, _divergence_backward)
