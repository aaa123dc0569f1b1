"""Rules that stop a run that goes wrong, or that has nothing left to learn, and the rule that ends a phase."""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.diagnosis.history import EVENT_BROKEN, not_finite
from jaxrl_llm.rules.decision import DONE, ENDED, GUARD, Decided, Decision, Memory, Own, Row, Rule
from jaxrl_llm.rules.resets import stalls
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls, Until


def not_a_number(
    row: Row, own: Own, learning_rate: float, field: str = "learner.optimiser", prefix: str = ""
) -> Decided:
    """Stop at a loss, gradient, log-probability, advantage or reward that is not finite: a ``Rule``.

    An update with such a loss or gradient was not applied, so the saved state is the one before it.

    Args:
      row: of the step.
      own: nothing.
      learning_rate: of the optimiser; the remedy is a tenth of it.
      field: the optimiser's setting, which holds that rate.
      prefix: of the names of its updates' metrics.
    """
    found = not_finite(row, prefix)
    found += [name for name, x in row.items() if isinstance(x, float) and math.isinf(x) and name.startswith(MEANS)]
    if not found:
        return Decision(), own
    whose = f" of the {prefix.removesuffix('/')}" if prefix else ""
    what = f"the gradient{whose}" if found[0].endswith("grad_norm") else found[0]
    side = "before" if row.get(f"{prefix}updates/not_finite") else "after"
    reason = f"{what} is not a number; the state {side} it is saved"
    remedy = f"--{field}.learning_rate {learning_rate / 10:g}"
    return Decision(GUARD, reason, remedy, events={EVENT_BROKEN: reason}), own


MEANS = ("reward/", "task/", "constraint/", "critic/returns", "sampler/", "kl", "controller/")
"""Prefixes of metrics that are not a number where nothing is measured, so that only infinity is told from that."""


FAILED = "/failed_fraction"
"""How the metric of a reward's failed calls ends: ``reward/NAME/failed_fraction``."""


def reward_fails(row: Row, own: Own) -> Decided:
    """Stop after a step in which all calls of one reward failed, so that its values are placeholders, or no answer of
    an evaluation could be scored; a ``Rule``.
    """
    for name, value in row.items():
        if name.startswith("eval/") and name.endswith(FAILED) and value == 1:
            return Decision(GUARD, f"nothing of the evaluation could be scored: {row['event/evaluation_failed']}"), own
        if name.startswith("reward/") and name.endswith(FAILED) and value == 1:
            reward = name.removeprefix("reward/").removesuffix(FAILED)
            return Decision(GUARD, f"reward {reward} failed for all completions: {row['event/reward_failed']}"), own
    return Decision(), own


OF_LESSONS = "teaches_nothing"
"""The name of the rule that watches whether steps teach."""


def teaches_nothing(
    row: Row,
    own: Own,
    patience: int,
    only_advantages: bool,
    filter_reads: str,
    ended: Callable[[str], Decision] | None = None,
) -> Decided:
    """Report steps that teach nothing, and stop after ``patience`` of them in a row: a ``Rule``.

    A step teaches nothing if no update was made, or if all advantages are 0 and nothing else moves the policy: the loss
    has no other term, the gradient is exactly 0 (as that of a KL while the policy equals the reference), or every
    reward is missing. A step in which a critic learns teaches, even while the critic warms up alone. A step without a
    finished group neither counts nor ends the series. If all completions of ``patience`` of them in a row are correct,
    the task is solved, and the run is done.

    Args:
      row: of the step.
      own: the number of ``empty`` steps in a row, and of the last of these that were ``solved``, if there are any.
      patience: steps; 0 never stops.
      only_advantages: whether the loss has no KL, no entropy term and no texts.
      filter_reads: the value that the filter of groups compares, "accuracy" or "reward"; empty without a filter.
      ended: in a phase before another, maps a reason to the decision that ends the phase once the task is solved.
    """
    empty = own.get("empty", 0)
    if row["step"] == 0:
        return Decision(), own
    if not row.get("updates") and math.isnan(row.get("completions/mean_length", math.nan)):
        return _told("no group was finished"), own
    reason = _emptiness(row, only_advantages, filter_reads)
    if not reason:
        return Decision(), {"empty": 0}
    empty += 1
    count = own.get(SOLVED, 0) + 1 if _all_correct(row) else 0
    remembered = {"empty": empty} | ({SOLVED: count} if count else {})
    if not patience or empty < patience:
        return _told(reason), remembered
    solved = count >= patience
    lasted = f"{empty} steps in a row taught nothing: {reason}"
    if solved:
        lasted = f"solved: every completion of the last {count} steps that could not teach was correct"
    if solved and ended is not None:
        decision = ended(f"since it is {lasted}")
        return dataclasses.replace(decision, events=decision.events | _told(reason).events), {"empty": 0}
    return dataclasses.replace(_told(reason), stop=DONE if solved else GUARD, reason=lasted), remembered


SOLVED = "solved"
"""The key in the memory of ``teaches_nothing`` with the number of steps in a row in which all was correct."""


def _all_correct(row: Row) -> bool:
    """Whether every completion of a step was verified and correct: ``reward/accuracy`` leaves out those that failed."""
    failed = any(value for name, value in row.items() if name.startswith("reward/") and name.endswith(FAILED))
    return row.get("reward/accuracy") == 1 and not failed and not _unscored(row)


def _emptiness(row: Row, only_advantages: bool, filter_reads: str) -> str:
    """Return why the step taught nothing; empty if it taught."""
    if row.get("critic/updates") and row.get("critic/loss"):
        return ""
    if row.get("updates") or row.get("updates/not_finite"):
        others = row.get("entropy_coef") or not only_advantages
        still = _unscored(row) or row.get("grad_norm") == 0
        if row.get("advantage/nonzero_fraction") != 0 or (others and not still):
            return ""
        if _unscored(row):
            return UNSCORED
        if "critic/loss" in row:
            return "all advantages are 0, since the critic predicts every reward"
        return "all advantages are 0, since the rewards of each group are equal"
    kept = row.get("dynamic_sampling/kept_fraction", 0.0)
    # Nothing went through the filter, or it kept some.
    if not filter_reads or row.get("completions") or math.isnan(kept):
        return "no token is in the loss"
    if _unscored(row):
        return UNSCORED
    varies = row.get("reward/zero_std_fraction", 1.0) < 1
    if varies and filter_reads == "accuracy":
        return f"{100 * kept:.0f} % of groups kept: your reward varies, accuracy does not"
    same = f"within each group {filter_reads} is the same for all completions"
    return f"{100 * kept:.0f} % of groups kept: {same}"


OF_FILTER = "few_kept"
"""The name of the rule that watches the share of groups that the filter keeps."""
FEW = 0.1
"""The share of kept groups below which the rule reports; it is ready to report again from twice that."""
POOLED = 32
"""The fewest groups over which the share is measured; earlier ones fade."""


def few_kept(row: Row, own: Own, filter_reads: str, group: int) -> Decided:
    """Report when the filter of groups begins to keep fewer than a tenth of them, with a remedy: a ``Rule``.

    It remembers the groups ``kept`` and ``seen``, and whether the report was made: ``told``.

    Args:
      row: of the step.
      own: its memory.
      filter_reads: the value that the filter compares, "accuracy" or "reward".
      group: completions of a prompt.
    """
    share, new = row.get("dynamic_sampling/kept_fraction", math.nan), row.get("dynamic_sampling/finished", 0)
    if math.isnan(share) or not new:
        return Decision(), own
    fade = min(1.0, POOLED / max(own.get("seen", 0.0), 1.0))
    kept, seen = fade * own.get("kept", 0.0) + share * new, fade * own.get("seen", 0.0) + new
    told = own.get("told", False)
    few = kept < (2 * FEW if told else FEW) * seen and (told or seen >= POOLED)
    now = {"kept": kept, "seen": seen, "told": few}
    if told or not few:
        return Decision(), now
    differ = 1 - row.get("reward/zero_std_fraction", 1.0)
    helps = f"--rollout.group {2 * group} makes more of them differ, rollout.collect.curriculum asks others"
    if filter_reads == "accuracy" and differ > 0.5:
        helps = f"rewards differ in {100 * differ:.0f} %: --recipe.filter_groups reward keeps those"
    same = f"{filter_reads} is the same for all completions of the others"
    said = f"{100 * (kept / seen):.1f} % of groups kept: {same}; {helps}"
    return Decision(events={"event/few_kept": said}), now


FOUND = "found/"
"""The prefix of findings in the rows that rules read: ``(step where it began, what, remedy)`` each."""
LR_SCALE = "lr_scale"
"""The coefficient that multiplies the learning rate."""
OF_GUARDS = "guard"
"""The name of the rule that acts on findings."""
ALL = "all"
"""A placeholder for all kinds of findings."""


def on_finding(row: Row, own: Own, rules: Rules) -> Decided:
    """Stop or roll back, as the settings say, when a finding of one of ``rules.guards`` begins: a ``Rule``.

    It remembers the ``known`` findings, cleared by a rollback, and how many ``times`` it rolled back.
    """
    found = {name.removeprefix(FOUND): value for name, value in row.items() if name.startswith(FOUND)}
    known = own.get("known", [])
    new = [kind for kind in found if kind not in known and (kind in rules.guards or ALL in rules.guards)]
    if not new:
        return Decision(), own
    began, what, remedy = found[new[0]]
    reason = f"{new[0].replace('_', ' ')} since step {began}: {what}"
    times = own.get("times", 0)
    if rules.on_guard == "rollback" and times < rules.rollbacks:
        scale = row.get(LR_SCALE, 1.0) * rules.slower
        return Decision(rollback=began, reason=reason, coefficients={LR_SCALE: scale}), {"times": times + 1}
    stopped = Decision(GUARD, f"{reason}; try {remedy}", events={"event/guard": reason})
    return stopped, own | {"known": [*known, *new]}


OF_PHASES = "phase"
"""The name of the rule that ends a phase."""
PHASE = "event/phase"
"""The event of the step after which another phase begins: its name, and the reason."""
WAITS = "event/phase_waits"
"""The event of a phase that waits for a metric that none of its rows contains."""
UNMEASURED = 10
"""Steps after which that event is reported, or twice the steps between evaluations if that is more."""


def phase_ends(
    row: Row, own: Own, phase: Phase, following: Phase | None, evaluation_every: int, test: str = ""
) -> Decided:
    """End a phase after its steps, or once its condition holds: a ``Rule``.

    It remembers the ``steps`` of the phase and the state of its condition: ``times`` in a row, or the ``best`` result
    and the ``stalled`` evaluations. A metric that no row contains is reported once: its name may be mistyped, and the
    phase would never end.

    Args:
      row: of the step.
      own: its memory.
      phase: that the run is in.
      following: the one after it; None for the last one, which ends the run.
      evaluation_every: steps between evaluations; those of other steps are ignored (see ``on_stall``).
      test: identifies the evaluation's settings; results of other evaluations are not compared.
    """
    until = phase.until
    if isinstance(until, Stalls):
        own = own | stalls(row, own, evaluation_every, test, until)
    if row["step"] == 0:
        return Decision(), own
    steps = own.get("steps", 0) + 1
    own = own | {"steps": steps}
    reason = ""
    if phase.steps is not None and steps >= phase.steps:
        reason = f"after {steps} step{'s' * (steps != 1)}"
    if isinstance(until, Stalls) and own.get("stalled", 0) >= until.evaluations:
        several = "s" * (until.evaluations != 1)
        measured = f"measurement{several} of {until.metric}" if until.metric else f"evaluation{several}"
        reason = f"since {until.evaluations} {measured} found nothing better"
    events: dict[str, bool | str] = {}
    if isinstance(until, Reaches):
        value = row.get(until.metric)
        if value is not None and not math.isnan(value):
            beyond = value > until.above if until.above is not None else value < until.below
            own["times"] = own.get("times", 0) + 1 if beyond else 0
        if own.get("times", 0) >= until.times:
            bound = f"above {until.above:g}" if until.above is not None else f"below {until.below:g}"
            again = f" in {until.times} measured steps in a row" if until.times > 1 else ""
            reason = f"since {until.metric} was {bound}{again}"
        if "times" not in own and steps == max(UNMEASURED, 2 * evaluation_every):
            events[WAITS] = f"{phase.name or 'the run'} waits for {until.metric}, which no step so far has measured"
    return phase_ended(phase, following, reason) if reason else Decision(events=events), own


def phase_ended(phase: Phase, following: Phase | None, reason: str) -> Decision:
    """Return the decision to begin the next phase, with its resets, or to end the run; ``reason``: why this one has
    ended."""
    if following is None:
        return Decision(DONE, f"the {f'phase {phase.name}' if phase.name else 'run'} ends {reason}")
    events: dict[str, bool | str] = {PHASE: f"{following.name} ({phase.name} ended {reason})"}
    events |= {"event/reference_reset": True} if following.reset else {}
    events |= {"event/optimiser_reset": True} if following.reset_optimiser else {}
    return Decision(next_phase=True, snapshot=True, events=events)


def would_end(until: Until, rows: Sequence[Row], evaluation_every: int, test: str) -> bool:
    """Whether a run with these rows and this condition ends after the last one. ``test``: as in ``phase_ends``."""
    decision, own = Decision(), {}
    for row in rows:
        decision, own = phase_ends(row, own, Phase("", until=until), None, evaluation_every, test)
    return decision.stop == DONE


def flags_to_continue(memory: Memory, run: Any) -> str:
    """Return the flags with which a run continues that a rule has ended; empty if no flag changes the rule.

    ``memory``: of the rules after the run's last step.
    """
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


def _unscored(row: Row) -> bool:
    """Whether completions were sampled and all of their rewards are missing."""
    return math.isnan(row.get("reward/mean", 0.0)) and not math.isnan(row.get("completions/mean_length", math.nan))


def _told(reason: str) -> Decision:
    return Decision(events={"event/teaches_nothing": reason})


def guards_of(run: Any, own: Mapping[str, Rule] = types.MappingProxyType({}), others: bool = False) -> dict[str, Rule]:
    """Return the guards of a run with these settings, by name; if several stop it, the first gives the reason.

    Args:
      run: with its settings resolved.
      own: rules of its ingredients.
      others: whether the policy has objectives in addition to the algorithm's.
    """
    algorithm = run.recipe.algorithm
    others = others or bool((algorithm.kl_in_loss and algorithm.kl_coef) or algorithm.entropy_coef)
    rules = {"not_a_number": partial(not_a_number, learning_rate=run.learner.optimiser.learning_rate), **own}
    if run.rules.guards:
        rules[OF_GUARDS] = partial(on_finding, rules=run.rules)
    reads = run.recipe.filter_groups or ""
    if reads:
        rules[OF_FILTER] = partial(few_kept, filter_reads=reads, group=run.rollout.group)
    rules["reward_fails"] = reward_fails
    rules[OF_LESSONS] = partial(
        teaches_nothing, patience=run.rollout.collect.patience, only_advantages=not others, filter_reads=reads
    )
    return rules
