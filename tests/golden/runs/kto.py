"""KTO on answers that are good or bad each by itself."""

from jaxrl_llm.algorithms.preference import KTO
from jaxrl_llm.config import BatchSize, Output, Preference
from jaxrl_llm.data import Unpaired
from jaxrl_llm.learner import Learner, Optimiser

ROWS = [
    {"prompt": f"Say {digit}: ", "completion": str((digit + number) % 10), "label": number == 0}
    for digit in range(10)
    for number in range(3)
]

config = Preference(
    model="tiny-random",
    data=Unpaired(ROWS, holdout=0.2),
    loss=KTO(beta=0.1, desirable=2.0),
    batch=BatchSize(rows=8, max_tokens=32),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3)),
    output=Output(checkpoint_every=2, trackers=()),
    steps=4,
)
