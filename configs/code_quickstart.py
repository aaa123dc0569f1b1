"""SmolLM2-135M-Instruct writes small Python functions, judged by their tests in the sandbox, on two CPU cores.

    jaxrl-llm train code_quickstart

The problems are those of level 1 of ``Programs``, one expression each; the reward is the share of the tests passed.
GRPO, 6 groups of 8 programs a step.

Measured on 2 CPU cores: of 30 held-out problems, answered greedily, 0.60 are solved before and 0.77 after five steps,
with one seed, in 4:46 minutes in all and 5.2 GB of memory. The programs that are sampled at temperature 0.8 solve 0.15,
0.25, 0.25, 0.50 and 0.44.
"""

from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import CodeTests
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Programs, Task

config = Run(
    model="smollm2-135m",
    task=Task(Programs(levels=(1,)), extractor="whole", verifier="code", template="chatml", holdout=0.3),
    scoring=Scoring(rewards=(CodeTests(all_or_nothing=False),)),
    recipe=GRPO,
    rollout=Rollout(
        prompts=6,
        group=8,
        max_prompt_tokens=112,
        max_new_tokens=64,
        temperature=0.8,
        engine=EngineOptions(slots=48, chunk=8),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), compute=Compute(remat="none")),
    evaluation=Evaluation(limit=30),
    output=Output(checkpoint_every=5, keep=1),
    steps=5,
)
