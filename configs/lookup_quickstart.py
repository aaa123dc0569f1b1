"""SmolLM2-135M-Instruct learns to ask a table: episodes with an environment of one's own, on two CPU cores.

    jaxrl-llm train lookup_quickstart

Each episode has a number that only its environment knows; ``<get>NAME</get>`` is answered with it. Three worked
examples in the prompt show how. The environment gives the reward: 1 for the right number in the first reply without a
request. GRPO, 6 groups of 8 episodes a step.

Measured on 2 CPU cores: the reward of 32 held-out problems, answered greedily, 0.03 before, 0.81 after one step and
0.97 after two; before, the model makes up a number. 2 minutes 37 seconds in all, compilation and both evaluations
included; 5.8 GB of memory.
"""

from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.environments import Limits
from jaxrl_llm.environments.examples import Keys, Lookup
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Task

config = Run(
    model="smollm2-135m",
    task=Task(Keys(size=128), environment=Lookup, verifier="none", template="chatml", holdout=0.25, name="lookup"),
    scoring=Scoring(rewards=()),
    recipe=GRPO,
    rollout=Rollout(
        prompts=6,
        group=8,
        max_prompt_tokens=256,
        max_new_tokens=96,
        temperature=0.8,
        engine=EngineOptions(slots=16),
        episode=Limits(max_turns=3),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=4e-5), compute=Compute(row_tokens=1024)),
    evaluation=Evaluation(limit=32),
    output=Output(checkpoint_every=2),
    steps=2,
)
