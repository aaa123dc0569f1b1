"""When the reference and the optimiser begin anew, and how far the reference goes then."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rules.decision import LAST_RESET, REFERENCE_AGE, REFERENCE_RESET, Decision, Row, Rule

ASKED = "asked/reset"
"""What rules read of a request that somebody has made: its ``id``, and whether it is ``with_optimiser``."""
BY_HAND = "by_hand"
"""The name of the rule that answers it."""
AGAIN = "again"
"""In what that rule remembers: the run went back to before its answer."""


@dataclasses.dataclass(frozen=True)
class Resets:
    """A recipe's resets. By KL means by the ``kl`` of a step's row, nats per token.

    Attributes:
      reference_every: steps after which the reference becomes the policy; 0 never.
      on_stall: evaluations without a better result after which it does; 0 never.
      with_optimiser: start the optimiser anew at each reset of the reference.
      optimiser_every: steps after which the optimiser alone starts anew; 0 never.
      on_kl: the KL above which the reference becomes the policy; 0 never.
      on_kl_share: the share of the KL in what pulls at a token, kl_coef kl / (kl_coef kl + mean |advantage|), above
        which it does; 0 never. The mean |advantage| is the size of the policy's term where the ratio is 1: that term
        itself is near 0 by construction, whatever it does.
      on_kl_jump: how many times the median of the last ``kl_window`` KLs since the last reset a KL must be; 0 never.
      kl_window: steps after any reset, and from the run's beginning, in which no KL resets.
      mix: how much of the policy is in the reference after a reset: reference <- (1 - mix) reference + mix policy. 1 is
        the policy itself; TRL's ref_model_mixup_alpha is 0.6.
      ema: after each step reference <- ema reference + (1 - ema) policy; 0 is off.
      snapshots: keep the models for good at each reset of the reference.
    """

    reference_every: int = 0
    on_stall: int = 0
    with_optimiser: bool = False
    optimiser_every: int = 0
    on_kl: float = 0.0
    on_kl_share: float = 0.0
    on_kl_jump: float = 0.0
    kl_window: int = 10
    mix: float = 1.0
    ema: float = 0.0
    snapshots: bool = True

    @property
    def by_kl(self) -> dict[str, float]:
        """What resets by KL, by field."""
        fields = {name: getattr(self, name) for name in ("on_kl", "on_kl_share", "on_kl_jump")}
        return {name: value for name, value in fields.items() if value}

    @property
    def of_reference(self) -> list[str]:
        """Fields under which the reference is reset."""
        return [name for name in ("reference_every", "on_stall", *self.by_kl) if getattr(self, name)]


def rules_of(resets: Resets, evaluation_every: int, kl_coef: float = 0.0, test: str = "") -> dict[str, Rule]:
    """The rules that make these resets, by name.

    Args:
      resets: of the recipe.
      evaluation_every: steps between evaluations.
      kl_coef: of the loss, where no controller moves it.
      test: tells what evaluations measure from what others do.
    """
    rules: dict[str, Rule] = {}
    reset: dict[str, Any] = {"with_optimiser": resets.with_optimiser, "mix": resets.mix, "snapshot": resets.snapshots}
    if resets.on_stall:
        rules["stall"] = OnStall(resets.on_stall, evaluation_every, **reset, test=test)
    if resets.reference_every:
        rules["reference"] = OnSchedule(
            resets.reference_every, True, resets.with_optimiser, resets.mix, resets.snapshots
        )
    if resets.optimiser_every:
        rules["optimiser"] = OnSchedule(resets.optimiser_every, False, True)
    if resets.by_kl:
        bounds = resets.on_kl, resets.on_kl_share, resets.on_kl_jump
        rules["kl"] = OnKL(*bounds, resets.kl_window, kl_coef, **reset)
    if resets.ema:
        rules["ema"] = Averaged(resets.ema)
    return rules


@dataclasses.dataclass(frozen=True)
class OnSchedule:
    """Resets every so many steps."""

    every: int
    reference: bool
    optimiser: bool
    mix: float = 1.0
    snapshot: bool = True

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``."""
        due = row["step"] > 0 and row["step"] % self.every == 0
        return _reset(due and self.reference, due and self.optimiser, self.mix, self.snapshot), own


@dataclasses.dataclass(frozen=True)
class OnStall:
    """Resets the reference once ``evaluations`` in a row have found nothing better.

    Evaluations of other steps than each ``every``-th are passed over: the one that a run makes at its end would not be
    there if it had been begun with more steps. What another ``test`` has found says nothing of this one.
    """

    evaluations: int
    every: int
    with_optimiser: bool
    mix: float = 1.0
    snapshot: bool = True
    test: str = ""

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers what ``stalls`` does."""
        found = stalls(row, own, self.every, self.test)
        due = bool(found) and found["stalled"] >= self.evaluations
        remembered = own | found | ({"stalled": 0} if due else {})
        return _reset(due, due and self.with_optimiser, self.mix, self.snapshot), remembered


@dataclasses.dataclass(frozen=True)
class OnKL:
    """Resets the reference where the KL is high, a large share of what pulls, or has jumped; the first ``window`` steps
    after any reset are let pass. A bound of 0 is none.
    """

    above: float
    share: float
    jump: float
    window: int
    kl_coef: float
    with_optimiser: bool
    mix: float = 1.0
    snapshot: bool = True

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the last KLs ``since`` the last reset. A step that measured none counts for
        nothing."""
        kl = row.get("kl", math.nan)
        if math.isnan(kl):
            return Decision(), own
        since = row[LAST_RESET]
        before = own["kls"] if own.get("since") == since else []
        reason = self._reason(kl, row, before) if row[REFERENCE_AGE] > self.window else ""
        remembered = {"since": since, "kls": [*before, kl][-self.window :]}
        return _reset(bool(reason), bool(reason) and self.with_optimiser, self.mix, self.snapshot, reason), remembered

    def _reason(self, kl: float, row: Row, before: list[float]) -> str:
        """Why the KL resets, in a few words; empty where it does not."""
        if self.above and kl > self.above:
            return f"the KL, {kl:.4g}, is above {self.above:g}"
        pull = row.get("kl_coef", self.kl_coef) * kl
        whole = pull + row.get("advantage/abs_mean", math.nan)
        if self.share and pull > self.share * whole:
            return f"the KL is {100 * pull / whole:.0f} % of what pulls, above {100 * self.share:g} %"
        if self.jump and len(before) == self.window and kl > self.jump * statistics.median(before) > 0:
            return f"the KL, {kl:.4g}, is {kl / statistics.median(before):.1f} times what it was, above {self.jump:g}"
        return ""


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Resets the reference where somebody has asked for it, once for each request, and again where the run went back to
    before that."""

    mix: float = 1.0
    snapshot: bool = True

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the ``id`` of the last request, the ``step`` at which it was answered, whether it was
        ``with_optimiser``, and where that is undone, that it is to be answered ``again``."""
        asked = row.get(ASKED)
        new = asked is not None and asked["id"] != own.get("id")
        if not new and not own.get(AGAIN):
            return Decision(), own
        requests = [asked] * new + [own] * bool(own.get(AGAIN))
        optimiser = any(request.get("with_optimiser", False) for request in requests)
        why = "by hand" if new else "by hand, again since the run went back"
        decision = _reset(True, optimiser, self.mix, self.snapshot, why)
        return decision, {"id": requests[0]["id"], "step": row["step"], "with_optimiser": optimiser}


@dataclasses.dataclass(frozen=True)
class Averaged:
    """The reference is a moving average of the policy: ``ema`` of it stays at each step. No reset, and no event."""

    ema: float

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step that made no update changes nothing."""
        moves = row["step"] > 0 and bool(row.get("updates"))
        return Decision(reset_reference=moves, mix=1 - self.ema if moves else 1.0), own


def stalls(row: Row, own: Mapping[str, Any], every: int, test: str) -> dict[str, Any]:
    """The ``best`` result of a ``test`` so far, and how many evaluations have ``stalled`` since; nothing where the step
    has none that counts. Another test than the one that is remembered begins anew; an unnamed one is taken for it."""
    result = evaluated(row)
    if result is None or row["step"] % every:
        return {}
    best = own.get("best") if own.get("test", test) == test else None
    better = best is None or result > best
    return {"best": result if better else best, "stalled": 0 if better else own["stalled"] + 1, "test": test}


def evaluated(row: Row) -> float | None:
    """The share of problems solved in the step's evaluation, or the mean reward where nothing is verified.

    Of several tasks their average, which stands first in a row. None without one.
    """
    for ending in ("/pass@1", "/reward"):
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith(ending):
                return value
    return None


def _reset(reference: bool, optimiser: bool, mix: float, snapshot: bool, reason: str = "") -> Decision:
    events = {REFERENCE_RESET: reference, "event/optimiser_reset": optimiser}
    return Decision(
        reset_reference=reference,
        reset_optimiser=optimiser,
        mix=mix if reference else 1.0,
        snapshot=reference and snapshot,
        events={
            name: (reason if name == REFERENCE_RESET and reason else True) for name, made in events.items() if made
        },
    )
