"""What is wrong with a run."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong, the step where it began, what it is, why it matters, what to do."""

    kind: str
    step: int
    what: str
    why: str
    remedy: str


def diagnose(rows: list[dict[str, Any]]) -> list[Finding]:
    """Findings of a history."""
    return []
