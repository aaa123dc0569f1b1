"""What one device holds in the two halves of a step: while it samples, and while it learns."""

import dataclasses

import jax

from jaxrl_llm.config import Run
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.logprobs import CHUNK
from jaxrl_llm.plan.arrays import Arrays, bytes_per_device
from jaxrl_llm.plan.formulas import Work
from jaxrl_llm.plan.lowering import Compiled
from jaxrl_llm.plan.sampler import prompt_calls


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device by kind; all but ``temporary`` are the exact sizes of arrays.

    Attributes:
      weights: of the policy that learns, and of the frozen base under its adapter.
      optimiser: its moments.
      reference: the frozen policy.
      batch: a step's packed data, of all its updates.
      sampled: the weights to sample from.
      cache: keys and values of slots and prompts.
      temporary: what programs need beside their arguments, and padding of layouts.
      compiled: whether ``temporary`` is the compiler's word, and no formula's.
    """

    weights: float = 0
    optimiser: float = 0
    reference: float = 0
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
    moments = [x for x in jax.tree.leaves(state.policy.opt_state) if x.sharding.memory_kind != "pinned_host"]
    return Memory(size(state.policy.params) + size(state.policy.base), size(moments), size(state.reference))


def learning(run: Run, arrays: Arrays, base: Memory, temporary: float, compiled: bool) -> Memory:
    """While it learns: the state and the data; weights to sample from only where sampling runs ahead."""
    ahead = run.rollout.collect.staleness and not run.mesh.rollout
    return dataclasses.replace(
        base, batch=bytes_per_device(arrays.packed) * run.learner.minibatches,
        sampled=bytes_per_device(arrays.sampled) if ahead else 0, temporary=temporary, compiled=compiled,
    )  # fmt: skip


def sampling(run: Run, arrays: Arrays, base: Memory, temporary: float, compiled: bool) -> Memory:
    """While it samples: the state (where the same devices learn), other weights, the cache."""
    base = Memory() if run.mesh.rollout else base
    sampled = bytes_per_device(arrays.sampled)
    cache = bytes_per_device(arrays.slots)
    return dataclasses.replace(base, sampled=sampled, cache=cache, temporary=temporary, compiled=compiled)


def compiled_temporary(done: Compiled, given: float) -> float:
    """What a program needs beside arguments of so many bytes; their padding counts."""
    return done.refused - given if done.refused else done.temporary + done.outputs + max(done.arguments - given, 0)


def prompts_waiting(run: Run, parts: int) -> int:
    """Calls whose keys and values wait at one time to be copied into slots: those of a first filling."""
    rows, _, _ = prompt_calls(run.rollout.max_prompt_tokens, parts)
    return -(-min(-(-run.rollout.slots // run.rollout.group), run.rollout.prompts) // rows)


def update_temporary(run: Run, config: ModelConfig, arrays: Arrays, one: Work, parts: int, share: float) -> float:
    """About what an update needs beside its arguments; a formula, for machines that nothing is compiled for.

    Gradients twice (a microbatch's, and their sum in float32), the policy in the compute type, each layer's input, the
    widest layer, scores, hidden states and a chunk of logits.
    """
    learner = run.learner
    a = config.attention
    width = 2 if learner.compute_dtype == "bfloat16" else 4
    tokens = learner.microbatch_rows * one.row_tokens / parts
    state = arrays.state
    gradients = sum(bytes_per_device(x) * (1 + 4 / x.dtype.itemsize) for x in jax.tree.leaves(state.policy))
    narrow = sum(
        bytes_per_device(x) * width / x.dtype.itemsize
        for x in jax.tree.leaves((state.policy.params, state.policy.base))
    )
    layer = tokens * (6 * config.mlp_width * share + 12 * config.width + 4 * a.heads * a.head_dim * share) * width
    dots = 3 * config.width + ((a.heads + 2 * a.kv_heads) * a.head_dim + 2 * config.mlp_width) * share
    kept = {"full": tokens * config.width * width, "dots": tokens * dots * width, "none": layer}[
        learner.remat
    ] * config.layers
    keys = min(one.row_tokens, 1024)
    scores = 3 * 4 * tokens * a.heads * share * keys
    hidden = 2 * tokens * config.width * width
    logits = 3 * 4 * CHUNK * config.vocab_size * share
    return gradients + narrow + kept + layer + scores + hidden + logits


def sampling_temporary(run: Run, config: ModelConfig, arrays: Arrays, parts: int, share: float) -> float:
    """About what sampling needs beside weights and cache: logits, prompts that wait, blocks that become more."""
    rows, piece, calls = prompt_calls(run.rollout.max_prompt_tokens, parts)
    width = arrays.slots.cache.k.dtype.itemsize
    heads = config.attention.kv_heads * share if config.attention.kv_heads * share >= 1 else config.attention.kv_heads
    tokens = prompts_waiting(run, parts) * rows / parts * piece * calls
    waiting = tokens * 2 * config.layers * heads * config.attention.head_dim * width
    logits = 4 * 4 * run.rollout.slots / parts * config.vocab_size * share
    return max(logits, bytes_per_device(arrays.slots.blocks) / 2) + waiting
