"""Gradients of packed, microbatched steps against one row for each completion, and what an update does to the state."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    TEMPERATURE,
    T,
    changed,
    moved,
    objective_gradient,
    one_device,
    padded,
    policy_gradient,
    policy_update,
    rollout,
    unpacked_logp,
    unpacked_loss,
)  # fmt: skip
from tiny import Compilations, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.ratios import Token
from jaxrl_llm.algorithms.surrogates import M2PO, PPOClip
from jaxrl_llm.learner import Layout, Optimiser, PolicyGradient, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh, score
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import NewRole
from jaxrl_llm.models.config import ComputeOptions

COMPUTE = ComputeOptions(remat="full")
LAYOUTS = {
    "one row": (Layout(1, 20, T), ComputeOptions()),
    "two rows": (Layout(2, 22, T), COMPUTE),
    "four rows": (Layout(4, 60, T), ComputeOptions(remat="dots", unroll=True)),
    "two parts, own prompts": (Layout(4, 40, T, parts=2, share_prompts=False), ComputeOptions()),
}
WIDE_GSPO = dataclasses.replace(PRESETS["gspo"], surrogate=PPOClip(0.2, 0.3))
"""GSPO with a band that the tiny model's ratios fall inside and outside of."""

CHOOSING = dataclasses.replace(PRESETS["m2po"], ratio=Token(), surrogate=M2PO(1e-4))


MODEL = tiny("windows")
OLD, REFERENCE = (moved(MODEL, tiny("windows", seed), 0.02) for seed in (5, 6))


@functools.partial(jax.jit, static_argnums=(2, 3))
def packed_gradient(model, packed, algorithm, compute=COMPUTE):
    return policy_gradient(model, packed, algorithm, compute)


@functools.partial(jax.jit, static_argnums=0)
def unpacked_gradient(algorithm, model, old_logp, ref_logp):
    return jax.grad(lambda m: unpacked_loss(algorithm, m, rollout(), old_logp, ref_logp), has_aux=True)(model)


def scored(model, packed):
    return score(model, packed, jnp.float32(TEMPERATURE), COMPUTE)


@pytest.mark.slow(but="gspo")
@pytest.mark.parametrize(
    ("algorithm", "layouts"),
    [(PRESETS["grpo"], LAYOUTS), (PRESETS["dapo"], ["two rows"]), (WIDE_GSPO, ["one row", "two parts, own prompts"]),
     (CHOOSING, ["one row"])],
    ids=["grpo", "dapo", "gspo", "over the whole step"],
)  # fmt: skip
def test_packing_and_microbatches_change_nothing_but_rounding(algorithm, layouts):
    wanted, metrics = unpacked_gradient(
        algorithm, MODEL, unpacked_logp(OLD, rollout()), unpacked_logp(REFERENCE, rollout())
    )
    assert 0 < metrics["clip_fraction/high"] + metrics["clip_fraction/low"] < 1
    for name in layouts:
        layout, compute = LAYOUTS[name]
        packed = pack(rollout(), layout)
        packed = packed.with_tokens(old_logp=scored(OLD, packed), ref_logp=scored(REFERENCE, packed))
        found, others = packed_gradient(MODEL, packed, algorithm, compute)
        assert largest_difference(found, wanted) < 1e-5, name
        for key, value in metrics.items():
            np.testing.assert_allclose(others[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_the_probability_of_clipped_tokens_is_that_of_the_policy():
    logp, old = (np.asarray(unpacked_logp(model, rollout())) for model in (MODEL, OLD))
    packed = pack(rollout(), LAYOUTS["two rows"][0])
    packed = packed.with_tokens(old_logp=scored(OLD, packed), ref_logp=scored(REFERENCE, packed))
    _, metrics = packed_gradient(MODEL, packed, PRESETS["grpo"], LAYOUTS["two rows"][1])
    low, high, spread = sums = dict.fromkeys(("clip_probability/low", "clip_probability/high", "ratio_spread"), 0.0)
    for row, sample in enumerate(rollout()):
        advantage = sample.scalars["advantages"]
        for t in np.flatnonzero(sample.mask):
            ratio = np.exp(logp[row, t] - old[row, t])
            sums[spread] += abs(logp[row, t] - old[row, t])
            sums[high] += np.exp(logp[row, t]) * (advantage > 0 and ratio > 1.2)
            sums[low] += np.exp(logp[row, t]) * (advantage < 0 and ratio < 0.8)
    assert sums[low] + sums[high] > 0.01
    tokens = sum(int(np.sum(sample.mask)) for sample in rollout())
    for name, total in sums.items():
        np.testing.assert_allclose(metrics[name], total / tokens, rtol=1e-4, err_msg=name)


def test_the_layouts_above_really_differ():
    packed = [pack(rollout(), layout) for layout, _ in LAYOUTS.values()]
    one, two, four, parts = (int(p.microbatches) for p in packed)
    assert one > two > four == 1 == parts
    assert (packed[3].rows.group > 0).sum() > (packed[2].rows.group > 0).sum()
    of_parts = packed[3].predictions
    assert of_parts.source.shape[1] == 2 and (of_parts.scatter[0, 1] < packed[3].mask[0].size).any()


def test_scores_of_a_packed_step_are_those_of_single_rows():
    packed = pack(rollout(), LAYOUTS["two rows"][0])
    found = np.asarray(scored(MODEL, packed))
    wanted = np.asarray(unpacked_logp(MODEL, rollout()))
    numbers = {s.scalars["advantages"]: i for i, s in enumerate(rollout())}
    seen = 0
    for m in range(int(packed.microbatches)):
        for b in range(packed.mask.shape[1]):
            index = next(
                (i for a, i in numbers.items() if np.float32(a) == packed.by_sequence["advantages"][m, b]), None
            )
            if index is not None:
                count = len(rollout()[index].tokens)
                np.testing.assert_allclose(found[m, b, :count], wanted[index, :count], atol=1e-5)
                assert not found[m, b, count:].any()
                seen += 1
    assert seen == len(rollout())


@pytest.mark.slow
def test_on_policy_the_learner_agrees_with_the_sampler():
    _, metrics = packed_gradient(MODEL, pack(rollout(), LAYOUTS["two rows"][0]), PRESETS["dapo"])
    assert 0 <= metrics["sampler/logp_abs_diff_mean"] <= metrics["sampler/logp_abs_diff_max"] < 1e-5
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-6)
    assert metrics["policy_kl"] == 0
    _, other = packed_gradient(OLD, pack(rollout(), LAYOUTS["two rows"][0]), PRESETS["dapo"])
    assert other["sampler/logp_abs_diff_max"] > 1e-2


def resumed(samples):
    """Four samples are of an earlier policy, others from their third token on are of the present one."""
    return [changed(s, fresh=(np.arange(len(s.tokens)) >= 2) & (i >= 4)) for i, s in enumerate(samples)]


def test_tokens_of_earlier_steps_take_the_sampler_as_their_old_policy():
    carried = resumed(rollout())
    found, metrics = packed_gradient(OLD, pack(carried, LAYOUTS["two rows"][0]), PRESETS["dapo"])
    wanted, _ = jax.jit(jax.grad(lambda m: unpacked_loss(PRESETS["dapo"], m, carried), has_aux=True))(OLD)
    assert largest_difference(found, wanted) < 1e-5
    assert metrics["policy_kl"] > 0 and abs(metrics["ratio"] - 1) > 1e-4
    np.testing.assert_allclose(metrics["sampler/logp_abs_diff_mean"], fresh_gap(OLD, carried), rtol=1e-4)
    stale = [changed(s, fresh=False) for s in rollout()]
    _, none = packed_gradient(OLD, pack(stale, LAYOUTS["two rows"][0]), PRESETS["dapo"])
    assert np.isnan(none["sampler/logp_abs_diff_max"]) and np.isnan(none["sampler/logp_abs_diff_mean"]), (
        "nothing was measured"
    )


def fresh_gap(model, samples):
    """Mean |learner - sampler| over the fresh tokens that the loss counts."""
    counted = (padded(samples, "mask") * padded(samples, "fresh")).astype(bool)
    return np.abs(np.asarray(unpacked_logp(model, samples)) - padded(samples, "sampler_logp"))[counted].mean()


def test_with_several_updates_the_old_policy_of_fresh_tokens_is_the_learners():
    samples = resumed(rollout())
    packed = pack(samples, LAYOUTS["two rows"][0])
    packed = packed.with_tokens(old_logp=scored(OLD, packed), ref_logp=scored(REFERENCE, packed))
    found, _ = packed_gradient(MODEL, packed, PRESETS["dapo"])
    old = unpacked_logp(OLD, samples)
    wanted, _ = jax.jit(jax.grad(lambda m: unpacked_loss(PRESETS["dapo"], m, samples, old), has_aux=True))(MODEL)
    assert largest_difference(found, wanted) < 1e-5


@pytest.mark.slow
def test_a_moved_kl_coefficient_is_used_and_compiles_nothing_anew():
    packed = pack(rollout(), LAYOUTS["two rows"][0])
    packed = packed.with_tokens(ref_logp=scored(REFERENCE, packed))
    gradient = jax.jit(lambda coef: policy_gradient(MODEL, packed, PRESETS["grpo"], COMPUTE, kl_coef=coef))
    for coef in (0.0, 0.04, 0.5):
        found, metrics = gradient(jnp.float32(coef))
        fixed = dataclasses.replace(PRESETS["grpo"], kl_coef=coef or 1e-30)
        wanted, _ = packed_gradient(MODEL, packed, fixed)
        assert largest_difference(found, wanted) < 1e-6
        assert metrics["kl"] > 0
    assert gradient._cache_size() == 1


@pytest.mark.slow
def test_the_entropy_bonus_reaches_the_weights():
    packed = pack(rollout(), LAYOUTS["two rows"][0])
    plain, before = packed_gradient(MODEL, packed, PRESETS["dapo"])
    bonus, after = packed_gradient(MODEL, packed, dataclasses.replace(PRESETS["dapo"], entropy_coef=0.1))
    np.testing.assert_allclose(after["loss"], before["loss"] - 0.1 * before["entropy"], rtol=1e-5)
    uphill = jax.tree.map(lambda a, b: b - a, plain, bonus)
    better = jax.tree.map(lambda w, d: w - 1e-2 * d, MODEL, uphill)
    assert packed_gradient(better, packed, PRESETS["dapo"])[1]["entropy"] > before["entropy"]


@pytest.mark.slow
def test_a_bonus_that_is_given_to_each_update_is_that_of_the_algorithm_and_may_be_0():
    packed = pack(rollout(), LAYOUTS["two rows"][0])
    moved = (PolicyGradient(PRESETS["dapo"], entropy_moves=True),)
    for coef in (0.0, 0.1):
        found, metrics = objective_gradient(MODEL, packed, moved, entropy_coef=jnp.float32(coef))
        wanted, fixed = packed_gradient(MODEL, packed, dataclasses.replace(PRESETS["dapo"], entropy_coef=coef))
        assert largest_difference(found, wanted) < 1e-6 and metrics["entropy"] > 0
        np.testing.assert_allclose(metrics["loss"], fixed["loss"], rtol=1e-6)


def test_nothing_counted_gives_no_gradient():
    nothing = [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in rollout()]
    found, metrics = packed_gradient(MODEL, pack(nothing, LAYOUTS["two rows"][0]), PRESETS["dapo"])
    assert metrics["loss"] == 0 and not any(np.any(x) for x in jax.tree.leaves(found))
    assert all(np.isfinite(value) or name.startswith("sampler/") for name, value in metrics.items()), metrics


@pytest.mark.slow
def test_a_forward_pass_in_bfloat16_still_gives_float32_gradients():
    # Rows of several parts: here CPUs refused attention's scores when run.
    packed = pack(rollout(), Layout(2, 160, T))
    found, metrics = policy_gradient(MODEL, packed, PRESETS["dapo"], ComputeOptions("bfloat16", "full"))
    wanted, _ = packed_gradient(MODEL, pack(rollout(), LAYOUTS["two rows"][0]), PRESETS["dapo"])
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)} and metrics[
        "loss"
    ].dtype == jnp.float32
    flat, target = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (found, wanted))
    assert flat @ target / np.linalg.norm(flat) / np.linalg.norm(target) > 0.99


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), MODEL)
    summed = functools.partial(policy_gradient, algorithm=PRESETS["dapo"], compute=ComputeOptions("bfloat16"))
    grads, _ = jax.eval_shape(summed, narrow, pack(rollout(), LAYOUTS["two rows"][0]))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


@functools.cache
def updater(optimiser, algorithm=PRESETS["dapo"]):
    return policy_update(algorithm, optimiser, COMPUTE)


def state_and_data(optimiser, samples=None, reference=False):
    mesh = one_device()
    data = put_on_mesh(pack(samples or rollout(), LAYOUTS["two rows"][0]), mesh)
    return create_state(jax.tree.map(jnp.copy, MODEL), build(optimiser), reference, mesh), data


def test_one_update_is_clipped_adamw_written_out():
    optimiser = Optimiser(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.05)
    state, data = state_and_data(optimiser)
    grads = jax.tree.map(np.float64, packed_gradient(MODEL, data, PRESETS["dapo"])[0])
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
    assert norm > optimiser.clip_norm
    new, metrics = updater(optimiser)(state, data)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["lr"], 1e-2, rtol=1e-6)
    assert int(new.policy.updates) == 1
    for (path, w), g, found in zip(
        jax.tree.leaves_with_path(MODEL), jax.tree.leaves(grads), jax.tree.leaves(new.policy.params), strict=True
    ):
        g = g * optimiser.clip_norm / norm
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
        wanted = np.float64(w) - 1e-2 * (g / (np.abs(g) + 1e-8) + decay * np.float64(w))
        sure = np.abs(g) > 1e-6  # where g is rounding, so is its sign
        np.testing.assert_allclose(np.asarray(found)[sure], wanted[sure], rtol=1e-4, atol=1e-5)


def test_weight_decay_leaves_norms_and_biases_alone():
    optimiser = Optimiser(learning_rate=1.0, weight_decay=0.5, clip_norm=0.0)
    chain = build(optimiser)
    for kind in ("bias", "head_norm", "gemma"):
        model = tiny(kind)
        zero = jax.tree.map(jnp.zeros_like, model)
        directions, _ = jax.jit(chain.update)(zero, jax.jit(chain.init)(model), model)
        for (path, direction), w in zip(jax.tree.leaves_with_path(directions), jax.tree.leaves(model), strict=True):
            spared = any(word in jax.tree_util.keystr(path) for word in ("norm", "bias"))
            np.testing.assert_allclose(direction, 0.0 if spared else 0.5 * np.asarray(w), rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda s: {"scalars": {"advantages": float("nan")}}, "refused/not_finite"),
    (lambda s: {"mask": np.zeros_like(s.mask)}, "refused/empty"),
])  # fmt: skip
def test_an_update_that_is_refused_leaves_the_state_as_it_was(change, reason):
    optimiser = Optimiser(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.05)
    state, data = state_and_data(optimiser)
    refused = put_on_mesh(
        pack([dataclasses.replace(s, **change(s)) for s in rollout()], LAYOUTS["two rows"][0]), one_device()
    )
    state, metrics = updater(optimiser)(state, data)  # momentum and decay would now move the weights by themselves
    assert metrics["refused/not_finite"] == 0 == metrics["refused/empty"]
    before = jax.device_get(jax.tree.map(np.array, state))
    new, metrics = updater(optimiser)(state, refused)
    assert {name for name in metrics if name.startswith("refused/") and metrics[name] == 1} == {reason}
    chex.assert_trees_all_equal(jax.device_get(new), before)
    after, metrics = updater(optimiser)(new, data)
    assert np.isfinite(metrics["grad_norm"]) and int(after.policy.updates) == 2


@pytest.mark.slow
def test_the_reference_outlives_the_donated_policy():
    optimiser = Optimiser(learning_rate=1e-2)
    state, data = state_and_data(optimiser, reference=True)
    data = data.with_tokens(ref_logp=scored(state.reference, data))
    policy, lies = state.policy.params, pointers(state.reference)
    new, metrics = updater(optimiser, PRESETS["grpo"])(state, data)
    assert all(x.is_deleted() for x in jax.tree.leaves(policy))
    chex.assert_trees_all_equal(new.reference, MODEL)
    assert largest_difference(new.policy.params, MODEL) > 1e-3
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    assert pointers(new.reference) == lies, "the reference was copied"
    assert not lies & pointers(new.policy.params)


def pointers(tree):
    """Where its arrays lie."""
    return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def test_no_two_parts_of_a_fresh_state_share_a_buffer():
    optimiser = build(Optimiser())
    others = (NewRole("critic", lambda model: model, optimiser),)
    state = create_state(tiny("windows"), optimiser, True, one_device(), others=others)
    assert len(pointers(state)) == len(jax.tree.leaves(state))


def shortened(sample):
    """Without its last token."""
    arrays = {name: x[:-1] for name, x in sample.arrays.items()}
    return dataclasses.replace(sample, tokens=sample.tokens[:-1], mask=sample.mask[:-1], arrays=arrays)


@pytest.mark.slow
def test_steps_of_other_lengths_and_updates_of_equal_settings_share_one_program():
    optimiser = Optimiser(learning_rate=1e-3)
    update = policy_update(PRESETS["dapo"], optimiser, COMPUTE)
    state, data = state_and_data(optimiser)
    state, _ = update(state, data)
    shorter = [shortened(s) if len(s.tokens) > 1 else s for s in rollout()]
    other = put_on_mesh(pack(shorter, LAYOUTS["two rows"][0]), one_device())
    assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, data)
    again = policy_update(PRESETS["dapo"], Optimiser(learning_rate=1e-3), COMPUTE)
    with Compilations() as compilations:
        state, _ = again(state, other, 0.5)
    assert compilations.heard == [] and int(state.policy.updates) == 2
