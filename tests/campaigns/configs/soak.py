"""The smoke run for thousands of steps: two kinds of phases in turn, resets with snapshots, a curriculum, replay."""

import dataclasses

from jaxrl_llm.config import Evaluation, Output, Run, Scoring, load_config
from jaxrl_llm.rewards import Accuracy
from jaxrl_llm.rollout import Replay
from jaxrl_llm.rules import Phase, Resets, Rules
from jaxrl_llm.tasks import Curriculum, Prioritised

EVERY = 50
"""Steps of a phase: both kinds have been there once after the first hundred, and a reset too."""
KINDS = ("wide", "deep")
CHANGES = ({"rollout.prompts": 4, "rollout.group": 4}, {"rollout.prompts": 2, "rollout.group": 8})
"""Few completions: what may grow does so from step to step."""
MOST = 100
"""Phases."""

smoke: Run = load_config("smoke")[1]
config = dataclasses.replace(
    smoke,
    scoring=Scoring((*smoke.scoring.rewards, Accuracy()), timeout_s=60.0),
    recipe=dataclasses.replace(smoke.recipe, resets=Resets(reference_every=40)),
    rollout=dataclasses.replace(
        smoke.rollout,
        engine=dataclasses.replace(smoke.rollout.engine, slots=16),
        collect=dataclasses.replace(
            smoke.rollout.collect, patience=0, curriculum=Curriculum(Prioritised()), replay=Replay()
        ),
    ),
    learner=dataclasses.replace(
        smoke.learner,
        optimiser=dataclasses.replace(smoke.learner.optimiser, learning_rate=1e-5),
        minibatches=1,
    ),
    evaluation=Evaluation(every=50, limit=16),
    output=Output(checkpoint_every=10),
    steps=5000,
    rules=Rules(
        phases=tuple(
            Phase(f"{KINDS[n % 2]} {n}", None if n == MOST - 1 else EVERY, changes=CHANGES[n % 2]) for n in range(MOST)
        )
    ),
)
