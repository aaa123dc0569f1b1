"""A run for two processes, each a host of its own: one of them is killed."""

from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Accuracy, Format
from jaxrl_llm.rollout import Collect, EngineOptions, Replay, Rollout
from jaxrl_llm.tasks import Curriculum, Prioritised, Rows, Task

config = Run(
    model="tiny-random",
    task=Task(
        Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)]),
        extractor="last_number",
        template="chatml",
    ),
    scoring=Scoring((Accuracy(), Format(".*[0-9].*")), timeout_s=60.0),
    recipe=GRPO,
    rollout=Rollout(
        prompts=4,
        group=4,
        max_prompt_tokens=32,
        max_new_tokens=16,
        engine=EngineOptions(slots=16, chunk=8),
        collect=Collect(curriculum=Curriculum(Prioritised()), replay=Replay(2, 16)),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), minibatches=2),
    output=Output(checkpoint_every=1, keep=3, trackers=()),
    steps=30,
)
