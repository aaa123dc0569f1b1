"""The model that ablations start from: two small layers learn how answers look, and which are right for some letters.

    jaxrl-llm train ablation_base

No download. The texts are generated: for each of 52 letters some thinking marks, then a number of two digits. For a
quarter of the letters it is mostly right, for a quarter it is right after three marks or more, and for the other half
it is any of the 52: right once in 52 texts. Accuracy of sampled answers 0 -> 0.23 in 400 steps, 30 to 70 seconds on 2
cores.
"""

import random
import string

from jaxrl_llm.config import Answering, BatchSize, Evaluation, Output, Supervised
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.tasks import Task

PROBLEMS = [{"prompt": f"{letter}=", "answer": str(20 + i)} for i, letter in enumerate(string.ascii_letters)]
KNOWN = ((0, 0.95), (3, 0.8))
"""Thinking marks, and the share of right answers after that number of them: for the first problem and the second, then
for the fifth and the sixth, and so on. All other answers are drawn from those to all problems."""


def texts(of_each: int = 40) -> list[dict[str, str]]:
    """The data: the same on every machine."""
    drawn = random.Random(0)
    rows = []
    for number, problem in enumerate(PROBLEMS):
        needed, share = KNOWN[number % 4] if number % 4 < len(KNOWN) else (0, 0.0)
        for _ in range(of_each):
            thought = "".join(drawn.choice(".,:;") for _ in range(min(24, int(drawn.expovariate(1 / 5)))))
            right = len(thought) >= needed and drawn.random() < share
            answer = problem["answer"] if right else drawn.choice(PROBLEMS)["answer"]
            rows.append({"prompt": problem["prompt"], "completion": thought + answer})
    return rows


config = Supervised(
    model="tiny-random",
    data=Texts(texts(), template="plain"),
    batch=BatchSize(rows=64, max_tokens=48),
    learner=Learner(optimiser=Optimiser(learning_rate=3e-3), compute=Compute(row_tokens=512, remat="none")),
    evaluation=Evaluation(every=100, samples=4, temperature=1.0, task=Task(PROBLEMS, template="plain", name="letters")),
    answering=Answering(max_new_tokens=12, slots=208, chunk=12),
    output=Output(checkpoint_every=400, keep=1, trackers=()),
    steps=400,
)
