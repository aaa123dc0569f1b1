"""Decisions of rules after a step, and their combination."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

DONE, GUARD = 0, 3
"""Exit codes: finished; stopped by a guard with state saved."""

REFERENCE_RESET = "event/reference_reset"
REFERENCE_AGE = "reference/age"
"""An input of rules besides a step's metrics: steps since the last reset of the reference, or since the run began."""
LAST_RESET = "reference/last_reset"
"""A further input of rules: the step of the reference's last reset; 0 for none."""
LAST = "last"
"""The key in the memory of the last reset's step, which no single rule knows."""
ENDED = "ended"
"""A further key, in the checkpoint of the step after which a rule has ended the run as done: ``step``, ``rule`` and
``reason``."""
EVENT_ENDED = "event/ended"
"""The event of that step: the reason."""
UNDONE = "undone"
"""A further key of that memory: steps since the reset that a rollback has undone; they do not age the reference."""

Row = Mapping[str, Any]
"""A step's metrics by name, including ``step``; unmeasured ones are absent or not a number."""
Own = dict[str, Any]
"""The memory of one rule, empty before the first step: JSON values, saved with the run."""
Memory = dict[str, Own]
"""The memory of each rule, by its name."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The actions after a step.

    Attributes:
      stop: the exit code to end the run with, after its state is saved; None to continue.
      reason: why it stops, in one line.
      remedy: flags that may help a new run from this state; empty if no flag would.
      reset_reference: whether the current policy is mixed into the reference.
      mix: the policy's share in the new reference; the rest is the old reference. 1 makes the policy the reference.
      reset_optimiser: whether the optimiser is reset.
      snapshot: whether the models after this step are kept permanently.
      next_phase: whether the run's next phase begins after this step.
      rollback: resume from the newest checkpoint before this step; None for no rollback.
      coefficients: of the loss, for the next step, by name.
      events: keys of the step's row, ``event/<name>``: True, or a line that says more.
      rule: the name of the rule that stops the run; set by ``decide``.
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
    rule: str = dataclasses.field(default="", compare=False)


Decided = tuple[Decision, Own]
Rule = Callable[[Row, Own], Decided]
"""A pure function of a step's row and of its own memory: it returns the decision and the new memory. Equal rows and
memories give equal decisions, on every process and after every resume."""


def decide_by_own(row: Row, own: Own, rule: Any) -> Decided:
    """Call a user's rule (``Rules.own``): a ``Rule``. If it fails, the run stops with its state saved."""
    try:
        found = rule.function(dict(row), dict(own))
        decision, memory = found if isinstance(found, tuple) else (found or Decision(), own)
        if not isinstance(decision, Decision):
            raise TypeError(f"it returned {found!r:.80} in place of a Decision, of a pair with its memory, or of None")
        memory = json.loads(json.dumps(memory))
    except Exception as error:  # noqa: BLE001  whatever the user's function raises
        reason = f"rule {rule.name} failed: {type(error).__name__}: {error}"
        return Decision(GUARD, reason, events={"event/rule_failed": reason}), own
    return decision, memory


def decide(rules: Mapping[str, Rule], row: Row, memory: Memory) -> tuple[Decision, Memory]:
    """Combine the decisions of all rules; return the decision and the memory.

    The first rule that stops the run gives the reason. A stop by a guard makes no resets, and after a rollback no other
    decision is applied: it would be about the policy that is undone. Of several resets of the reference the one with
    the largest ``mix`` is made. Rules also read ``REFERENCE_AGE`` and ``LAST_RESET``. The memory of absent rules is
    kept: a later phase may have them again.
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
        rule = next(name for name, d in zip(rules, decisions, strict=True) if d is acting[0])
        return dataclasses.replace(acting[0], events=_merged(d.events for d in acting), rule=rule), remembered
    events = _merged(d.events for d in decisions)
    if REFERENCE_RESET in events:
        remembered[LAST] = {REFERENCE_RESET: row["step"]}
    acts = ("reset_reference", "reset_optimiser", "snapshot", "next_phase")
    chosen: dict[str, Any] = {act: any(getattr(d, act) for d in decisions) for act in acts}
    return Decision(
        **chosen,
        mix=max((d.mix for d in decisions if d.reset_reference), default=1.0),
        reason="; ".join(d.reason for d in decisions if d.reason),
        coefficients=_merged(d.coefficients for d in decisions),
        events=events,
    ), remembered


def _merged(parts: Any) -> dict[str, Any]:
    """Merge several dicts; their keys do not clash."""
    return {name: value for part in parts for name, value in part.items()}
