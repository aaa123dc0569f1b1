"""A small language model learns six kinds of problems and the capitals of a file at once, for any number of steps.

    jaxrl-llm train mixture_smollm2

SmolLM2-135M-Instruct; five families of reasoning-gym that have one number as their answer, chosen among nineteen
because such a small model is sometimes right on them (greatest common divisors, products, counted letters, sums, least
common multiples), mixed operations, and a file. Each has its share of the prompts, its own held-out problems, and is
evaluated every ten steps; the file's answers are compared whole, and have a separate token limit and separate rewards.

ProRL's pieces keep it learning: a wide upper clip, the groups that can teach, a KL to a reference that is moved to
the policy every twenty steps. Runs on a CPU.
"""

import dataclasses
from pathlib import Path

from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V2
from jaxrl_llm.rewards import Accuracy, LengthPenalty
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Resets
from jaxrl_llm.tasks import ReasoningGym, Table, Task

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def family(name: str, options: dict, weight: float = 1.0) -> Part:
    """Problems of one family; the answer is the last number in the text."""
    return Part(Task(ReasoningGym(name, options, size=1000), template="chatml", holdout=0.2, name=name), weight)


config = Run(
    model="smollm2-135m",
    task=Mixture(
        (
            family("chain_sum", ONE_DIGIT),
            family("products", ONE_DIGIT),
            family("basic_arithmetic", ONE_DIGIT),
            family("gcd", {"min_value": 2, "max_value": 12}),
            family("lcm", {"min_value": 2, "max_value": 9}),
            family("letter_counting", {"min_words": 2, "max_words": 4}),
            Part(
                Task(
                    Table(str(Path(__file__).with_name("capitals.jsonl"))),
                    extractor="whole",
                    template="chatml",
                    holdout=0.2,
                    name="capitals",
                ),
                weight=2.0,
                # An answer is one short sentence, and right if it is the file's.
                rewards=(Accuracy(), LengthPenalty(0.01)),
                max_new_tokens=16,
            ),
        )
    ),
    recipe=dataclasses.replace(PRORL_V2, shaping=(), resets=Resets(reference_every=20)),
    rollout=Rollout(
        prompts=8,
        group=8,
        max_prompt_tokens=96,
        max_new_tokens=24,
        temperature=0.9,
        engine=EngineOptions(slots=80, chunk=8),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-5), minibatches=2, compute=Compute(remat="none")),
    evaluation=Evaluation(every=10, limit=16),
    output=Output(checkpoint_every=20, keep=2),
    steps=60,
)
