"""What happens between a rollout and the new policy: minibatches, epochs, anchors, early stops."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    PROMPTS,
    G,
    T,
    UpdateBy,
    changed,
    forward_on,
    groups,
    moved,
    one_device,
    padded,
    policy_training,
    rollout,
    unpacked_logp,
)  # fmt: skip
from tiny import Compilations, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.learner import (
    Layout,
    Learner,
    Optimiser,
    PolicyGradient,
    Training,
    create_state,
    learn,
    make_update,
)
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import split_minibatches
from jaxrl_llm.models.config import ComputeOptions, Lora

MESH = one_device()
FORWARD = forward_on(MESH, Layout(2, 40, T))


class Record:
    """An update that moves nothing and remembers what it was given."""

    def __init__(self, kl=()):
        self.seen, self.limits, self.kl = [], [], list(kl)

    def __call__(self, state, packed, coefficients):
        target_kl = coefficients.get("target_kl", np.inf)
        self.seen.append(packed)
        self.limits.append(target_kl)
        count = len(self.seen)
        kl = self.kl[count - 1] if self.kl else 0.0
        metrics = {"policy_kl": kl, "sampler/logp_abs_diff_max": count, "loss": count}
        refused = {
            "refused/empty": packed.counts["policy"].tokens == 0,
            "refused/not_finite": np.isnan(kl),
            "refused/far": kl > target_kl,
        }
        return state, {name: jnp.float32(value) for name, value in (metrics | refused).items()}

    def advantages(self):
        """The set of advantages of each update's samples."""
        return [frozenset(advantages_of(p)) for p in self.seen]


def advantages_of(packed):
    """Those of its samples."""
    found = np.asarray(packed.by_sequence["advantages"])
    return found[found != 0].tolist()


def run(settings, update, held=False, seed=3, samples=None, algorithm=PRESETS["dapo"], coefficients=None, **given):
    """Learn from the rollout; ``held``: the state has a reference."""
    state = create_state(tiny("windows"), build(settings.optimiser), held, MESH)
    training = (Training((PolicyGradient(algorithm, settings.updates > 1),), UpdateBy(update)),)
    return learn(state, groups(samples or rollout()), settings, FORWARD, training, coefficients or {}, seed, **given)


def computed(packed):
    """What was computed before the first update and given to the loss."""
    return {"old_logp", "ref_logp"} & set(packed.by_token)


def whole():
    return [frozenset(np.float32(s.scalars["advantages"]).item() for s in group) for group in groups(rollout())]


@pytest.mark.slow
def test_epochs_go_over_the_whole_batch_again_and_again():
    record = Record()
    _, metrics = run(Learner(epochs=4, minibatches=3), record)
    epochs = [record.advantages()[i : i + 3] for i in range(0, 12, 3)]
    assert epochs[0] == whole()
    for epoch in epochs:
        assert set(epoch) == set(whole())
    assert len({tuple(e) for e in epochs}) > 1 and metrics["updates"] == 12
    again, other = Record(), Record()
    run(Learner(epochs=4, minibatches=3), again)
    run(Learner(epochs=4, minibatches=3), other, seed=4)
    assert again.advantages() == record.advantages() != other.advantages()


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_minibatches_are_whole_groups_that_partition_the_batch(minibatches):
    record = Record()
    run(Learner(minibatches=minibatches), record)
    assert len(record.seen) == minibatches
    assert frozenset().union(*record.advantages()) == frozenset().union(*whole())
    assert sum(map(len, record.advantages())) == sum(map(len, whole()))
    for group in whole():
        assert sum(group <= batch for batch in record.advantages()) == 1


def test_each_update_divides_by_its_own_counts():
    record = Record()
    run(Learner(minibatches=3), record)
    for packed, group in zip(record.seen, groups(rollout()), strict=True):
        assert float(packed.counts["policy"].tokens) == sum(s.mask.sum() for s in group)
        assert float(packed.counts["policy"].sequences) == sum(s.mask.any() for s in group)


def test_one_update_needs_no_old_policy_and_no_coefficient_no_reference():
    record = Record()
    run(Learner(), record)
    assert not computed(record.seen[0])
    for settings in (Learner(epochs=2), Learner(minibatches=2)):
        record = Record()
        run(settings, record)
        assert all(computed(p) == {"old_logp"} for p in record.seen)


def test_old_and_reference_are_scored_before_the_first_update():
    settings = Learner(optimiser=Optimiser(learning_rate=1e-2), epochs=2)
    real = policy_training(PRESETS["grpo"], settings.optimiser, several=True).update
    record = Record()

    def update(state, packed, coefficients):
        record(None, packed, coefficients)
        return real(state, packed, coefficients)

    run(settings, update, held=True, algorithm=PRESETS["grpo"])
    first, second = record.seen
    for name in ("old_logp", "ref_logp"):
        np.testing.assert_array_equal(first.by_token[name], second.by_token[name])
    wanted = sorted(np.asarray(unpacked_logp(tiny("windows"), rollout()))[:, 0].tolist())
    for name in ("old_logp", "ref_logp"):
        found = np.asarray(first.by_token[name])[np.asarray(first.by_sequence["advantages"]) != 0]
        np.testing.assert_allclose(sorted(found[:, 0].tolist()), wanted, atol=1e-5)


def test_the_passes_end_with_the_update_that_is_refused():
    record = Record(kl=[0.2, 0.01, 0.3, 0.0])
    _, metrics = run(Learner(epochs=4, target_kl=0.1), record)
    assert len(record.seen) == 3 and metrics["target_kl/early_stops"] == 1
    assert record.limits == [np.inf, 0.1, 0.1], "nothing has moved before the first update"
    assert metrics["updates"] == 2 and metrics["loss"] == 1.5, "a refused update is in no mean"
    record = Record(kl=[0.0, 0.01, 0.05, 0.09])
    _, metrics = run(Learner(epochs=4, target_kl=0.1), record)
    assert len(record.seen) == 4 and metrics["target_kl/early_stops"] == 0
    assert "target_kl/early_stops" not in run(Learner(), Record())[1]


def test_a_gradient_that_is_not_finite_ends_the_passes():
    record = Record(kl=[0.0, np.nan, 0.0])
    _, metrics = run(Learner(epochs=3), record)
    assert len(record.seen) == 2 and metrics["updates"] == 1 == metrics["updates/not_finite"] == metrics["loss"]
    _, metrics = run(Learner(), Record(kl=[np.nan]))
    assert metrics["updates"] == 0 and metrics["updates/not_finite"] == 1 and np.isnan(metrics["loss"])


BROKEN = {
    "the sampler's log-probability": (lambda s: s.with_arrays(sampler_logp=s.arrays["sampler_logp"] * np.nan), 1),
    "an advantage": (lambda s: dataclasses.replace(s, scalars=s.scalars | {"advantages": np.nan}), 1),
    "that of one token": (lambda s: s.with_arrays(sampler_logp=np.where(s.mask, np.inf, 0).astype(np.float32)), 1),
    "what does not count": (
        lambda s: dataclasses.replace(s, scalars=s.scalars | {"advantages": np.nan}, mask=np.zeros_like(s.mask)),
        0,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_numbers_of_samples_that_are_not_finite_are_named(name):
    change, count = BROKEN[name]
    samples = [change(sample) if index == 1 else sample for index, sample in enumerate(rollout())]
    found = {key: value for key, value in run(Learner(), Record(), samples=samples)[1].items() if "not_finite/" in key}
    assert list(found.values()) == [1.0] * count and set(found) <= {"not_finite/advantages", "not_finite/sampler_logp"}


@dataclasses.dataclass(frozen=True)
class Overflowing(PolicyGradient):
    """A loss that is not a number where the gradient is one."""

    def __call__(self, outputs, batch, counts, coefficients):
        """Return the loss with a constant."""
        loss, metrics = super().__call__(outputs, batch, counts, coefficients)
        return loss + coefficients["constant"], metrics | {"loss": loss + coefficients["constant"]}


def test_an_update_with_such_a_loss_is_refused():
    settings = Learner(optimiser=Optimiser(learning_rate=1e-2))
    rate, compute = learning_rate(settings.optimiser), ComputeOptions()
    update = make_update((Overflowing(PRESETS["dapo"]),), build(settings.optimiser), rate, compute)
    before = create_state(tiny("windows"), build(settings.optimiser), False, MESH).policy
    for constant, refused in ((0.0, 0), (np.inf, 1), (np.nan, 1)):
        state, metrics = run(settings, update, coefficients={"constant": constant})
        assert metrics["updates/not_finite"] == refused == int(state.policy.updates) ^ 1
        assert metrics.get("not_finite/loss", 0.0) == refused and "not_finite/grad_norm" not in metrics
        same = jax.tree.map(lambda a, b: bool((a == b).all()), state.policy.params, before.params)
        assert all(jax.tree.leaves(same)) == bool(refused)


def masked(samples, groups=range(len(PROMPTS))):
    """No token of these groups is in the loss."""
    return [
        dataclasses.replace(s, mask=np.zeros_like(s.mask)) if index // G in groups else s
        for index, s in enumerate(samples)
    ]


def test_minibatches_without_tokens_are_passed_over():
    record = Record()
    _, metrics = run(Learner(minibatches=3, target_kl=0.1), record, samples=masked(rollout(), [0]))
    assert record.limits == [np.inf, np.inf, 0.1] and metrics["updates"] == 2
    assert metrics["loss"] == 2.5 and metrics["sampler/logp_abs_diff_max"] == 2
    _, metrics = run(Learner(), Record(), samples=masked(rollout()), measure_kl=True)
    assert metrics.pop("updates") == 0 == metrics.pop("updates/not_finite")
    assert {"loss", "policy_kl", "controller/kl", "controller/kl_sequence"} < set(metrics)
    assert all(np.isnan(value) for value in metrics.values()), metrics


def test_metrics_are_means_and_those_of_the_sampler_are_on_policy():
    _, metrics = run(Learner(epochs=3), Record())
    assert metrics["loss"] == 2.0 and metrics["sampler/logp_abs_diff_max"] == 1.0


OTHER = moved(tiny("windows"), tiny("windows", 5), 0.05)


def jump(state, packed, coefficients):
    """An update to another policy."""
    moved = state.with_role("policy", params=jax.tree.map(jnp.copy, OTHER))
    return moved, {name: jnp.float32(0) for name in ("policy_kl", "refused/empty", "refused/not_finite")}


HELD_IN = {
    "loss": PRESETS["grpo"],
    "reward": dataclasses.replace(PRESETS["grpo"], kl_in="reward"),
    None: PRESETS["dapo"],
}
"""Algorithms whose KL to a reference is there."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "reward", None])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_controller_is_told_how_far_the_new_policy_is(where, minibatches):
    # Were the sampler taken for the old policy, or another policy's tokens for the new one's, this gap would show.
    stale = [index % 3 == 0 for index in range(len(rollout()))]
    samples = [
        changed(s, sampler_logp=s.arrays["sampler_logp"] - np.float32(0.3), fresh=not old)
        for s, old in zip(rollout(), stale, strict=True)
    ]
    _, metrics = run(
        Learner(minibatches=minibatches),
        jump,
        held=where is not None,
        samples=samples,
        algorithm=HELD_IN[where],
        measure_kl=True,
    )
    old, new = (np.float64(unpacked_logp(model, samples)) for model in (tiny("windows"), OTHER))
    sampler, mask = (padded(samples, name) for name in ("sampler_logp", "mask"))
    if where is None:
        ratio = np.exp(new - np.where(np.array(stale)[:, None], sampler, old))
        wanted = ratio - 1 - np.log(ratio)
    else:  # the reference is the policy before the jump
        wanted = np.exp(new - sampler) * (np.exp(old - new) - 1 - (old - new))
    total = np.sum(wanted * mask)
    np.testing.assert_allclose(metrics["controller/kl"], total / mask.sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["controller/kl_sequence"], total / mask.any(axis=1).sum(), rtol=1e-4)


def test_nothing_is_measured_for_a_controller_that_is_not_there():
    record = Record()
    _, metrics = run(Learner(), record, measure_kl=True)
    assert not computed(record.seen[0]) and metrics["controller/kl"] == 0 == metrics["controller/kl_sequence"]
    record = Record()
    run(Learner(), record, held=True, algorithm=HELD_IN["reward"], measure_kl=True)
    assert not computed(record.seen[0]), "what the KL is measured with is not in the loss"
    assert not any(name.startswith("controller/") for name in run(Learner(), Record())[1])


def with_reference(state):
    """The state whose reference is another policy than its own."""
    return state._replace(frozen={"reference": jax.tree.map(jnp.copy, OTHER)})


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "scored"), [(Learner(), set()), (Learner(minibatches=3), {"old_logp"})])
def test_a_reference_is_watched_that_nothing_is_learned_from(settings, scored):
    # A text beside the groups is none of the policy's, and tokens of another policy count by their weight.
    samples = [changed(s, sampler_logp=s.arrays["sampler_logp"] - np.float32(0.3)) for s in rollout()]
    text = dataclasses.replace(samples[0], mask=np.ones_like(samples[0].mask), counted_by=("text/",))
    given = [[dataclasses.replace(s, counted_by=("policy",)) for s in group] for group in groups(samples)]
    record = Record()
    training = (Training((PolicyGradient(PRESETS["dapo"], settings.updates > 1), Beside()), UpdateBy(record)),)
    state = with_reference(create_state(tiny("windows"), build(settings.optimiser), True, MESH))
    state, metrics = learn(state, [*given, [text]], settings, FORWARD, training, {}, 3, monitor_kl=True)
    logp, ref = (np.float64(unpacked_logp(model, samples)) for model in (tiny("windows"), OTHER))
    sampler, mask = (padded(samples, name) for name in ("sampler_logp", "mask"))
    terms = np.exp(logp - sampler) * (np.exp(ref - logp) - 1 - (ref - logp))
    np.testing.assert_allclose(metrics["kl"], np.sum(terms * mask) / mask.sum(), rtol=1e-4)
    assert all(computed(packed) == scored for packed in record.seen), "the updates see nothing of it"
    assert state.reference is not None and metrics["kl"] > 0.01


class Beside(Objective):
    """An objective of the policy that counts texts."""

    name, role, outputs, needs = "text/", "policy", (), ()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [Lora(), Lora(2, 4.0, ("attn/q", "mlp/down"))])
def test_to_watch_the_kl_changes_nothing_that_is_learned(lora):
    settings = Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=3)
    training = (policy_training(PRESETS["dapo"], settings.optimiser, several=True),)
    plain = watched = None
    for step in range(2):
        states, found = [], []
        for before, held in ((plain, False), (watched, True)):
            state = before or create_state(tiny("windows"), build(settings.optimiser), held, MESH, lora)
            state, metrics = learn(state, groups(rollout()), settings, FORWARD, training, {}, step, monitor_kl=held)
            states.append(state)
            found.append(metrics)
        plain, watched = states
        assert (found[1].pop("kl") > 0) == (step > 0), "0 exactly before the first update"
        assert found[0] == found[1] and found[0]["grad_norm"] > 0
        chex.assert_trees_all_equal(*(jax.device_get(state.policy) for state in states))
    assert largest_difference(watched.policy.params, watched.reference) > 1e-3


def test_a_watched_reference_is_not_what_a_controller_holds_the_policy_to():
    found = [
        run(Learner(), jump, held=held, measure_kl=True, monitor_kl=held)[1]["controller/kl"] for held in (True, False)
    ]
    assert found[0] == found[1] > 0


def test_a_second_epoch_sees_ratios_that_moved_and_a_far_one_is_refused():
    settings = Learner(optimiser=Optimiser(learning_rate=3e-3, weight_decay=0.1), epochs=3, target_kl=1e9)
    real = policy_training(PRESETS["dapo"], settings.optimiser, several=True).update
    seen, states = [], []

    def update(state, packed, coefficients):
        state, metrics = real(state, packed, coefficients)
        seen.append(jax.device_get(metrics))
        states.append(jax.device_get(jax.tree.map(np.array, state)))
        return state, metrics

    state, metrics = run(settings, update)
    np.testing.assert_allclose(seen[0]["ratio"], 1.0, rtol=1e-6)
    assert seen[0]["policy_kl"] < 1e-9 and seen[1]["policy_kl"] > 1e-6
    assert seen[1]["loss"] < seen[0]["loss"] and int(state.policy.updates) == 3 == metrics["updates"]
    assert largest_difference(state.policy.params, tiny("windows")) > 1e-3
    rare, cut = (sum(one[f"{name}/high"] for one in seen) for name in ("clip_probability", "clip_fraction"))
    assert 0 < metrics["clip_probability/high"] < 1 and abs(metrics["clip_probability/high"] - rare / cut) < 1e-6
    # Each target is passed by the update after those that it lets through.
    for target, applied in ((1e-12, 1), ((seen[1]["policy_kl"] + seen[2]["policy_kl"]) / 2, 2)):
        with Compilations() as compilations:
            state, metrics = run(dataclasses.replace(settings, target_kl=float(target)), update)
        assert "jit(update)" not in compilations.heard
        chex.assert_trees_all_equal(jax.device_get(state), states[applied - 1])
        assert metrics["updates"] == applied == int(state.policy.updates) and metrics["target_kl/early_stops"] == 1
        np.testing.assert_allclose(metrics["loss"], np.mean([one["loss"] for one in seen[:applied]]), rtol=1e-6)
    assert seen[1]["policy_kl"] < seen[2]["policy_kl"]


@pytest.mark.parametrize(("optimiser", "wanted"), [
    (Optimiser(learning_rate=2.0), {0: 2.0, 100: 2.0}),
    (Optimiser(learning_rate=1.0, warmup=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 50: 1.0}),
    (Optimiser(learning_rate=1.0, warmup=1), {0: 1.0, 1: 1.0}),
    (Optimiser(learning_rate=1.0, schedule="cosine", decay=(0, 10)), {0: 1.0, 5: 0.5, 10: 0.0, 20: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="cosine", decay=(0, 12)), {0: 0.5, 1: 1.0, 7: 0.5, 12: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="linear", decay=(0, 12)),
     {0: 0.5, 2: 1.0, 7: 0.5, 12: 0.0, 99: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="linear", decay=(8, 12)),
     {0: 0.5, 1: 1.0, 8: 1.0, 9: 0.75, 12: 0.0}),
    (Optimiser(learning_rate=1.0, schedule="cosine", decay=(8, 12)), {0: 1.0, 8: 1.0, 10: 0.5, 11: 0.146447, 12: 0.0}),
])  # fmt: skip
def test_learning_rates(optimiser, wanted):
    rate = learning_rate(optimiser)
    for count, value in wanted.items():
        np.testing.assert_allclose(rate(jnp.int32(count)), value, atol=1e-6)


def test_fewer_groups_than_minibatches_make_no_empty_one():
    groups = [["a", "b"], ["c"], ["d"]]
    assert split_minibatches(groups, 2) == [["a", "b", "c"], ["d"]]
    assert split_minibatches(groups, 3) == split_minibatches(groups, 9) == [["a", "b"], ["c"], ["d"]]
