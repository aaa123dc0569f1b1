"""Rules that change the loss between steps: resets of reference and optimiser, and controllers of coefficients."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from jaxrl_llm.errors import require
from jaxrl_llm.rules.decision import LAST_RESET, REFERENCE_AGE, REFERENCE_RESET, Decided, Decision, Own, Row, Rule
from jaxrl_llm.rules.settings import Stalls
from jaxrl_llm.system.json_lines import number
from jaxrl_llm.system.setting import Range, Setting

ASKED = "asked/reset"
"""The metric of a user's request for a reset: its ``id``, and whether it is ``with_optimiser``."""
BY_HAND = "by_hand"
"""The name of the rule that answers a user's request for a reset."""
AGAIN = "again"
"""The key in the memory of ``by_hand`` that marks an answer undone by a rollback."""
OF_ENTROPY = "entropy"
"""The name of the rule that updates the coefficient of the entropy bonus."""


@dataclasses.dataclass(frozen=True)
class Resets(Setting):
    """A recipe's resets. By KL means by the ``kl`` of a step's row, nats per token.

    Attributes:
      reference_every: steps after which the reference becomes the policy; 0 never.
      on_stall: evaluations in a row not better than the best one, of which the one before training (step 0) is the
        first, after which it does; 0 never.
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
        resetting = ("reference_every", "on_stall", "on_kl", "on_kl_share", "on_kl_jump")
        given = [name for name in (*resetting, "ema") if getattr(self, name)]
        distillation = run.scoring.distillation
        teaches = distillation is not None and distillation.needs_reference
        for name in given:
            require(
                algorithm.needs_reference or run.output.monitor_kl or teaches,
                f"{where}{name} {getattr(self, name)} has no reference to reset: set recipe.algorithm.kl_coef above 0, "
                f"output.monitor_kl True, or {where}{name} 0",
            )
        require(
            not self.on_kl_share or (algorithm.needs_reference and algorithm.kl_in == "loss"),
            f"{where}on_kl_share {self.on_kl_share} has no share in the loss to compare: set "
            f"recipe.algorithm.kl_coef above 0 and kl_in 'loss', or take {where}on_kl",
        )
        require(
            self.mix == 1 or bool({*given} - {"ema"}),
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


def rules_of(resets: Resets, evaluation_every: int, test: str = "") -> dict[str, Rule]:
    """Return the rules that make these resets, by name.

    Args:
      resets: of the recipe.
      evaluation_every: steps between evaluations.
      test: identifies the evaluation's settings; results of other evaluations are not compared.
    """
    rules: dict[str, Rule] = {}
    if resets.on_stall:
        rules["stall"] = partial(on_stall, resets=resets, every=evaluation_every, test=test)
    if resets.reference_every:
        rules["reference"] = partial(on_schedule, resets=resets, every=resets.reference_every)
    if resets.optimiser_every:
        rules["optimiser"] = partial(on_schedule, resets=resets, every=resets.optimiser_every, reference=False)
    if resets.on_kl or resets.on_kl_share or resets.on_kl_jump:
        rules["kl"] = partial(on_kl, resets=resets)
    if resets.ema:
        rules["ema"] = partial(averaged, ema=resets.ema)
    return rules


def on_schedule(row: Row, own: Own, resets: Resets, every: int, reference: bool = True) -> Decided:
    """Reset after every ``every`` steps: a ``Rule`` for the reference, or without it for the optimiser alone."""
    due = row["step"] > 0 and row["step"] % every == 0
    return _reset(resets, due and reference, due and (resets.with_optimiser or not reference)), own


def on_stall(row: Row, own: Own, resets: Resets, every: int, test: str = "") -> Decided:
    """Reset the reference after ``on_stall`` evaluations in a row not better than the best one: a ``Rule``.

    Only evaluations at multiples of ``every`` count: the one at a run's end would be absent in a longer run. Results of
    another ``test`` are not compared. It remembers the result of ``stalls``.
    """
    found = stalls(row, own, every, test)
    due = bool(found) and found["stalled"] >= resets.on_stall
    return _reset(resets, due, due and resets.with_optimiser), own | found | ({"stalled": 0} if due else {})


def on_kl(row: Row, own: Own, resets: Resets) -> Decided:
    """Reset the reference if the KL is high, is a large share of the loss, or has jumped: a ``Rule``.

    It skips the first ``kl_window`` steps after any reset. It remembers the last KLs ``since`` the last reset,
    without steps that measured none.
    """
    kl = row.get("kl", math.nan)
    if math.isnan(kl):
        return Decision(), own
    since = row[LAST_RESET]
    before = own["kls"] if own.get("since") == since else []
    pull = row.get("kl_coef", 0.0) * kl
    whole = pull + row.get("advantage/abs_mean", math.nan)
    usual = statistics.median(before) if len(before) == resets.kl_window else math.inf
    reason = ""
    if row[REFERENCE_AGE] > resets.kl_window:
        if resets.on_kl and kl > resets.on_kl:
            reason = f"the KL, {kl:.4g}, is above {resets.on_kl:g}"
        elif resets.on_kl_share and pull > resets.on_kl_share * whole:
            reason = f"the KL is {100 * pull / whole:.0f} % of the total pull, above {100 * resets.on_kl_share:g} %"
        elif resets.on_kl_jump and kl > resets.on_kl_jump * usual > 0:
            reason = f"the KL, {kl:.4g}, is {kl / usual:.1f} times what it was, above {resets.on_kl_jump:g}"
    remembered = {"since": since, "kls": [*before, kl][-resets.kl_window :]}
    return _reset(resets, bool(reason), bool(reason) and resets.with_optimiser, reason), remembered


def by_hand(row: Row, own: Own, resets: Resets) -> Decided:
    """Reset the reference once for each user request, and again after a rollback to before the reset: a ``Rule``.

    It remembers the last request's ``id`` and ``with_optimiser``, and the ``step`` of the answer; after a rollback also
    that the request is to be answered ``again``.
    """
    asked = row.get(ASKED)
    new = asked is not None and asked["id"] != own.get("id")
    if not new and not own.get(AGAIN):
        return Decision(), own
    requests = [asked] * new + [own] * bool(own.get(AGAIN))
    optimiser = any(request.get("with_optimiser", False) for request in requests)
    why = "by hand" if new else "by hand, again after a rollback"
    return _reset(resets, True, optimiser, why), {
        "id": requests[0]["id"],
        "step": row["step"],
        "with_optimiser": optimiser,
    }


def averaged(row: Row, own: Own, ema: float) -> Decided:
    """Make the reference a moving average of the policy with decay ``ema``, without reset events: a ``Rule``.

    A step without an update changes nothing.
    """
    moves = row["step"] > 0 and bool(row.get("updates"))
    return Decision(reset_reference=moves, mix=1 - ema if moves else 1.0), own


def kl_controlled(row: Row, own: Own, reads: str, controller: Callable[[float, float, int], float]) -> Decided:
    """Update the KL coefficient from the KL measured after the step's last update, if there is one: a ``Rule``.

    ``reads``: the metric that the controller (``algorithms.kl.AdaptiveKL``) reads.
    """
    measured = row.get(reads, math.nan)
    if math.isnan(measured):
        return Decision(), own
    coefficient = controller(row["kl_coef"], measured, int(row["completions"]))
    return Decision(coefficients={"kl_coef": float(coefficient)}), own


def entropy_controlled(row: Row, own: Own, controller: Callable[[float, float], tuple[float, float]]) -> Decided:
    """Update the coefficient of the entropy bonus from the step's entropy, if it is measured: a ``Rule``.

    It remembers the controller's internal coefficient, which is kept while the bonus is off.
    """
    entropy = row.get("entropy", math.nan)
    if math.isnan(entropy):
        return Decision(), own
    moved, coefficient = controller(own.get("moved", row["entropy_coef"]), entropy)
    return Decision(coefficients={"entropy_coef": coefficient}), {"moved": moved}


def evaluation_result(row: Row) -> float | None:
    """Return the result of a row's evaluation, higher is better; None without one, or if it is not a number.

    It is the share of problems solved, or the mean reward if nothing is verified, or the accuracy of a reward model, or
    the negative loss on texts. The average of several tasks comes first.
    """
    value, sign = measured_result(row)
    return None if value is None else sign * value


def measured_result(row: Row) -> tuple[float | None, int]:
    """Return the number of ``evaluation_result`` as it was measured, and 1 where higher is better, -1 for a loss."""
    tested = [name for name in row if name.startswith("eval/")]
    for ending, sign in (("/pass@1", 1), ("/reward", 1), ("/accuracy", 1), ("/loss", -1)):
        found = next((name for name in tested if name.endswith(ending)), None)
        if found is not None:
            return number(row[found]), sign
    return None, 1


def stalls(row: Row, own: Mapping[str, Any], every: int, test: str, until: Stalls | None = None) -> dict[str, Any]:
    """Return the ``best`` result of a ``test``, that of step 0 included, and the evaluations ``stalled`` since; empty
    without one that counts.

    A change of the test restarts the count; a memory without a test's name is taken to be of this one. If ``until``
    names a metric, each of its measurements counts.
    """
    result = evaluation_result(row)
    if until is not None and until.metric:
        result, test = row.get(until.metric), until.metric
    elif result is not None and row["step"] % every:
        result = None
    if result is None or math.isnan(result):
        return {}
    best = own.get("best") if own.get("test", test) == test else None
    better = best is None or (result < best if until is not None and until.lower else result > best)
    return {"best": result if better else best, "stalled": 0 if better else own["stalled"] + 1, "test": test}


def _reset(resets: Resets, reference: bool, optimiser: bool, reason: str = "") -> Decision:
    events: dict[str, bool | str] = {REFERENCE_RESET: reason or True} if reference else {}
    events |= {"event/optimiser_reset": True} if optimiser else {}
    return Decision(
        reset_reference=reference,
        reset_optimiser=optimiser,
        mix=resets.mix if reference else 1.0,
        snapshot=reference and resets.snapshots,
        events=events,
    )
