"""The kinds of runs there are, by the types of their configurations."""

from jaxrl_llm.config.run import Run

KINDS: tuple[type, ...] = (Run,)
"""What a configuration file may set ``config`` to; ``stages.STAGES`` says how each is trained."""
