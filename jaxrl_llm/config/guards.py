"""What is refused of a run's guards."""

import difflib

from jaxrl_llm.config.run import Run
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rules import ALL
from jaxrl_llm.telemetry.diagnosis.words import WORDS


def check_guards(run: Run) -> None:
    """Refuse a guard of what nobody finds, and rollbacks that could go nowhere.

    Raises:
      InputError: names the field, its value and the remedy.
    """
    rules = run.rules
    for kind in rules.guards:
        if kind != ALL and kind not in WORDS:
            close = difflib.get_close_matches(kind, WORDS, 1, 0.5)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(WORDS)}, or all"
            raise InputError(f"rules.guards has {kind!r}, which is no kind of finding: {meant}")
    require(rules.on_guard in ("stop", "rollback"), f"rules.on_guard must be stop or rollback, got {rules.on_guard!r}")
    require(0 < rules.slower <= 1, f"rules.slower must be above 0 and at most 1, got {rules.slower}")
    require(rules.rollbacks >= 1, f"rules.rollbacks must be at least 1, got {rules.rollbacks}")
    require(
        bool(rules.guards) or rules.on_guard == "stop",
        "rules.on_guard rollback waits for no guard: add --guard KIND, or set it to stop",
    )
