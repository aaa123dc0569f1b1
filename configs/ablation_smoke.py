"""A small run that exercises every piece of a recipe: rare successes, answers cut off, several updates.

    jaxrl-llm train ablation_base
    jaxrl-llm train ablation_smoke

The policy is that of ``runs/ablation_base``: it writes any number of thinking marks, then names a number, which is
often right for some letters, hardly ever for others. The recipe here is GRPO, without a KL, with eight updates of each
batch. ``python tools/ablate.py ablation_smoke --ladder dapo`` takes its settings from this file.

Measured with seeds 0 to 2: accuracy 0.23 -> 0.61 (0.57 to 0.63), 45 to 75 seconds on 2 cores shared with other
programs.
"""

import dataclasses
import string

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.tasks import Task

task = Task(
    [{"prompt": f"{letter}=", "answer": str(20 + i)} for i, letter in enumerate(string.ascii_letters)],
    template="plain",
    name="letters",
)

config = Run(
    model="runs/ablation_base",
    task=task,
    recipe=dataclasses.replace(GRPO, algorithm=dataclasses.replace(GRPO.algorithm, kl=None, kl_coef=0.0)),
    rollout=Rollout(
        prompts=16,
        group=8,
        max_prompt_tokens=8,
        max_new_tokens=12,
        engine=EngineOptions(slots=128, chunk=12),
        collect=Collect(max_rounds=4, patience=0),
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=3e-4),
        epochs=2,
        minibatches=4,
        compute=Compute(row_tokens=768, remat="none"),
    ),
    # The evaluation uses the letters of training too: it compares learning, not generalisation.
    evaluation=Evaluation(every=10, samples=4, temperature=1.0, task=task),
    output=Output(checkpoint_every=50, keep=1, samples=0, trackers=()),
    steps=100,
)
