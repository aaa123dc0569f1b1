"""Rules that change the loss between steps: resets of reference and optimiser, and controllers of coefficients."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Annotated, Any

from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import AdaptiveKL, ProportionalKL
from jaxrl_llm.errors import require
from jaxrl_llm.rules.decision import LAST_RESET, REFERENCE_AGE, REFERENCE_RESET, Decision, Row, Rule
from jaxrl_llm.system.setting import Range, Setting

ASKED = "asked/reset"
"""The metric of a user's request for a reset: its ``id``, and whether it is ``with_optimiser``."""
BY_HAND = "by_hand"
"""The name of the rule that answers a user's request for a reset."""
AGAIN = "again"
"""The key in the memory of ``ByHand`` that marks an answer undone by a rollback."""
OF_ENTROPY = "entropy"
"""The name of the rule that updates the coefficient of the entropy bonus."""


@dataclasses.dataclass(frozen=True)
class Resets(Setting):
    """A recipe's resets. By KL means by the ``kl`` of a step's row, nats per token.

    Attributes:
      reference_every: steps after which the reference becomes the policy; 0 never.
      on_stall: evaluations without a better result after which it does; 0 never.
      with_optimiser: reset the optimiser at each reset of the reference.
      optimiser_every: steps after which the optimiser alone is reset; 0 never.
      on_kl: the KL above which the reference becomes the policy; 0 never.
      on_kl_share: the KL's share of the loss terms at a token, kl_coef kl / (kl_coef kl + mean |advantage|), above
        which it does; 0 never. The mean |advantage| is the size of the policy's term where the ratio is 1: that term
        itself is near 0 by construction.
      on_kl_jump: how many times the median of the last ``kl_window`` KLs since the last reset a KL must be; 0 never.
      kl_window: steps after any reset, and from the run's beginning, in which no KL resets.
      mix: the policy's share in the reference after a reset: reference <- (1 - mix) reference + mix policy. 1 is the
        policy itself; TRL's ref_model_mixup_alpha is 0.6.
      ema: after each step reference <- ema reference + (1 - ema) policy; 0 is off.
      snapshots: keep the models permanently at each reset of the reference.
    """

    reference_every: Annotated[int, Range("[0, inf]")] = 0
    on_stall: Annotated[int, Range("[0, inf]")] = 0
    with_optimiser: bool = False
    optimiser_every: Annotated[int, Range("[0, inf]")] = 0
    on_kl: Annotated[float, Range("[0, inf)", "0 is off")] = 0.0
    on_kl_share: Annotated[float, Range("[0, 1)", "off")] = 0.0
    on_kl_jump: float = 0.0
    kl_window: Annotated[int, Range("[1, inf]")] = 10
    mix: Annotated[float, Range("(0, 1]")] = 1.0
    ema: Annotated[float, Range("[0, 1)", "off")] = 0.0
    snapshots: bool = True

    def check(self, run: Any, where: str) -> None:
        """Refuse resets that lack a reference, a loss term, evaluations or float32 weights that they need."""
        require(
            self.on_kl_jump == 0 or 1 < self.on_kl_jump < math.inf,
            f"{where}on_kl_jump must be above 1, or 0 for off, got {self.on_kl_jump}",
        )
        algorithm = run.recipe.algorithm
        for name in (*self.of_reference, *["ema"] * bool(self.ema)):
            require(
                algorithm.needs_reference or run.output.monitor_kl,
                f"{where}{name} {getattr(self, name)} has no reference to reset: set recipe.algorithm.kl_coef above 0, "
                f"output.monitor_kl True, or {where}{name} 0",
            )
        require(
            not self.on_kl_share or (algorithm.needs_reference and algorithm.kl_in == "loss"),
            f"{where}on_kl_share {self.on_kl_share} has no share in the loss to compare: set "
            f"recipe.algorithm.kl_coef above 0 and kl_in 'loss', or take {where}on_kl",
        )
        require(
            self.mix == 1 or bool(self.of_reference),
            f"{where}mix {self.mix} has no reset to act in: set {where}reference_every, or {where}mix 1",
        )
        for name, off in (("mix", 1.0), ("ema", 0.0)):
            value = getattr(self, name)
            require(
                value == off or not run.learner.lora.rank,
                f"{where}{name} {value} would mix the factors of two adapters, which is not the mixture of their "
                f"products: set {where}{name} {off:g}, or learner.lora.rank 0",
            )
        require(
            not self.ema or run.learner.dtype == "float32",
            f"{where}ema {self.ema} moves a bfloat16 reference by less than its rounding: set learner.dtype "
            f"float32, or {where}reference_every in place of {where}ema",
        )
        require(
            not self.on_stall or run.evaluation.every > 0,
            f"{where}on_stall {self.on_stall} waits for evaluations: set evaluation.every above 0, or "
            f"{where}on_stall 0",
        )

    @property
    def of_reference(self) -> list[str]:
        """Return the fields that reset the reference."""
        fields = ("reference_every", "on_stall", "on_kl", "on_kl_share", "on_kl_jump")
        return [name for name in fields if getattr(self, name)]


def rules_of(resets: Resets, evaluation_every: int, kl_coef: float = 0.0, test: str = "") -> dict[str, Rule]:
    """Return the rules that make these resets, by name.

    Args:
      resets: of the recipe.
      evaluation_every: steps between evaluations.
      kl_coef: of the loss, if no controller updates it.
      test: identifies the evaluation's settings; results of other evaluations are not compared.
    """
    rules: dict[str, Rule] = {}
    if resets.on_stall:
        rules["stall"] = OnStall(resets, evaluation_every, test)
    if resets.reference_every:
        every = resets.reference_every
        rules["reference"] = OnSchedule(every, True, resets.with_optimiser, resets.mix, resets.snapshots)
    if resets.optimiser_every:
        rules["optimiser"] = OnSchedule(resets.optimiser_every, False, True)
    if resets.on_kl or resets.on_kl_share or resets.on_kl_jump:
        rules["kl"] = OnKL(resets, kl_coef)
    if resets.ema:
        rules["ema"] = Averaged(resets.ema)
    return rules


@dataclasses.dataclass(frozen=True)
class OnSchedule:
    """A rule that resets after every ``every`` steps."""

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
    """A rule that resets the reference after ``on_stall`` evaluations in a row without a better result.

    Only evaluations at multiples of ``every`` count: the one at a run's end would be absent in a longer run. Results of
    another ``test`` are not compared.
    """

    resets: Resets
    every: int
    test: str = ""

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the result of ``stalls``."""
        found = stalls(row, own, self.every, self.test)
        due = bool(found) and found["stalled"] >= self.resets.on_stall
        remembered = own | found | ({"stalled": 0} if due else {})
        resets = self.resets
        return _reset(due, due and resets.with_optimiser, resets.mix, resets.snapshots), remembered


@dataclasses.dataclass(frozen=True)
class OnKL:
    """A rule that resets the reference if the KL is high, is a large share of the loss, or has jumped.

    It skips the first ``kl_window`` steps after any reset. ``kl_coef``: of the loss, if no controller updates it.
    """

    resets: Resets
    kl_coef: float

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the last KLs ``since`` the last reset, without steps that measured none."""
        resets, kl = self.resets, row.get("kl", math.nan)
        if math.isnan(kl):
            return Decision(), own
        since = row[LAST_RESET]
        before = own["kls"] if own.get("since") == since else []
        pull = row.get("kl_coef", self.kl_coef) * kl
        whole = pull + row.get("advantage/abs_mean", math.nan)
        usual = statistics.median(before) if len(before) == resets.kl_window else math.inf
        reason = ""
        if row[REFERENCE_AGE] > resets.kl_window:
            if resets.on_kl and kl > resets.on_kl:
                reason = f"the KL, {kl:.4g}, is above {resets.on_kl:g}"
            elif resets.on_kl_share and pull > resets.on_kl_share * whole:
                reason = f"the KL is {100 * pull / whole:.0f} % of what pulls, above {100 * resets.on_kl_share:g} %"
            elif resets.on_kl_jump and kl > resets.on_kl_jump * usual > 0:
                reason = f"the KL, {kl:.4g}, is {kl / usual:.1f} times what it was, above {resets.on_kl_jump:g}"
        remembered = {"since": since, "kls": [*before, kl][-resets.kl_window :]}
        due = bool(reason)
        return _reset(due, due and resets.with_optimiser, resets.mix, resets.snapshots, reason), remembered


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A rule that resets the reference once for each user request, and again after a rollback to before the reset."""

    resets: Resets = Resets()

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the last request's ``id`` and ``with_optimiser``, and the ``step`` of the answer.

        After a rollback it also remembers that the request is to be answered ``again``.
        """
        asked = row.get(ASKED)
        new = asked is not None and asked["id"] != own.get("id")
        if not new and not own.get(AGAIN):
            return Decision(), own
        requests = [asked] * new + [own] * bool(own.get(AGAIN))
        optimiser = any(request.get("with_optimiser", False) for request in requests)
        why = "by hand" if new else "by hand, again since the run went back"
        decision = _reset(True, optimiser, self.resets.mix, self.resets.snapshots, why)
        return decision, {"id": requests[0]["id"], "step": row["step"], "with_optimiser": optimiser}


@dataclasses.dataclass(frozen=True)
class Averaged:
    """A rule that makes the reference a moving average of the policy with decay ``ema``, without reset events."""

    ema: float

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step without an update changes nothing."""
        moves = row["step"] > 0 and bool(row.get("updates"))
        return Decision(reset_reference=moves, mix=1 - self.ema if moves else 1.0), own


@dataclasses.dataclass(frozen=True)
class Controlled:
    """A rule that updates the KL coefficient from the KL measured after the step's last update.

    Attributes:
      controller: computes the next coefficient.
    """

    controller: AdaptiveKL | ProportionalKL

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step without an update leaves the coefficient unchanged."""
        measured = row.get(self.controller.reads, math.nan)
        if math.isnan(measured):
            return Decision(), own
        coefficient = self.controller(row["kl_coef"], measured, int(row["completions"]))
        return Decision(coefficients={"kl_coef": float(coefficient)}), own


@dataclasses.dataclass(frozen=True)
class EntropyControlled:
    """A rule that updates the coefficient of the entropy bonus from the step's entropy."""

    controller: AdaptiveEntropy

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; remembers the controller's internal coefficient, which is kept while the bonus is off.

        A step without a measured entropy changes nothing.
        """
        entropy = row.get("entropy", math.nan)
        if math.isnan(entropy):
            return Decision(), own
        moved, coefficient = self.controller(own.get("moved", row["entropy_coef"]), entropy)
        return Decision(coefficients={"entropy_coef": coefficient}), {"moved": moved}


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """A rule for the multiplier of a constraint: ``lam <- max(0, lam + rate * (mean cost - limit))``.

    Attributes:
      cost: the metric that is the step's mean cost.
      coefficient: the name of lam.
      limit: of the mean cost.
      rate: of lam.
    """

    cost: str
    coefficient: str
    limit: float
    rate: float

    def __call__(self, row: Row, own: dict[str, Any]) -> tuple[Decision, dict[str, Any]]:
        """See ``Rule``; a step without a cost leaves lam unchanged."""
        cost = row.get(self.cost, math.nan)
        if math.isnan(cost):
            return Decision(), own
        moved = max(0.0, row[self.coefficient] + self.rate * (cost - self.limit))
        return Decision(coefficients={self.coefficient: moved}), own


def stalls(row: Row, own: Mapping[str, Any], every: int, test: str) -> dict[str, Any]:
    """Return the ``best`` result of a ``test`` and the evaluations ``stalled`` since; empty without one that counts.

    A change of the test restarts the count; a memory without a test's name is taken to be of this one.
    """
    # The share of problems solved, or the mean reward if nothing is verified; the average of several tasks comes first.
    tested = [name for name in row if name.startswith("eval/")]
    names = [name for ending in ("/pass@1", "/reward") for name in tested if name.endswith(ending)]
    result = row[names[0]] if names else None
    if result is None or row["step"] % every:
        return {}
    best = own.get("best") if own.get("test", test) == test else None
    better = best is None or result > best
    return {"best": result if better else best, "stalled": 0 if better else own["stalled"] + 1, "test": test}


def _reset(reference: bool, optimiser: bool, mix: float, snapshot: bool, reason: str = "") -> Decision:
    events: dict[str, bool | str] = {REFERENCE_RESET: reason or True} if reference else {}
    events |= {"event/optimiser_reset": True} if optimiser else {}
    return Decision(
        reset_reference=reference,
        reset_optimiser=optimiser,
        mix=mix if reference else 1.0,
        snapshot=reference and snapshot,
        events=events,
    )
