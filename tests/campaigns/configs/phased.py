"""Four phases, the third on a mixture of two tasks; resets by schedule and by a phase, each with its snapshot."""

import dataclasses

from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import DAPO, PRORL_V2
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Phase, Reaches, Resets, Rules
from jaxrl_llm.tasks import Rows, Task

DIGITS = Task(
    Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
    template="chatml",
    holdout=0.2,
    name="digits",
)
LETTERS = dataclasses.replace(DIGITS, template="plain", name="letters")
config = Run(
    model="tiny-random",
    task=DIGITS,
    scoring=Scoring((Format(".*[0-9].*"),), timeout_s=60.0),
    recipe=DAPO,
    rollout=Rollout(
        prompts=4, group=4, max_prompt_tokens=32, max_new_tokens=8, engine=EngineOptions(slots=16, chunk=8)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), minibatches=2),
    evaluation=Evaluation(every=6, limit=4),
    output=Output(checkpoint_every=2, trackers=()),
    steps=30,
    rules=Rules(
        phases=(
            Phase("short", steps=7),
            Phase("slower", steps=6, changes={"learner.optimiser.learning_rate": 5e-4}),
            Phase(
                "both, anchored",
                steps=9,
                until=Reaches("kl", above=0.5, times=2),
                changes={
                    "task": Mixture((Part(DIGITS, 2.0), Part(LETTERS, rewards=(Format("[a-m].*"),)))),
                    "recipe": dataclasses.replace(PRORL_V2, shaping=(), resets=Resets(reference_every=3)),
                    "rollout.group": 8,
                    "rollout.prompts": 2,
                },
            ),
            Phase("reset", reset=True, reset_optimiser=True, changes={"recipe.algorithm.kl_coef": 0.01}),
        )
    ),
)
