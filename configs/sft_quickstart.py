"""A real language model learns sums from its own right answers: rejection sampling, then supervised fine-tuning.

    jaxrl-llm train sft_quickstart

SmolLM2-135M-Instruct (Apache-2.0, downloaded once) answers the training half of ``chain_sum``'s one-digit problems 16
times each at temperature 0.5; right, verified and distinct answers become the data. The other half of the problems is
answered before and after with greedy decoding.

Measured on 2 CPU cores without an accelerator: accuracy 0.55 -> 0.95 in 14 steps, 3 minutes 25 seconds in all,
compilation, the collection of 241 texts and both evaluations included; 4.9 GB of memory.
"""

from jaxrl_llm.config import Answering, BatchSize, Output, Supervised
from jaxrl_llm.data import Collected, Texts
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.tasks import ReasoningGym, Task

task = Task(
    source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
    extractor="last_number",
    keep="jaxrl_llm.tasks.filters:nonnegative_answer",
    template="chatml",
    holdout=0.5,
)

config = Supervised(
    model="smollm2-135m",
    data=Texts(Collected(task, samples=16, temperature=0.5, keep="all")),
    batch=BatchSize(rows=32, max_tokens=64),
    learner=Learner(optimiser=Optimiser(learning_rate=2e-5), compute=Compute(remat="none")),
    answering=Answering(max_new_tokens=24, slots=80, chunk=8),
    output=Output(checkpoint_every=14, keep=1),
    steps=14,
)
