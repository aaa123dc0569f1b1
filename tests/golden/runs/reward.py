"""A reward model from pairs."""

from dpo import config as dpo

from jaxrl_llm.config import Output, RewardModel

config = RewardModel(
    model="tiny-random",
    data=dpo.data,
    batch=dpo.batch,
    learner=dpo.learner,
    output=Output(checkpoint_every=2, trackers=()),
    steps=4,
)
