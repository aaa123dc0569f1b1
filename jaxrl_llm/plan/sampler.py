"""The sampler's compiled calls, lowered from shapes alone, at the largest sizes that a run may bring them to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.placement import slot_shardings
from jaxrl_llm.engine.prefix_cache import LONGEST_CALL, PIECE, bucket, rows_of_call
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.sampling import asked
from jaxrl_llm.engine.scheduler import Build, idle, wanted
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.engine.slots import (
    Slots,
    as_rules,
    empty_slots,
    extend_prompts,
    fill_slots,
    run_chunk,
)
from jaxrl_llm.models.cache import Cache, empty_cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.sharding import abstract, batch_parts


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


def prompt_calls(tokens: int, parts: int) -> tuple[int, int, int]:
    """How prompts of so many tokens are computed: sequences in one call, tokens of each, calls for each.

    ``parts``: into which the mesh divides the sequences.
    """
    piece = bucket(tokens) if bucket(tokens) <= LONGEST_CALL else PIECE
    calls = -(-tokens // piece)
    return rows_of_call(piece if calls == 1 else piece * calls, parts), piece, calls


def prompts(config: Any, rollout: Rollout, dtype: Any, mesh: Any) -> Cache:
    """What a call returns of the longest prompts, as shapes with their layout; ``mesh`` may be abstract."""
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens, batch_parts(mesh))
    cache = jax.eval_shape(lambda: empty_cache(config, rows, bucket(calls * piece), dtype))
    return abstract(cache, slot_shardings(cache, mesh))


def lower_prompts(model: Decoder, rollout: Rollout, dtype: Any, mesh: Mesh) -> jax.stages.Lowered:
    """Keys and values of the longest prompts; the last call, where there are several."""
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens, batch_parts(mesh))
    cache = prompts(model.config, rollout, dtype, mesh)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, piece), jnp.int32)
    with jax.set_mesh(mesh):
        return extend_prompts.lower(model, cache if calls > 1 else None, lengths, tokens, cache.columns, mesh)


def lower_refill(
    slots: Slots, shape: SlotShape, given: Cache, repetition: Repetition | None, mesh: Mesh
) -> jax.stages.Lowered:
    """Slots and blocks begun with prompts of a call."""
    begun = jax.eval_shape(lambda: idle(shape, given.v.shape[1], np.zeros(shape.rows, np.int32), repetition))
    with jax.set_mesh(mesh):
        return fill_slots.lower(slots, given, begun, mesh)
