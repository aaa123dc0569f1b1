"""What one device holds in the two halves of a step: while it samples, and while it learns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl_llm.config import Configuration
from jaxrl_llm.learner.platform import forward_bytes, update_bytes
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.logprobs import CHUNK
from jaxrl_llm.plan.arrays import Arrays, Learned, Reading, SamplingArrays, bytes_per_device, share_of, width_of
from jaxrl_llm.plan.lowering import Compiled
from jaxrl_llm.plan.sampler import prompt_calls
from jaxrl_llm.rollout.settings import Rollout


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device by kind; all but ``temporary`` are the exact sizes of arrays.

    Attributes:
      weights: of the policy that learns, and of the frozen base under its adapter.
      optimiser: its moments.
      reference: the frozen policy.
      critic: the weights of the critic, or of any role beside the policy.
      critic_optimiser: its moments.
      judges: reward models.
      batch: a step's packed data, of all its updates.
      sampled: the weights to sample from.
      cache: keys and values of slots and prompts.
      temporary: what programs need beside their arguments, and padding of layouts.
      compiled: whether ``temporary`` is the compiler's word, and no formula's.
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
    compiled: bool = False

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, float]:
        """By kind."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "compiled"}


def resident(arrays: Arrays) -> Memory:
    """The state, which is there in both halves; moments that lie in the host's memory take none here."""
    state = arrays.state
    size = bytes_per_device
    policy = state.policy
    others = [role for name, role in state.roles.items() if name != "policy"]
    return Memory(
        weights=size(policy.params) + size(policy.base),
        optimiser=_on_device(policy.opt_state),
        reference=size(state.reference),
        critic=sum(size(role.params) + size(role.base) for role in others),
        critic_optimiser=sum(_on_device(role.opt_state) for role in others),
    )


def _on_device(moments: Any) -> int:
    return bytes_per_device([x for x in jax.tree.leaves(moments) if x.sharding.memory_kind != "pinned_host"])


def judges(arrays: Arrays) -> float:
    """The reward models, which stay where the run samples."""
    return sum(one.asked.copies * bytes_per_device(one.model) for one in arrays.readings)


def learning(run: Configuration, arrays: Arrays, base: Memory, temporary: float, compiled: bool) -> Memory:
    """While it learns: the state and the data; weights to sample from only where sampling runs ahead.

    Reward models are there too, unless they have devices of their own.
    """
    sampled = 0
    if isinstance(arrays, SamplingArrays) and arrays.rollout.collect.staleness and not run.mesh.rollout:
        sampled = bytes_per_device(arrays.sampled)
    return dataclasses.replace(
        base, judges=0 if run.mesh.rollout else judges(arrays), sampled=sampled,
        batch=bytes_per_device(arrays.packed) * run.learner.minibatches, temporary=temporary, compiled=compiled,
    )  # fmt: skip


def sampling(run: Configuration, arrays: SamplingArrays, base: Memory, temporary: float, compiled: bool) -> Memory:
    """While it samples: the state (where the same devices learn), other weights, the cache."""
    base = Memory() if run.mesh.rollout else base
    sampled = bytes_per_device(arrays.sampled)
    cache = bytes_per_device(arrays.slots)
    return dataclasses.replace(
        base, judges=judges(arrays), sampled=sampled, cache=cache, temporary=temporary, compiled=compiled
    )


def compiled_temporary(done: Compiled, given: float) -> float:
    """What a program needs beside arguments of so many bytes; their padding counts."""
    return done.refused - given if done.refused else done.temporary + done.outputs + max(done.arguments - given, 0)


def prompts_waiting(rollout: Rollout, parts: int) -> int:
    """Calls whose keys and values wait at one time to be copied into slots: those of a first filling."""
    rows, _, _ = prompt_calls(rollout.max_prompt_tokens, parts)
    return -(-min(-(-rollout.slots // rollout.group), rollout.prompts) // rows)


def learning_temporary(run: Configuration, arrays: Arrays, done: Mapping[str, Compiled], base: Memory) -> float:
    """What the busiest program that learns needs, beside the state and a step's data.

    ``done``: the programs as compiled; empty where all is by formula. ``base``: the state.
    """
    batch = bytes_per_device(arrays.packed)
    needs = []
    for one in arrays.learned:
        given = bytes_per_device(arrays.state) + batch
        needs.append(compiled_temporary(done[one.program], given) if done else update_temporary(one))
    for one in arrays.readings:
        # A step's data is packed for its updates after the passes. What reads all data before the first step does so
        # before there is a state.
        there = batch * run.learner.minibatches
        if not one.asked.copies:
            there += 0 if one.asked.calls else base.total - bytes_per_device(one.model)
            needs.append(reading_bytes(one, done) - there)
    return max(needs)


def reading_bytes(one: Reading, done: Mapping[str, Compiled]) -> float:
    """What a pass needs beside its model: data and temporaries."""
    packed = bytes_per_device(one.packed)
    if not done:
        return packed + reading_temporary(one)
    return packed + compiled_temporary(done[one.asked.name], packed + bytes_per_device(one.model))


def update_temporary(one: Learned) -> float:
    """About what an update needs beside its arguments; a formula, for machines that nothing is compiled for.

    Gradients twice (a microbatch's, and their sum in float32), the model in the compute type, activations, and a chunk
    of logits.
    """
    gradients = sum(bytes_per_device(x) * (1 + 4 / x.dtype.itemsize) for x in jax.tree.leaves(one.role))
    return gradients + _pass(one, update_bytes)


def reading_temporary(one: Reading) -> float:
    """About what a pass needs beside its model and data; a formula."""
    return _pass(one, forward_bytes)


def _pass(one: Learned | Reading, each: Callable[[Compute, ModelConfig, int, float], float]) -> float:
    """The model in the compute type, where it lies, ``each`` for each token, and a chunk of logits where there are
    any."""
    layout, compute, config = one.forward.layout, one.forward.compute, one.model.config
    share = share_of(one.gathered)
    cast = sum(bytes_per_device(x) * width_of(one) / x.dtype.itemsize for x in jax.tree.leaves(one.model))
    tokens = layout.rows * layout.row_tokens / layout.parts
    logits = 3 * 4 * CHUNK * config.vocab_size * share * one.predicts
    return cast + tokens * each(compute, config, layout.row_tokens, share) + logits


def sampling_temporary(arrays: SamplingArrays, done: Mapping[str, Compiled], parts: int) -> float:
    """What the busiest program that samples needs beside weights and cache; ``parts``: into which slots are divided."""
    if not done:
        busiest = sampling_formula(arrays, parts)
        scoring = [reading_bytes(one, done) for one in arrays.readings if one.asked.copies]
        return max(busiest, *scoring) if scoring else busiest
    size = bytes_per_device
    sampled = size(arrays.sampled)
    slots = size(arrays.slots)
    waiting = done["prompts"].outputs + done["prompts"].arguments - sampled
    waiting = max(waiting, 0) * prompts_waiting(arrays.rollout, parts)
    decode = compiled_temporary(done["decode"], sampled + slots)
    weights = done.get("weights", Compiled("weights"))
    moving = weights.refused or weights.temporary + max(weights.outputs - sampled, 0)
    refill = compiled_temporary(done["refill"], slots + waiting)
    # The blocks that prompts had before, while they become more.
    blocks = size(arrays.slots.blocks) / 2
    # Slots are empty while weights are laid out; what one call of prompts returns is already among those that wait.
    busiest = max(decode, blocks, refill, done["prompts"].temporary)
    scoring = [reading_bytes(one, done) for one in arrays.readings if one.asked.copies]
    return max(busiest + waiting, moving - slots, *scoring)


def sampling_formula(arrays: SamplingArrays, parts: int) -> float:
    """About what sampling needs beside weights and cache: logits, prompts that wait, blocks that become more."""
    rollout = arrays.rollout
    config = arrays.sampled.config
    share = share_of(arrays.sampled)
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens, parts)
    width = arrays.slots.cache.k.dtype.itemsize
    heads = config.attention.kv_heads * share if config.attention.kv_heads * share >= 1 else config.attention.kv_heads
    tokens = prompts_waiting(rollout, parts) * rows / parts * piece * calls
    waiting = tokens * 2 * config.layers * heads * config.attention.head_dim * width
    logits = 4 * 4 * rollout.slots / parts * config.vocab_size * share
    return max(logits, bytes_per_device(arrays.slots.blocks) / 2) + waiting
