"""A per-token array from the engine to the loss: the log-probability of the most likely token.

The engine's values for each token travel by name to the loss: ``Completion.extras``, ``Sample.arrays``,
``Packed.by_token``, ``Tokens.extras``. Nothing between the two ends has to be written: packing scatters every array it
finds. The piece of an algorithm names what it reads in ``reads`` and finds it in ``at.extras``, [B, T], 0 at padding,
without gradient. An array that prompts have too (``Sample.prompt_arrays``) is in ``Packed.by_column``; one number for
each completion is in ``Sample.scalars`` and ``Packed.by_sequence``.
"""

# jaxrl_llm/algorithms/surrogates.py
import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.surrogates import Surrogate
from jaxrl_llm.algorithms.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Hesitant(Surrogate):
    """``-r A`` where another token was likelier than the one that was drawn; 0 elsewhere."""

    reads = ("top_logp",)

    def __call__(self, at: Tokens) -> jax.Array:
        """Losses [B, T]."""
        behind = at.sampler_logp < at.extras["top_logp"] - 1e-6
        return jnp.where(behind, -jnp.exp(at.log_ratio) * at.advantages, 0.0)


# jaxrl_llm/engine/sampling.py, in draw, after extras = {"entropy"
def draw(extras, total):
    extras["top_logp"] = -jnp.log(total)
