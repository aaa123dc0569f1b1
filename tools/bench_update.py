"""How fast and how large the learner's update is, on one device of this machine's default kind.

    python tools/bench_update.py [--model 7m] [--lengths equal] [--rows 64] [--group 8] [--repeats 5]
    [--learner.compute.remat full]

Prints one JSON line. The work is one optimiser step of GRPO without a reference on random completions, packed and
computed as the trainer does it; every setting of the learner is an option. ``lengths`` are those of bench_rollout.
Tokens are the completions'. ``backward_s`` is loss and gradient of packed data; ``update_s`` is all of ``learn``:
packing, transfer, loss, gradient, optimiser and metrics. ``mfu`` is the share of ``update_s`` that the least number of
operations would take (forward and backward once, a prompt once for its group, the head for completions only) at the
speed of a matrix product measured here too. ``filled`` is the share of the computed positions that hold a token of a
prompt (once for its group) or of a completion. ``temp_mb`` is what the compiled update needs beside its arguments,
``peak_mb`` the process's largest memory, compiling included. ``compile_s`` is what the first call took longer.
"""

import dataclasses
import functools
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from bench_rollout import measured_peaks, model_of, requests

from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.learner import (
    Compute,
    Forward,
    Layout,
    Learner,
    Optimiser,
    PolicyGradient,
    Sample,
    Training,
    create_state,
    learn,
    make_update,
    pack,
)  # fmt: skip
from jaxrl_llm.learner.forward import on_mesh
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding.compiler import compiler_options
from jaxrl_llm.sharding.mesh import MeshShape, make_mesh, platform_of
from jaxrl_llm.types import Role, TrainState

ALGORITHM: Algorithm = dataclasses.replace(PRESETS["grpo"], kl_coef=0.0)
ADAM = Optimiser(learning_rate=1e-4, clip_norm=0.0)
LEARNER = Learner(optimiser=ADAM, compute=Compute(microbatch_rows=4, remat="none"))
"""The settings that were fastest on CPUs at 7m."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      model: 7m, 20m, 7m-experts (4 of 32 for each token) or ``random:NAME`` of a published shape (random weights), or
        anything that jaxrl-llm loads.
      lengths: equal or long (a long tail).
      rows: completions.
      group: completions of each prompt.
      prompt: tokens of a prompt.
      completion: tokens of the longest completion.
      repeats: timed calls after one that compiles.
      learner: as in a run.
    """

    model: str = "7m"
    lengths: Literal["equal", "long"] = "equal"
    rows: int = 64
    group: int = 8
    prompt: int = 32
    completion: int = 128
    repeats: int = 5
    learner: Learner = LEARNER


class Setup(NamedTuple):
    """What the trainer makes of its settings, on one device."""

    settings: Learner
    training: Training
    forward: Forward

    @property
    def layout(self) -> Layout:
        """Shapes of a microbatch."""
        return self.forward.layout


def set_up(model: Decoder, settings: Learner, prompt: int, completion: int) -> tuple[TrainState, Setup]:
    """A fresh state, and what updates it by completions of at most so many tokens."""
    mesh = make_mesh(MeshShape())
    optimiser = build(settings.optimiser)
    compute = compute_for(settings, model.config, platform_of(mesh), compiler_options(mesh))
    objectives = (PolicyGradient(ALGORITHM),)
    update = make_update(objectives, optimiser, learning_rate(settings.optimiser), compute)
    forward = Forward(layout_for(settings, compute, prompt + completion, completion, mesh), compute, 1.0, mesh)
    state = create_state(model, optimiser, False, mesh, settings.lora)
    return state, Setup(settings, Training(objectives, update), forward)


def samples_of(prompts: list[Any], completions: list[Any], advantages: list[float], group: int) -> list[list[Sample]]:
    """Groups as the trainer hands them to the learner."""
    samples = []
    for prompt, tokens, advantage in zip(prompts, completions, advantages, strict=True):
        every = np.ones(len(tokens), bool)
        arrays = {"sampler_logp": np.zeros(len(tokens), np.float32), "fresh": every}
        ids = np.asarray(prompt, np.int32), np.asarray(tokens, np.int32)
        samples.append(Sample(*ids, every, {"advantages": float(advantage)}, arrays))
    return [samples[i : i + group] for i in range(0, len(samples), group)]


def updated(state: TrainState, groups: list[list[Sample]], setup: Setup) -> tuple[TrainState, dict[str, float]]:
    """One step of learning and its metrics, on the host; the state is donated."""
    with jax.set_mesh(setup.forward.mesh):
        state, metrics = learn(state, groups, setup.settings, setup.forward, (setup.training,), {}, 0)
        return jax.block_until_ready(state), metrics


def least_operations(model: Decoder, prompt: int, limits: np.ndarray, group: int) -> float:
    """Of loss and gradient for a dense model: matrix products and causal attention, three times those of a forward
    pass.
    """
    config, attention = model.config, model.config.attention
    head = config.vocab_size * config.width
    layers = sum(x.size for x in jax.tree.leaves(model)) - head * (1 if config.embeddings.tied else 2)
    prompts, completed = len(limits) / group, float(limits.sum())
    pairs = prompts * prompt * (prompt + 1) / 2 + float(np.sum(limits * prompt + limits * (limits + 1) / 2))
    products = layers * (prompts * prompt + completed) + head * completed
    return 6 * products + 12 * config.layers * attention.heads * attention.head_dim * pairs


def backward(packed: Any, setup: Setup) -> Callable[[Decoder], Any]:
    """Loss and gradient of packed data, compiled."""
    role = functools.partial(Role, opt_state=None, updates=jnp.int32(0))
    given = packed, setup.training.objectives, {"temperature": jnp.float32(1)}, setup.forward.compute
    return jax.jit(lambda policy: accumulate(role(policy), *given))


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(seconds of the first call beyond the others, median seconds of the others)."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    return seconds[0] - median, median


def run(options: Options) -> dict[str, Any]:
    """The row."""
    model, random = model_of(options.model), np.random.default_rng(1)
    words, work = model.config.vocab_size, (options.rows, options.group, options.prompt, options.completion)
    prompts, limits = requests(words, *work, options.lengths)
    completions = [random.integers(0, words, limit) for limit in limits]
    groups = samples_of(prompts, completions, random.standard_normal(options.rows).tolist(), options.group)
    state, setup = set_up(model, options.learner, options.prompt, options.completion)
    with jax.set_mesh(setup.forward.mesh):
        packed = on_mesh(pack([sample for group in groups for sample in group], setup.layout), setup.forward.mesh)
        compiled = setup.training.update.lower(state, packed, {"temperature": 1.0}).compile().memory_analysis()
        _, backward_s = timed(functools.partial(backward(packed, setup), state.policy.params), options.repeats)
    holder = [state]

    def once() -> None:
        holder[0], _ = updated(holder[0], groups, setup)

    compile_s, update_s = timed(once, options.repeats)
    _, speed = measured_peaks(options.learner.compute.dtype)
    least = least_operations(model, options.prompt, limits, options.group) / speed
    return dataclasses.asdict(options) | {
        "device": jax.devices()[0].device_kind,
        "parameters_m": round(sum(x.size for x in jax.tree.leaves(model)) / 1e6, 2),
        "mean_over_max": round(float(limits.mean()) / options.completion, 3),
        "tokens": int(limits.sum()),
        "backward_s": round(backward_s, 3),
        "update_s": round(update_s, 3),
        "tokens_per_s": round(limits.sum() / update_s, 1),
        "filled": round((limits.sum() + options.rows // options.group * options.prompt) / computed(packed), 3),
        "mfu": round(least / update_s, 3),
        "compile_s": round(max(compile_s, 0), 1),
        "temp_mb": round(compiled.temp_size_in_bytes / 2**20, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def computed(packed: Any) -> int:
    """Positions of the rows that are computed, padding included."""
    _, rows, tokens = packed.rows.tokens.shape
    return int(packed.microbatches) * rows * tokens


if __name__ == "__main__":
    print(json.dumps(run(tyro.cli(Options, description=__doc__))))
