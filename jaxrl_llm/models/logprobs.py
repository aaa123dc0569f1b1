"""Log-probability and entropy of chosen tokens without ever holding all logits."""

import jax
import jax.numpy as jnp

from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.sharding import BATCH, constrain

CHUNK = 512
"""Positions whose logits exist at one time."""


def token_logprobs(
    model: Decoder, hidden: jax.Array, targets: jax.Array, temperature: jax.Array | float, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of its whole distribution, at the sampling temperature.

    The LM head runs over ``chunk`` positions at a time and is recomputed in the backward pass, so memory does not grow
    with N * V.

    Args:
      model: gives the LM head.
      hidden: final hidden states [N, D] of the positions that predict the targets.
      targets: int32[N].
      temperature: logits are divided by it; above 0.
      chunk: positions at a time.

    Returns:
      ``logp`` and ``entropy``, float32[N], in nats.
    """
    count, width = hidden.shape
    size = min(chunk, count)
    pieces = -(-count // size)
    hidden = jnp.pad(hidden, ((0, pieces * size - count), (0, 0))).reshape(pieces, size, width)
    targets = jnp.pad(targets, (0, pieces * size - count)).reshape(pieces, size)

    @jax.checkpoint
    def piece(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, t = constrain(inputs[0], BATCH), constrain(inputs[1], BATCH)
        return None, logprob_and_entropy(unembed(model, h) / temperature, t)

    _, (logp, entropy) = jax.lax.scan(piece, None, (hidden, targets))
    return logp.reshape(-1)[:count], entropy.reshape(-1)[:count]


def logprob_and_entropy(scaled_logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From float32 logits [..., V] (already divided by the temperature): log-probability of targets [...], entropy [...]."""
    logp = scaled_logits - jax.nn.logsumexp(scaled_logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    # An impossible token has logit -inf: it adds nothing to the entropy, and 0 * inf must not become NaN. The logits' mean
    # subtracted from logsumexp would lose the digits that both have in common.
    finite = jnp.maximum(logp, float(jnp.finfo(logp.dtype).min))
    return chosen, -jnp.sum(jnp.exp(logp) * finite, axis=-1)
