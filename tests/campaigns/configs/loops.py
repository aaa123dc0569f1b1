"""Episodes whose turns the rule of repetition ends, under a loss that reads what the sampler said."""

import dataclasses

from branches import PLAYED
from branches import config as branches

from jaxrl_llm.recipes import DEEPSEEK_V3_2
from jaxrl_llm.rollout.settings import Repetition

config = dataclasses.replace(
    branches,
    task=dataclasses.replace(PLAYED, name="loops"),
    recipe=DEEPSEEK_V3_2,
    rollout=dataclasses.replace(
        branches.rollout,
        temperature=0.5,
        repetition=Repetition(longest_period=2, times=2),
    ),
)
