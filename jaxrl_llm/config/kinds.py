"""The kinds of runs there are, by the types of their configurations."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.config.check_texts import check_from_data
from jaxrl_llm.config.field_types import check_finite
from jaxrl_llm.config.phases import check_phases
from jaxrl_llm.config.run import Configuration, Run
from jaxrl_llm.config.texts import Preference, RewardModel, Supervised
from jaxrl_llm.config.validation import check_reinforcement

CHECKS: dict[type, Callable[[Any], None]] = {
    Run: check_reinforcement,
    Supervised: check_from_data,
    Preference: check_from_data,
    RewardModel: check_from_data,
}
"""What is refused of each; ``stages.STAGES`` says how it is trained."""
KINDS = tuple(CHECKS)
"""What a configuration file may set ``config`` to."""


def validate(run: Configuration) -> None:
    """Refuse what cannot work, before anything is loaded; InputError names the field, its value and the remedy."""
    own = next(check for kind, check in CHECKS.items() if isinstance(run, kind))

    def check(settings: Configuration) -> None:
        own(settings)
        check_finite(settings)  # last, since the checks of a field say more

    if isinstance(run, Run) and run.rules.phases:
        check_phases(run, check)
    else:
        check(run)
