"""Findings while a run goes on: each kind is told once, when it begins to be found."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.telemetry.diagnosis import Finding, diagnose
from jaxrl_llm.telemetry.diagnosis.history import MEASURED, TESTED
from jaxrl_llm.telemetry.rows import jsonable

log = logging.getLogger(__name__)

EVERY = 10
"""Steps between two looks at the history, or a twentieth of all so far: a look takes longer the longer that is."""


class Watch:
    """Keeps what a diagnosis reads of each row.

    Args:
      steps: that the run ends with.
      earlier: the rows of a run that is gone on with; what is found in them has been told.
    """

    def __init__(self, steps: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self._steps = steps
        self._rows = [_read(row) for row in earlier]
        self._next = EVERY
        self._told = {finding.kind for finding in self._found()}

    def see(self, row: Mapping[str, Any]) -> list[Finding]:
        """What is found now and was not before; it looks after an evaluation, or when it is time to."""
        self._rows.append(_read(row))
        step = int(row["step"])
        if step < self._next and not any(TESTED.fullmatch(name) for name in row):
            return []
        self._next = step + max(EVERY, step // 20)
        try:
            new = [finding for finding in self._found() if finding.kind not in self._told]
        except Exception:
            log.exception("what goes wrong could not be told")  # no run ends for its diagnosis
            return []
        self._told |= {finding.kind for finding in new}
        return new

    def _found(self) -> list[Finding]:
        """All that can be said already: a run has stalled once it has for half of the steps that it is to make."""
        last = max((row["step"] for row in self._rows), default=0)
        found = diagnose(self._rows)
        return [one for one in found if one.kind != "stalled" or last - one.step >= self._steps / 2]


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in row if name == "step" or name in MEASURED or TESTED.fullmatch(name)]
    return {name: jsonable(row[name]) for name in names}
