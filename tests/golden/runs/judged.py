"""A policy that the reward model of ``reward.py`` scores and compares with its beginning; a gate; pretraining texts."""

from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Format, Gate, ModelReward
from jaxrl_llm.rollout import Collect, EngineOptions, Ptx, Rollout
from jaxrl_llm.tasks import Rows, Task

config = Run(
    model="tiny-random",
    task=Task(
        Rows([{"prompt": f"Say {digit}: ", "answer": str(digit)} for digit in range(10)]),
        template="plain",
        holdout=0.2,
        name="digits",
    ),
    scoring=Scoring((ModelReward("reward"),), gate=Gate(Format(".*[0-9].*"))),
    recipe=GRPO,
    rollout=Rollout(
        prompts=4,
        group=4,
        max_prompt_tokens=32,
        max_new_tokens=8,
        engine=EngineOptions(slots=16, chunk=8),
        collect=Collect(ptx=Ptx(Texts([{"text": f"Say {digit}: {digit}"} for digit in range(10)]), rows=4, coef=0.1)),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3)),
    evaluation=Evaluation(every=2, limit=2, judge=ModelReward("reward")),
    output=Output(checkpoint_every=2, trackers=()),
    steps=2,
)
