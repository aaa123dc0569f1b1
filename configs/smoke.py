"""Two random layers learn to write a digit: the whole program, end to end, in under a minute on two CPU cores.

    jaxrl-llm train smoke

No download. The reward is 1 if a completion contains a digit: a random model starts near 0.3 and passes 0.9 within the
six steps. Accuracy on the sums themselves stays near 0, as expected for such a model; evaluation runs at both ends.
Measured on 2 cores: 10 to 15 seconds, most of it compilation.
"""

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import ReasoningGym, Task

config = Run(
    model="tiny-random",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=200),
        template="plain",
        holdout=0.2,
    ),
    scoring=Scoring(rewards=(Format(r".*[0-9].*"),)),
    recipe=GRPO,
    rollout=Rollout(
        prompts=8, group=8, max_prompt_tokens=80, max_new_tokens=8, engine=EngineOptions(slots=64, chunk=8)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=2, compute=Compute(row_tokens=256)),
    output=Output(checkpoint_every=2),
    steps=6,
)
