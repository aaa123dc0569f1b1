"""A task with episodes and one without, a filter of groups, evaluations of both."""

import dataclasses

from branches import PLAYED, ROWS
from branches import config as branches

from jaxrl_llm.config import Evaluation, Mixture, Part
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Format
from jaxrl_llm.tasks import Task

PLAIN = Task(ROWS, template="chatml", verifier="none", holdout=0.2, name="plain")
config = dataclasses.replace(
    branches,
    task=Mixture(
        (
            Part(dataclasses.replace(PLAYED, holdout=0.2)),
            Part(PLAIN, max_new_tokens=24),
        )
    ),
    scoring=dataclasses.replace(branches.scoring, rewards=(Format(".*[0-9].*"),)),
    recipe=dataclasses.replace(GRPO, name="filtered_grpo", filter_groups="reward"),
    rollout=dataclasses.replace(branches.rollout, prompts=4, group=4),
    evaluation=Evaluation(every=4, limit=2),
)
