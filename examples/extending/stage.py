"""A stage: a kind of training, which here memorises the answers of a task's problems, in the stream's order.

A stage is a file in ``jaxrl_llm/stages/`` and the type of its configuration. Loop, checkpoints, metrics, progress,
resuming, meshes and adapters are the same for all; ``jaxrl_llm/stages/stage.py`` shows what a stage may override. The
configuration refuses combinations that cannot work in its ``check``. With ``groups`` and ``outline`` the stage's file
also defines what ``plan`` compiles.
"""

# jaxrl_llm/config/run.py
import dataclasses

from jaxrl_llm.config.run import Run


@dataclasses.dataclass(frozen=True)
class Copying(Run):
    """The configuration of a run that copies: ``rollout.prompts`` answers in each step."""


# jaxrl_llm/config/checks.py, at the top: from jaxrl_llm.config.run import Copying
# jaxrl_llm/config/checks.py
from jaxrl_llm.config.checks import KINDS

KINDS = (*KINDS, Copying)

# jaxrl_llm/stages/__init__.py, at the top: from jaxrl_llm.config.run import Copying
# jaxrl_llm/stages/__init__.py, in STAGES, after Run
STAGES = {
    Copying: "jaxrl_llm.stages.copying",
}

# jaxrl_llm/stages/copying.py
import contextlib
import dataclasses
import time
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.learner import Forward, Sample, Training, make_update
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for, platform_of
from jaxrl_llm.stages.stage import Stage, StepOutcome


@dataclasses.dataclass(frozen=True)
class Likelihood(Objective):
    """``-mean_t logp``: next-token prediction."""

    name: ClassVar[str] = "text"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs, batch, counts, coefficients):
        loss = -jnp.sum(jnp.where(batch.mask, outputs["logp"], 0.0)) / jnp.maximum(counts.tokens, 1)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyingStage(Stage):
    """As many problems in each step as a step of reinforcement learning has prompts."""

    stream: tasks.PromptStream
    task: tasks.Task
    tokenizer: Any
    count: int

    def step(self, state, carry, coefficients, number, must_stop):
        if must_stop(before_update=True):
            return StepOutcome(state, carry)
        begin = carry or 0
        end = begin + self.count
        samples = [[self.sample(index)] for index in range(begin, end)]
        state, row = self.update(state, samples, coefficients, number, time.perf_counter())
        return StepOutcome(state, end, row)

    def sample(self, number):
        problem, _ = self.stream.next(number, {})
        prompt = np.asarray(tasks.encode(problem, self.task, self.tokenizer), np.int32)
        tokens = np.asarray(self.tokenizer(problem.answer, add_special_tokens=False)["input_ids"], np.int32)
        return Sample(prompt, tokens, np.ones(len(tokens), bool))


def resources(run, peers, directory):
    """Nothing has to be closed."""
    return contextlib.ExitStack()


def prepare(run, model, tokenizer, mesh, resources, progress, peers):
    """A stage that trains on the run's task."""
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    layout = layout_for(run.learner, compute, run.rollout.max_length, run.rollout.max_new_tokens, mesh)
    objectives = (Likelihood(),)
    update = make_update(objectives, build(run.learner.optimiser), learning_rate(run.learner.optimiser), compute)
    training = (Training(objectives, update),)
    return CopyingStage(
        run=run,
        training=training,
        forward=Forward(layout, compute, 1.0, mesh),
        label=run.task.label,
        stream=tasks.Shuffled(tasks.load(run.task, True).train, run.seed),
        task=run.task,
        tokenizer=tokenizer,
        count=run.rollout.prompts,
    )
