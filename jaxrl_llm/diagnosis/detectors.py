"""Checks of a run: one for each kind of trouble, a pure function of the run's history.

The value of a metric alone says little: checks compare it with the run's own past, require a change to last, and
tolerate much in a run that learns. The thresholds are ours, chosen on synthetic and real runs.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.diagnosis.findings import LOST, Finding, make_finding, of_change
from jaxrl_llm.diagnosis.generalisation import overfitting, reward_hacking
from jaxrl_llm.diagnosis.history import (
    EVENT_BROKEN,
    MEASURED,
    ROLLED_BACK,
    TESTED,
    ChangePoint,
    History,
    Limit,
    Series,
    broken,
    change_point,
    history,
    lasting,
    smoothed,
)
from jaxrl_llm.diagnosis.tool_use import tools_failing, tools_unused, turns_growing
from jaxrl_llm.diagnosis.trends import fallen, improved, learned, lost, plateau, recent, risen
from jaxrl_llm.system.json_lines import jsonable
from jaxrl_llm.system.text import short

log = logging.getLogger(__name__)

READ = {"step", ROLLED_BACK, *MEASURED}
"""The metrics that a diagnosis reads, in addition to evaluations."""
EVERY = 10
"""Steps between two diagnoses, or a twentieth of all so far if that is more: a longer history takes longer."""
SMALL = 0.1
"""The gradient norm below which there are no spikes: a converged run has tiny gradients."""
APART, FEWEST_BELOW, LEAST_SPACING = 16.0, 10, 0.03
"""A spike's distance in mean spacings of the heights below it, the fewest such heights, and the least mean spacing."""
SHORT = 200
"""The number of gradients up to which two spikes are many; a rare single one is harmless."""


def diagnose(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> list[Finding]:
    """Diagnose a run by the rows of its ``metrics.jsonl``; return findings in the order of their beginning.

    Only the pinned names of metrics are read; a missing, null or non-numeric value counts as unmeasured, but where an
    update was made. Troubles that are over by the last row are not reported, except spikes of the gradient and what was
    not a number. At most one finding of each kind.
    ``steps``: planned steps of an unfinished run; it counts as stalled only after half of them without progress.
    """
    run = history(rows, steps)
    found = [finding for rule in RULES.values() if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: finding.step)


class FindingTracker:
    """A tracker of a run's rows that diagnoses them during the run, for guards and for people.

    Guards get all findings, at steps that depend on nothing else: equal whether or not the run was interrupted. People
    get each kind once, when it is first found.

    Args:
      steps: that the run ends with.
      earlier: the rows of a run that is resumed; findings in them have been reported to people.
    """

    def __init__(self, steps: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self._steps = steps
        self._rows: list[dict[str, Any]] = []
        for row in earlier:
            self.take(row)
        self._next = EVERY
        self._told = {finding.kind for finding in diagnose(self._rows, steps)} if self._rows else set()

    def take(self, row: Mapping[str, Any]) -> None:
        """Keep a row, or merge later metrics of the last step into its row."""
        read = {
            name: plain
            for name, value in row.items()
            if (name in READ or TESTED.fullmatch(name)) and (plain := jsonable(value)) is not None
        }
        read |= {EVENT_BROKEN: said} if (said := broken(row)) else {}
        if self._rows and read.get("step") in (None, self._rows[-1].get("step")):
            self._rows[-1] |= read
        else:
            self._rows.append(read)

    def found(self, row: Mapping[str, Any]) -> list[Finding]:
        """Keep the row and return all findings after its step; empty at steps without a diagnosis."""
        self.take(row)
        step = int(row["step"])
        if step == 0 or not (looks(step) or any(TESTED.fullmatch(name) for name in row)):
            return []
        return diagnose(self._rows, self._steps)

    def new(self, row: Mapping[str, Any]) -> list[Finding]:
        """Keep the row and return new kinds of findings; diagnoses after an evaluation, or at regular intervals."""
        self.take(row)
        step = int(row["step"])
        if step < self._next and not any(TESTED.fullmatch(name) for name in row):
            return []
        self._next = step + max(EVERY, step // 20)
        try:
            new = [finding for finding in diagnose(self._rows, self._steps) if finding.kind not in self._told]
        except Exception:
            log.exception("the diagnosis failed")  # no run ends for its diagnosis
            return []
        self._told |= {finding.kind for finding in new}
        return new


def looks(step: int) -> bool:
    """Whether guards diagnose after this step: each ``EVERY``-th at first, then less often; a function of it."""
    at = 0
    while at < step:
        at += max(EVERY, at // 20)
    return at == step


def above(least: float, times: float = 1.0, more: float = 0.0, always: float = np.inf) -> Limit:
    """Return a limit for a metric that is bad when it grows.

    Args:
      least: never bad below.
      times: bad from this multiple of the past level.
      more: bad from this difference to the past level.
      always: bad from here at any past level.
    """
    return lambda past: np.minimum(np.maximum(np.maximum(least, times * past), past + more), always)


def entropy_collapse(run: History) -> Finding | None:
    """Find an entropy near 0, far below its own past, while neither reward nor evaluation rises."""
    # 0.2 of the past up to 0.25 nats, or 0.5 of it up to 0.03 nats.
    near_zero = lambda past: np.maximum(np.minimum(0.2 * past, 0.25), np.minimum(0.5 * past, 0.03))  # noqa: E731
    found = change_point(run["entropy"], near_zero, False)
    if found is None or learned(run):
        return None
    step = found.step
    # Texts have no reward: there the loss tells.
    if improved(run, step) if _scored(run) else fallen(run["loss"], step):
        flat = plateau(run)
        late = max(flat.step, found.reached) if flat else run.last
        if run.last - late < run.last / 3:
            return None
        step = found.reached
    return of_change("entropy_collapse", step, found, run)


GROWN: dict[str, tuple[str, Limit, Limit, bool, float]] = {
    "entropy_explosion": ("entropy", above(0.5, 2.0, 0.4), above(1.5, 3.0, 1.2), True, np.inf),
    "truncation": ("completions/truncated_fraction", above(0.2, more=0.15), above(0.3, more=0.2), False, 0.5),
    "repetition": ("completions/repetition_fraction", above(0.15, more=0.12), above(0.25, more=0.15), False, 0.4),
    "kl_runaway": ("kl", above(0.2, 5.0), above(0.4, 8.0), True, np.inf),
}
"""Troubles that are a metric's growth: its name, two bounds, whether factors count, and what is much from the start."""


def grown(kind: str, run: History) -> Finding | None:
    """Find growth of a metric of ``GROWN``: beyond the second bound in any run, beyond the first in one that learned
    nothing meanwhile; or there, where the metric is high from the first step and does not fall."""
    name, idle, learning, relative, high = GROWN[kind]
    series = run[name]
    found = change_point(series, learning, True, relative)
    if found is None:
        found = change_point(series, idle, True, relative)
        if found is not None and (not _lasts(found, series) or _excused(run, found)):
            found = None
    if found is None:
        found = change_point(series, above(high), True)
        if found is not None and (found.count < 12 or fallen(series, found.step) or _excused(run, found)):
            found = None
    return of_change(kind, found.steep, found, run) if found else None


def lengths_off(kind: str, run: History) -> Finding | None:
    """Find completions that shrank to 55 % of their length or less, or grew to 1.8 times of it or more, while nothing
    is learned: to a third or to three times, or for long in a run with rewards or evaluations."""
    up = kind == "length_explosion"
    lengths = run["completions/mean_length"]
    found = change_point(lengths, above(0.0, 1.8) if up else lambda past: 0.55 * past, up, relative=up)
    if found is None:
        return None
    gross = found.after > 3 * found.before if up else found.after < found.before / 3
    excused = improved(run, found.step) or (learned(run) and not (up and found.after >= 4 * found.before))
    if excused or not (gross or (_scored(run) and _lasts(found, lengths))):
        return None
    return of_change(kind, found.steep, found, run)


def no_signal(run: History) -> Finding | None:
    """Find nearly all groups with equal rewards, while the task is unsolved and reward and evaluation do not rise.

    If almost no group teaches, a rising evaluation does not excuse a flat reward.
    """
    found = change_point(run["reward/zero_std_fraction"], above(0.8), True)
    if found is None or learned(run):
        return None
    rewards = run["reward/mean"]
    none_left = found.after > 0.95 and len(rewards) and not risen(rewards, found.step)
    if not none_left and improved(run, found.step):
        return None
    return of_change("no_signal", found.step, found, run)


def clip_saturation(run: History) -> Finding | None:
    """Find many tokens with a cut gradient; a clip on whole sequences cuts about one in seven in good runs."""
    low, high = run["clip_fraction/low"], run["clip_fraction/high"]
    steps = np.union1d(low.steps, high.steps)
    clipped = np.zeros(len(steps))
    for series in (low, high):  # an unmeasured value counts as 0
        clipped[np.searchsorted(steps, series.steps)] += series.values
    found = change_point(Series(steps, clipped), above(0.2, 4.0, 0.1, always=0.3), True)
    return of_change("clip_saturation", found.step, found, run) if found else None


def sampler_mismatch(run: History) -> Finding | None:
    """Find a disagreement of sampler and learner on the tokens that were just sampled."""
    found = change_point(run["sampler/logp_abs_diff_mean"], above(0.02, 5.0, always=0.1), True, relative=True)
    found = found or change_point(run["sampler/logp_abs_diff_max"], above(1.5, 8.0, always=5.0), True, relative=True)
    return of_change("sampler_mismatch", found.step, found, run) if found else None


def gradient_spikes(run: History) -> Finding | None:
    """Find several gradients far above all others, close together; or lasting growth to ten times the past norm."""
    measured = run["grad_norm"]
    # Where all advantages are 0 there is none.
    gradients = Series(measured.steps[measured.values > 0], measured.values[measured.values > 0])
    if len(gradients) < 2 * lasting(len(gradients)):
        return None
    if found := change_point(gradients, above(SMALL, 10.0), True, relative=True):
        start = np.median(gradients.values[: recent(len(gradients))])
        if found.after > 5 * start:
            changed = f"grew from {short(found.before)} to {short(found.after)} and stays there"
            return make_finding("gradient_spikes", found.step, changed=changed)
    values = gradients.values
    # Of every second gradient that is a spike, the median is one, too.
    usual = np.maximum(smoothed(values, 15, 0.35), np.quantile(values, 0.35))
    heights = np.log(np.maximum(values, 1e-12) / np.maximum(usual, 1e-12))
    spread = (np.quantile(heights, 0.35) - np.quantile(heights, 0.1)) / 0.9
    spikes = np.flatnonzero((heights > max(np.log(4.0), 6 * spread)) & (values > SMALL))
    high = len(values) <= SHORT and heights[spikes].max(initial=0.0) > np.log(10.0)
    fewest = 2 if high else 3
    spikes = _apart(heights, spikes, fewest)
    # From the first of ``fewest`` on that are close together.
    distances = spikes[fewest - 1 :] - spikes[: len(spikes) - fewest + 1]
    close = np.flatnonzero(distances < max(SHORT // 2, len(values) // 4))
    if not len(close):
        return None
    spikes = spikes[close[0] :]
    times = float(np.max(values[spikes] / np.maximum(usual[spikes], 1e-12)))
    often = f"{times:.0f}" if times < 1000 else "more than 1000"  # where most are next to nothing
    highest = short(float(values[spikes].max()))
    changed = f"spiked {len(spikes)} times, up to {highest}, {often} times what is usual"
    return make_finding("gradient_spikes", int(gradients.steps[spikes[0]]), changed=changed)


def not_a_number(run: History) -> Finding | None:
    """Find the first step with a loss, a gradient, log-probabilities, advantages or rewards that are not finite."""
    return make_finding("not_a_number", (at := min(run.broken)), found=run.broken[at]) if run.broken else None


def stalled(run: History) -> Finding | None:
    """Find a run without a rise of reward or evaluation for at least half of it, far from perfect; or one that lost
    most of its best reward and evaluation.
    """
    if found := lost(run):
        return make_finding("stalled", found.step, LOST, best=short(found.best), now=short(found.now))
    found = plateau(run)
    if found is None or (run.last < run.planned and run.last - found.step < run.planned / 2):
        return None
    return make_finding("stalled", found.step, last=run.last, best=short(found.best), now=short(found.now))


RULES: dict[str, Callable[[History], Finding | None]] = {
    "entropy_collapse": entropy_collapse,
    "entropy_explosion": functools.partial(grown, "entropy_explosion"),
    "length_collapse": functools.partial(lengths_off, "length_collapse"),
    "length_explosion": functools.partial(lengths_off, "length_explosion"),
    "truncation": functools.partial(grown, "truncation"),
    "reward_hacking": reward_hacking,
    "no_signal": no_signal,
    "kl_runaway": functools.partial(grown, "kl_runaway"),
    "clip_saturation": clip_saturation,
    "sampler_mismatch": sampler_mismatch,
    "gradient_spikes": gradient_spikes,
    "not_a_number": not_a_number,
    "stalled": stalled,
    "repetition": functools.partial(grown, "repetition"),
    "overfitting": overfitting,
    "tools_unused": tools_unused,
    "tools_failing": tools_failing,
    "turns_growing": turns_growing,
}
"""The check of each kind of trouble."""


def _apart(heights: np.ndarray, spikes: np.ndarray, fewest: int) -> np.ndarray:
    """Return the highest spikes that are separated by a gap from all lower heights; empty if fewer than ``fewest``.

    Heavy tails have high values without a gap below them: for an exponential tail, common for logarithms, the gaps
    between sorted heights, the j-th from the top times j, are all of one size (Renyi, 1953).
    """
    if len(spikes) < fewest:
        return spikes[:0]
    order = np.argsort(-heights, kind="stable")
    gaps = -np.diff(heights[order])
    spacings = gaps * np.arange(1, len(heights))
    # Some of those that stand apart may be too low for spikes.
    for count in range(int(np.sum(heights > heights[spikes].min() / 2)), fewest - 1, -1):
        below = float(np.mean(spacings[count : count + max(2 * count, FEWEST_BELOW)]))
        if spacings[count - 1] > APART * max(below, LEAST_SPACING):
            return np.sort(order[: min(count, len(spikes))])
    return spikes[:0]


def _scored(run: History) -> bool:
    """Whether the run has rewards or evaluations."""
    return bool(len(run["reward/mean"]) or run.evaluations)


def _excused(run: History, found: ChangePoint) -> bool:
    """Whether the run has learned since a change began, or has learned its task."""
    return improved(run, found.step) or learned(run)


def _lasts(found: ChangePoint, series: Series) -> bool:
    """Whether a change has lasted long enough."""
    return found.count >= max(lasting(len(series)), min(max(len(series) // 10, 8), 60))
