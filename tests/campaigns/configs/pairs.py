"""Direct preference optimisation: no sampling, an order of pairs, a reference that is scored once."""

from jaxrl_llm.algorithms.preference import DPO
from jaxrl_llm.config import BatchSize, Evaluation, Output, Preference
from jaxrl_llm.data import Pairs
from jaxrl_llm.learner import Learner, Optimiser

config = Preference(
    model="tiny-random",
    data=Pairs(
        [
            {"prompt": f"Say {digit}: ", "chosen": str(digit), "rejected": str((digit + number) % 10)}
            for digit in range(10)
            for number in range(1, 4)
        ],
        holdout=0.2,
    ),
    loss=DPO(beta=0.1),
    batch=BatchSize(rows=8, max_tokens=32),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3)),
    evaluation=Evaluation(every=20),
    output=Output(checkpoint_every=2, trackers=()),
    steps=80,
)
