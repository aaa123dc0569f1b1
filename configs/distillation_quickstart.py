"""The finished quickstart run teaches the model that it began from: on-policy distillation, without any reward.

    jaxrl-llm train quickstart
    jaxrl-llm train distillation_quickstart

The student answers, and at each token of its own answers it learns from the teacher's distribution over the vocabulary
(reverse KL, ``docs/distillation.md``). Answers are verified for the display alone.

Measured on 2 CPU cores: accuracy 0.55 -> 0.96 after 2 steps and 1.00 after 4, in 2:25 minutes with compilation and
both evaluations; 5.3 GB of memory.
"""

import dataclasses

from jaxrl_llm.config import Distillation, Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import DAPO, Overlong
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import ReasoningGym, Task

config = Run(
    model="smollm2-135m",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
        extractor="last_number",
        keep="jaxrl_llm.tasks.filters:nonnegative_answer",
        template="chatml",
        holdout=0.5,
    ),
    scoring=Scoring(rewards=(), distillation=Distillation("runs/quickstart", divergence="reverse_kl")),
    # Nothing is compared within a group, so that none is left out.
    recipe=dataclasses.replace(DAPO, overlong=Overlong(share=0.0), filter_groups=False),
    rollout=Rollout(
        prompts=16,
        group=4,
        max_prompt_tokens=40,
        max_new_tokens=24,
        temperature=0.7,
        engine=EngineOptions(slots=64, chunk=8),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), compute=Compute(remat="none")),
    output=Output(checkpoint_every=4, keep=1),
    steps=4,
)
