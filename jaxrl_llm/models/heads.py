"""A decoder with a scalar head in place of its language model's: a critic, or a reward model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, Weights, causal_rows, forward, from_parameters


class ScalarModel(nnx.Module):
    """One number for each position; build it with ``with_scalar_head``.

    Attributes:
      decoder: its hidden states; it has no head of its own, but for embeddings that were one.
      weights: ``scalar`` [D].
    """

    def __init__(self, decoder: Decoder, parameters: dict[str, Any]):
        self.decoder = decoder
        self.weights = Weights(parameters)

    @property
    def config(self) -> ModelConfig:
        """The decoder's."""
        return self.decoder.config


def with_scalar_head(decoder: Decoder, scalar: Any = None) -> ScalarModel:
    """A model with this head [D], or one whose every number is 0 yet.

    Its arrays are the decoder's and no copies; the head of the language model is not among them.
    """
    weights = decoder.weights
    if scalar is None:
        scalar = jnp.zeros(decoder.config.width, weights.embed.dtype)
    if weights.has("head"):
        # Not by way of plain arrays, which would lose an attached adapter.
        kept = {name: value for name, value in vars(weights).items() if name != "head"}
        parts = {name: value.get_value() for name, value in kept.items() if isinstance(value, nnx.Param)}
        parts |= {name: value for name, value in kept.items() if isinstance(value, nnx.Module)}
        decoder = from_parameters(decoder.config, parts)
    return ScalarModel(decoder, {"scalar": scalar})


HEAD_SCALE = 0.02
"""Standard deviation of the numbers of a reward model's first head: that of transformers, and so of TRL. Scores begin
near 0 and differ with the seed, as do the models of an ensemble that learn from the same rows in the same order."""


def drawn_head(decoder: Decoder, seed: int) -> jax.Array:
    """The first head [D] of a new reward model: normal numbers of ``HEAD_SCALE``, the same for the same seed."""
    key = jax.random.fold_in(jax.random.key(seed), 2)  # a run draws its adapters by the seed itself, and by 1
    drawn = HEAD_SCALE * jax.random.normal(key, (decoder.config.width,), jnp.float32)
    return drawn.astype(decoder.weights.embed.dtype)


def split(model: Decoder | ScalarModel) -> tuple[Decoder, Any]:
    """A scalar model's decoder and its head [D]; a language model and None."""
    if isinstance(model, ScalarModel):
        return model.decoder, model.weights.scalar.get_value()
    return model, None


def scalars(model: ScalarModel, hidden: jax.Array) -> jax.Array:
    """Float32 numbers [...] of final hidden states [..., D]."""
    weights = model.weights.scalar[...]
    return jnp.einsum("...d,d->...", hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)


def scores(model: ScalarModel, tokens: Any, lengths: Any) -> jax.Array:
    """A reward model's scores of right-padded sequences: array-like int[B, T], int[B] -> float32[B].

    The score of a sequence is the number at its last token, as in transformers' sequence classifiers. For tests and
    tools.

    Raises:
      InputError: a length is none of 1 to T.
    """
    tokens = np.asarray(tokens, np.int32)
    lengths = np.asarray(lengths, np.int32)
    if np.any(lengths < 1) or np.any(lengths > tokens.shape[1]):
        raise InputError(f"lengths {lengths.tolist()} do not lie in 1 to {tokens.shape[1]}; give each row's own")
    return _scores(model, tokens, lengths)


@jax.jit
def _scores(model: ScalarModel, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    hidden = forward(model.decoder, causal_rows(tokens))
    return scalars(model, hidden[jnp.arange(len(tokens)), lengths - 1])
