"""The divergence of a model's next-token distribution from a teacher's, without ever holding all logits of either."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.kl import JensenShannon, spread_slopes, top_classes
from jaxrl_llm.models import layers
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import CHUNK, Head, head_gradients, head_of, put_chunk, take_chunk, wide
from jaxrl_llm.sharding import constrain


class TeacherStates(NamedTuple):
    """A teacher whose whole distributions are compared.

    Attributes:
      model: gives the LM head; the tokens that both models have are compared, so that one vocabulary may be padded.
      hidden: its final hidden states [P, N, D'].
    """

    model: Decoder
    hidden: Any


class TopTokens(NamedTuple):
    """The most likely tokens of a teacher at each position.

    Attributes:
      ids: int32[P, N, k], different tokens at each position.
      logp: float32[P, N, k + 1], their log-probabilities, and that of all others together.
    """

    ids: Any
    logp: Any


@dataclasses.dataclass(frozen=True)
class _Compared:
    """What is static of a comparison: both heads, the teacher's None with ``TopTokens``, and the divergence."""

    head: Head
    teacher: Head | None
    divergence: JensenShannon


class _Given(NamedTuple):
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
    """Compute the divergence from the teacher at each position, float32[P, N], nats.

    Both LM heads run over ``chunk`` positions of each part at a time, and once more in the backward pass: memory does
    not grow with N * V. The gradient reaches ``model`` and ``hidden``, and nothing of the teacher.

    Args:
      divergence: which one, and whether over all tokens or the teacher's most likely ones.
      model: gives the LM head.
      hidden: final hidden states [P, N, D].
      teacher: ``TopTokens`` where ``divergence.top_k`` is above 0.
      temperature: the logits of both are divided by it.
      chunk: positions at a time.
      count: int32[]; positions from there on in every part are not computed and give 0. None computes all.
    """
    total = hidden.shape[1]
    pieces = -(-total // min(chunk, total))
    size = -(-total // pieces)
    head, static = _static(model, size)
    theirs = other = None
    positions: Any = tuple(teacher)
    if isinstance(teacher, TeacherStates):
        theirs, other = _static(teacher.model, size)
        positions = (teacher.hidden,)
    room = (0, pieces * size - total)
    hidden, positions = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), room, *[(0, 0)] * (x.ndim - 2))), (hidden, positions)
    )
    count = jnp.asarray(total if count is None else count, jnp.int32)
    chunks = -(-jnp.minimum(count, pieces * size) // size)
    given = _Given(positions, theirs, jnp.asarray(temperature, wide(hidden)), chunks)
    return _divergence(_Compared(static, other, divergence), hidden, head, given)[:, :total]


def top_tokens(model: Decoder, hidden: jax.Array, k: int, temperature: jax.Array | float, limit: int) -> TopTokens:
    """Return a teacher's k most likely tokens at each position, in chunks of positions.

    ``limit``: tokens from there on, which the student lacks, are left out.
    """
    total = hidden.shape[1]
    pieces = -(-total // min(CHUNK, total))
    size = -(-total // pieces)
    head, static = _static(model, size)
    head = constrain(head, *static.layout)
    parts, room = len(hidden), (0, pieces * size - total)
    hidden = jnp.pad(hidden, ((0, 0), room, (0, 0)))

    def body(index: jax.Array, out: tuple[jax.Array, jax.Array]) -> Any:
        logp = jax.nn.log_softmax(_scaled(static, take_chunk(index, size, hidden), head, temperature)[..., :limit])
        ids = jax.lax.top_k(logp, k)[1].astype(jnp.int32)
        return put_chunk(index, size, out, (ids, top_classes(logp, ids)))

    shape = (parts, pieces * size)
    blank = jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k + 1), wide(hidden))
    ids, logp = jax.lax.fori_loop(0, pieces, body, blank)
    return TopTokens(ids[:, :total], logp[:, :total])


def _static(model: Decoder, size: int) -> tuple[jax.Array, Head]:
    head, letters, layout = head_of(model)
    return head, Head(letters, layout, model.config.embeddings.logit_softcap, size, False)


def _scaled(static: Head, hidden: jax.Array, head: jax.Array, temperature: Any) -> jax.Array:
    return layers.softcap(layers.product(static.letters, hidden, head), static.cap) / temperature


def _classes(static: _Compared, scaled: jax.Array, own: Any, given: _Given) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log-probabilities of both over the classes that are compared, [P, C, ...], and the model's of tokens."""
    if static.teacher is None:
        ids, theirs = own
        logp = jax.nn.log_softmax(scaled)
        return top_classes(logp, ids), theirs.astype(scaled.dtype), logp
    other = _scaled(static.teacher, own[0], given.head, given.temperature.astype(wide(own[0])))
    both = min(scaled.shape[-1], other.shape[-1])
    logp = jax.nn.log_softmax(scaled[..., :both])
    return logp, jax.nn.log_softmax(other[..., :both]).astype(scaled.dtype), logp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(static: _Compared, hidden: jax.Array, head: jax.Array, given: _Given) -> jax.Array:
    return _forward(static, hidden, head, given)[0]


def _forward(static: _Compared, hidden: jax.Array, head: jax.Array, given: _Given) -> tuple[jax.Array, Any]:
    head = constrain(head, *static.head.layout)
    if static.teacher is not None:
        given = given._replace(head=constrain(given.head, *static.teacher.layout))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        h, own = take_chunk(index, static.head.chunk, (hidden, given.positions))
        ours, theirs, _ = _classes(static, _scaled(static.head, h, head, given.temperature), own, given)
        return put_chunk(index, static.head.chunk, out, static.divergence(ours, theirs))

    blank = jnp.zeros(hidden.shape[:2], wide(hidden))
    return jax.lax.fori_loop(0, given.chunks, body, blank), (hidden, head, given)


def _backward(static: _Compared, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    hidden, head, given = saved

    def slopes(scaled: jax.Array, own: Any) -> jax.Array:
        g, of_teacher = own
        ours, theirs, logp = _classes(static, scaled, of_teacher, given)
        by_class = g[..., None] * static.divergence.slopes(ours, theirs)
        if static.teacher is None:
            return spread_slopes(by_class, logp, ours, of_teacher[0])
        return jnp.pad(by_class, ((0, 0), (0, 0), (0, scaled.shape[-1] - by_class.shape[-1])))

    per_position = cotangent, given.positions
    return *head_gradients(static.head, hidden, head, given.temperature, given.chunks, per_position, slopes), None


_divergence.defvjp(_forward, _backward)
