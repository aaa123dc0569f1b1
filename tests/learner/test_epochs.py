"""What happens between a rollout and the new policy: minibatches, epochs, anchors, early stops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.learner import Layout, Learner, Optimiser, create_state, learn, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.models.compute import Compute
from learner.rollouts import TEMPERATURE, T, groups, one_device, rollout, unpacked_logp
from tiny import largest_difference, tiny

LAYOUT, COMPUTE = Layout(2, 40, T), Compute(remat="full")
MESH = one_device()


class Record:
    """An update that moves nothing and remembers what it was given."""

    def __init__(self, kl=()):
        self.seen, self.kl = [], list(kl)

    def __call__(self, state, packed, temperature):
        self.seen.append(packed)
        kl = self.kl[len(self.seen) - 1] if self.kl else 0.0
        return state, {
            "policy_kl": jnp.float32(kl),
            "sampler/logp_abs_diff_max": jnp.float32(len(self.seen)),
            "loss": jnp.float32(len(self.seen)),
        }

    def advantages(self):
        """The set of advantages of each update's samples."""
        return [frozenset(np.asarray(p.advantages)[np.asarray(p.advantages) != 0].tolist()) for p in self.seen]


def run(settings, update, reference=False, seed=3):
    state = create_state(tiny("windows"), build(settings.optimiser), reference, MESH)
    return learn(state, groups(rollout()), settings, LAYOUT, COMPUTE, update, TEMPERATURE, seed, MESH)


def whole():
    return [frozenset(np.float32(s.advantage).item() for s in group) for group in groups(rollout())]


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
        assert float(packed.totals.tokens) == sum(s.mask.sum() for s in group)
        assert float(packed.totals.sequences) == sum(s.mask.any() for s in group)


def test_one_update_needs_no_old_policy_and_no_coefficient_no_reference():
    record = Record()
    run(Learner(), record)
    assert record.seen[0].old_logp is None and record.seen[0].ref_logp is None
    for settings in (Learner(epochs=2), Learner(minibatches=2)):
        record = Record()
        run(settings, record)
        assert all(p.old_logp is not None and p.ref_logp is None for p in record.seen)


def test_old_and_reference_are_scored_before_the_first_update():
    settings = Learner(optimiser=Optimiser(learning_rate=1e-2), epochs=2)
    real = make_update(PRESETS["grpo"], build(settings.optimiser), learning_rate(settings.optimiser), COMPUTE)
    record = Record()

    def update(state, packed, temperature):
        record(None, packed, temperature)
        return real(state, packed, temperature)

    run(settings, update, reference=True)
    first, second = record.seen
    for name in ("old_logp", "ref_logp"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    wanted = sorted(np.asarray(unpacked_logp(tiny("windows"), rollout()))[:, 0].tolist())
    for name in ("old_logp", "ref_logp"):
        found = np.asarray(getattr(first, name))[np.asarray(first.advantages) != 0]
        np.testing.assert_allclose(sorted(found[:, 0].tolist()), wanted, atol=1e-5)


def test_the_passes_end_once_the_policy_is_far_from_where_they_began():
    record = Record(kl=[0.0, 0.01, 0.3, 0.0])
    _, metrics = run(Learner(epochs=4, target_kl=0.1), record)
    assert len(record.seen) == 3 and metrics["target_kl/early_stops"] == 1 and metrics["updates"] == 3
    record = Record(kl=[0.0, 0.01, 0.05, 0.09])
    _, metrics = run(Learner(epochs=4, target_kl=0.1), record)
    assert len(record.seen) == 4 and metrics["target_kl/early_stops"] == 0
    assert "target_kl/early_stops" not in run(Learner(), Record())[1]


def test_metrics_are_means_and_those_of_the_sampler_are_on_policy():
    _, metrics = run(Learner(epochs=3), Record())
    assert metrics["loss"] == 2.0 and metrics["sampler/logp_abs_diff_max"] == 1.0


def test_a_second_epoch_sees_ratios_that_moved():
    settings = Learner(optimiser=Optimiser(learning_rate=3e-3), epochs=2)
    real = make_update(PRESETS["dapo"], build(settings.optimiser), learning_rate(settings.optimiser), COMPUTE)
    seen = []

    def update(state, packed, temperature):
        state, metrics = real(state, packed, temperature)
        seen.append(jax.device_get(metrics))
        return state, metrics

    state, _ = run(settings, update)
    np.testing.assert_allclose(seen[0]["ratio"], 1.0, rtol=1e-6)
    assert seen[0]["policy_kl"] < 1e-9 and seen[1]["policy_kl"] > 1e-6
    assert seen[1]["loss"] < seen[0]["loss"] and int(state.updates) == 2
    assert largest_difference(state.policy, tiny("windows")) > 1e-3


@pytest.mark.parametrize(("optimiser", "wanted"), [
    (Optimiser(learning_rate=2.0), {0: 2.0, 100: 2.0}),
    (Optimiser(learning_rate=1.0, warmup=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 50: 1.0}),
    (Optimiser(learning_rate=1.0, warmup=1), {0: 1.0, 1: 1.0}),
    (Optimiser(learning_rate=1.0, schedule="cosine", decay=(0, 10)), {0: 1.0, 5: 0.5, 10: 0.0, 20: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="cosine", decay=(0, 12)), {0: 0.5, 1: 1.0, 7: 0.5, 12: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="linear", decay=(0, 12)), {0: 0.5, 2: 1.0, 7: 0.5, 12: 0.0, 99: 0.0}),
    (Optimiser(learning_rate=1.0, warmup=2, schedule="linear", decay=(8, 12)), {0: 0.5, 1: 1.0, 8: 1.0, 9: 0.75, 12: 0.0}),
    (Optimiser(learning_rate=1.0, schedule="cosine", decay=(8, 12)), {0: 1.0, 8: 1.0, 10: 0.5, 11: 0.146447, 12: 0.0}),
])  # fmt: skip
def test_learning_rates(optimiser, wanted):
    rate = learning_rate(optimiser)
    for count, value in wanted.items():
        np.testing.assert_allclose(rate(jnp.int32(count)), value, atol=1e-6)
