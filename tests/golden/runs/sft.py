"""Supervised fine-tuning on prompts with completions."""

from jaxrl_llm.config import BatchSize, Evaluation, Output, Supervised
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Learner, Optimiser

config = Supervised(
    model="tiny-random",
    data=Texts([{"prompt": f"Say {digit}: ", "completion": str(digit)} for digit in range(40)], holdout=0.2),
    batch=BatchSize(rows=8, max_tokens=32),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), minibatches=2),
    evaluation=Evaluation(every=3),
    output=Output(checkpoint_every=2, trackers=()),
    steps=6,
)
