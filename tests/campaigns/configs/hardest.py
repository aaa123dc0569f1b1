"""Everything at once: phases with a mixture, a curriculum, replay, partial rollouts with interrupts, sampling ahead,
resets by KL and by schedule with snapshots, a reference that is mixed, an adaptive entropy bonus, evaluations.
"""

import dataclasses
import time

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import AdaptiveEntropy
from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import Overlong, Recipe
from jaxrl_llm.rewards import Accuracy, Format, Function
from jaxrl_llm.rollout import Collect, EngineOptions, Replay, Rollout
from jaxrl_llm.rules import Phase, Reaches, Resets, Rules
from jaxrl_llm.tasks import Curriculum, Dropping, Prioritised, Rows, Task


def unhurried(problem, completion):
    """No reward: scoring takes long enough to be interrupted."""
    time.sleep(0.002)
    return 0.0


DIGITS = Task(
    Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
    extractor="last_number",
    template="chatml",
    holdout=0.2,
    name="digits",
)
LETTERS = dataclasses.replace(DIGITS, template="plain", name="letters")
BOTH = Mixture((Part(DIGITS, 2.0), Part(LETTERS, rewards=(Accuracy(), Format("[a-m].*")), max_new_tokens=24)))
RECIPE = Recipe(
    "hardest",
    PRESETS["grpo"],
    filter_groups="reward",
    overlong=Overlong(share=0.25),
    resets=Resets(on_kl=1e-3, kl_window=3, reference_every=9, mix=0.6),
    controller=AdaptiveEntropy(5.45, 0.01),
)
config = Run(
    model="tiny-random",
    task=BOTH,
    scoring=Scoring((Accuracy(), Function(unhurried, weight=0.0)), timeout_s=60.0),
    recipe=RECIPE,
    rollout=Rollout(
        prompts=2,
        group=4,
        max_prompt_tokens=32,
        max_new_tokens=32,
        engine=EngineOptions(slots=16, chunk=8),
        collect=Collect(
            max_rounds=8,
            token_budget=20,
            interrupt=True,
            staleness=1,
            curriculum=Curriculum(Prioritised(), drop=Dropping(3, 2, again=1)),
            replay=Replay(2, 16),
        ),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), minibatches=2),
    evaluation=Evaluation(every=8, limit=4),
    output=Output(checkpoint_every=1, trackers=()),
    steps=30,
    rules=Rules(
        phases=(
            Phase("ahead", steps=10),
            Phase(
                "fresh",
                steps=9,
                until=Reaches("kl", above=1.0, times=2),
                changes={"rollout.collect.staleness": 0, "rollout.collect.token_budget": 12},
            ),
            Phase(
                "longer",
                reset=True,
                reset_optimiser=True,
                changes={"rollout.collect.staleness": 1, "rollout.group": 6, "learner.optimiser.learning_rate": 5e-4},
            ),
        )
    ),
)
