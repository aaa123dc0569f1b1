"""A policy that runs away from its reference, and a guard that goes back before that at a lower rate, within the second
of three phases; few checkpoints are kept, so that one too many would push out what is gone back to."""

import dataclasses

from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V2
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.tasks import Rows, Task

config = Run(
    model="tiny-random",
    task=Task(
        Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
        template="chatml",
        name="digits",
    ),
    scoring=Scoring((Format(".*[0-9].*"),), timeout_s=60.0),
    recipe=dataclasses.replace(PRORL_V2, shaping=(), filter_groups=False, controller=AdaptiveKL(100.0)),
    rollout=Rollout(
        prompts=4, group=4, max_prompt_tokens=32, max_new_tokens=8, engine=EngineOptions(slots=16, chunk=8)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=5e-2), minibatches=2),
    output=Output(checkpoint_every=2, keep=4, trackers=()),
    steps=30,
    rules=Rules(
        phases=(
            Phase("near", steps=2),
            Phase("away", steps=15, changes={"recipe.algorithm.kl_coef": 0.002}),
            Phase("slower", reset_optimiser=True, changes={"learner.optimiser.learning_rate": 1e-3}),
        ),
        guards=("kl_runaway",),
        on_guard="rollback",
        slower=0.1,
    ),
)
