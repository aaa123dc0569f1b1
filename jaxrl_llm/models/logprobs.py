"""Log-probability and entropy of chosen tokens without ever holding all logits."""

import jax
import jax.numpy as jnp

from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.sharding import BATCH, constrain

CHUNK = 512
"""Positions whose logits exist at one time."""


def token_logprobs(
    model: Decoder, hidden: jax.Array, targets: jax.Array, temperature: jax.Array | float, chunk: int = CHUNK,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of its whole distribution, at the sampling temperature.

    Where the sampler cut tokens off, ``kept`` says which it kept: the log-probability is then that of the target among
    those (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), for policies that have moved too. The entropy stays the whole
    distribution's, as the sampler reports it: it compares between runs, and a bonus on it can bring back what was cut off.

    The LM head runs over ``chunk`` positions at a time and is recomputed in the backward pass, so memory does not grow
    with N * V.

    Args:
      model: gives the LM head.
      hidden: final hidden states [N, D] of the positions that predict the targets.
      targets: int32[N].
      temperature: logits are divided by it; above 0.
      chunk: positions at a time.
      kept: uint32[N, ceil(V / 32)], token v as bit v % 32 of word v // 32; a row of zeros keeps everything. None cuts nothing.

    Returns:
      ``logp`` and ``entropy``, float32[N], in nats.
    """
    count, width = hidden.shape
    size = min(chunk, count)
    pieces = -(-count // size)
    hidden = jnp.pad(hidden, ((0, pieces * size - count), (0, 0))).reshape(pieces, size, width)
    targets = jnp.pad(targets, (0, pieces * size - count)).reshape(pieces, size)
    if kept is not None:
        kept = jnp.pad(kept, ((0, pieces * size - count), (0, 0))).reshape(pieces, size, -1)

    @jax.checkpoint
    def piece(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, t, words = jax.tree.map(lambda x: constrain(x, BATCH), inputs)
        scaled = unembed(model, h) / temperature
        return None, logprob_and_entropy(scaled, t, None if words is None else unpack_kept(words, scaled.shape[-1]))

    _, (logp, entropy) = jax.lax.scan(piece, None, (hidden, targets, kept))
    return logp.reshape(-1)[:count], entropy.reshape(-1)[:count]


def unpack_kept(words: jax.Array, vocab: int) -> jax.Array:
    """Kept sets uint32[N, ceil(V / 32)] as bool[N, V]; a row of zeros, where no policy sampled, keeps everything."""
    places = jnp.arange(32, dtype=jnp.uint32)[None, None]
    bits = (words[:, :, None] >> places) & jnp.uint32(1)
    return (bits > 0).reshape(words.shape[0], -1)[:, :vocab] | jnp.all(words == 0, axis=1, keepdims=True)


def logprob_and_entropy(
    scaled_logits: jax.Array, targets: jax.Array, kept: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """From float32 logits [..., V] (already divided by the temperature): log-probability of targets [...], entropy [...].

    ``kept`` bool[..., V]: the log-probability is that among these tokens.
    """
    logp = scaled_logits - jax.nn.logsumexp(scaled_logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    if kept is not None:
        chosen = chosen - jax.nn.logsumexp(jnp.where(kept, logp, -jnp.inf), axis=-1)
    # An impossible token has logit -inf: it adds nothing to the entropy, and 0 * inf must not become NaN. The logits' mean
    # subtracted from logsumexp would lose the digits that both have in common.
    finite = jnp.maximum(logp, float(jnp.finfo(logp.dtype).min))
    return chosen, -jnp.sum(jnp.exp(logp) * finite, axis=-1)
