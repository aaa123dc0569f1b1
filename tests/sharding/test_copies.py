"""Key/value heads on more devices of ``tensor`` than there are: each device holds a copy of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import PROMPTS, WIDTH, T, one_device, policy_gradient, rollout
from tiny import KINDS, largest_difference

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.engine.slots import extend_prompts
from jaxrl_llm.learner import Layout, pack
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import attend_with_copies, causal_rows, initialise
from jaxrl_llm.models.layers import attention_over
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, head_copies, make_mesh, shardings

pytestmark = pytest.mark.slow

SEVEN = dataclasses.replace(KINDS["bias"], attention=dataclasses.replace(KINDS["bias"].attention, heads=14, kv_heads=2))
"""Seven query heads for each of two key/value heads, as Qwen2.5-7B has for each of four."""
LAYOUT = Layout(8, 24, T)


@functools.cache
def seven():
    return initialise(SEVEN, jax.random.key(0), scale=0.3)


@pytest.mark.parametrize(
    ("heads", "tensor", "copies"), [(2, 1, 1), (2, 4, 2), (2, 8, 4), (4, 8, 2), (6, 4, 2), (1, 8, 8)]
)
def test_copies_are_as_few_as_divide(heads, tensor, copies):
    assert head_copies(heads, tensor) == copies
    assert heads * copies % tensor == 0 and head_copies(heads) == 1


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("heads", [4, 14])
def test_copies_of_heads_change_no_bit(copies, heads):
    q, k, v = (
        jax.random.normal(key, (3, 9, count, 8))
        for key, count in zip(jax.random.split(jax.random.key(0), 3), (heads, 2, 2), strict=True)
    )
    config = dataclasses.replace(SEVEN.attention, heads=heads)
    attend = functools.partial(
        attention_over(causal_rows(np.zeros((3, 9))), config, ComputeOptions()), window=jnp.int32(4)
    )
    form = jax.jit(lambda count, *given: attend_with_copies(attend, count, *given), static_argnums=0)
    np.testing.assert_array_equal(form(copies, q, k, v), form(1, q, k, v))
    gradient = lambda count: jax.grad(lambda given: jnp.sum(jnp.sin(form(count, *given))))((q, k, v))
    assert largest_difference(gradient(copies), gradient(1)) < 1e-6


@pytest.mark.parametrize(
    ("shape", "strict", "cache"), [((1, 2, 4), False, "auto"), ((1, 1, 8), True, "auto"), ((1, 2, 4), False, "int8")]
)
def test_completions_do_not_depend_on_copies(shape, strict, cache):
    model = seven()
    mesh = make_mesh(MeshShape(*shape))
    rules = Sampling(max_new_tokens=6, stop_ids=(3, 11))
    prompts, seeds = [p for p in PROMPTS for _ in range(4)], range(12)
    wanted = Engine(model, 8, WIDTH, 3, strict=strict, group=4, kv_cache_dtype=cache).generate(
        model, prompts, seeds, rules
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh))
        engine = Engine(placed, 8, WIDTH, 3, mesh, strict, 4, kv_cache_dtype=cache)
        found = engine.generate(placed, prompts, seeds, rules)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2, 4), (1, 1, 8)])
def test_a_device_holds_one_head_of_the_cache_with_its_numbers(shape):
    mesh = make_mesh(MeshShape(*shape))
    lengths, tokens = np.zeros(8, np.int32), np.arange(80, dtype=np.int32).reshape(8, 10) % SEVEN.vocab_size
    plain, _ = extend_prompts(seven(), None, lengths, tokens, lengths, 16)
    with jax.set_mesh(mesh):
        model = jax.device_put(seven(), shardings(seven(), mesh))
        found, _ = extend_prompts(model, None, lengths, tokens, lengths, 16, mesh)
    for whole, wanted in zip(found[:2], plain[:2], strict=True):
        assert whole.addressable_shards[0].data.shape[1:3] == (8 // shape[1], 1)
        copies = np.repeat(wanted, shape[2] // 2, axis=2)
        np.testing.assert_allclose(whole, copies, rtol=1e-4, atol=1e-5)


def test_gradients_do_not_depend_on_copies():
    def gradient(mesh):
        with jax.set_mesh(mesh):
            model = jax.device_put(seven(), shardings(seven(), mesh))
            compute = jax.jit(functools.partial(policy_gradient, algorithm=PRESETS["dapo"]))
            return jax.device_get(compute(model, put_on_mesh(pack(rollout(), LAYOUT), mesh))[0])

    assert largest_difference(gradient(make_mesh(MeshShape(1, 2, 4))), gradient(one_device())) < 1e-5
