"""ProRL, second version, with its cycles written out: length is penalised for 100 steps, and is not for 500.

    jaxrl-llm train prorl_v2_cycles

Hardware: written for 32 chips; not run by us.

From its description: REINFORCE++-baseline, k2, 3000 steps and more with completions of up to 8,192 tokens throughout,
a length reward that comes and goes (for example 100 updates on, 500 off), the reference reset every 200 to 500 steps,
at a jump of the KL or when validation stalls, without the optimiser. From its open recipe: 512 prompts of 16 in 8
updates, clip 0.2 / 0.27, coefficient 1e-4, learning rate 1e-6. Published, not measured by us: 3000 steps beat the first
version's 2000 at 16k, with completions 17.5 % shorter.

Our choices: cycles counted in steps; 300 of the 200 to 500 steps; the definition of a jump (3 times the median of the
last 20 steps) and of a stall (three evaluations without a better one); mesh, prompt limit; and the data, DeepScaleR's
mathematics alone, where it learned five kinds of problems. The recipe ``prorl_v2`` has the cycle in one piece, by
updates (``LengthCycle``); as phases each turn is an event, a kept snapshot and a line of the summary.
"""

import dataclasses

from jaxrl_llm.config import Evaluation, Output, Run
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import PRORL_V2
from jaxrl_llm.rewards.shaping import LengthCycle, StopProperly
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rules import Phase, Resets, Rules
from jaxrl_llm.tasks import HubDataset, Task

COMPLETION, PROMPT = 8192, 1024
CYCLES, PUNISHED, FREE = 5, 100, 500
ON = (StopProperly(), LengthCycle(on=1, off=0))
OFF = (StopProperly(),)


def cycles() -> tuple[Phase, ...]:
    """Each cycle's two phases."""
    found = []
    for cycle in range(1, CYCLES + 1):
        last = cycle == CYCLES
        found.append(Phase(f"cycle {cycle}: length", PUNISHED, changes={"recipe.shaping": ON}))
        found.append(Phase(f"cycle {cycle}: free", None if last else FREE, changes={"recipe.shaping": OFF}))
    return tuple(found)


config = Run(
    model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    task=Task(
        source=HubDataset("agentica-org/DeepScaleR-Preview-Dataset", prompt_field="problem"),
        extractor="boxed",
        verifier="math",
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        holdout=0.005,
    ),
    recipe=dataclasses.replace(PRORL_V2, resets=Resets(reference_every=300, on_stall=3, on_kl_jump=3.0, kl_window=20)),
    rollout=Rollout(
        prompts=512,
        group=16,
        max_prompt_tokens=PROMPT,
        max_new_tokens=COMPLETION,
        engine=EngineOptions(slots=512, chunk=64),
    ),
    learner=Learner(
        optimiser=Optimiser(learning_rate=1e-6), minibatches=8, compute=Compute(microbatch_rows=32, dtype="bfloat16")
    ),
    evaluation=Evaluation(every=50, samples=4, temperature=0.6, top_p=0.95),
    output=Output(checkpoint_every=50),
    steps=CYCLES * (PUNISHED + FREE),
    rules=Rules(phases=cycles()),
)
