"""A real language model learns one-digit sums and differences from checked answers, on whatever device is there.

    jaxrl-llm train quickstart

SmolLM2-135M-Instruct (Apache-2.0, downloaded once) and reasoning-gym's ``chain_sum``: two terms of one digit, answers
that are not negative. Some 155 such problems exist; half of them, chosen by question text, are held out and tested before
and after with greedy decoding. DAPO, 8 groups of 8 a step.
"""

import dataclasses

from jaxrl_llm.config import Output, Run
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import DAPO
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.tasks import ReasoningGym, Task

config = Run(
    model="smollm2-135m",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
        extractor="last_number",
        # With negative answers left in, the model stays near 0.80: it never samples a minus sign, so those groups never
        # have a success to learn from.
        keep="jaxrl_llm.tasks.filters:nonnegative_answer",
        template="chatml",
        holdout=0.5,
    ),
    # Of 24 tokens there is no long end to punish: the paper's overlong rules are for thousands.
    recipe=dataclasses.replace(DAPO, drop_truncated=False, overlong_share=0.0),
    rollout=Rollout(prompts=8, group=8, max_prompt_tokens=40, max_new_tokens=24, temperature=0.7, slots=64, chunk=8),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), microbatch_rows=1, remat="none"),
    output=Output(checkpoint_every=6, keep=1),
    steps=6,
)
