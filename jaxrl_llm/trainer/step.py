"""One step of a run: take a batch, learn from it, evaluate, decide, record; and the start of the next phase.

If the stage samples ahead, the next batch is made meanwhile.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_llm import learner
from jaxrl_llm.checkpoints.snapshots import BEST, keep
from jaxrl_llm.config import Configuration, in_phase, keeps_reference, phases_of
from jaxrl_llm.config.origin import recorded_best
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.platform import utilisation
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.learner.update import reset_optimiser, reset_reference, with_reference
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rollout.groups import OutOfTime
from jaxrl_llm.rules import BY_HAND, FOUND, LAST, LR_SCALE, OF_ENTROPY, OF_GUARDS, Decision, decide
from jaxrl_llm.rules.decision import DONE, ENDED, EVENT_ENDED
from jaxrl_llm.stages.stage import Batch, Stage
from jaxrl_llm.telemetry.records import record
from jaxrl_llm.trainer.context import Cursor, LoopState, RunContext, asked_reset, forget_best
from jaxrl_llm.trainer.segment import go_back
from jaxrl_llm.types import Completion, Group, TrainState

LOGGED_TOKENS = 4096
"""Most tokens of a step that are written one by one: about 150 KB."""
DIGITS = 4


def make_step(context: RunContext, cursor: Cursor, step: int) -> tuple[dict[str, Any], Batch, Decision] | None:
    """Take a batch, learn from it, evaluate, decide and record; return the row, the batch and the decision.

    ``cursor`` ends with the state after the decision, and with the batch's leftovers for the next step. If the run has
    to stop before it learns, the result is None: the state is that before the step, and the host state has the
    samples so far.
    """
    stage, host, progress = cursor.stage, cursor.host, context.progress
    began = time.perf_counter()
    progress.status("sampling")
    version = int(cursor.state.policy.updates)
    make = functools.partial(stage.next, stage.weights(model_of(cursor.state)), version)
    try:
        batch = make(host.left, context.late) if host.ready is None else host.ready
    except OutOfTime as stopped:
        host.left = stopped.left
        return None
    if context.late(cursor.learning_s):
        host.ready = batch if stage.records else None  # rows of data are drawn again
        return None
    host.left = batch.left
    host.ready = None
    progress.status("updating")
    learn = functools.partial(learn_from, stage, cursor.settings, cursor.state, batch, dict(host.coefficients), step)
    if stage.ahead:
        # In the last step too: should the run be given more, the next one's groups are of these weights, which the
        # update replaces. A run that is given no more pays for one collection that it does not need.
        host.left = None
        if stage.apart:
            with ThreadPoolExecutor(1) as other:
                learned = other.submit(learn)
                host.ready = make(batch.left)
                cursor.state, measured, samples = learned.result()
        else:  # two threads may start programs in another order on each device that they share, and wait for each other
            cursor.state, measured, samples = learn()
            host.ready = make(batch.left)
        del make
    else:
        del make  # and with it the weights that it sampled from
        cursor.state, measured, samples = learn()
    lately, host.memory = stage.remembered(measured, host.memory)
    row = batch.metrics | measured | lately | host.coefficients | {"step": step} | cursor.row
    row["time/step_s"] = time.perf_counter() - began
    cursor.learning_s = row["time/update_s"]
    progress.step(row)
    return row, batch, finish(context, cursor, row, batch, samples, began)


def finish(
    context: RunContext, cursor: Cursor, row: dict[str, Any], batch: Batch, samples: list[Sample], began: float
) -> Decision:
    """Evaluate after a step has learned, decide, and record; return the decision.

    Args:
      context: of the run.
      cursor: as the update has left it.
      row: the step's; added to.
      batch: of the step.
      samples: the learner's record of the examples to write to samples.jsonl.
      began: start of the step, by the performance counter.
    """
    stage, step, progress = cursor.stage, row["step"], context.progress
    found = stage.test(model_of(cursor.state)) if context.schedule.evaluates(step) else None
    if found is not None:
        row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began - row["time/step_s"]}
        progress.tested(step, row)

    def asked() -> dict[str, Any]:
        seen = [] if context.sight is None else context.sight.found(row)
        findings = {f"{FOUND}{one.kind}": [one.step, one.what, one.remedy] for one in seen}
        return asked_reset(context.directory) | findings

    # Requests, and what guards see, are equal on all processes.
    decision, cursor.host.memory = decide(stage.rules, row | context.peers.first(asked), cursor.host.memory)
    if decision.rollback is not None:
        decision = go_back(context, cursor, decision)
        if context.sight is not None:
            context.sight.take(decision.events)
    better = found is not None and decision.rollback is None and context.run.output.keep_best
    better = better and context.peers.first(lambda: recorded_best(context.directory, row) == step)
    if better:  # whole before its row, and that before an older one goes
        progress.status("saving")
        context.store.wait()
        keep(context.directory, step, cursor.state, cursor.host.phase, BEST)
    cursor.state = apply(decision, cursor.state, cursor.settings)
    cursor.host.coefficients |= decision.coefficients
    cursor.row, cursor.step = {}, step
    row |= decision.events
    progress.happened(step, row, batch.examples)
    if decision.stop == DONE:
        row[EVENT_ENDED] = decision.reason
        cursor.host.memory[ENDED] = {"step": step, "rule": decision.rule, "reason": decision.reason}
    examples = [batch.examples[place] for place in shown_places(batch, cursor.settings.output.samples, step)]
    lines = training_lines(examples, samples, stage.spell) if context.writer else ()
    record(context.writer, step, row, lines, None if found is None else found.lines())
    if better and context.peers.leads:
        forget_best(context.directory)
    return decision


def learn_from(
    stage: Stage, run: Configuration, state: TrainState, batch: Batch, coefficients: Mapping[str, float], step: int
) -> tuple[TrainState, dict[str, Any], list[Sample]]:
    """Make all updates of a batch; return the new state, the metrics, and the samples to write to samples.jsonl."""
    began = time.perf_counter()
    if not len(batch):
        return state, {"updates": 0.0, "time/update_s": 0.0}, []
    with jax.set_mesh(stage.forward.mesh):  # of this thread
        samples, measured = stage.samples(state, batch, coefficients)
        training = stage.learning(step)
        state, metrics = learner.learn(
            state,
            samples,
            run.learner,
            stage.forward,
            training,
            dict(coefficients),
            run.seed + step,
            stage.measures_kl,
            run.output.monitor_kl,
        )
        shown = of_examples(shown_places(batch, run.output.samples, step), samples)
        if run.output.ratios and shown:
            shown = stage.followed(state, shown)
    metrics["time/update_s"] = time.perf_counter() - began
    devices = list(stage.forward.mesh.devices.flat)
    metrics |= utilisation(state, samples, training, run.learner.minibatches, metrics, devices)
    return state, measured | metrics, shown


def shown_places(batch: Batch, most: int, step: int) -> list[int]:
    """Return the places of the batch's examples that a step writes to samples.jsonl, in rotation: always the first ones
    would show only one task of a mixture with a fixed order."""
    count = len(batch.examples)
    return [(step * most + i) % count for i in range(min(most, count))]


def training_lines(
    groups: Sequence[Group], samples: Sequence[Sample], spell: Callable[[Sequence[int]], list[str]]
) -> list[dict[str, Any]]:
    """Return a line for each completion; the first ones, up to ``LOGGED_TOKENS`` tokens, have values of each token.

    Args:
      groups: the groups to write down.
      samples: the learner's samples of their completions, each with its place among these groups.
      spell: returns the text of each token of a completion; if empty, tokens are not written one by one.
    """
    seen = {sample.place: sample for sample in samples}
    room = LOGGED_TOKENS
    lines = []
    for number, group in enumerate(groups):
        for i, completion in enumerate(group.completions):
            sample = seen.get((number, i))
            line = {
                "kind": "training",
                "group": number,
                "task": group.problem.task,
                "prompt": group.problem.prompt[-1]["content"],
                "completion": completion.transcript,
                "reward": float(group.rewards[i]),
                "parts": {name: float(part[i]) for name, part in group.parts.items()},
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
                **completion.played,
            }
            if sample is not None:  # where each token has its own advantage, their mean over those that count
                advantage = np.asarray(advantage_of(sample), np.float64)
                counted = np.broadcast_to(sample.mask, advantage.shape) if advantage.ndim else np.ones(())
                line["advantage"] = float(np.sum(advantage * counted) / max(np.sum(counted), 1))
            room -= len(completion.tokens)
            if room >= 0 and (texts := spell(completion.tokens.tolist())):
                line["by_token"] = {"text": texts, **by_token(completion, sample)}
            lines.append(line)
    return lines


def by_token(completion: Completion, sample: Sample | None) -> dict[str, list[Any]]:
    """Return the values of each token by name: numbers of sampler and learner; ``mask``, if the policy did not sample
    all tokens; ``counted``, if the loss leaves out some of those.
    """
    arrays = {"sampler_logp": completion.sampler_logp, **completion.extras, **({} if sample is None else sample.arrays)}
    told: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        if array.ndim == 1 and np.issubdtype(array.dtype, np.floating):  # sets and marks are no numbers of tokens
            told[name] = np.round(array.astype(np.float64), DIGITS).tolist()
    if not completion.mask.all():
        told["mask"] = completion.mask.astype(int).tolist()
    if sample is not None and (sample.mask != completion.mask).any():
        told["counted"] = sample.mask.astype(int).tolist()
    return told


def of_examples(places: Sequence[int], samples: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the learner's samples of the examples at these places of a batch, with their places renumbered among
    them."""
    order = {place: number for number, place in enumerate(places)}
    return [
        dataclasses.replace(sample, place=(order[sample.place[0]], sample.place[1]))
        for group in samples
        for sample in group
        if sample.place is not None and sample.place[0] in order
    ]


BEYOND = (LAST, BY_HAND, OF_GUARDS)
"""Entries of the rules' memory that outlive a phase: the last reset, the last request, the actions of guards."""


def next_phase(run: Configuration, stage: Stage, state: TrainState, host: LoopState) -> TrainState:
    """Return the state at the start of the run's next phase: with a reference if it needs one, reset if it says so.

    Args:
      run: all of it.
      stage: of the phase that has ended.
      state: donated.
      host: updated for the next phase. Coefficients moved by rules are kept if recipe and constraints stay equal; the
        learning rate scale after a rollback is always kept. The rules' memory is cleared, except for ``BEYOND``.
    """
    before: Any = in_phase(run, host.phase)
    host.phase += 1
    after: Any = in_phase(run, host.phase)
    phase = phases_of(run)[host.phase]
    host.left = stage.carried_over(host.carried, before, after)
    host.ready = None
    host.problems = {}  # the next phase may have others
    same = (before.recipe, before.scoring.constraints) == (after.recipe, after.scoring.constraints)
    stay = (*BEYOND, OF_ENTROPY) if same else BEYOND
    host.memory = {name: own for name, own in host.memory.items() if name in stay}
    if not same:
        host.coefficients = {name: value for name, value in host.coefficients.items() if name == LR_SCALE}
    resets = Decision(reset_reference=phase.reset, reset_optimiser=phase.reset_optimiser)
    return apply(resets, with_reference(state, keeps_reference(after)), after)


def apply(decision: Decision, state: TrainState, run: Configuration) -> TrainState:
    """Return the state after the resets of a decision; only this function applies decisions to it."""
    if decision.reset_reference:
        state = reset_reference(state, decision.mix)
    if decision.reset_optimiser:
        state = reset_optimiser(state, build(run.learner.optimiser))
    return state
