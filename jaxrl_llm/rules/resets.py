"""When the reference and the optimiser begin anew."""

import dataclasses
from typing import Any

from jaxrl_llm.rules.decision import Decision, Row, Rule


@dataclasses.dataclass(frozen=True)
class Resets:
    """A recipe's resets.

    Attributes:
      reference_every: steps after which the reference becomes the policy; 0 never.
      on_stall: evaluations without a better result after which it does; 0 never.
      with_optimiser: start the optimiser anew at each reset of the reference.
      optimiser_every: steps after which the optimiser alone starts anew; 0 never.
    """

    reference_every: int = 0
    on_stall: int = 0
    with_optimiser: bool = False
    optimiser_every: int = 0


def rules_of(resets: Resets, evaluation_every: int) -> dict[str, Rule]:
    """The rules that make these resets, by name."""
    rules: dict[str, Rule] = {}
    if resets.on_stall:
        rules["stall"] = OnStall(resets.on_stall, evaluation_every, resets.with_optimiser)
    if resets.reference_every:
        rules["reference"] = OnSchedule(resets.reference_every, True, resets.with_optimiser)
    if resets.optimiser_every:
        rules["optimiser"] = OnSchedule(resets.optimiser_every, False, True)
    return rules


@dataclasses.dataclass(frozen=True)
class OnSchedule:
    """Resets every so many steps."""

    every: int
    reference: bool
    optimiser: bool

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``."""
        due = row["step"] > 0 and row["step"] % self.every == 0
        return _reset(due and self.reference, due and self.optimiser), own


@dataclasses.dataclass(frozen=True)
class OnStall:
    """Resets the reference once ``evaluations`` in a row have found nothing better.

    Evaluations of other steps than each ``every``-th are passed over: the one that a run makes at its end would not be
    there if it had been begun with more steps.
    """

    evaluations: int
    every: int
    with_optimiser: bool

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers ``best``, and how many evaluations have ``stalled`` since."""
        result = evaluated(row)
        if result is None or row["step"] % self.every:
            return Decision(), own
        best = own.get("best")
        better = best is None or result > best
        stalled = 0 if better else own["stalled"] + 1
        due = stalled >= self.evaluations
        remembered = {"best": result if better else best, "stalled": 0 if due else stalled}
        return _reset(due, due and self.with_optimiser), remembered


def evaluated(row: Row) -> float | None:
    """The share of problems solved in the step's evaluation, or the mean reward where nothing is verified.

    None without one.
    """
    for ending in ("/pass@1", "/reward"):
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith(ending):
                return value
    return None


def _reset(reference: bool, optimiser: bool) -> Decision:
    events = {"event/reference_reset": reference, "event/optimiser_reset": optimiser}
    return Decision(
        reset_reference=reference,
        reset_optimiser=optimiser,
        snapshot=reference,
        events={name: True for name, made in events.items() if made},
    )
