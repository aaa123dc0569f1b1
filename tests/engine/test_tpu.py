"""The sampler's compiled calls for a TPU that need not be there: the cache is updated where it lies, never copied."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.engine.requests import SlotShape
from jaxrl_llm.engine.sampling import draw_options, to_traced
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import empty_admission, empty_slots, fill_slots, rearrange_slots, run_chunk
from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig, Norm
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.decoding import empty_cache

OPTIMISED = True
pytestmark = [pytest.mark.slow, pytest.mark.compilers]

SLOTS, GROUP, COLUMNS, STEPS = 32, 4, (1024, 2048), 16
CONFIG = ModelConfig("qwen2", 1024, 256, 3, 512, Attention(4, 2, 64), Norm(1e-6), embeddings=Embeddings(tied=True))


@functools.cache
def chip():
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def abstract(tree):
    """Shapes on the chip."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip()), tree)


def shape(columns):
    return SlotShape(SLOTS, columns, SLOTS // GROUP, columns, 1, GROUP)


def slots(columns, dtype):
    """As many columns in slots as in the blocks of prompts, and room for more slots."""
    make = lambda: empty_slots(CONFIG, shape(columns), dtype, cache_shape=(SLOTS + 8, columns))
    return abstract(jax.eval_shape(make))


def chunk(columns, dtype):
    """Three quarters of the columns are read."""
    make = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), initialise(CONFIG, key))
    model = abstract(jax.eval_shape(make, jax.random.key(0)))
    rules = abstract(to_traced(Sampling()))
    return run_chunk.lower(
        model, slots(columns, dtype), rules, STEPS, draw_options(Sampling()), GROUP, columns=columns * 3 // 4
    )


def fill(columns, dtype):
    begun = empty_admission(shape(columns), 8, None)
    prompts = jax.eval_shape(lambda: empty_cache(CONFIG, 8, 256, dtype))
    return fill_slots.lower(slots(columns, dtype), abstract(prompts), abstract(begun))


def shrink(columns, dtype):
    """To half as many slots."""
    light = slots(columns, dtype)._replace(cache=None, blocks=None)
    order = abstract(np.zeros(SLOTS // 2, np.int32))
    return rearrange_slots.lower(slots(columns, dtype).cache, light, order, order)


@pytest.fixture(autouse=True)
def nothing_is_read_from_the_compilation_cache():
    """A cached program of a TPU that is not there cannot be loaded."""
    on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("call", [chunk, fill, shrink])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_memory_beside_the_cache_does_not_grow_with_it(call, dtype):
    found = [call(columns, dtype).compile().memory_analysis() for columns in COLUMNS]
    small, large = (
        sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(
                (slots(columns, dtype).cache, () if call is shrink else slots(columns, dtype).blocks)
            )
        )
        for columns in COLUMNS
    )
    assert found[0].alias_size_in_bytes >= small and found[1].alias_size_in_bytes >= large
    assert found[1].temp_size_in_bytes - found[0].temp_size_in_bytes < 0.01 * (large - small)
    assert found[1].temp_size_in_bytes < 0.1 * large
