"""One step at a time, compiled, mapped over batches, or divided over 8 devices: the same numbers."""

import functools

import chex
import jax
import numpy as np
import pytest
from algorithms.batches import NAMES, plain, presets, ragged, scored
from algorithms.test_estimators import BY_TOKEN, ESTIMATORS, every
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms import PRESETS

LENGTHS = (5, 3, 1, 4, 0, 2, 5, 2)
ALL = tuple(ESTIMATORS)


def same(found, wanted):
    """Two trees of results; sums over rows may be taken in another order."""
    chex.assert_trees_all_close(found, wanted, rtol=2e-5, atol=1e-6)


@functools.cache
def compiled():
    return presets(*ragged(0, LENGTHS))


@functools.cache
def mapped():
    batches = [ragged(seed, LENGTHS) for seed in (1, 0)]
    return jax.vmap(presets)(*jax.tree.map(lambda *x: np.stack(x), *batches))


def divided(tree):
    """The arrays on 8 devices, their first axis divided among them."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("rows")))


@functools.cache
def sharded():
    return presets(*divided(ragged(0, LENGTHS)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_the_same_step_by_step_and_compiled(name):
    same(plain(PRESETS[name], *ragged(0, LENGTHS)), compiled()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_the_same_mapped_over_batches(name):
    same(jax.tree.map(lambda x: x[1], mapped()[name]), compiled()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_the_same_on_eight_devices(name):
    (loss, _), grad = sharded()[name]
    assert len(grad.sharding.device_set) == 8 and loss.sharding.is_fully_replicated
    same(sharded()[name], compiled()[name])


@functools.cache
def estimated():
    rewards, context = scored(0, LENGTHS)
    return every(ALL, rewards.reshape(4, 2), context)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_estimator_is_the_same_step_by_step_and_compiled(name):
    rewards, context = scored(0, LENGTHS)
    rewards = rewards.reshape(4, 2)
    found = ESTIMATORS[name](np.stack([rewards, rewards**2], axis=-1) if name == "gdpo" else rewards, context)
    same(found if name in BY_TOKEN else found.reshape(-1), estimated()[name])


@pytest.mark.slow
def test_estimators_are_the_same_mapped_over_batches():
    batches = [scored(seed, LENGTHS) for seed in (1, 0)]
    rewards, context = jax.tree.map(lambda *x: np.stack(x), *batches)
    found = jax.vmap(lambda r, c: every(ALL, r, c))(rewards.reshape(2, 4, 2), context)
    for name in ALL:
        same(found[name][1], estimated()[name])


@pytest.mark.slow
def test_estimators_are_the_same_on_eight_devices():
    rewards, context = scored(0, LENGTHS)
    ids = np.repeat(np.arange(4), 2)
    found = every(ALL, *divided((rewards, context._replace(group_ids=ids))))
    for name in ALL:
        same(found[name], estimated()[name])
