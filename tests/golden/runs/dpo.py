"""Direct preference optimisation on pairs."""

from jaxrl_llm.algorithms.preference import DPO
from jaxrl_llm.config import BatchSize, Evaluation, Output, Preference
from jaxrl_llm.data import Pairs
from jaxrl_llm.learner import Learner, Optimiser

ROWS = [
    {"prompt": f"Say {digit}: ", "chosen": str(digit), "rejected": str((digit + number) % 10)}
    for digit in range(10)
    for number in range(1, 4)
]

config = Preference(
    model="tiny-random",
    data=Pairs(ROWS, template="plain", holdout=0.2),
    loss=DPO(beta=0.1),
    batch=BatchSize(rows=8, max_tokens=32),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3)),
    evaluation=Evaluation(every=3),
    output=Output(checkpoint_every=2, trackers=()),
    steps=6,
)
