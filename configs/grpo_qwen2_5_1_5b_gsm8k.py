"""GRPO on grade-school mathematics: Qwen2.5-1.5B-Instruct on GSM8K.

    jaxrl-llm train grpo_qwen2_5_1_5b_gsm8k

Hardware: written for 8 chips of 16 GB or more; weights, gradients and Adam's moments in float32 take 25 GB in all and
the reference 6 GB, divided over the chips. Model and data come from the Hugging Face hub.

Not measured by us: neither the accuracy nor the speed. The expected starting point is the model's own report (arXiv
2412.15115): 73.2 % on GSM8K with four examples in the prompt; here the prompt has none. DeepSeekMath (arXiv 2402.03300)
took a 7B model from 82.9 to 88.2 with GRPO, on 144 thousand problems. From it: learning rate 1e-6, KL coefficient 0.04,
one update of each batch. Our choices, for machines of this size: 64 prompts of 8 completions of at most 512 tokens,
where it has 16 prompts of 64, 1,024 completions of at most 1,024 tokens; GSM8K alone, the clip range 0.2, mesh and
number of steps.
"""

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import HubDataset, Task

INSTRUCTION = "\nThink step by step, and put the final number in \\boxed{}."


def gsm8k(split: str) -> Task:
    """A split of GSM8K; its solutions end in ``#### 42``, so the reference is the last number."""
    source = HubDataset("openai/gsm8k", "main", split=split, answer_extractor="last_number")
    return Task(source, extractor="boxed", verifier="match", suffix=INSTRUCTION)


config = Run(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    task=gsm8k("train"),
    recipe=GRPO,
    rollout=Rollout(
        prompts=64, group=8, max_prompt_tokens=384, max_new_tokens=512, engine=EngineOptions(slots=256, chunk=32)
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=1e-6), compute=Compute(microbatch_rows=8, row_tokens=4096, dtype="bfloat16")
    ),
    evaluation=Evaluation(every=20, task=gsm8k("test")),
    output=Output(checkpoint_every=20),
    steps=200,
)
