"""A mixture of two tasks under LoRA, sampled one step ahead of learning; controllers of the KL and of the entropy."""

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.models.config import Lora
from jaxrl_llm.recipes import AdaptiveEntropy, AdaptiveKL, Recipe
from jaxrl_llm.rewards import Format, LengthPenalty
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.rules import Resets
from jaxrl_llm.tasks import Rows, Task

ROWS = Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)])
DIGITS = Part(Task(ROWS, template="chatml", holdout=0.2, name="digits"), 2.0)
LETTERS = Part(
    Task(ROWS, template="plain", holdout=0.3, name="letters", suffix=" letter", verifier="none"),
    rewards=(Format("[a-m].*"), LengthPenalty(0.01)),
    max_new_tokens=5,
)

config = Run(
    model="tiny-random",
    task=Mixture((DIGITS, LETTERS)),
    scoring=Scoring((Format(".*[0-9].*"),)),
    recipe=Recipe(
        "controlled",
        PRESETS["grpo"],
        resets=Resets(reference_every=2),
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
    evaluation=Evaluation(every=2, limit=2),
    output=Output(checkpoint_every=2, trackers=()),
    steps=4,
)
