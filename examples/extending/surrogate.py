"""An algorithm: simple policy optimisation (SPO) is GRPO with another surrogate.

A comment that names a file says where the lines below it go. For a run of your own nothing goes anywhere: the class
stays in your file, and ``dataclasses.replace(PRESETS["grpo"], surrogate=SPO())`` is the algorithm.
"""

# jaxrl_llm/algorithms/surrogates.py
import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.surrogates import Surrogate
from jaxrl_llm.algorithms.tokens import ABOVE_0, Tokens


@dataclasses.dataclass(frozen=True)
class SPO(Surrogate):
    """``-r A + |A| (r - 1)^2 / (2 eps)``: simple policy optimisation (arXiv 2401.16025).

    Best at r = 1 + eps where A > 0 and at r = 1 - eps where A < 0; beyond, the gradient leads back.
    """

    eps: Annotated[float, ABOVE_0] = 0.2

    def __call__(self, at: Tokens) -> jax.Array:
        """Losses [B, T]."""
        ratio = jnp.exp(at.log_ratio)
        return -ratio * at.advantages + jnp.abs(at.advantages) * (ratio - 1) ** 2 / (2 * self.eps)


# jaxrl_llm/algorithms/__init__.py, at the top: from jaxrl_llm.algorithms.surrogates import SPO
from jaxrl_llm.algorithms import Algorithm, GroupZScore, SequenceMean, Token

# jaxrl_llm/algorithms/__init__.py, in PRESETS, after "kl_cov"
PRESETS = {
    "spo": Algorithm(GroupZScore(), Token(), SPO(0.2), SequenceMean()),
}


# tests/oracles.py, in policy_terms, before if name == "sapo"; "spo" is also one of SEQUENCE_MEANS there
def policy_terms(name, ratios, advantage):
    if name == "spo":
        return [-r * advantage + abs(advantage) * (r - 1) ** 2 / 0.4 for r in ratios]


# tests/algorithms/test_spo.py, or a file of your own: a loss of yours is tested in the same way, compiled and not
import chex
import numpy as np

from jaxrl_llm.algorithms import PolicyBatch, policy_loss


class PaddingIsFree(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_padding_is_free(self):
        algorithm = dataclasses.replace(PRESETS["spo"], surrogate=SPO(0.3))
        logp = np.log(np.linspace(0.1, 0.9, 6, dtype=np.float32)).reshape(2, 3)
        mask = np.array([[True, True, False], [True, False, False]])
        batch = PolicyBatch(np.float32([1.0, -0.5]), mask, old_logp=logp - 0.1)
        loss = self.variant(lambda logp: policy_loss(algorithm, logp, batch)[0])
        chex.assert_shape(loss(logp), ())
        gradient = jax.grad(loss)(logp)
        chex.assert_tree_all_finite(gradient)
        chex.assert_trees_all_equal(gradient[~mask], np.zeros(3, np.float32))
