"""A decoder with a scalar head in place of its language model's: a critic, or a reward model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.decoder import Decoder, Weights


class ScalarModel(nnx.Module):
    """One number for each position; build it with ``with_scalar_head``.

    Attributes:
      decoder: its hidden states; what it has of a language model's head goes unread.
      weights: ``scalar`` [D].
    """

    def __init__(self, decoder: Decoder, parameters: dict[str, Any]):
        self.decoder = decoder
        self.weights = Weights(parameters)


def with_scalar_head(decoder: Decoder) -> ScalarModel:
    """A model whose every number is 0 yet; its decoder is the one given, and not a copy."""
    dtype = jax.tree.leaves(decoder)[0].dtype
    return ScalarModel(decoder, {"scalar": jnp.zeros(decoder.config.width, dtype)})


def scalars(model: ScalarModel, hidden: jax.Array) -> jax.Array:
    """Float32 numbers [...] of final hidden states [..., D]."""
    weights = model.weights.scalar[...]
    return jnp.einsum("...d,d->...", hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
