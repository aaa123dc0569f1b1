"""Three phases with a mixture and a reset; in the second the KL runs away, and the run goes back to a checkpoint."""

import dataclasses

from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.config import Mixture, Output, Part, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V2
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.tasks import Rows, Task

DIGITS = Task(
    Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]), template="chatml", name="digits"
)
LETTERS = dataclasses.replace(DIGITS, template="plain", name="letters")
BOTH = Mixture((Part(DIGITS, 2.0), Part(LETTERS, rewards=(Format("[a-m].*"),))))

config = Run(
    model="tiny-random",
    task=DIGITS,
    scoring=Scoring((Format(".*[0-9].*"),)),
    recipe=dataclasses.replace(PRORL_V2, shaping=(), filter_groups=False, controller=AdaptiveKL(100.0)),
    rollout=Rollout(
        prompts=4, group=4, max_prompt_tokens=32, max_new_tokens=8, engine=EngineOptions(slots=16, chunk=8)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=5e-2), minibatches=2),
    output=Output(checkpoint_every=2, keep=9, trackers=()),
    steps=16,
    rules=Rules(
        phases=(
            Phase("near", steps=2),
            Phase("away", steps=11, changes={"recipe.algorithm.kl_coef": 0.002}),
            Phase("both", reset=True, reset_optimiser=True, changes={"task": BOTH, "rollout.group": 6}),
        ),
        guards=("kl_runaway",),
        on_guard="rollback",
        slower=0.1,
    ),
)
