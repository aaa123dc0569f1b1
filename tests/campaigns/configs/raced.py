"""Experts whose routes are replayed, in groups that are interrupted and go on in the next step."""

import dataclasses

from branches import config as branches

from jaxrl_llm.recipes import GSPO
from jaxrl_llm.rollout import Collect

config = dataclasses.replace(
    branches,
    model="tiny-random-moe",
    steps=4,
    recipe=GSPO,
    rollout=dataclasses.replace(branches.rollout, collect=Collect(interrupt=True)),
    learner=dataclasses.replace(branches.learner, routing_replay="R3"),
)
