"""ProRL, first version, as the eight runs of its appendix E: one command, a phase for each (arXiv 2505.24864).

    jaxrl-llm train prorl_v1_runs

Hardware: written for 32 chips; not run by us. The paper used 4 nodes of 8 H100 for about 16,000 GPU hours. Its
results are in ``prorl_r1_distill_1_5b``, which has its settings as one run.

From the paper: the changes from run to run, as below; a reset is of the reference and of the optimiser, when
validation stagnates or degrades: at the beginning of the runs 2, 6 and 7; the last run has about 200 steps. It names
neither the steps of the others nor its definition of a stagnation or a jump of the lengths: three evaluations without a
better one, and a quarter of the completions cut off in five steps in a row, are our choices, and so are the most steps
of each run. Runs 4 and 5 penalise answers without an end; it does not name their difference: the fifth continues here.

Its data are 40 thousand problems of mathematics, 37 thousand puzzles of 96 families, 25 thousand of science, 24
thousand of code and 10 thousand instructions. This file has the mathematics, puzzles of 16 families in the same share,
and instructions that are generated and checked (``Instructions``), on the text after the thoughts; it has no science
and no code. ``eval RUN@STEP`` and ``train --from RUN@STEP`` take each run's beginning: it is kept for good.
"""

import dataclasses

from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V1
from jaxrl_llm.rewards.shaping import StopProperly
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Phase, Reaches, Resets, Rules, Stalls
from jaxrl_llm.tasks import HubDataset, Instructions, ReasoningGym, Task

CONTEXT, LONGER, PROMPT = 8096, 16384, 1024

MATHEMATICS = Task(
    source=HubDataset("agentica-org/DeepScaleR-Preview-Dataset", prompt_field="problem"),
    extractor="boxed",
    verifier="math",
    suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
    holdout=0.005,
    name="mathematics",
)
INSTRUCTIONS = Task(Instructions(size=20000), extractor="after:</think>", verifier="instructions", holdout=0.005)
FAMILIES = (
    "knights_knaves", "zebra_puzzles", "syllogism", "time_intervals", "family_relationships", "countdown",
    "mini_sudoku", "n_queens", "tower_of_hanoi", "futoshiki", "shortest_path", "course_schedule", "word_ladder",
    "caesar_cipher", "number_sequence", "letter_jumble",
)  # fmt: skip


def puzzles(family: str) -> Part:
    """The puzzles of one family, with its share of all puzzles."""
    task = Task(
        ReasoningGym(family, size=2300),
        extractor="tag:answer",
        verifier="reasoning_gym",
        suffix="\nPlease reason step by step, and put your final answer within <answer></answer>.",
        holdout=0.005,
    )
    return Part(task, weight=3.7 / len(FAMILIES))


FIRST = Mixture((Part(MATHEMATICS, weight=4.0), *map(puzzles, FAMILIES)), "mathematics and puzzles")
ALL = Mixture((*FIRST.parts, Part(INSTRUCTIONS, weight=1.0)), "instructions too")

STAGNATES = Stalls(3)
LENGTHS_JUMP = Reaches("completions/truncated_fraction", above=0.25, times=5)
RESET = {"reset": True, "reset_optimiser": True}

config = Run(
    model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    task=FIRST,
    recipe=dataclasses.replace(PRORL_V1, resets=Resets()),
    rollout=Rollout(
        prompts=256,
        group=16,
        max_prompt_tokens=PROMPT,
        max_new_tokens=CONTEXT - PROMPT,
        engine=EngineOptions(slots=512, chunk=64),
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=2e-6), minibatches=4, compute=Compute(microbatch_rows=32, dtype="bfloat16")
    ),
    evaluation=Evaluation(every=50, samples=4, temperature=0.6, top_p=0.95),
    output=Output(checkpoint_every=50),
    steps=2000,
    rules=Rules(
        phases=(
            Phase("run 1: 8k, no instructions", 400, STAGNATES),
            Phase("run 2: reset", 300, STAGNATES, **RESET),
            Phase("run 3: instructions too", 300, LENGTHS_JUMP, changes={"task": ALL}),
            Phase("run 4: cut off is wrong", 200, STAGNATES, changes={"recipe.shaping": (StopProperly(),)}),
            Phase("run 5: goes on", 200, STAGNATES),
            Phase("run 6: 32 completions, reset", 200, STAGNATES, changes={"rollout.group": 32}, **RESET),
            Phase("run 7: reset", 200, STAGNATES, **RESET),
            Phase(
                "run 8: 16k, 16 completions",
                changes={"rollout.max_new_tokens": LONGER - PROMPT, "rollout.group": 16},
            ),
        )
    ),
)
