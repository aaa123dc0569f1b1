"""The sampler's compiled calls, lowered from shapes alone, at the largest sizes that a run may bring them to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.prefix_cache import LONGEST_CALL, PIECE, ROWS, TOKENS, bucket
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.sampling import asked
from jaxrl_llm.engine.scheduler import Build, wanted
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import (
    Slots,
    as_rules,
    empty_slots,
    extend_prompts,
    parts_of,
    rearranged,
    run_chunk,
    slot_shardings,
)
from jaxrl_llm.models.cache import Cache, empty_cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.sharding import abstract


def largest_shape(config: Any, rollout: Rollout, dtype: Any, mesh: Any, sampling: Sampling) -> SlotShape:
    """All slots, completions and prompts at their longest, and as many blocks of prompts as any requests could need."""
    group = 1 if rollout.strict else min(rollout.group, rollout.slots)
    build = Build(config, dtype, rollout.slots, rollout.max_length, rollout.chunk, mesh, rollout.strict, group)
    prompt = np.zeros(rollout.max_prompt_tokens, np.int32)
    sampled = rollout.max_new_tokens
    at_their_end = [Request(i, prompt, 0, sampled, count=sampled - 1, block_key=i) for i in range(rollout.slots)]
    shape = wanted(build, sampling, at_their_end, None, False)
    return shape._replace(blocks=shape.rows)


def abstract_slots(config: Any, shape: SlotShape, dtype: Any, mesh: Any, sampling: Sampling) -> Slots:
    """Slots as shapes with their layout; ``mesh`` may be abstract."""
    slots = jax.eval_shape(lambda: empty_slots(config, shape, dtype, None, sampling.repetition))
    return abstract(slots, slot_shardings(slots, mesh))


def lower_chunk(
    model: Decoder, slots: Slots, rollout: Rollout, sampling: Sampling, group: int, mesh: Mesh
) -> jax.stages.Lowered:
    """A chunk of decode steps."""
    rules = jax.eval_shape(lambda: as_rules(sampling))
    with jax.set_mesh(mesh):
        return run_chunk.lower(model, slots, rules, rollout.chunk, asked(sampling), group, mesh)


def lower_growth(slots: Slots, columns: int, mesh: Mesh) -> jax.stages.Lowered:
    """The cache brought to ``columns`` columns: for a moment there are two."""
    order = jax.ShapeDtypeStruct((slots.tokens.shape[0],), jnp.int32)
    with jax.set_mesh(mesh):
        return rearranged.lower(slots, order, columns, mesh, parts_of(mesh, slots.tokens.shape[0]))


def columns_before(columns: int) -> int:
    """Columns of the cache before it grew to so many, at most."""
    return 1 << (columns - 1).bit_length() - 1


def prompt_calls(tokens: int) -> tuple[int, int, int]:
    """How prompts of so many tokens are computed: sequences in one call, tokens of each, calls for each."""
    piece = bucket(tokens) if bucket(tokens) <= LONGEST_CALL else PIECE
    calls = -(-tokens // piece)
    return max(1, min(ROWS, TOKENS // (piece if calls == 1 else piece * calls))), piece, calls


def lower_prompts(model: Decoder, rollout: Rollout, dtype: Any, mesh: Mesh) -> jax.stages.Lowered:
    """Keys and values of the longest prompts; the last call, where there are several."""
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens)

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    cache: Cache = jax.eval_shape(lambda: empty_cache(model.config, rows, bucket(calls * piece), dtype))
    with jax.set_mesh(mesh):
        return extend_prompts.lower(model, cache, int32(rows), int32(rows, piece), calls > 1)
