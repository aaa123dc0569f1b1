"""Steps are rewarded, all outcomes are equal: process-supervised GRPO learns where outcomes teach nothing.

    jaxrl-llm train process_smoke

No download. The outcome reward is 1 for every completion; each two characters are a step, worth the share of them that
are letters or digits. GRPO by steps (arXiv 2402.03300, section 4.1.3) raises ``reward/steps`` from 0.26 to 0.99 in ten
steps. GRPO by outcomes, otherwise the same, has nothing to compare:

    jaxrl-llm train process_smoke --recipe grpo --recipe.algorithm.kl_coef 0 --run_dir runs/outcome_smoke

stays at its start (between 0.23 and 0.28), and reports at each step that it teaches nothing (event/teaches_nothing).
That would end it after three steps, if ``rollout.collect.patience`` were not 0 here. ``reward/mean`` is 1.0 in both,
and accuracy on the sums stays near 0. Measured on 2 cores: 20 to 45 seconds, most of it compilation.
"""

import dataclasses
from collections.abc import Iterator

from jaxrl_llm.algorithms.advantages import ProcessSupervised
from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Format, StepFunction
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.tasks import ReasoningGym, Task
from jaxrl_llm.types import Completion, Problem


def letters(problem: Problem, completion: Completion) -> Iterator[tuple[int, float]]:
    """Where each step of two characters ends, and the share of them that are ASCII letters or digits."""
    text = completion.text
    for end in range(2, len(text) + 1, 2):
        yield end, sum(c.isascii() and c.isalnum() for c in text[end - 2 : end]) / 2


config = Run(
    model="tiny-random",
    task=Task(
        source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=200),
        template="plain",
        holdout=0.2,
    ),
    scoring=Scoring(rewards=(Format(".*"), StepFunction("process_smoke:letters"))),
    recipe=dataclasses.replace(
        GRPO, name="process_grpo", algorithm=dataclasses.replace(GRPO.algorithm, advantage=ProcessSupervised())
    ),
    rollout=Rollout(
        prompts=8,
        group=8,
        max_prompt_tokens=80,
        max_new_tokens=12,
        engine=EngineOptions(slots=64, chunk=12),
        collect=Collect(patience=0),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-2), minibatches=2, compute=Compute(row_tokens=256)),
    output=Output(checkpoint_every=10, trackers=()),
    steps=10,
)
