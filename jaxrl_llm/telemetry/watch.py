"""Findings while a run goes on: each kind is told once, when it begins to be found."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.telemetry.diagnosis import Finding, diagnose
from jaxrl_llm.telemetry.diagnosis.history import MEASURED, ROLLED_BACK, TESTED
from jaxrl_llm.telemetry.rows import jsonable

log = logging.getLogger(__name__)

READ = {"step", ROLLED_BACK, *MEASURED}
"""What a diagnosis reads of a row, beside evaluations."""
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
        return diagnose(self._rows, self._steps)


class Sight:
    """What guards see of a run: the same at each step whether the run was interrupted before it or not.

    Args:
      steps: that the run ends with.
      earlier: the rows of a run that is gone on with.
    """

    def __init__(self, steps: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self._steps = steps
        self._rows = [_read(row) for row in earlier]

    def found(self, row: Mapping[str, Any]) -> list[Finding]:
        """All that is found after this step, which is kept; nothing where it is not time to look."""
        self._rows.append(_read(row))
        step = int(row["step"])
        if step == 0 or not (looks(step) or any(TESTED.fullmatch(name) for name in row)):
            return []
        return diagnose(self._rows, self._steps)

    def went_back(self, row: Mapping[str, Any]) -> None:
        """What the run has done after the step that it has just seen, where it went back: part of that step's row."""
        self._rows[-1] |= _read(row)


def looks(step: int) -> bool:
    """Whether it is time to look after this step: each ``EVERY``-th at first, then less often; a function of it."""
    at = 0
    while at < step:
        at += max(EVERY, at // 20)
    return at == step


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in row if name in READ or TESTED.fullmatch(name)]
    return {name: jsonable(row[name]) for name in names}
