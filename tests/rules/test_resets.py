"""Resets by KL, soft ones and moving averages: what rules decide from rows alone, and what a reference becomes."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Compilations, rules_in, tiny

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.batch import Sample
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.samples import mean_abs_advantage
from jaxrl_llm.models.config import Lora
from jaxrl_llm.recipes import RECIPES, Recipe
from jaxrl_llm.rules import Decision, Resets, decide, not_a_number, rules_of
from jaxrl_llm.rules.guards import GUARD, on_stall
from jaxrl_llm.sharding import MeshShape, make_mesh
from jaxrl_llm.trainer.state import apply_resets

SMOKE = configs.load_config("smoke")[1]
KL = "event/reference_reset"


def decided(resets, kls, **more):
    """The decision after each step with these KLs; what rules remember goes through JSON, as in a checkpoint."""
    rules = rules_of(resets, 1)
    memory, decisions = {}, []
    for step, kl in enumerate(kls, start=1):
        row = {"step": step, "kl": kl, "kl_coef": 0.1} | more
        decision, memory = decide(rules, row, json.loads(json.dumps(memory)))
        decisions.append(decision)
    return decisions


def resets_at(*arguments, **more):
    return [step for step, d in enumerate(decided(*arguments, **more), start=1) if d.reset_reference]


def test_a_kl_above_its_bound_resets_and_not_again_at_each_step():
    resets = Resets(on_kl=0.3, kl_window=2, with_optimiser=True)
    assert resets_at(resets, [0.1, 0.2, 0.3, 0.31, 0.4, 0.4, 0.4, 0.1]) == [4, 7], "0.3 itself is not above 0.3"
    assert resets_at(resets, [9.0] * 3) == [3], "the first two steps of a run are let pass too"
    hit = decided(resets, [0.1, 0.1, 0.1, 0.5])[-1]
    assert hit.reset_optimiser and hit.snapshot and hit.mix == 1
    assert hit.events == {KL: "the KL, 0.5, is above 0.3", "event/optimiser_reset": True}
    assert resets_at(resets, [math.nan, math.nan, math.nan, 0.5, math.nan]) == [4], "no KL was measured, no verdict"


def test_a_reset_by_another_rule_begins_the_window_too():
    both = Resets(on_kl=0.3, kl_window=3, reference_every=4)
    assert resets_at(both, [0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5]) == [4, 8]
    alone = dataclasses.replace(both, reference_every=0)
    assert resets_at(alone, [0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5]) == [5, 9]


def test_a_share_is_of_what_pulls_at_a_token():
    # kl_coef kl / (kl_coef kl + mean |A|): 0.1 * 6 / (0.1 * 6 + 0.9) = 0.4
    resets = Resets(on_kl_share=0.39, kl_window=1)
    assert resets_at(resets, [6.0, 6.0], **{"advantage/abs_mean": 0.9}) == [2]
    assert resets_at(dataclasses.replace(resets, on_kl_share=0.41), [6.0, 6.0], **{"advantage/abs_mean": 0.9}) == []
    # The coefficient of a controller is the row's: 0.05 * 6 / (0.05 * 6 + 0.9) = 0.25
    assert resets_at(resets, [6.0, 6.0], **{"advantage/abs_mean": 0.9, "kl_coef": 0.05}) == []
    flat = decided(resets, [0.1, 0.1], **{"advantage/abs_mean": 0.0})[-1]
    assert flat.events == {KL: "the KL is 100 % of the total pull, above 39 %"}
    assert resets_at(resets, [0.0, 0.0], **{"advantage/abs_mean": 0.0}) == [] == resets_at(resets, [6.0, 6.0])


def test_a_jump_is_so_many_times_the_median_since_the_last_reset():
    resets = Resets(on_kl_jump=3.0, kl_window=3)
    assert resets_at(resets, [0.1, 9.0, 0.1, 0.31]) == [4], "one KL that stands out does not move a median"
    assert resets_at(resets, [0.1, 9.0, 9.0, 0.31]) == [] == resets_at(resets, [0.1, 0.1, 0.31, 0.29])
    assert resets_at(resets, [0.1, 0.1, 0.1, 0.31, 9.0, 9.0, 9.0, 26.0]) == [4], "it is measured anew after a reset"
    assert resets_at(resets, [0.1, 0.1, 0.1, 0.31, 9.0, 9.0, 9.0, 28.0]) == [4, 8]
    assert resets_at(resets, [0.0, 0.0, 0.0, 1.0]) == [], "nothing is so many times 0"
    assert resets_at(resets, [9.0, 9.0, 0.1, 0.1, 0.1, 0.31]) == [6], "older ones are forgotten"
    nan = math.nan
    assert resets_at(resets, [0.1, 0.1, 0.1, 0.31, nan, nan, 1.0, 5.0]) == [4], "too few were measured since then"


def test_size_of_advantages_is_the_mean_over_tokens_that_count():
    tokens = np.zeros(3, np.int32)
    whole = Sample(tokens, tokens, np.array([True, True, False]), {"advantages": -2.0})
    by_token = Sample(tokens, tokens, np.array([False, True, True]), {}, {"advantages": np.array([9.0, 1.0, -4.0])})
    assert mean_abs_advantage([whole, by_token]) == (2 + 2 + 1 + 4) / 4
    assert math.isnan(mean_abs_advantage([]))


def test_soft_resets_and_averages_say_how_far_the_reference_goes():
    soft = decided(Resets(reference_every=2, mix=0.6, ema=0.9), [0.1, 0.1], updates=1.0)
    assert [d.mix for d in soft] == [pytest.approx(0.1), 0.6] and all(d.reset_reference for d in soft)
    assert [d.snapshot for d in soft] == [False, True] and [bool(d.events) for d in soft] == [False, True]
    hard = decided(Resets(reference_every=2, ema=0.9), [0.1, 0.1], updates=1.0)
    assert hard[1].mix == 1, "of several the one that goes furthest counts"
    assert not decided(Resets(ema=0.9), [0.1], updates=0.0)[0].reset_reference, "no update, nothing to follow"
    assert not decided(Resets(reference_every=2, snapshots=False), [0.1, 0.1])[1].snapshot
    # An average is no reset: the window of a KL goes on.
    assert decided(Resets(ema=0.9, on_kl=0.3, kl_window=1), [0.5, 0.5], updates=1.0)[1].events


def test_what_a_guard_has_kept_from_being_reset_is_still_to_come():
    rules = {
        "stall": partial(on_stall, resets=Resets(on_stall=1), every=1),
        "guard": partial(not_a_number, learning_rate=1.0),
    }
    before = {"stall": {"best": 0.5, "stalled": 0}}
    decision, memory = decide(rules, {"step": 3, "eval/x/pass@1": 0.4, "updates/not_finite": 1.0}, before)
    assert decision.stop == GUARD and not decision.reset_reference and memory["stall"] == before["stall"]


def test_a_run_has_the_rules_of_its_recipe():
    guards = {"not_a_number", "reward_fails", "teaches_nothing"}
    assert rules_in(SMOKE).keys() == guards | {"by_hand"}
    one, two = (rules_in(configs.with_recipe(SMOKE, name)) for name in ("prorl_v1", "prorl_v2"))
    filtered = guards | {"few_kept"}
    resets = RECIPES["prorl_v1"].resets
    assert (resets.on_stall, resets.with_optimiser) == (3, True)
    test = configs.evaluation_key(SMOKE)
    assert one["stall"].keywords == {"resets": resets, "every": SMOKE.evaluation.every, "test": test}
    assert one.keys() == filtered | {"stall", "by_hand"}
    assert two["reference"].keywords["every"] == 300 and not two["reference"].keywords["resets"].with_optimiser
    assert two.keys() == filtered | {"reference", "by_hand"}
    without = dataclasses.replace(SMOKE, recipe=RECIPES["dapo"])
    assert rules_in(without).keys() == filtered, "there is no reference that could be reset by hand"
    kimi = rules_in(configs.with_recipe(SMOKE, "kimi_k1_5"))
    assert kimi["optimiser"].keywords["every"] == 1 and kimi["optimiser"].keywords["reference"] is False
    controlled = dataclasses.replace(SMOKE, recipe=dataclasses.replace(SMOKE.recipe, controller=AdaptiveKL(0.1)))
    assert rules_in(controlled)["controller"].keywords == {
        "reads": AdaptiveKL.reads,
        "controller": AdaptiveKL(0.1),
    }
    only = {
        name: rules_in(configs.with_recipe(SMOKE, name))["teaches_nothing"].keywords["only_advantages"]
        for name in RECIPES
    }
    assert only["grpo"] is False and only["dr_grpo"] is True


def test_a_run_has_the_rules_of_its_resets():
    recipe = Recipe("mine", PRESETS["grpo"], resets=Resets(on_kl=0.3, on_kl_jump=4.0, mix=0.5, ema=0.9))
    found = rules_in(dataclasses.replace(SMOKE, recipe=recipe))
    assert found["kl"].keywords == {"resets": recipe.resets} and found["ema"].keywords == {"ema": 0.9}


@pytest.fixture(scope="module")
def state():
    """A state over eight devices whose policy is not its reference."""
    mesh = make_mesh(MeshShape(1, 8, 1))
    state = create_state(tiny(), build(Optimiser()), True, mesh)
    params = jax.tree.map(lambda x: x * 1.5 + 0.25, state.policy.params)
    return state.with_role("policy", params=params)


def test_a_mixture_is_by_weight_in_buffers_of_its_own_and_compiles_once(state):
    policy, before = (jax.device_get(x) for x in (state.policy.params, state.reference))
    layouts = jax.tree.map(lambda x: x.sharding, state.reference)
    moved = apply_resets(Decision(reset_reference=True, mix=0.25), state, SMOKE)
    jax.tree.map(
        lambda new, old, now: np.testing.assert_allclose(new, 0.75 * old + 0.25 * now, rtol=1e-6, atol=1e-7),
        jax.device_get(moved.reference), before, policy,
    )  # fmt: skip
    for found, wanted, live in zip(*map(jax.tree.leaves, (moved.reference, layouts, moved.policy.params)), strict=True):
        assert found.sharding.is_equivalent_to(wanted, found.ndim)
        assert found.addressable_shards[0].data.unsafe_buffer_pointer() != (
            live.addressable_shards[0].data.unsafe_buffer_pointer()
        )
    with Compilations() as compilations:
        again = apply_resets(Decision(reset_reference=True, mix=0.125), moved, SMOKE)
    assert not compilations.heard
    whole = apply_resets(Decision(reset_reference=True), again, SMOKE)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole.reference), policy)


def test_a_bfloat16_reference_is_mixed_in_float32():
    params = jnp.full((4,), 1.0, jnp.bfloat16)
    from jaxrl_llm.types import Role, TrainState

    state = TrainState({"policy": Role(params * 2, None, jnp.int32(0))}, {"reference": params})
    found = apply_resets(Decision(reset_reference=True, mix=0.3), state, SMOKE).reference
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.full((4,), 1.3, jnp.bfloat16))


NO_KL = dataclasses.replace(PRESETS["grpo"], kl_coef=0.0)
IN_REWARD = dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.01)
REFUSED = [
    (Resets(on_kl=0.1), NO_KL, {}, "recipe.resets.on_kl 0.1 has no reference to reset"),
    (Resets(ema=0.9), NO_KL, {}, "recipe.resets.ema 0.9 has no reference to reset"),
    (Resets(on_kl_share=0.5), NO_KL, {"output": configs.Output(monitor_kl=True)}, "no share in the loss to compare"),
    (Resets(on_kl_share=0.5), IN_REWARD, {}, "take recipe.resets.on_kl"),
    (Resets(on_kl_jump=0.5), PRESETS["grpo"], {}, "recipe.resets.on_kl_jump must be above 1, or 0 for off, got 0.5"),
    (Resets(on_kl=math.nan), PRESETS["grpo"], {}, "recipe.resets.on_kl must be at least 0"),
    (Resets(kl_window=0), PRESETS["grpo"], {}, "recipe.resets.kl_window must be at least 1, got 0"),
    (Resets(mix=0.5), PRESETS["grpo"], {}, "recipe.resets.mix 0.5 has no reset to act in"),
    (Resets(mix=0.0, on_kl=1), PRESETS["grpo"], {}, "recipe.resets.mix must be above 0 and at most 1, got 0.0"),
    (Resets(ema=1.0), PRESETS["grpo"], {}, "recipe.resets.ema must be from 0 (off) to below 1, got 1.0"),
    (
        Resets(on_kl=1, mix=0.5),
        PRESETS["grpo"],
        {"learner": dataclasses.replace(SMOKE.learner, lora=Lora(rank=2))},
        "recipe.resets.mix 0.5 would mix the factors of two adapters",
    ),
    (
        Resets(ema=0.5),
        PRESETS["grpo"],
        {"learner": dataclasses.replace(SMOKE.learner, dtype="bfloat16", optimiser=Optimiser(learning_rate=1e-3))},
        "recipe.resets.ema 0.5 moves a bfloat16 reference by less than its rounding",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_act_is_refused_in_one_line(case):
    resets, algorithm, changes, words = REFUSED[case]
    run = dataclasses.replace(SMOKE, recipe=Recipe("mine", algorithm, resets=resets), **changes)
    with pytest.raises(InputError) as refused:
        configs.validate(run)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_watched_kl_resets_where_none_is_in_the_loss():
    watched = dataclasses.replace(
        SMOKE,
        recipe=Recipe("mine", NO_KL, resets=Resets(on_kl=0.1, reference_every=50)),
        output=configs.Output(monitor_kl=True),
    )
    configs.validate(watched)


def test_many_snapshots_are_told_before_the_run():
    recipe = Recipe("mine", PRESETS["grpo"], resets=Resets(reference_every=1))
    run = dataclasses.replace(SMOKE, recipe=recipe, steps=21)
    told = "recipe.resets.reference_every 1 keeps 21 snapshots of the models for good; --recipe.resets.no_snapshots"
    assert any(told in line for line in configs.notes(run))
    silent = dataclasses.replace(recipe, resets=Resets(reference_every=1, snapshots=False))
    assert not any("snapshots" in line for line in configs.notes(dataclasses.replace(run, recipe=silent)))
