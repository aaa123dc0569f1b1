"""What one step does: take a batch, learn from it, make the next one meanwhile where the stage says so.

The loop says when.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxrl_llm import codec, learner
from jaxrl_llm import config as configs
from jaxrl_llm.config import Configuration
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.samples import pooled
from jaxrl_llm.learner.state import mix_reference, reset_optimiser, reset_reference, with_reference
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.rollout import earlier
from jaxrl_llm.rules import BY_HAND, LAST, LR_SCALE, OF_ENTROPY, OF_GUARDS, Decision, Memory
from jaxrl_llm.stages.stage import Batch, Fingerprints, Stage
from jaxrl_llm.types import TrainState

OF_CRITIC = "critic"
"""In the memory of rules: what the explained variance is pooled of; a phase begins without."""


@dataclasses.dataclass
class LoopState:
    """What lives beside the device state and is saved with it.

    Attributes:
      left: what the last batch left to the next; None before the first, and where a ready one holds what it leaves.
      ready: a batch that was made ahead, for the next step; None where none is.
      memory: what each rule remembers, and what the critic's last steps have measured.
      coefficients: of the loss, for the next step, where a rule moves them.
      problems: fingerprints of the problems that the run, or its phase, began with; none between two phases.
      phase: the number of the run's phase, from 0.
    """

    left: Any = None
    ready: Batch | None = None
    memory: Memory = dataclasses.field(default_factory=dict)
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: Fingerprints = dataclasses.field(default_factory=dict)
    phase: int = 0

    def to_json(self, records: Sequence[type], packed: bool = True) -> dict[str, Any]:
        """Plain values; exact. ``records``: the kinds of dataclasses in it; ``packed``: as ``codec.to_json`` has it."""
        return codec.to_json(vars(self), records, packed)

    @classmethod
    def from_json(cls, data: dict[str, Any], records: Sequence[type]) -> "LoopState":
        """The inverse of ``to_json``; also reads what earlier versions have saved."""
        if "backlog" in data:
            return _from_earlier(data)
        return cls(**codec.from_json(data, records))


def _from_earlier(data: dict[str, Any]) -> LoopState:
    """As saved before values were records, before rules had a memory, and before problems had a fingerprint."""
    left, ready = earlier.read(data)
    if ready is not None:
        left = None
    problems = data.get("problems", {})
    if "memory" in data:
        return LoopState(left, ready, data["memory"], data["coefficients"], problems)
    memory = {"stall": {"best": data["best"], "stalled": data["stalled"]}}
    coefficients = {} if data["kl_coef"] is None else {"kl_coef": data["kl_coef"]}
    return LoopState(left, ready, memory, coefficients, problems)


def take_step(
    stage: Stage, run: Configuration, state: TrainState, host: LoopState, step: int, status: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any], Batch, list[Sample]]:
    """Make a batch, or take the one that is ready, and learn from it; where the stage says so, make the next one
    meanwhile.

    Args:
      stage: what makes batches.
      run: its settings.
      state: donated.
      host: told what the batch leaves to the next step, and what the critic's last steps have measured.
      step: its number.
      status: told what is going on.

    Returns:
      The new state, the step's row, the batch, and what the learner saw of its examples.
    """
    make = functools.partial(stage.next, stage.weights(policy_model(state)), int(state.policy.updates))
    batch = make(host.left) if host.ready is None else host.ready
    host.left = batch.left
    host.ready = None
    status("updating")
    learn = functools.partial(learn_from, stage, run, state, batch, dict(host.coefficients), step)
    if stage.ahead:
        # In the last step too: should the run be given more, the next one's groups are of these weights, which the
        # update replaces. A run that is given no more pays for one collection that it does not need.
        (state, measured, samples), host.ready = both(learn, lambda: make(batch.left), stage.apart)
        host.left = None
    else:
        del make  # and with it the weights that it sampled from
        state, measured, samples = learn()
    lately, own = pooled(measured, host.memory.get(OF_CRITIC, {}))
    if lately:
        host.memory = host.memory | {OF_CRITIC: own}
    return state, batch.metrics | measured | lately | host.coefficients, batch, samples


def learn_from(
    stage: Stage, run: Configuration, state: TrainState, batch: Batch, coefficients: Mapping[str, float], step: int
) -> tuple[TrainState, dict[str, Any], list[Sample]]:
    """Every update that a batch is worth; returns the new state, what was measured, and the samples to write down."""
    began = time.perf_counter()
    if not len(batch):
        return state, {"updates": 0.0, "time/update_s": 0.0}, []
    with jax.set_mesh(stage.forward.mesh):  # of this thread
        samples, measured = stage.samples(state, batch, coefficients)
        state, metrics = learner.learn(
            state,
            samples,
            run.learner,
            stage.forward,
            stage.learning(step),
            dict(coefficients),
            run.seed + step,
            stage.measures_kl,
            run.output.monitor_kl,
        )
        shown = of_examples(written_down(batch, run.output.samples, step), samples)
        if run.output.ratios and shown:
            shown = stage.followed(state, shown)
    return state, measured | metrics | {"time/update_s": time.perf_counter() - began}, shown


def written_down(batch: Batch, most: int, step: int) -> list[Any]:
    """The examples of a batch that a step writes down, in turn: were they always the first, a mixture whose tasks come
    in the same order in each batch would show one of them alone."""
    examples = batch.examples
    count = min(most, len(examples))
    return [examples[(step * most + i) % len(examples)] for i in range(count)]


def of_examples(examples: Sequence[Any], samples: Sequence[Sequence[Sample]]) -> list[Sample]:
    """What the learner saw of some examples of a batch, which others may stand between."""
    wanted = {id(completion.tokens) for group in examples for completion in group.completions}
    return [sample for group in samples for sample in group if id(sample.tokens) in wanted]


def both(learn: Callable[[], Any], sample: Callable[[], Any], apart: bool) -> tuple[Any, Any]:
    """The results of both calls, at the same time where their devices are ``apart``.

    Two threads may start programs in another order on each device of a mesh that they share, and wait for each other.
    """
    if not apart:
        return learn(), sample()
    with ThreadPoolExecutor(1) as other:
        learned = other.submit(learn)
        sampled = sample()
        return learned.result(), sampled


BEYOND = (LAST, BY_HAND, OF_GUARDS)
"""In the memory of rules what outlives a phase: the last reset, what was asked for by hand, what guards have done."""


def next_phase(run: Configuration, stage: Stage, state: TrainState, host: LoopState) -> TrainState:
    """The state as the next phase of the run begins with it: with a reference if that has one, reset where it says so.

    Args:
      run: all of it.
      stage: of the phase that has ended.
      state: donated.
      host: told what the next phase finds. Coefficients that rules have moved stay where the recipe and the limits of
        costs are the same; so does what a rollback has left of the learning rate, in any case. Rules begin anew but for
        those of ``BEYOND``.
    """
    before: Any = configs.in_phase(run, host.phase)
    host.phase += 1
    after: Any = configs.in_phase(run, host.phase)
    phase = configs.phases_of(run)[host.phase]
    host.left = stage.leaves(host.left if host.ready is None else host.ready.left, after)
    host.ready = None
    host.problems = {}  # the next phase may have others
    same = (before.recipe, before.scoring.constraints) == (after.recipe, after.scoring.constraints)
    stay = (*BEYOND, OF_ENTROPY) if same else BEYOND
    host.memory = {name: own for name, own in host.memory.items() if name in stay}
    if not same:
        host.coefficients = {name: value for name, value in host.coefficients.items() if name == LR_SCALE}
    state = with_reference(state, configs.keeps_reference(after))
    if phase.reset:
        state = reset_reference(state)
    if phase.reset_optimiser:
        state = reset_optimiser(state, build(after.learner.optimiser))
    return state


def apply(decision: Decision, state: TrainState, run: Configuration) -> TrainState:
    """The state after what the rules have decided: the one place where their decisions act on it."""
    if decision.reset_reference:
        state = reset_reference(state) if decision.mix == 1 else mix_reference(state, decision.mix)
    if decision.reset_optimiser:
        state = reset_optimiser(state, build(run.learner.optimiser))
    return state
