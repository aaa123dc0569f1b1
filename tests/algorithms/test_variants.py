"""Losses compiled and not, from host and device arrays: one number, and one trace whatever the coefficients are."""

import chex
import jax
import numpy as np
from absl.testing import parameterized
from algorithms.batches import ragged
from oracles import loop_loss

from jaxrl_llm.algorithms import PRESETS, policy_loss


class Variants(chex.TestCase):
    """One preset for each kind of ratio and reducer."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @parameterized.parameters("grpo", "dapo", "gspo", "cispo", "kimi_k1_5")
    def test_a_loss_is_the_loop_whatever_runs_it(self, name):
        logp, batch = ragged(1)
        double = [np.float64(x) for x in (logp, batch.old_logp, batch.advantages)]
        wanted = loop_loss(name, *double, batch.mask, *(np.float64(x) for x in (batch.ref_logp, batch.sampler_logp)))
        loss, metrics = self.variant(lambda logp, batch: policy_loss(PRESETS[name], logp, batch))(logp, batch)
        chex.assert_shape([loss, *metrics.values()], ())
        chex.assert_tree_all_finite(metrics)
        np.testing.assert_allclose(loss, wanted, rtol=2e-5, atol=1e-7)

    def test_a_moved_coefficient_traces_nothing_anew(self):
        logp, batch = ragged(2)
        traced = chex.assert_max_traces(lambda coef: policy_loss(PRESETS["grpo"], logp, batch, kl_coef=coef)[0], n=1)
        found = [float(jax.jit(traced)(np.float32(coef))) for coef in (0.0, 0.1, 0.2)]
        np.testing.assert_allclose(found[2] - found[1], found[1] - found[0], rtol=1e-3)
