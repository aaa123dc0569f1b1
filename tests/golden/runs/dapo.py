"""Dynamic sampling with over-sampling, a token budget that interrupts, a curriculum, stored successes."""

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import Overlong, Recipe
from jaxrl_llm.rewards import Accuracy
from jaxrl_llm.rollout import Collect, EngineOptions, Replay, Rollout
from jaxrl_llm.tasks import Curriculum, Dropping, Prioritised, Rows, Task

ROWS = [{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]

config = Run(
    model="tiny-random",
    # Random bytes end in the right digit often enough for some groups to hold both kinds of answer.
    task=Task(Rows(ROWS), extractor="last_number", template="chatml", holdout=0.2, name="digits"),
    scoring=Scoring((Accuracy(),), timeout_s=60.0),
    recipe=Recipe("dapo", PRESETS["dapo"], filter_groups="accuracy", overlong=Overlong(share=0.25)),
    rollout=Rollout(
        prompts=2,
        group=6,
        max_prompt_tokens=32,
        max_new_tokens=32,
        engine=EngineOptions(slots=24, chunk=8),
        collect=Collect(
            max_rounds=8,
            token_budget=20,
            interrupt=True,
            curriculum=Curriculum(Prioritised(), drop=Dropping(3, 2, again=1)),
            replay=Replay(2, 16),
        ),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3, warmup=3), minibatches=2),
    evaluation=Evaluation(every=3, limit=2),
    output=Output(checkpoint_every=1, trackers=()),
    steps=6,
)
