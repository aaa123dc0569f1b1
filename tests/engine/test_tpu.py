"""The sampler's compiled calls for a TPU that need not be there: the cache is updated where it lies, never copied."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.repetition import fresh_tail
from jaxrl_llm.engine.sampling import asked
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import Admission, as_rules, empty_slots, fill_slots, run_chunk
from jaxrl_llm.models.cache import empty_cache
from jaxrl_llm.models.config import Attention, ModelConfig, Norm
from jaxrl_llm.models.decoder import initialise

OPTIMISED = True

SLOTS, GROUP, COLUMNS, STEPS = 32, 4, (1024, 2048), 16
CONFIG = ModelConfig("qwen2", 1024, 256, 3, 512, Attention(4, 2, 64, bias=True), Norm(1e-6), tied_embeddings=True)


@functools.cache
def chip():
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def abstract(tree):
    """Shapes on the chip."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip()), tree)


def slots(columns):
    """As many columns in slots as in the blocks of prompts."""
    shape = SlotShape(SLOTS, columns, SLOTS // GROUP, columns, 1, GROUP)
    return abstract(jax.eval_shape(lambda: empty_slots(CONFIG, shape, jnp.bfloat16)))


def chunk(columns):
    make = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), initialise(CONFIG, key))
    model = abstract(jax.eval_shape(make, jax.random.key(0)))
    return run_chunk.lower(model, slots(columns), abstract(as_rules(Sampling())), STEPS, asked(Sampling()), GROUP)


def fill(columns):
    row = np.zeros(SLOTS, np.int32)
    blocks, seeds = np.zeros(SLOTS // GROUP, np.int32), np.zeros((SLOTS, 2), np.uint32)
    begun = Admission(blocks, row, row > 0, row, row, row, row, seeds, row, row, fresh_tail(SLOTS, None))
    prompts = jax.eval_shape(lambda: empty_cache(CONFIG, 8, 256, jnp.bfloat16))
    return fill_slots.lower(slots(columns), abstract(prompts), abstract(begun))


@pytest.fixture(autouse=True)
def nothing_is_read_from_the_compilation_cache():
    """A cached program of a TPU that is not there cannot be loaded."""
    on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("call", [chunk, fill])
def test_memory_beside_the_cache_does_not_grow_with_it(call):
    found = [call(columns).compile().memory_analysis() for columns in COLUMNS]
    small, large = (
        sum(x.size * x.dtype.itemsize for x in [*slots(columns).cache, *slots(columns).blocks]) for columns in COLUMNS
    )
    assert found[0].alias_size_in_bytes >= small and found[1].alias_size_in_bytes >= large
    assert found[1].temp_size_in_bytes - found[0].temp_size_in_bytes < 0.01 * (large - small)
    assert found[1].temp_size_in_bytes < 0.1 * large
