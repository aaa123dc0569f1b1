"""Rules between steps: guards, ends of runs and phases, resets of reference and optimiser, controllers."""

import dataclasses
import json
import math
import statistics
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from jaxrl_llm.diagnosis.history import EVENT_BROKEN, ROLLED_BACK, not_finite
from jaxrl_llm.errors import require
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls, Until
from jaxrl_llm.system.json_lines import number
from jaxrl_llm.system.setting import Range, Setting

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
"""A further key, in the checkpoint at which a rule has ended the run as done: ``step``, ``rule`` and ``reason``."""
EVENT_ENDED = "event/ended"
"""The event of that step: the reason."""
UNDONE = "undone"
"""A further key of that memory: steps since the reset that a rollback has undone; they do not age the reference."""

Row = Mapping[str, Any]
"""A step's metrics by name, including ``step``; unmeasured ones are absent or not a number."""
RuleMemory = dict[str, Any]
"""The memory of one rule, empty before the first step: JSON values, saved with the run."""
Memory = dict[str, RuleMemory]
"""The memory of each rule, by its name."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The actions after a step; defaults do nothing.

    Attributes:
      stop: the exit code to end the run with, after its state is saved; None to continue.
      reason: why it stops, in one line.
      remedy: flags that may help a new run from this state; empty if no flag would.
      mix: the policy's share in a reset reference; the rest is the old reference. 1 makes the policy the reference.
      snapshot: keep the models after this step permanently.
      next_phase: begin the run's next phase after this step.
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


Decided = tuple[Decision, RuleMemory]
Rule = Callable[[Row, RuleMemory], Decided]
"""A pure function of a step's row and of its own memory: the decision and the new memory, equal on every process."""


def decide_by_user_rule(row: Row, own: RuleMemory, rule: Any) -> Decided:
    """Call a user's rule (``Rules.own``): a ``Rule``. If it fails, the run stops with its state saved."""
    try:
        decided = rule.function(dict(row), dict(own))
        decision, memory = decided if isinstance(decided, tuple) else (decided or Decision(), own)
        if not isinstance(decision, Decision):
            raise TypeError(
                f"it returned {decided!r:.80} in place of a Decision, of a pair with its memory, or of None"
            )
        memory = json.loads(json.dumps(memory))
    except Exception as error:  # noqa: BLE001  whatever the user's function raises
        reason = f"rule {rule.name} failed: {type(error).__name__}: {error}"
        return Decision(GUARD, reason, events={"event/rule_failed": reason}), own
    return decision, memory


def decide(rules: Mapping[str, Rule], row: Row, memory: Memory) -> tuple[Decision, Memory]:
    """Combine the decisions of all rules; return the decision and the memory.

    The first rule that stops the run gives the reason. A stop by a guard makes no resets. After a rollback no other
    decision is applied: it would be about the undone policy. Of several resets of the reference the largest ``mix``
    wins. Rules also read ``REFERENCE_AGE`` and ``LAST_RESET``. Absent rules keep their memory: a later phase may have
    them.
    """
    decisions = []
    remembered: Memory = {name: rule_memory for name, rule_memory in memory.items() if name not in rules}
    last = memory.get(LAST, {})
    since = last.get(REFERENCE_RESET, 0)
    row = {**row, LAST_RESET: since, REFERENCE_AGE: row["step"] - since - last.get(UNDONE, 0)}
    for name, rule in rules.items():
        decision, rule_memory = rule(row, memory.get(name, {}))
        decisions.append(decision)
        remembered[name] = rule_memory
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
        return dataclasses.replace(acting[0], events=merge_dicts(d.events for d in acting), rule=rule), remembered
    events = merge_dicts(d.events for d in decisions)
    if REFERENCE_RESET in events:
        remembered[LAST] = {REFERENCE_RESET: row["step"]}
    acts = ("reset_reference", "reset_optimiser", "snapshot", "next_phase")
    chosen: dict[str, Any] = {act: any(getattr(d, act) for d in decisions) for act in acts}
    return Decision(
        **chosen,
        mix=max((d.mix for d in decisions if d.reset_reference), default=1.0),
        reason="; ".join(d.reason for d in decisions if d.reason),
        coefficients=merge_dicts(d.coefficients for d in decisions),
        events=events,
    ), remembered


def merge_dicts(parts: Any) -> dict[str, Any]:
    """Merge several dicts; their keys do not clash."""
    return {name: value for part in parts for name, value in part.items()}


def not_a_number(
    row: Row, memory: RuleMemory, learning_rate: float, field: str = "learner.optimiser", prefix: str = ""
) -> Decided:
    """Stop at a loss, gradient, log-probability, advantage or reward that is not finite: a ``Rule``.

    An update with such a loss or gradient was not applied, so the saved state is the one before it. The remedy is a
    tenth of ``learning_rate``, set in ``field``; ``prefix`` precedes the names of the optimiser's metrics.
    """
    names = not_finite(row, prefix)
    names += [name for name, x in row.items() if isinstance(x, float) and math.isinf(x) and name.startswith(MEANS)]
    if not names:
        return Decision(), memory
    whose = f" of the {prefix.removesuffix('/')}" if prefix else ""
    what = f"the gradient{whose}" if names[0].endswith("grad_norm") else names[0]
    side = "before" if row.get(f"{prefix}updates/not_finite") else "after"
    reason = f"{what} is not a number; the state {side} it is saved"
    remedy = f"--{field}.learning_rate {learning_rate / 10:g}"
    return Decision(GUARD, reason, remedy, events={EVENT_BROKEN: reason}), memory


MEANS = ("reward/", "task/", "constraint/", "critic/returns", "sampler/", "kl", "controller/")
"""Prefixes of metrics that are not a number where nothing is measured, so that only infinity is told from that."""


REWARD_FAILED = "/failed_fraction"
"""How the metric of a reward's failed calls ends: ``reward/NAME/failed_fraction``."""


def reward_fails(row: Row, memory: RuleMemory) -> Decided:
    """Stop if all calls of one reward failed in a step, or no answer of an evaluation could be scored: a ``Rule``."""
    for name, value in row.items():
        if name.startswith("eval/") and name.endswith(REWARD_FAILED) and value == 1:
            return Decision(
                GUARD, f"nothing of the evaluation could be scored: {row['event/evaluation_failed']}"
            ), memory
        if name.startswith("reward/") and name.endswith(REWARD_FAILED) and value == 1:
            reward = name.removeprefix("reward/").removesuffix(REWARD_FAILED)
            return Decision(GUARD, f"reward {reward} failed for all completions: {row['event/reward_failed']}"), memory
    return Decision(), memory


OF_LESSONS = "teaches_nothing"
"""The name of the rule that watches whether steps teach."""


def teaches_nothing(
    row: Row,
    memory: RuleMemory,
    patience: int,
    only_advantages: bool,
    filter_reads: str,
    ended: Callable[[str], Decision] | None = None,
) -> Decided:
    """Report steps that teach nothing, and stop after ``patience`` of them in a row (0 never): a ``Rule``.

    A step teaches nothing if no update was made, or if all advantages are 0 and nothing else moves the policy: the loss
    has no other term, the gradient is exactly 0 (as that of a KL while the policy equals the reference), or every
    reward is missing. A step in which a critic learns teaches, even in its warm-up. A step without a finished group
    neither counts nor ends the series. If all completions of ``patience`` such steps in a row are
    correct, the run is done.

    Args:
      memory: the number of ``empty`` steps in a row, and of the last of these that were ``solved``, if there are any.
      only_advantages: whether the loss has no KL, no entropy term and no texts.
      filter_reads: the value that the filter of groups compares, "accuracy" or "reward"; empty without a filter.
      ended: in a phase before another, maps a reason to the decision that ends the phase once the task is solved.
    """
    empty = memory.get("empty", 0)
    if row["step"] == 0:
        return Decision(), memory
    if not row.get("updates") and math.isnan(row.get("completions/mean_length", math.nan)):
        return report_no_signal("no group was finished"), memory
    reason = why_no_signal(row, only_advantages, filter_reads)
    if not reason:
        return Decision(), {"empty": 0}
    empty += 1
    count = memory.get(SOLVED, 0) + 1 if _all_correct(row) else 0
    remembered = {"empty": empty} | ({SOLVED: count} if count else {})
    if not patience or empty < patience:
        return report_no_signal(reason), remembered
    solved = count >= patience
    lasted = f"{empty} steps in a row taught nothing: {reason}"
    if solved:
        lasted = f"solved: every completion of the last {count} steps that could not teach was correct"
    if solved and ended is not None:
        decision = ended(f"since it is {lasted}")
        return dataclasses.replace(decision, events=decision.events | report_no_signal(reason).events), {"empty": 0}
    return dataclasses.replace(report_no_signal(reason), stop=DONE if solved else GUARD, reason=lasted), remembered


SOLVED = "solved"
"""The key in the memory of ``teaches_nothing`` with the number of steps in a row in which all was correct."""


def _all_correct(row: Row) -> bool:
    """Whether every completion of a step was verified and correct: ``reward/accuracy`` leaves out those that failed."""
    failed = any(value for name, value in row.items() if name.startswith("reward/") and name.endswith(REWARD_FAILED))
    return row.get("reward/accuracy") == 1 and not failed and not has_no_score(row)


def why_no_signal(row: Row, only_advantages: bool, filter_reads: str) -> str:
    """Return why the step taught nothing; empty if it taught."""
    if row.get("critic/updates") and row.get("critic/loss"):
        return ""
    if row.get("updates") or row.get("updates/not_finite"):
        other_terms = row.get("entropy_coef") or not only_advantages
        still = has_no_score(row) or row.get("grad_norm") == 0
        if row.get("advantage/nonzero_fraction") != 0 or (other_terms and not still):
            return ""
        if has_no_score(row):
            return UNSCORED
        if "critic/loss" in row:
            return "all advantages are 0, since the critic predicts every reward"
        return "all advantages are 0, since the rewards of each group are equal"
    share_kept = row.get("dynamic_sampling/kept_fraction", 0.0)
    # Nothing went through the filter, or it kept some.
    if not filter_reads or row.get("completions") or math.isnan(share_kept):
        return "no token is in the loss"
    if has_no_score(row):
        return UNSCORED
    varies = row.get("reward/zero_std_fraction", 1.0) < 1
    if varies and filter_reads == "accuracy":
        return f"{100 * share_kept:.0f} % of groups kept: your reward varies, accuracy does not"
    same = f"within each group {filter_reads} is the same for all completions"
    return f"{100 * share_kept:.0f} % of groups kept: {same}"


OF_FILTER = "few_kept"
"""The name of the rule that watches the share of groups that the filter keeps."""
FEW = 0.1
"""The share of kept groups below which the rule reports; it is ready to report again from twice that."""
POOLED = 32
"""The fewest groups over which the share is measured; earlier ones fade."""


def few_kept(row: Row, memory: RuleMemory, filter_reads: str, group: int) -> Decided:
    """Report when the filter by ``filter_reads`` ("accuracy" or "reward") begins to keep less than a tenth of the
    groups: a ``Rule``. It remembers the groups ``kept`` and ``seen``, and whether this was ``told``.
    """
    share, new = row.get("dynamic_sampling/kept_fraction", math.nan), row.get("dynamic_sampling/finished", 0)
    if math.isnan(share) or not new:
        return Decision(), memory
    fade = min(1.0, POOLED / max(memory.get("seen", 0.0), 1.0))
    faded_kept, faded_count = fade * memory.get("kept", 0.0) + share * new, fade * memory.get("seen", 0.0) + new
    reported = memory.get("told", False)
    few = faded_kept < (2 * FEW if reported else FEW) * faded_count and (reported or faded_count >= POOLED)
    now = {"kept": faded_kept, "seen": faded_count, "told": few}
    if reported or not few:
        return Decision(), now
    differ = 1 - row.get("reward/zero_std_fraction", 1.0)
    helps = f"--rollout.group {2 * group} makes more of them differ, rollout.collect.curriculum asks others"
    if filter_reads == "accuracy" and differ > 0.5:
        helps = f"rewards differ in {100 * differ:.0f} %: --recipe.filter_groups reward keeps those"
    same = f"{filter_reads} is the same for all completions of the others"
    said = f"{100 * (faded_kept / faded_count):.1f} % of groups kept: {same}; {helps}"
    return Decision(events={"event/few_kept": said}), now


FOUND = "found/"
"""The prefix of findings in the rows that rules read: ``(step where it began, what, remedy)`` each."""
LR_SCALE = "lr_scale"
"""The coefficient that multiplies the learning rate."""
OF_GUARDS = "guard"
"""The name of the rule that acts on findings."""
ALL = "all"
"""A placeholder for all kinds of findings."""


def on_finding(row: Row, memory: RuleMemory, rules: Rules) -> Decided:
    """Stop or roll back, as the settings say, when a finding of one of ``rules.guards`` begins: a ``Rule``. It
    remembers the ``known`` findings, cleared by a rollback, and how many ``times`` it rolled back.
    """
    findings = {name.removeprefix(FOUND): value for name, value in row.items() if name.startswith(FOUND)}
    reported = memory.get("known", [])
    new = [kind for kind in findings if kind not in reported and (kind in rules.guards or ALL in rules.guards)]
    if not new:
        return Decision(), memory
    began, what, remedy = findings[new[0]]
    reason = f"{new[0].replace('_', ' ')} since step {began}: {what}"
    times = memory.get("times", 0)
    if rules.on_guard == "rollback" and times < rules.rollbacks:
        scale = row.get(LR_SCALE, 1.0) * rules.slower
        return Decision(rollback=began, reason=reason, coefficients={LR_SCALE: scale}), {"times": times + 1}
    stopped = Decision(GUARD, f"{reason}; try {remedy}", events={"event/guard": reason})
    return stopped, memory | {"known": [*reported, *new]}


OF_PHASES = "phase"
"""The name of the rule that ends a phase."""
PHASE = "event/phase"
"""The event of the step after which another phase begins: its name, and the reason."""
WAITS = "event/phase_waits"
"""The event of a phase that waits for a metric that none of its rows contains."""
UNMEASURED = 10
"""Steps after which that event is reported, or twice the steps between evaluations if that is more."""


def phase_ends(
    row: Row, memory: RuleMemory, phase: Phase, following: Phase | None, evaluation_every: int, test: str = ""
) -> Decided:
    """End a phase after its steps, or once its condition holds: a ``Rule``.

    It remembers the ``steps`` of the phase and the state of its condition: ``times`` in a row, or the ``best`` result
    and the ``stalled`` evaluations. A metric that no row contains is reported once: its name may be mistyped.

    Args:
      following: the next phase; None for the last one, which ends the run.
      evaluation_every: steps between evaluations; those of other steps are ignored (see ``on_stall``).
      test: identifies the evaluation's settings; results of other evaluations are not compared.
    """
    until = phase.until
    if isinstance(until, Stalls):
        memory = memory | stalls(row, memory, evaluation_every, test, until)
    if row["step"] == 0:
        return Decision(), memory
    steps = memory.get("steps", 0) + 1
    memory = memory | {"steps": steps}
    reason = ""
    if phase.steps is not None and steps >= phase.steps:
        reason = f"after {steps} step{'s' * (steps != 1)}"
    if isinstance(until, Stalls) and memory.get("stalled", 0) >= until.evaluations:
        several = "s" * (until.evaluations != 1)
        measured = f"measurement{several} of {until.metric}" if until.metric else f"evaluation{several}"
        reason = f"since {until.evaluations} {measured} found nothing better"
    events: dict[str, bool | str] = {}
    if isinstance(until, Reaches):
        value = row.get(until.metric)
        if value is not None and not math.isnan(value):
            beyond = value > until.above if until.above is not None else value < until.below
            memory["times"] = memory.get("times", 0) + 1 if beyond else 0
        if memory.get("times", 0) >= until.times:
            bound = f"above {until.above:g}" if until.above is not None else f"below {until.below:g}"
            again = f" in {until.times} measured steps in a row" if until.times > 1 else ""
            reason = f"since {until.metric} was {bound}{again}"
        if "times" not in memory and steps == max(UNMEASURED, 2 * evaluation_every):
            events[WAITS] = f"{phase.name or 'the run'} waits for {until.metric}, which no step so far has measured"
    return phase_ended(phase, following, reason) if reason else Decision(events=events), memory


def phase_ended(phase: Phase, following: Phase | None, reason: str) -> Decision:
    """Return the decision to begin the next phase, with its resets, or to end the run, for this ``reason``."""
    if following is None:
        return Decision(DONE, f"the {f'phase {phase.name}' if phase.name else 'run'} ends {reason}")
    events: dict[str, bool | str] = {PHASE: f"{following.name} ({phase.name} ended {reason})"}
    events |= {"event/reference_reset": True} if following.reset else {}
    events |= {"event/optimiser_reset": True} if following.reset_optimiser else {}
    return Decision(next_phase=True, snapshot=True, events=events)


def ends_run(until: Until, rows: Sequence[Row], evaluation_every: int, test: str) -> bool:
    """Whether a run with these rows and this condition ends after the last one. ``test``: as in ``phase_ends``."""
    decision, memory = Decision(), {}
    for row in rows:
        decision, memory = phase_ends(row, memory, Phase("", until=until), None, evaluation_every, test)
    return decision.stop == DONE


def flags_to_continue(memory: Memory, run: Any) -> str:
    """Return the flags that continue a run that a rule has ended, by its last memory; empty if no flag would."""
    rule = memory[ENDED]["rule"]
    if rule == OF_LESSONS:
        return "--rollout.collect.patience 0"
    if rule != OF_PHASES or run.rules.phases:
        return ""
    until, stalled = run.rules.until, memory[OF_PHASES].get("stalled", 0)
    if isinstance(until, Stalls):
        return f"--rules.until.evaluations {2 * max(until.evaluations, stalled)}"
    return "--rules.until None"


UNSCORED = "no completion could be scored: the reward is NaN for all"
"""The reason why a step without any reward taught nothing."""


def has_no_score(row: Row) -> bool:
    """Whether completions were sampled and all of their rewards are missing."""
    return math.isnan(row.get("reward/mean", 0.0)) and not math.isnan(row.get("completions/mean_length", math.nan))


def report_no_signal(reason: str) -> Decision:
    """Return a decision that only reports that a step teaches nothing."""
    return Decision(events={"event/teaches_nothing": reason})


def guards_of(
    run: Any, more: Mapping[str, Rule] = types.MappingProxyType({}), other_terms: bool = False
) -> dict[str, Rule]:
    """Return the guards of a resolved run by name, with ``more`` rules of its ingredients; the first that stops the run
    gives the reason. ``other_terms``: whether the policy has objectives in addition to the algorithm's.
    """
    algorithm = run.recipe.algorithm
    other_terms = other_terms or bool((algorithm.kl_in_loss and algorithm.kl_coef) or algorithm.entropy_coef)
    rules = {
        "not_a_number": partial(not_a_number, learning_rate=run.learner.optimiser.learning_rate),
        **more,
    }
    if run.rules.guards:
        rules[OF_GUARDS] = partial(on_finding, rules=run.rules)
    reads = run.recipe.filter_groups or ""
    if reads:
        rules[OF_FILTER] = partial(few_kept, filter_reads=reads, group=run.rollout.group)
    rules["reward_fails"] = reward_fails
    rules[OF_LESSONS] = partial(
        teaches_nothing, patience=run.rollout.collect.patience, only_advantages=not other_terms, filter_reads=reads
    )
    return rules


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
      on_stall: evaluations in a row not better than the best one, step 0's included, after which it does; 0 never.
      with_optimiser: reset the optimiser at each reset of the reference.
      optimiser_every: steps after which the optimiser alone is reset; 0 never.
      on_kl: the KL above which the reference becomes the policy; 0 never.
      on_kl_share: the KL's share of the loss terms at a token, kl_coef kl / (kl_coef kl + mean |advantage|), above
        which it does; 0 never. Mean |advantage| is the policy term's size at ratio 1, where the term itself is near 0.
      on_kl_jump: how many times the median of the last ``kl_window`` KLs since the last reset a KL must be; 0 never.
      kl_window: steps after any reset, and from the run's beginning, in which no KL resets.
      mix: m in reference <- (1 - m) reference + m policy at a reset; 1 is the policy, TRL's ref_model_mixup_alpha 0.6.
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
        triggers = [name for name in (*resetting, "ema") if getattr(self, name)]
        distillation = run.scoring.distillation
        teaches = distillation is not None and distillation.needs_reference
        for name in triggers:
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
            self.mix == 1 or bool({*triggers} - {"ema"}),
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
    """Return the rules that make these resets, by name; ``evaluation_every`` and ``test`` as in ``phase_ends``."""
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
        rules["ema"] = partial(moving_average, ema=resets.ema)
    return rules


def on_schedule(row: Row, memory: RuleMemory, resets: Resets, every: int, reference: bool = True) -> Decided:
    """Reset after every ``every`` steps: a ``Rule`` for the reference, or without it for the optimiser alone."""
    due = row["step"] > 0 and row["step"] % every == 0
    return reset_decision(resets, due and reference, due and (resets.with_optimiser or not reference)), memory


def on_stall(row: Row, memory: RuleMemory, resets: Resets, every: int, test: str = "") -> Decided:
    """Reset the reference after ``on_stall`` evaluations in a row not better than the best one: a ``Rule``. It keeps
    the result of ``stalls``. Only multiples of ``every`` count: a longer run would not evaluate at this run's end.
    """
    stall = stalls(row, memory, every, test)
    due = bool(stall) and stall["stalled"] >= resets.on_stall
    return reset_decision(resets, due, due and resets.with_optimiser), memory | stall | ({"stalled": 0} if due else {})


def on_kl(row: Row, memory: RuleMemory, resets: Resets) -> Decided:
    """Reset the reference if the KL is high, is a large share of the loss, or has jumped: a ``Rule``. It skips the
    first ``kl_window`` steps after any reset, and remembers the last KLs ``since`` then, without unmeasured ones.
    """
    kl = row.get("kl", math.nan)
    if math.isnan(kl):
        return Decision(), memory
    since = row[LAST_RESET]
    before = memory["kls"] if memory.get("since") == since else []
    pull = row.get("kl_coef", 0.0) * kl
    total = pull + row.get("advantage/abs_mean", math.nan)
    usual = statistics.median(before) if len(before) == resets.kl_window else math.inf
    reason = ""
    if row[REFERENCE_AGE] > resets.kl_window:
        if resets.on_kl and kl > resets.on_kl:
            reason = f"the KL, {kl:.4g}, is above {resets.on_kl:g}"
        elif resets.on_kl_share and pull > resets.on_kl_share * total:
            reason = f"the KL is {100 * pull / total:.0f} % of the total pull, above {100 * resets.on_kl_share:g} %"
        elif resets.on_kl_jump and kl > resets.on_kl_jump * usual > 0:
            reason = f"the KL, {kl:.4g}, is {kl / usual:.1f} times what it was, above {resets.on_kl_jump:g}"
    remembered = {"since": since, "kls": [*before, kl][-resets.kl_window :]}
    return reset_decision(resets, bool(reason), bool(reason) and resets.with_optimiser, reason), remembered


def by_hand(row: Row, memory: RuleMemory, resets: Resets) -> Decided:
    """Reset the reference once for each user request, and again after a rollback to before the reset: a ``Rule``. It
    remembers the request's ``id`` and ``with_optimiser``, the ``step`` of the answer, and an answer due ``again``.
    """
    asked = row.get(ASKED)
    new = asked is not None and asked["id"] != memory.get("id")
    if not new and not memory.get(AGAIN):
        return Decision(), memory
    requests = [asked] * new + [memory] * bool(memory.get(AGAIN))
    optimiser = any(request.get("with_optimiser", False) for request in requests)
    why = "by hand" if new else "by hand, again after a rollback"
    return reset_decision(resets, True, optimiser, why), {
        "id": requests[0]["id"],
        "step": row["step"],
        "with_optimiser": optimiser,
    }


def moving_average(row: Row, memory: RuleMemory, ema: float) -> Decided:
    """Move the reference to the policy at each update, with decay ``ema`` and without reset events: a ``Rule``."""
    moves = row["step"] > 0 and bool(row.get("updates"))
    return Decision(reset_reference=moves, mix=1 - ema if moves else 1.0), memory


def kl_controlled(
    row: Row, memory: RuleMemory, reads: str, controller: Callable[[float, float, int], float]
) -> Decided:
    """Update the KL coefficient by the controller (``algorithms.kl.AdaptiveKL``) from the metric ``reads`` of the
    step's last update, if there is one: a ``Rule``.
    """
    measured = row.get(reads, math.nan)
    if math.isnan(measured):
        return Decision(), memory
    coefficient = controller(row["kl_coef"], measured, int(row["completions"]))
    return Decision(coefficients={"kl_coef": float(coefficient)}), memory


def entropy_controlled(
    row: Row, memory: RuleMemory, controller: Callable[[float, float], tuple[float, float]]
) -> Decided:
    """Update the coefficient of the entropy bonus from the step's entropy, if measured: a ``Rule``. It remembers the
    controller's internal coefficient, which is kept while the bonus is off.
    """
    entropy = row.get("entropy", math.nan)
    if math.isnan(entropy):
        return Decision(), memory
    moved, coefficient = controller(memory.get("moved", row["entropy_coef"]), entropy)
    return Decision(coefficients={"entropy_coef": coefficient}), {"moved": moved}


def evaluation_result(row: Row) -> float | None:
    """Return the result of a row's evaluation, higher is better; None without a number: the share solved, else the mean
    reward, a reward model's accuracy, or minus the loss on texts. A mixture's average comes first.
    """
    value, sign = measured_result(row)
    return None if value is None else sign * value


def measured_result(row: Row) -> tuple[float | None, int]:
    """Return the number of ``evaluation_result`` as it was measured, and 1 where higher is better, -1 for a loss."""
    tested = [name for name in row if name.startswith("eval/")]
    for ending, sign in (("/pass@1", 1), ("/reward", 1), ("/accuracy", 1), ("/loss", -1)):
        metric = next((name for name in tested if name.endswith(ending)), None)
        if metric is not None:
            return number(row[metric]), sign
    return None, 1


def stalls(row: Row, memory: Mapping[str, Any], every: int, test: str, until: Stalls | None = None) -> dict[str, Any]:
    """Return the ``best`` result of a ``test``, that of step 0 included, and the evaluations ``stalled`` since; empty
    without one. Another test restarts the count. If ``until`` names a metric, each of its measurements counts.
    """
    result = evaluation_result(row)
    if until is not None and until.metric:
        result, test = row.get(until.metric), until.metric
    elif result is not None and row["step"] % every:
        result = None
    if result is None or math.isnan(result):
        return {}
    best = memory.get("best") if memory.get("test", test) == test else None
    better = best is None or (result < best if until is not None and until.lower else result > best)
    return {"best": result if better else best, "stalled": 0 if better else memory["stalled"] + 1, "test": test}


def reset_decision(resets: Resets, reference: bool, optimiser: bool, reason: str = "") -> Decision:
    """Return the decision to reset the reference, the optimiser, or both."""
    events: dict[str, bool | str] = {REFERENCE_RESET: reason or True} if reference else {}
    events |= {"event/optimiser_reset": True} if optimiser else {}
    return Decision(
        reset_reference=reference,
        reset_optimiser=optimiser,
        mix=resets.mix if reference else 1.0,
        snapshot=reference and resets.snapshots,
        events=events,
    )


OF_RESULTS = ('"eval/', PHASE, ROLLED_BACK)
"""Words in the lines of metrics.jsonl that ``best_step`` needs."""


def surviving_rows(rows: Iterable[Row], tests: Sequence[int] = ()) -> list[list[Row]]:
    """Return the rows of metrics.jsonl that no rollback has undone, for each phase and each of its evaluations.
    ``tests``: steps after which evaluations were of other settings.
    """
    groups: list[list[Row]] = [[]]
    before, moved = 0, False
    for row in rows:
        if moved or any(before <= step < row["step"] for step in tests):
            groups.append([])
        before, moved = row["step"], PHASE in row
        if (back := row.get(ROLLED_BACK)) is None:
            groups[-1].append(row)
        else:  # what this row has measured is of the policy that is undone
            groups = [[row_in_group for row_in_group in group if row_in_group["step"] <= back] for group in groups]
    return groups


def best_step(rows: Iterable[Row], tests: Sequence[int] = ()) -> int | None:
    """Return the step of the best evaluation, the first of equal ones; None without any. Results are compared within
    the last phase and evaluation with a result; the arguments are those of ``surviving_rows``.
    """
    for group in reversed(surviving_rows(rows, tests)):
        results = {row["step"]: result for row in group if (result := evaluation_result(row)) is not None}
        if results:
            return max(results, key=lambda step: results[step])
    return None
