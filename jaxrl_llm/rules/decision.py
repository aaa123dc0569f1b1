"""What a rule may decide, and how the decisions of several become one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

DONE, GUARD = 0, 3
"""Exit codes: finished; stopped by a guard with state saved."""

REFERENCE_RESET = "event/reference_reset"
REFERENCE_AGE = "reference/age"
"""What rules read beside a step's metrics: the steps since the reference was last reset, or since the run began."""
LAST_RESET = "reference/last_reset"
"""And the step of that reset, which tells one reference from another; 0 for none."""
LAST = "last"
"""In the memory: the step of the last reset, which no rule knows of by itself."""
UNDONE = "undone"
"""And the steps since that a rollback has undone: the reference is no older for them."""

Row = Mapping[str, Any]
"""A step's metrics by name, ``step`` among them; what was not measured is absent or not a number."""
Memory = dict[str, dict[str, Any]]
"""What each rule remembers, by its name: JSON values, saved with the run."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is to be done after a step.

    Attributes:
      stop: the exit code to end the run with, after its state is saved; None to go on.
      reason: why it stops, in one line.
      remedy: flags under which a new run from this state may fare better; empty where flags are no help.
      reset_reference: the policy as it is goes into the reference.
      mix: how much of it; the rest is the reference as it was. 1 makes the policy the reference.
      reset_optimiser: the optimiser starts anew.
      snapshot: the models as they are after this step are kept for good.
      next_phase: the run's next phase begins after this step.
      rollback: the run goes on from the newest checkpoint of before this step; None to go on from here.
      coefficients: of the loss, for the next step, by name.
      events: keys of the step's row, ``event/<name>``: True, or a line that says more.
    """

    stop: int | None = None
    reason: str = ""
    remedy: str = ""
    reset_reference: bool = False
    mix: float = 1.0
    reset_optimiser: bool = False
    snapshot: bool = False
    next_phase: bool = False
    rollback: int | None = None
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    events: dict[str, bool | str] = dataclasses.field(default_factory=dict)


class Rule(Protocol):
    """A pure function: equal rows and memories give equal decisions, on every process and after every resume."""

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """The decision after the step of ``row``, and what to remember; ``own`` is empty before the first step."""


def decide(rules: Mapping[str, Rule], row: Row, memory: Memory) -> tuple[Decision, Memory]:
    """What all rules decide together, and what they remember.

    The first rule that stops the run says why. A run that is stopped by a guard is left as it is: nothing is reset. Nor
    does anything else act on a run that goes back: what the others decide is of the policy that it leaves. Of several
    resets of the reference the one that goes furthest counts. Rules also read ``REFERENCE_AGE`` and ``LAST_RESET``.
    What absent rules remember stays: a later phase may have them again.
    """
    decisions = []
    remembered: Memory = {name: own for name, own in memory.items() if name not in rules}
    last = memory.get(LAST, {})
    since = last.get(REFERENCE_RESET, 0)
    row = {**row, LAST_RESET: since, REFERENCE_AGE: row["step"] - since - last.get(UNDONE, 0)}
    for name, rule in rules.items():
        decision, own = rule(row, memory.get(name, {}))
        decisions.append(decision)
        remembered[name] = own
    stopping = [decision for decision in decisions if decision.stop is not None]
    back = [decision for decision in decisions if decision.rollback is not None]
    if stopping or back:
        undone = [
            name
            for name, d in zip(rules, decisions, strict=True)
            if d.reset_reference or d.reset_optimiser or d.next_phase or (stopping and d.rollback is not None)
        ]
        remembered |= {name: memory.get(name, {}) for name in undone}  # is still to come
        acting = stopping or back
        return dataclasses.replace(acting[0], events=_merged(d.events for d in acting)), remembered
    events = _merged(d.events for d in decisions)
    if REFERENCE_RESET in events:
        remembered[LAST] = {REFERENCE_RESET: row["step"]}
    return Decision(
        mix=max((d.mix for d in decisions if d.reset_reference), default=1.0),
        reset_reference=any(d.reset_reference for d in decisions),
        reset_optimiser=any(d.reset_optimiser for d in decisions),
        snapshot=any(d.snapshot for d in decisions),
        next_phase=any(d.next_phase for d in decisions),
        reason="; ".join(d.reason for d in decisions if d.reason),
        coefficients=_merged(d.coefficients for d in decisions),
        events=events,
    ), remembered


def _merged(parts: Any) -> dict[str, Any]:
    """One dict of several; names do not clash."""
    return {name: value for part in parts for name, value in part.items()}
