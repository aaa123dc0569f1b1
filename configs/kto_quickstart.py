"""A real language model learns from answers that are good or bad each by itself: Kahneman-Tversky optimisation.

    jaxrl-llm train kto_quickstart

SmolLM2-135M-Instruct (Apache-2.0, downloaded once) answers the training half of ``chain_sum``'s one-digit problems 8
times each at temperature 0.5. Right answers are desirable, wrong ones and those that were cut off at 24 tokens are not;
no answer needs a partner. A fifth of the prompts with their answers is held out; the other half of the problems is
answered before and after with greedy decoding.
"""

from jaxrl_llm.algorithms.preference import KTO
from jaxrl_llm.config import Answering, BatchSize, Output, Preference
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.tasks import Collected, ReasoningGym, Task, Unpaired

task = Task(
    source=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
    extractor="last_number",
    keep="jaxrl_llm.tasks.filters:nonnegative_answer",
    template="chatml",
    holdout=0.5,
)

config = Preference(
    model="smollm2-135m",
    data=Unpaired(Collected(task, samples=8, temperature=0.5, keep="all", cut_off=True), holdout=0.2),
    loss=KTO(beta=0.1),
    batch=BatchSize(rows=32, max_tokens=64),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-5), compute=Compute(remat="none")),
    answering=Answering(max_new_tokens=24, slots=80, chunk=8),
    output=Output(checkpoint_every=8, keep=1),
    steps=8,
)
