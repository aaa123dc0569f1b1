"""Sampling one step ahead of learning: what it learns from, on which devices, and what a resumed run makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import commands
from end_to_end.test_resume import CONFIG, plain, rows
from tiny import tiny

from jaxrl_llm.algorithms import PolicyBatch, policy_loss
from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.config import load_config, resolved, validate
from jaxrl_llm.engine.engine import weights_for_sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.objectives import old_policy
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rollout import Collect
from jaxrl_llm.sharding import MeshShape, make_mesh, rollout_mesh, shardings

pytestmark = pytest.mark.slow

AHEAD = (
    f"train {CONFIG} --run_dir {{}} --steps {{}} --recipe grpo --rollout.prompts 8 --rollout.collect.token_budget 0"
    " --rollout.collect.no-interrupt --rollout.collect.staleness 1"
)
APART = f"{AHEAD} --mesh.rollout 1"


def trained(folder, *lines):
    """These runs, one after the other in a process of two devices."""
    for answer in commands(list(lines), folder, JAX_NUM_CPU_DEVICES="2"):
        assert answer.code == 0, answer.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ahead on devices apart, the same with its last step added later by another process, ahead on the learner's
    devices: the rows of each.
    """
    folder = tmp_path_factory.mktemp("runs")
    trained(folder, APART.format("extended", 2), APART.format("apart", 3))
    trained(folder, APART.format("extended", 3), AHEAD.format("shared", 3))
    return {name: rows(folder / name) for name in ("apart", "extended", "shared")}


def test_a_run_that_is_given_more_steps_goes_on_with_what_its_last_one_sampled_ahead(runs):
    own = lambda row: {name: value for name, value in plain(row).items() if not name.startswith("eval/")}
    assert "event/resumed" in runs["extended"][3] and runs["extended"][2].keys() > runs["apart"][2].keys()
    for one, other in zip(runs["apart"], runs["extended"], strict=True):
        assert own(one) == own(other)
    assert plain(runs["apart"][3]) == plain(runs["extended"][3])


def test_only_the_first_step_learns_from_its_own_policy(runs):
    gaps = [row["sampler/logp_abs_diff_mean"] for row in runs["apart"][1:]]
    assert gaps[0] < 1e-5 < 1e-3 < min(gaps[1:])


def test_where_it_samples_changes_nothing_but_rounding(runs):
    for one, other in zip(runs["apart"][:3], runs["shared"][:3], strict=True):
        for name in ("reward/mean", "completions/mean_length", "prompts"):
            if one["step"]:
                np.testing.assert_allclose(one[name], other[name], rtol=1e-6, err_msg=name)


def run_with(collect=None, rollout=0, **changes):
    _, run = load_config(str(CONFIG))
    stale = dataclasses.replace(run.rollout, collect=collect or Collect())
    return dataclasses.replace(run, rollout=stale, mesh=MeshShape(rollout=rollout), **changes)


def test_every_recipe_corrects_for_the_step_between():
    for recipe in RECIPES.values():
        algorithm = resolved(run_with(Collect(staleness=1), recipe=recipe)).recipe.algorithm
        assert algorithm.corrects_sampler or algorithm.ratio.anchor == "sampler", recipe.name
        assert resolved(run_with(recipe=recipe)).recipe.algorithm.correction == recipe.algorithm.correction
    assert resolved(run_with(Collect(staleness=1))).recipe.algorithm.correction == TruncatedIS()


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "grpo", "dapo", "cispo", "deepseek_v3_2", "minirl"])
def test_a_token_of_any_age_is_weighted_by_what_the_policy_and_its_own_sampler_gave_it(name):
    """Surplus of a step that sampled ahead is two updates old, what was sampled with the step's weights one."""
    algorithm = resolved(run_with(Collect(staleness=1), recipe=RECIPES[name])).recipe.algorithm
    logp, ages = np.log(np.full((2, 6), 0.3, np.float32)), np.array([[0, 1, 2, 2, 1, 0], [2, 2, 1, 0, 0, 1]])
    sampled, mask = (logp - 0.04 * ages).astype(np.float32), np.ones((2, 6), bool)

    def gradient(mu, fresh):
        def loss(logp):
            old = old_policy(algorithm, logp, None, mu, fresh)
            batch = PolicyBatch(np.array([1.0, -0.5], np.float32), mask, old, logp, mu)
            return policy_loss(algorithm, logp, batch, kl_coef=0.0 if algorithm.kl_in_loss else None)[0]

        return np.asarray(jax.grad(loss)(jnp.asarray(logp)))

    found, present = gradient(sampled, ages < 2), gradient(logp, mask)
    np.testing.assert_allclose(found / present, np.exp(0.04 * ages), rtol=1e-5)


def test_what_cannot_run_ahead_is_refused():
    with pytest.raises(InputError, match=r"rollout.collect.staleness must be 0 or 1, got 2"):
        validate(run_with(Collect(staleness=2)))
    with pytest.raises(InputError, match=r"mesh.rollout 1 sets devices aside .*: set rollout.collect.staleness 1"):
        validate(run_with(rollout=1))
    for devices in (0, 8):
        with pytest.raises(InputError, match=r"mesh.rollout must be from 0 to"):
            MeshShape(rollout=devices or -1).sizes(8)


@pytest.mark.parametrize("shape", [MeshShape(1, 2, 2), MeshShape(1, 2, 2, rollout=4), MeshShape(1, 5, 1, rollout=3)])
def test_weights_that_sample_outlive_the_policy_and_lie_whole_over_fsdp(shape):
    learner, sampler = (
        make(shape) if shape.rollout else make(MeshShape(2, 2, 2)) for make in (make_mesh, rollout_mesh)
    )
    assert not shape.rollout or not set(learner.devices.flat) & set(sampler.devices.flat)
    model, plain_copy = tiny("windows"), jax.device_get(tiny("windows"))
    policy = jax.device_put(model, shardings(model, learner))
    weights = weights_for_sampling(model, "float32", learner, sampler, keep=True)(policy)
    for leaf in jax.tree.leaves(policy):
        leaf.delete()
    for found, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(plain_copy), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.sharding.mesh.devices.tolist() == sampler.devices.tolist()
        assert sampler.size == 1 or "fsdp" not in str(found.sharding.spec)
