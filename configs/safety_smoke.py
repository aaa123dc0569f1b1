"""A Lagrangian constraint."""

import math

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import DR_GRPO
from jaxrl_llm.rewards import Constraint, Function, LengthPenalty
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.tasks import ReasoningGym, Task
from jaxrl_llm.types import Completion, Problem


def fullness(problem: Problem, completion: Completion) -> float:
    """More text is better, each further character less so."""
    return math.log1p(len(completion.text))


config = Run(
    model="tiny-random",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=200),
        template="plain",
        holdout=0.2,
    ),
    scoring=Scoring(
        rewards=(Function("safety_smoke:fullness"),),
        constraints=(Constraint(LengthPenalty(-1.0), limit=8.0, rate=0.002, multiplier=0.1, name="length"),),
    ),
    recipe=DR_GRPO,
    rollout=Rollout(prompts=8, group=8, max_prompt_tokens=80, max_new_tokens=16, slots=64, chunk=16),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=2, microbatch_rows=2, row_tokens=256),
    output=Output(checkpoint_every=20, tensorboard=False),
    steps=40,
)
