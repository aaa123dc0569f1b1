"""PPO: one completion of each prompt, a critic that warms up, the value of what was cut off, a KL in the reward."""

import dataclasses

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GAE
from jaxrl_llm.algorithms.kl import K1, AdaptiveKL
from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.learner import Critic, Learner, Optimiser
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Rows, Task

ROWS = [{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]
ALGORITHM = dataclasses.replace(
    PRESETS["ppo"], advantage=GAE(whiten=True, bootstrap=True), kl=K1(), kl_in="reward", kl_coef=0.02
)

config = Run(
    model="tiny-random",
    task=Task(Rows(ROWS), template="chatml", holdout=0.2, name="digits"),
    scoring=Scoring((Format(".*[0-9].*"),)),
    recipe=Recipe(
        "ppo",
        ALGORITHM,
        controller=AdaptiveKL(1e-9),
        critic=Critic(optimiser=Optimiser(learning_rate=1e-3, clip_norm=0.5), warmup=1),
    ),
    rollout=Rollout(prompts=8, group=1, max_prompt_tokens=32, max_new_tokens=8, engine=EngineOptions(slots=8, chunk=8)),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-3), minibatches=2, epochs=2),
    evaluation=Evaluation(limit=2),
    output=Output(checkpoint_every=1, trackers=()),
    steps=3,
)
