"""Two random layers learn from tests: each completion ends a program, which is run in the sandbox.

    jaxrl-llm train code_smoke

No download. The prompt tells where a comparison changes, and ends with the beginning of a program; one byte ends it.
Five tests give the share of right comparisons: a text that is no program passes none, any digit some, the right one
all.

Measured: the mean share is below 0.1 in the first four steps, 0.6 to 0.7 after 12; on the two held-out problems 0.0
before and 0.6 after. The model has learned to write a digit near the middle, not yet to read the prompt. 21 seconds on
2 CPU cores, of which 6 are compilation.
"""

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import DR_GRPO
from jaxrl_llm.rewards import CodeTests
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Task

BEGIN = "def above(x):\n    return x > "
ROWS = [
    {
        "prompt": f"above({number}) is False, above({number + 1}) is True.\n{BEGIN}",
        "begin": BEGIN,
        "tests": [f"assert above({x}) == {x > number}" for x in (1, 3, 5, 7, 9)],
    }
    for number in range(10)
]

config = Run(
    model="tiny-random",
    task=Task(ROWS, template="plain", extractor="whole", verifier="none", holdout=0.2, name="above"),
    scoring=Scoring(rewards=(CodeTests(all_or_nothing=False, before="begin"),)),
    recipe=DR_GRPO,
    rollout=Rollout(
        prompts=4, group=16, max_prompt_tokens=80, max_new_tokens=1, engine=EngineOptions(slots=64, chunk=1)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=2, compute=Compute(row_tokens=256)),
    output=Output(checkpoint_every=12, trackers=()),
    steps=12,
)
