"""Two random layers of 8 experts learn to write a digit, with the experts that the sampler took.

    jaxrl-llm train moe_smoke

No download. The task is that of ``smoke``; of the 8 experts of a layer each token takes 2. The recipe is GSPO, whose
ratio is a whole completion's, with two updates of each rollout and ``learner.routing_replay`` R3. See docs/experts.md.
Measured on 2 CPU cores: reward 0.30 -> 0.98 in 6 steps, 16 seconds with JAX's cache warm; 67 without it, while other
programs ran.
"""

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GSPO
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import ReasoningGym, Task

config = Run(
    model="tiny-random-moe",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=200),
        template="plain",
        holdout=0.2,
    ),
    scoring=Scoring(rewards=(Format(r".*[0-9].*"),)),
    recipe=GSPO,
    rollout=Rollout(
        prompts=8, group=8, max_prompt_tokens=80, max_new_tokens=8, engine=EngineOptions(slots=64, chunk=8)
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=1e-2), minibatches=2, compute=Compute(row_tokens=256), routing_replay="R3"
    ),
    output=Output(checkpoint_every=2),
    steps=6,
)
