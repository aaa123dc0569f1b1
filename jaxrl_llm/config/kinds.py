"""The kinds of runs there are, by the types of their configurations."""

from jaxrl_llm.config.run import Run
from jaxrl_llm.config.texts import Preference, RewardModel, Supervised

KINDS: tuple[type, ...] = (Run, Supervised, Preference, RewardModel)
"""What a configuration file may set ``config`` to; ``stages.STAGES`` says how each is trained."""
