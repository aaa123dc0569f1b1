"""A real language model learns from a reward model alone, and the verifier measures the true accuracy.

    jaxrl-llm train reward_quickstart
    jaxrl-llm train rm_rl_quickstart

The judge is the reward model of ``runs/reward_quickstart``; no answer is verified for the reward. Accuracy is still
measured, in every step and on the held-out problems, and the summary shows it next to the judge's score: if
that keeps rising and the accuracy does not, the judge is being exploited.

Measured on 2 CPU cores without an accelerator: accuracy 0.55 -> 0.85 in 8 steps, 2 minutes 21 seconds in all,
compilation and both evaluations included; 5.2 GB of memory. In the first five steps only the judge's score rises (it
first learns to end its answers), the accuracy of sampled answers only after that: from 0.25 to 0.69.
"""

import dataclasses

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import DAPO, Overlong
from jaxrl_llm.rewards import ModelReward
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
    scoring=Scoring(rewards=(ModelReward("runs/reward_quickstart"),)),
    # Scores of a model are never all equal: no group needs filtering.
    recipe=dataclasses.replace(DAPO, overlong=Overlong(share=0.0), filter_groups=False),
    rollout=Rollout(
        prompts=8,
        group=8,
        max_prompt_tokens=40,
        max_new_tokens=24,
        temperature=0.7,
        engine=EngineOptions(slots=64, chunk=8),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), compute=Compute(remat="none")),
    output=Output(checkpoint_every=8, keep=1),
    steps=8,
)
