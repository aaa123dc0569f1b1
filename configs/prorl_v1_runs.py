"""ProRL, first version, as the eight runs of its appendix E: one command, a phase for each (arXiv 2505.24864).

    jaxrl-llm train prorl_v1_runs

Hardware: written for 32 chips; not run by us. The paper used 4 nodes of 8 H100 for about 16,000 GPU hours. What it
reached is in ``prorl_r1_distill_1_5b``, which has its settings as one run.

From the paper: what changes from run to run, as below; a reset is of the reference and of the optimiser, when
validation stagnates or degrades; the last run has about 200 steps. It names neither the steps of the others nor what a
stagnation or a jump of the lengths is: three evaluations without a better one, and a quarter of the completions cut off
in five steps in a row, are ours, and so are the most steps of each run. Its instructions come from a collection of its
own; here they are generated and checked (``Instructions``). ``eval RUN@STEP`` and ``train --from RUN@STEP`` take each
run's beginning: it is kept for good.
"""

import dataclasses

from jaxrl_llm.config import Evaluation, Mixture, Output, Part, Run
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V1
from jaxrl_llm.rewards.group_shaping import StopProperly
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.rules import Phase, Reaches, Resets, Rules, Stalls
from jaxrl_llm.tasks import HubDataset, Instructions, Task

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
BOTH = Mixture((Part(MATHEMATICS, weight=4.0), Part(INSTRUCTIONS, weight=1.0)))

STAGNATES = Stalls(3)
LENGTHS_JUMP = Reaches("completions/truncated_fraction", above=0.25, times=5)
RESET = {"reset": True, "reset_optimiser": True}

config = Run(
    model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    task=MATHEMATICS,
    recipe=dataclasses.replace(PRORL_V1, resets=Resets()),
    rollout=Rollout(
        prompts=256, group=16, max_prompt_tokens=PROMPT, max_new_tokens=CONTEXT - PROMPT, slots=512, chunk=64
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=2e-6), minibatches=4, microbatch_rows=32, compute_dtype="bfloat16"
    ),
    evaluation=Evaluation(every=50, samples=4, temperature=0.6, top_p=0.95),
    output=Output(checkpoint_every=50),
    steps=2000,
    rules=Rules(
        phases=(
            Phase("run 1: 8k, no instructions", 400, STAGNATES),
            Phase("run 2: reset", 300, STAGNATES, **RESET),
            Phase("run 3: instructions too", 300, LENGTHS_JUMP, changes={"task": BOTH}),
            Phase("run 4: cut off is wrong", 200, STAGNATES, changes={"recipe.shaping": (StopProperly(),)}),
            Phase("run 5: reset", 200, STAGNATES, **RESET),
            Phase("run 6: 32 completions", 200, STAGNATES, changes={"rollout.group": 32}, **RESET),
            Phase("run 7: reset", 200, STAGNATES, **RESET),
            Phase(
                "run 8: 16k, 16 completions",
                changes={"rollout.max_new_tokens": LONGER - PROMPT, "rollout.group": 16},
                **RESET,
            ),
        )
    ),
)
