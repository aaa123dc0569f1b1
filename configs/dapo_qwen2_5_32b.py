"""DAPO with its paper's numbers: Qwen2.5-32B on DAPO-Math-17k (arXiv 2503.14476).

    jaxrl-llm train dapo_qwen2_5_32b

Hardware: written for 256 chips (elsewhere change mesh and learner.compute.microbatch_rows); not run by us. Weights,
gradients and Adam's moments in float32 alone are 525 GB, divided over the mesh; a completion may have 20480 tokens.

Published, not measured by us: AIME 2024 avg@32 from 30 (plain GRPO) to 50, step by step in the paper's table 1:
overlong filtering 36, clip-higher 38, soft overlong punishment 41, token-level loss 42, dynamic sampling 50.

From the paper: 512 prompts of 16 completions, 16 updates a step, clip 0.2 / 0.28, learning rate 1e-6 after a linear
warm-up of 20 steps, no KL, cap 20480, of which the last 4096 are penalised (the recipe's share 0.2). Rewards are 1 and
0 where the paper's are +1 and -1: the penalty is half of the difference in both, so advantages are the same. From the
authors' script (verl, recipe/dapo): weight decay 0.1, prompts of at most 2048 tokens, overlong filtering off, and a
bound on dynamic sampling: up to 10 batches of 1,536 prompts for 512, which are 30 times the prompts. There each batch
is sampled whole; here prompts are started as they are needed. The script also has a dual clip at 10, which neither the
paper nor this run has: ``--recipe.algorithm.surrogate.dual 10``. Our choices: mesh, evaluation every 10 steps, number
of steps.
"""

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import DAPO
from jaxrl_llm.rollout import Collect, EngineOptions, Rollout
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.tasks import HubDataset, Task

UPDATES = 16  # of each step: 8192 completions in minibatches of 512


def problems(name: str) -> Task:
    """One of the data sets published with the paper: the prompts ask for a last line ``Answer: 42``, an integer."""
    return Task(HubDataset(name, prompt_field="prompt", answer_field="reward_model.ground_truth"), verifier="integer")


config = Run(
    model="Qwen/Qwen2.5-32B",
    task=problems("BytedTsinghua-SIA/DAPO-Math-17k"),
    recipe=DAPO,
    rollout=Rollout(
        prompts=512,
        group=16,
        max_prompt_tokens=2048,
        max_new_tokens=20480,
        engine=EngineOptions(slots=1024, chunk=64),
        collect=Collect(max_rounds=30),
    ),
    learner=Learner(
        # The warm-up counts updates: 20 steps of 16.
        optimiser=Optimiser(learning_rate=1e-6, warmup=20 * UPDATES, weight_decay=0.1),
        minibatches=UPDATES,
        compute=Compute(microbatch_rows=32, dtype="bfloat16"),
    ),
    mesh=MeshShape(data=1, fsdp=-1, tensor=8),
    evaluation=Evaluation(
        every=10, samples=32, temperature=1.0, top_p=0.7, task=problems("BytedTsinghua-SIA/AIME-2024")
    ),
    output=Output(checkpoint_every=10),
    steps=300,
)
