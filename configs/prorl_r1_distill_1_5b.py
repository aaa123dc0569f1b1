"""ProRL, first version: long training of DeepSeek-R1-Distill-Qwen-1.5B, with resets (arXiv 2505.24864).

    jaxrl-llm train prorl_r1_distill_1_5b

Hardware: written for 32 chips; not run by us. The paper used 4 nodes of 8 H100 for about 16,000 GPU hours over eight
runs of growing scope.

Published, not measured by us: average pass@1 on mathematics 44.45 -> 60.14 (table 1: AIME 2024 28.54 -> 48.13, AIME
2025 22.71 -> 33.33, MATH 82.90 -> 91.89). The paper trains on 136 thousand problems of mathematics, code, STEM, logic
and instruction following; this is its mathematics alone, from DeepScaleR's open collection, so expect less.

From the paper: clip 0.2 / 0.4, token-level loss, dynamic sampling, learning rate 2e-6, 16 completions at temperature
1.2, batch 256 in minibatches of 64, context 8096, reference and optimiser reset when validation stagnates. It does
not state its KL coefficient; 1e-4 is that of the second version's open recipe. Our choices: prompt limit, mesh, no
weight decay, evaluation every 50 steps and the definition of stagnation (three evaluations without a better one).
"""

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V1
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import HubDataset, Task

CONTEXT, PROMPT = 8096, 1024

config = Run(
    model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    task=Task(
        source=HubDataset("agentica-org/DeepScaleR-Preview-Dataset", prompt_field="problem"),
        extractor="boxed",
        verifier="math",
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        holdout=0.005,
    ),
    recipe=PRORL_V1,
    rollout=Rollout(
        prompts=256,
        group=16,
        max_prompt_tokens=PROMPT,
        max_new_tokens=CONTEXT - PROMPT,
        temperature=1.2,
        engine=EngineOptions(slots=512, chunk=64),
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=2e-6), minibatches=4, compute=Compute(microbatch_rows=32, dtype="bfloat16")
    ),
    evaluation=Evaluation(every=50, samples=4, temperature=0.6, top_p=0.95),
    output=Output(checkpoint_every=50),
    steps=2000,
)
