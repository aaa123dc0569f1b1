"""SmolLM2-135M-Instruct learns to use a calculator: episodes of two turns with a tool, on two CPU cores.

jaxrl-llm train calculator_quickstart
"""

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.environments import Limits
from jaxrl_llm.environments.examples import Products, multiply
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Task

config = Run(
    model="smollm2-135m",
    task=Task(Products(size=256), tools=(multiply,), template="chatml", holdout=0.2),
    recipe=GRPO,
    rollout=Rollout(
        prompts=6,
        group=8,
        max_prompt_tokens=352,
        max_new_tokens=128,
        temperature=0.8,
        engine=EngineOptions(slots=48),
        episode=Limits(max_turns=3),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), compute=Compute(row_tokens=1024)),
    evaluation=Evaluation(every=2, limit=40, temperature=0.8),
    output=Output(checkpoint_every=2),
    steps=4,
)
