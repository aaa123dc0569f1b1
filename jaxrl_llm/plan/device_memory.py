"""Memory of one device in the two halves of a step: sampling and learning."""

import dataclasses
from collections.abc import Mapping

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Configuration
from jaxrl_llm.learner.platform import token_bytes
from jaxrl_llm.learner.samples import bytes_to_estimate
from jaxrl_llm.plan.lowering import Compiled
from jaxrl_llm.plan.shapes import Arrays, PlannedModel, SamplingArrays, bytes_per_device, prompt_calls, share_of


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by kind; all but ``temporary`` are the exact sizes of arrays.

    Attributes:
      weights: the policy that learns, and the frozen base under its adapter.
      optimiser: the policy's optimiser moments.
      reference: the frozen reference policy.
      critic: the weights of the critic, or of any role other than the policy.
      critic_optimiser: the optimiser moments of those roles.
      judges: reward models.
      batch: a step's packed data, of all its updates.
      sampled: the weights to sample from.
      cache: keys and values of slots and prompts.
      temporary: memory of programs in addition to their arguments, and padding of layouts.
    """

    weights: float = 0
    optimiser: float = 0
    reference: float = 0
    critic: float = 0
    critic_optimiser: float = 0
    judges: float = 0
    batch: float = 0
    sampled: float = 0
    cache: float = 0
    temporary: float = 0

    @property
    def total(self) -> float:
        """Return the sum of all kinds."""
        return sum(dataclasses.astuple(self))


def resident(arrays: Arrays) -> DeviceMemory:
    """Return the memory of the training state, resident in both halves; moments kept in host memory do not count."""
    weights, moments = {"policy": 0, "critic": 0}, {"policy": 0, "critic": 0}
    for name, role in arrays.state.roles.items():
        kind = "policy" if name == "policy" else "critic"
        here = [x for x in jax.tree.leaves(role.opt_state) if x.sharding.memory_kind != "pinned_host"]
        weights[kind] += bytes_per_device((role.params, role.base))
        moments[kind] += bytes_per_device(here)
    return DeviceMemory(
        weights=weights["policy"],
        optimiser=moments["policy"],
        reference=bytes_per_device(arrays.state.reference),
        critic=weights["critic"],
        critic_optimiser=moments["critic"],
    )


def judges(arrays: Arrays) -> float:
    """Return the bytes of the reward models, which stay on the devices that sample."""
    return sum(one.asked.copies * bytes_per_device(one.model) for one in arrays.readings)


def learning(run: Configuration, arrays: Arrays, done: Mapping[str, Compiled]) -> DeviceMemory:
    """Return the memory while learning: state and data; weights to sample from only where sampling runs ahead.

    Reward models count too, unless they have devices of their own. ``done``: the compiled programs; empty to use
    formulas for temporaries.
    """
    base = resident(arrays)
    packed = bytes_per_device(arrays.packed)
    batch = packed * run.learner.minibatches
    needs = []
    for one in arrays.learned:
        if done:
            needs.append(compiled_temporary(done[one.name], bytes_per_device(arrays.state) + packed))
            continue
        # Gradients twice: those of a microbatch, and their sum in float32.
        gradients = sum(bytes_per_device(x) * (1 + 4 / x.dtype.itemsize) for x in jax.tree.leaves(one.role))
        needs.append(gradients + pass_by_formula(one, update=True))
    for one in arrays.readings:
        # A step's data is packed for its updates after the passes. What reads all data before the first step does so
        # before there is a state.
        if not one.asked.copies:
            there = batch + (0 if one.asked.calls else base.total - bytes_per_device(one.model))
            needs.append(reading_bytes(one, done) - there)
    if isinstance(run, configs.Run) and configs.samples_groups(run):
        layout, rows = arrays.learned[0].forward.layout, run.rollout.prompts * run.rollout.group
        estimate = bytes_to_estimate(run.recipe.algorithm.advantage, rows, layout.completion_tokens)
        needs.append(estimate / layout.parts - batch)  # of which a step's data is made
    sampled = 0
    if isinstance(arrays, SamplingArrays) and arrays.sampler.rollout.collect.staleness and not run.mesh.rollout:
        sampled = bytes_per_device(arrays.sampled)
    held = 0 if run.mesh.rollout else judges(arrays)
    return dataclasses.replace(base, judges=held, sampled=sampled, batch=batch, temporary=max(needs))


def sampling(run: Configuration, arrays: SamplingArrays, done: Mapping[str, Compiled]) -> DeviceMemory:
    """Return the memory while sampling: the state (where the same devices learn), weights to sample from, the cache.

    ``done``: as in ``learning``.
    """
    rollout = arrays.sampler.rollout
    parts = arrays.slot_shape.parts
    sampled = bytes_per_device(arrays.sampled)
    slots = bytes_per_device(arrays.slots)
    # The blocks that prompts had before, while they become more.
    blocks = bytes_per_device(arrays.slots.blocks) / 2
    # Calls with keys and values that wait at one time to be copied into slots, at the first filling.
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens, parts)
    filling = -(-min(-(-rollout.engine.slots // rollout.group), rollout.prompts) // rows)
    needs = [reading_bytes(one, done) for one in arrays.readings if one.asked.copies]
    if done:
        waiting = max(done["prompts"].outputs + done["prompts"].arguments - sampled, 0) * filling
        decode = compiled_temporary(done["decode"], sampled + slots)
        weights = done.get("weights", Compiled())
        moving = weights.refused or weights.temporary + max(weights.outputs - sampled, 0)
        refill = compiled_temporary(done["refill"], slots + waiting)
        # Slots are empty while weights are laid out; what one call of prompts returns is already among those that wait.
        busiest = max(decode, blocks, refill, done["prompts"].temporary)
        needs += [busiest + waiting, moving - slots]
    else:
        config = arrays.sampled.config
        share = share_of(arrays.sampled)
        keys = arrays.slots.cache.k
        heads = keys.sharding.shard_shape(keys.shape)[2]
        tokens = filling * rows / parts * piece * calls
        waiting = tokens * 2 * config.layers * heads * config.attention.head_dim * keys.dtype.itemsize
        logits = 4 * 4 * rollout.engine.slots / parts * config.vocab_size * share
        needs.append(max(logits, blocks) + waiting)
    base = DeviceMemory() if run.mesh.rollout else resident(arrays)
    return dataclasses.replace(base, judges=judges(arrays), sampled=sampled, cache=slots, temporary=max(needs))


def compiled_temporary(done: Compiled, given: float) -> float:
    """Return the bytes that a program needs in addition to arguments of ``given`` bytes; their padding counts."""
    return done.refused - given if done.refused else done.temporary + done.outputs + max(done.arguments - given, 0)


def reading_bytes(one: PlannedModel, done: Mapping[str, Compiled]) -> float:
    """Return the bytes that a pass needs in addition to its model: data and temporaries."""
    packed = bytes_per_device(one.packed)
    if not done:
        return packed + pass_by_formula(one, update=False)
    return packed + compiled_temporary(done[one.name], packed + bytes_per_device(one.model))


def pass_by_formula(one: PlannedModel, update: bool) -> float:
    """Estimate the bytes that a pass needs in addition to its arguments, without compiling.

    That is the model in the compute type, in its layout, ``token_bytes`` for each token, and a chunk of logits where
    the model predicts tokens.
    """
    layout = one.forward.layout
    compute = one.forward.compute
    config = one.model.config
    share = share_of(one.gathered)
    cast = sum(bytes_per_device(x) * one.width / x.dtype.itemsize for x in jax.tree.leaves(one.model))
    tokens = layout.rows * layout.row_tokens / layout.parts
    positions = one.packed.predictions.target.shape[-1]
    logits = 3 * 4 * min(positions, compute.head_chunk) * config.vocab_size * share * one.predicts
    return cast + tokens * token_bytes(compute, config, layout.row_tokens, share, update) + logits
