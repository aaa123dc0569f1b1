"""Sampling one step ahead of learning, an adapter, and two controllers: of the KL and of the entropy."""

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.models.config import Lora
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.rules import Resets
from jaxrl_llm.tasks import Rows, Task

config = Run(
    model="tiny-random",
    task=Task(
        Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
        template="chatml",
        name="digits",
    ),
    scoring=Scoring((Format(r".*[0-9].*"),), timeout_s=60.0),
    recipe=Recipe(
        "controlled",
        PRESETS["grpo"],
        resets=Resets(reference_every=7),
        controller=(AdaptiveKL(0.01), AdaptiveEntropy(5.45, 0.01)),
    ),
    rollout=Rollout(
        prompts=4,
        group=4,
        max_prompt_tokens=32,
        max_new_tokens=8,
        engine=EngineOptions(slots=16, chunk=8),
        collect=Collect(staleness=1),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), minibatches=2, lora=Lora(4)),
    output=Output(checkpoint_every=2, trackers=()),
    steps=40,
)
