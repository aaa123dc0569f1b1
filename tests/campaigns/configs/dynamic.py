"""Dynamic sampling with partial rollouts and interrupts, a curriculum, and replay of successes."""

import time

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards import Accuracy, Function
from jaxrl_llm.rollout import Collect, EngineOptions, Replay, Rollout
from jaxrl_llm.tasks import Curriculum, Dropping, Prioritised, Rows, Task


def unhurried(problem, completion):
    """No reward: scoring takes long enough to be interrupted."""
    time.sleep(0.002)
    return 0.0


config = Run(
    model="tiny-random",
    task=Task(
        Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
        extractor="last_number",
        template="chatml",
    ),
    scoring=Scoring((Accuracy(), Function(unhurried, weight=0.0)), timeout_s=60.0),
    recipe=Recipe("filtered_grpo", PRESETS["grpo"], filter_groups="accuracy"),
    rollout=Rollout(
        prompts=2,
        group=6,
        max_prompt_tokens=32,
        max_new_tokens=32,
        engine=EngineOptions(slots=24, chunk=8),
        collect=Collect(
            8, 20, True, curriculum=Curriculum(Prioritised(), drop=Dropping(3, 2, again=1)), replay=Replay(2, 16)
        ),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3, warmup=3), minibatches=2),
    output=Output(checkpoint_every=1, trackers=()),
    steps=30,
)
