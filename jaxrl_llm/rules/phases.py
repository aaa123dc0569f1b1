"""When a phase of a run ends."""

import dataclasses
import math
from typing import Any

from jaxrl_llm.rules.decision import Decision, Row
from jaxrl_llm.rules.resets import stalls
from jaxrl_llm.rules.settings import Phase, Reaches, Stalls

OF_PHASES = "phase"
"""The name of the rule that ends a phase."""
PHASE = "event/phase"
"""The event of the step after which another phase begins: its name, and why."""
WAITS = "event/phase_waits"
"""The event of a phase that waits for a metric which none of its rows has had."""
UNMEASURED = 10
"""Steps, and two evaluations, after which that is said."""


@dataclasses.dataclass(frozen=True)
class PhaseEnds:
    """Ends a phase after its steps, or once what it waits for is so.

    Attributes:
      phase: that the run is in.
      following: the one after it.
      evaluation_every: steps between evaluations; those of other steps are passed over (see ``OnStall``).
      test: tells what evaluations measure from what others do.
    """

    phase: Phase
    following: Phase
    evaluation_every: int
    test: str = ""

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers how many ``steps`` the phase has made, and what it waits for. A metric that no row
        has is said once: its name may be mistyped, and the phase would never end.
        """
        if row["step"] == 0:
            return Decision(), own
        steps = own.get("steps", 0) + 1
        remembered = own | {"steps": steps} | self._waited(row, own)
        reason = ""
        if self.phase.steps is not None and steps >= self.phase.steps:
            reason = f"after {steps} step{'s' * (steps != 1)}"
        if self._fulfilled(remembered):
            reason = words(self.phase.until)
        if not reason:
            return Decision(events=self._in_vain(remembered)), remembered
        return self.ended(reason), remembered

    def ended(self, reason: str) -> Decision:
        """The next phase begins, and what comes with that; ``reason``: why this one has ended."""
        following = self.following
        events: dict[str, bool | str] = {PHASE: f"{following.name} ({self.phase.name} ended {reason})"}
        events |= {"event/reference_reset": True} if following.reset else {}
        events |= {"event/optimiser_reset": True} if following.reset_optimiser else {}
        return Decision(next_phase=True, snapshot=True, events=events)

    def _waited(self, row: Row, own: dict[str, Any]) -> dict[str, Any]:
        """What it remembers of what it waits for: ``times`` in a row, or the ``best`` and the ``stalled``."""
        until = self.phase.until
        if isinstance(until, Reaches):
            value = row.get(until.metric)
            if value is None or math.isnan(value):
                return {}
            beyond = value > until.above if until.above is not None else value < until.below
            return {"times": own.get("times", 0) + 1 if beyond else 0}
        return stalls(row, own, self.evaluation_every, self.test) if isinstance(until, Stalls) else {}

    def _in_vain(self, remembered: dict[str, Any]) -> dict[str, bool | str]:
        """An event where it becomes clear that nobody measures what it waits for; empty otherwise."""
        until, patience = self.phase.until, max(UNMEASURED, 2 * self.evaluation_every)
        if not isinstance(until, Reaches) or "times" in remembered or remembered["steps"] != patience:
            return {}
        return {WAITS: f"{self.phase.name} waits for {until.metric}, which no step so far has measured"}

    def _fulfilled(self, remembered: dict[str, Any]) -> bool:
        until = self.phase.until
        if isinstance(until, Reaches):
            return remembered.get("times", 0) >= until.times
        return isinstance(until, Stalls) and remembered.get("stalled", 0) >= until.evaluations


def words(until: Any) -> str:
    """Why a phase has ended, for people."""
    if isinstance(until, Stalls):
        return f"since {until.evaluations} evaluations found nothing better"
    bound = f"above {until.above:g}" if until.above is not None else f"below {until.below:g}"
    again = f" for {until.times} steps" if until.times > 1 else ""
    return f"since {until.metric} was {bound}{again}"
