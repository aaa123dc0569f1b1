"""A real language model learns from pairs of its own answers, right against wrong: direct preference optimisation.

    jaxrl-llm train dpo_quickstart

SmolLM2-135M-Instruct (Apache-2.0, downloaded once) answers the training half of ``chain_sum``'s one-digit problems 16
times each at temperature 0.5. Right answers are preferred to wrong ones, including wrong ones that were cut off at 24
tokens: without these nothing would keep the model from answers that never end. A fifth of the prompts with their pairs
is held out; the other half of the problems is answered before and after with greedy decoding.

Measured on 2 CPU cores without an accelerator: accuracy 0.55 -> 0.99 in 8 steps, and 90.8 % of 76 held-out pairs in
order; less than 4 and a half minutes in all, compilation, the collection of 370 pairs and both evaluations included;
4.8 GB of memory.
"""

from jaxrl_llm.algorithms.preference import DPO
from jaxrl_llm.config import Answering, BatchSize, Output, Preference
from jaxrl_llm.data import Collected, Pairs
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.tasks import ReasoningGym, Task

task = Task(
    source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
    extractor="last_number",
    keep="jaxrl_llm.tasks.filters:nonnegative_answer",
    template="chatml",
    holdout=0.5,
)

config = Preference(
    model="smollm2-135m",
    data=Pairs(Collected(task, samples=16, temperature=0.5, keep="all", cut_off=True), holdout=0.2),
    loss=DPO(beta=0.1),
    batch=BatchSize(rows=32, max_tokens=64),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-5), compute=Compute(remat="none")),
    answering=Answering(max_new_tokens=24, slots=80, chunk=8),
    output=Output(checkpoint_every=8, keep=1),
    steps=8,
)
