"""A reward that grows with every token, and a limit on their mean number: a multiplier finds the price.

    jaxrl-llm train safety_smoke

No download. Each token is worth less than the one before, and none costs anything at first: completions fill their
budget of 16. The constraint ``length`` limits their mean to 8 tokens. Its multiplier starts at 0.03, rises until the
tokens beyond cost more than they are worth, falls once completions are too short, and comes near 0.03, the worth of
the eighth token.

Measured with seeds 0 to 3: ``constraint/length/cost`` 15 -> 7.95, 8.02, 8.00 and 8.10, the mean of the last ten of 50
steps. It swings on the way there: all fall to 3 or 4 before they come back. Of the last ten steps each is from 7.8 to
8.2 with three of the seeds, and from 4 to 14 with seed 2, which has not settled. ``constraint/length/multiplier`` rises
to between 0.055 and 0.073 and ends at 0.033 to 0.035. 35 to 60 seconds on 2 cores, 20 of them compilation.
"""

import math

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import DR_GRPO
from jaxrl_llm.rewards import Constraint, Function, LengthPenalty
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.tasks import ReasoningGym, Task
from jaxrl_llm.types import Completion, Problem


def fullness(problem: Problem, completion: Completion) -> float:
    """Every token is better, each further one by less: from 0 towards 1."""
    return 1 - math.exp(-len(completion.tokens) / 4)


config = Run(
    model="tiny-random",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=200),
        template="plain",
        holdout=0.2,
    ),
    scoring=Scoring(
        rewards=(Function("safety_smoke:fullness"),),
        constraints=(Constraint(LengthPenalty(-1.0), limit=8.0, rate=0.001, multiplier=0.03, name="length"),),
    ),
    recipe=DR_GRPO,
    # At first hardly any completion ends by itself, and a step without one teaches nothing.
    rollout=Rollout(
        prompts=8,
        group=8,
        max_prompt_tokens=80,
        max_new_tokens=16,
        engine=EngineOptions(slots=64, chunk=16),
        collect=Collect(patience=0),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=2, compute=Compute(row_tokens=256)),
    output=Output(checkpoint_every=25, trackers=()),
    steps=50,
)
