"""The end of a phase of a run."""

import dataclasses
import math
from typing import Any

from jaxrl_llm.rules.decision import Decision, Row
from jaxrl_llm.rules.resets import stalls
from jaxrl_llm.rules.settings import Phase, Reaches, Stalls

OF_PHASES = "phase"
"""The name of the rule that ends a phase."""
PHASE = "event/phase"
"""The event of the step after which another phase begins: its name, and the reason."""
WAITS = "event/phase_waits"
"""The event of a phase that waits for a metric that none of its rows contains."""
UNMEASURED = 10
"""Steps after which that event is reported, or twice the steps between evaluations if that is more."""


@dataclasses.dataclass(frozen=True)
class PhaseEnds:
    """A rule that ends a phase after its steps, or once its condition holds.

    Attributes:
      phase: that the run is in.
      following: the one after it.
      evaluation_every: steps between evaluations; those of other steps are ignored (see ``OnStall``).
      test: identifies the evaluation's settings; results of other evaluations are not compared.
    """

    phase: Phase
    following: Phase
    evaluation_every: int
    test: str = ""

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the ``steps`` of the phase and the state of its condition.

        A metric that no row contains is reported once: its name may be mistyped, and the phase would never end.
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
        """Return the decision to begin the next phase, with its resets; ``reason``: why this one has ended."""
        following = self.following
        events: dict[str, bool | str] = {PHASE: f"{following.name} ({self.phase.name} ended {reason})"}
        events |= {"event/reference_reset": True} if following.reset else {}
        events |= {"event/optimiser_reset": True} if following.reset_optimiser else {}
        return Decision(next_phase=True, snapshot=True, events=events)

    def _waited(self, row: Row, own: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the condition: ``times`` in a row, or the ``best`` result and the ``stalled``
        evaluations.
        """
        until = self.phase.until
        if isinstance(until, Reaches):
            value = row.get(until.metric)
            if value is None or math.isnan(value):
                return {}
            beyond = value > until.above if until.above is not None else value < until.below
            return {"times": own.get("times", 0) + 1 if beyond else 0}
        return stalls(row, own, self.evaluation_every, self.test) if isinstance(until, Stalls) else {}

    def _in_vain(self, remembered: dict[str, Any]) -> dict[str, bool | str]:
        """Return an event at the step where the awaited metric turns out to be missing; empty otherwise."""
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
    """Return why a phase has ended, for people."""
    if isinstance(until, Stalls):
        return f"since {until.evaluations} evaluations found nothing better"
    bound = f"above {until.above:g}" if until.above is not None else f"below {until.below:g}"
    again = f" for {until.times} steps" if until.times > 1 else ""
    return f"since {until.metric} was {bound}{again}"
