"""GSPO on the model of its paper, Qwen3-30B-A3B-Base (arXiv 2507.18071): 128 experts a layer, 8 for each token.

    jaxrl-llm train gspo_qwen3_30b_a3b

At toy size, on two CPU cores, with the method unchanged (GSPO, four updates, no replay):

    jaxrl-llm train gspo_qwen3_30b_a3b --sizes moe_smoke

Hardware: written for 128 chips; not run by us. Weights, gradients and Adam's moments in float32 are 490 GB for the
model of the paper.

Published, not measured by us: better rewards than GRPO for equal compute on AIME 2024, LiveCodeBench and CodeForces
(curves without a table), two orders of magnitude more clipped tokens, and no need for routing replay.

From the paper: the band 3e-4 / 4e-4 around a sequence ratio of 1, four minibatches of each rollout, no KL. The paper
gives neither its data nor its batch sizes, lengths and learning rate: those here are our choices.
"""

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GSPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.tasks import HubDataset, Task

config = Run(
    model="Qwen/Qwen3-30B-A3B-Base",
    task=Task(
        source=HubDataset("agentica-org/DeepScaleR-Preview-Dataset", prompt_field="problem"),
        extractor="boxed",
        verifier="math",
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        holdout=0.005,
    ),
    recipe=GSPO,
    rollout=Rollout(
        prompts=256, group=8, max_prompt_tokens=1024, max_new_tokens=8192, engine=EngineOptions(slots=512, chunk=64)
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=1e-6), minibatches=4, compute=Compute(microbatch_rows=32, dtype="bfloat16")
    ),
    mesh=MeshShape(data=1, fsdp=-1, tensor=4),
    evaluation=Evaluation(every=20, samples=4, temperature=0.6, top_p=0.95),
    output=Output(checkpoint_every=20),
    steps=400,
)
