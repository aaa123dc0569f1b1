"""One rule for each kind of trouble: pure functions of a run's history.

What a metric is at all says little: rules compare it with the run's own past, want a change to last, and forgive much
to a run that learns. The numbers are ours, chosen on synthetic and real runs.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.telemetry.columns import short
from jaxrl_llm.telemetry.diagnosis import stalls, words
from jaxrl_llm.telemetry.diagnosis.departure import Departure, Limit, departure, lasting, smoothed
from jaxrl_llm.telemetry.diagnosis.finding import Finding
from jaxrl_llm.telemetry.diagnosis.history import History, Series, history, total
from jaxrl_llm.telemetry.diagnosis.learning import fallen, improved, learned, recent, risen
from jaxrl_llm.telemetry.diagnosis.overfitting import overfitted
from jaxrl_llm.telemetry.diagnosis.words import percent

SMALL = 0.1
"""Gradients below are no spikes: a run that has converged has next to none."""
APART, FEWEST_BELOW, LEAST_SPACING = 16.0, 10, 0.03
"""How many times the mean spacing of the heights below them, so many at least, spikes are away; no mean counts as less.
"""
SHORT = 200
"""Gradients up to which two spikes are many; one now and then is no trouble."""


def diagnose(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> list[Finding]:
    """What is wrong with a run, by the rows of its ``metrics.jsonl``, in the order in which it began.

    It reads the pinned names of metrics alone; what is missing, null or no number was not measured. Troubles that are
    over by the last row are not told, but for spikes of the gradient. At most one finding of each kind. ``steps``: what
    a run that goes on is to make; it has stalled once it has for half of those.
    """
    run = history(rows, steps)
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: finding.step)


@dataclasses.dataclass(frozen=True)
class Above:
    """A limit for what grows: bad from ``least`` on if it is ``times`` and ``more`` than it was; ``always`` if so high.

    Attributes:
      least: never bad below.
      times: multiple of what it was.
      more: difference from what it was.
      always: bad whatever it was.
    """

    least: float
    times: float = 1.0
    more: float = 0.0
    always: float = np.inf

    def __call__(self, past: np.ndarray) -> np.ndarray:
        grown = np.maximum(np.maximum(self.least, self.times * past), past + self.more)
        return np.minimum(grown, self.always)


def entropy_collapse(run: History) -> Finding | None:
    """Near 0, while neither reward nor evaluation rises: far below its own past, and small in itself."""
    found = departure(run["entropy"], _near_zero, False)
    if found is None or learned(run):
        return None
    step = found.step
    if _learns(run, step):
        plateau = stalls.stalled(run)
        late = max(plateau.step, found.reached) if plateau else run.last
        if run.last - late < run.last / 3:
            return None
        step = found.reached
    return words.of_change("entropy_collapse", step, found, run)


def entropy_explosion(run: History) -> Finding | None:
    """Far above its own past; less far where nothing is learned meanwhile."""
    found = _grown(run, "entropy", Above(0.5, 2.0, 0.4), Above(1.5, 3.0, 1.2), relative=True)
    return words.of_change("entropy_explosion", found.steep, found, run) if found else None


def length_collapse(run: History) -> Finding | None:
    """Half of what they were or less, while nothing is learned."""
    lengths = run["completions/mean_length"]
    found = departure(lengths, lambda past: 0.55 * past, False)
    if found is None or not _tells(run, found, found.after < found.before / 3):
        return None
    return None if _excused(run, found) else words.of_change("length_collapse", found.step, found, run)


def length_explosion(run: History) -> Finding | None:
    """Nearly twice what they were or more, while nothing is learned."""
    lengths = run["completions/mean_length"]
    found = departure(lengths, Above(0.0, 1.8), True, relative=True)
    if found is None or not _tells(run, found, found.after > 3 * found.before):
        return None
    excused = improved(run, found.step) or (learned(run) and found.after < 4 * found.before)
    return None if excused else words.of_change("length_explosion", found.steep, found, run)


def truncation(run: History) -> Finding | None:
    """Many completions are cut off, and more than before or from the start without end."""
    found = _grown(run, "completions/truncated_fraction", Above(0.2, more=0.15), Above(0.3, more=0.2))
    found = found or _always(run, "completions/truncated_fraction", 0.5)
    return words.of_change("truncation", found.step, found, run) if found else None


def repetition(run: History) -> Finding | None:
    """Many completions repeat themselves, and more than before or from the start without end."""
    found = _grown(run, "completions/repetition_fraction", Above(0.15, more=0.12), Above(0.25, more=0.15))
    found = found or _always(run, "completions/repetition_fraction", 0.4)
    return words.of_change("repetition", found.step, found, run) if found else None


def reward_hacking(run: History) -> Finding | None:
    """The training reward rises, or a reward model's; evaluation falls, or the accuracy in training."""
    found = stalls.parting(run)
    if found is None:
        return None
    return words.finding(
        "reward_hacking",
        found.step,
        task=found.task,
        best=percent(found.best),
        now=percent(found.now),
        reward=found.reward,
        reward_then=short(found.reward_then),
        reward_now=short(found.reward_now),
    )


def no_signal(run: History) -> Finding | None:
    """Nearly all groups have equal rewards, though they are not all solved, and reward and evaluation stand still.

    Where next to no group teaches, an evaluation that still rises does not excuse a reward that does not.
    """
    found = departure(run["reward/zero_std_fraction"], Above(0.8), True)
    if found is None or learned(run):
        return None
    rewards = run["reward/mean"]
    none_left = found.after > 0.95 and len(rewards) and not risen(rewards, found.step)
    if not none_left and improved(run, found.step):
        return None
    return words.of_change("no_signal", found.step, found, run)


def kl_runaway(run: History) -> Finding | None:
    """Many times what it was, and large in itself; less large where nothing is learned."""
    found = _grown(run, "kl", Above(0.2, 5.0), Above(0.4, 8.0), relative=True)
    return words.of_change("kl_runaway", found.steep, found, run) if found else None


def clip_saturation(run: History) -> Finding | None:
    """The gradient of many tokens is cut; a clip on whole sequences cuts about one in seven in good runs."""
    clipped = total(run["clip_fraction/low"], run["clip_fraction/high"])
    found = departure(clipped, Above(0.2, 4.0, 0.1, always=0.3), True)
    return words.of_change("clip_saturation", found.step, found, run) if found else None


def sampler_mismatch(run: History) -> Finding | None:
    """Sampler and learner disagree on the tokens that were just sampled."""
    found = departure(run["sampler/logp_abs_diff_mean"], Above(0.02, 5.0, always=0.1), True, relative=True)
    found = found or departure(run["sampler/logp_abs_diff_max"], Above(1.5, 8.0, always=5.0), True, relative=True)
    return words.of_change("sampler_mismatch", found.step, found, run) if found else None


def gradient_spikes(run: History) -> Finding | None:
    """Single gradients far above all others, several of them close together; or ten times what they were, for good."""
    measured = run["grad_norm"]
    # Where all advantages are 0 there is none.
    gradients = Series(measured.steps[measured.values > 0], measured.values[measured.values > 0])
    if len(gradients) < 2 * lasting(len(gradients)):
        return None
    if found := departure(gradients, Above(SMALL, 10.0), True, relative=True):
        start = np.median(gradients.values[: recent(len(gradients))])
        if found.after > 5 * start:
            changed = f"grew from {short(found.before)} to {short(found.after)} and stays there"
            return words.finding("gradient_spikes", found.step, changed=changed)
    values = gradients.values
    # Of every second gradient that is a spike, the median is one, too.
    usual = np.maximum(smoothed(values, 15, 0.35), np.quantile(values, 0.35))
    heights = np.log(np.maximum(values, 1e-12) / np.maximum(usual, 1e-12))
    spread = (np.quantile(heights, 0.35) - np.quantile(heights, 0.1)) / 0.9
    spikes = np.flatnonzero((heights > max(np.log(4.0), 6 * spread)) & (values > SMALL))
    high = len(values) <= SHORT and heights[spikes].max(initial=0.0) > np.log(10.0)
    fewest = 2 if high else 3
    spikes = _crowded(_apart(heights, spikes, fewest), fewest, max(SHORT // 2, len(values) // 4))
    if not len(spikes):
        return None
    times = float(np.max(values[spikes] / np.maximum(usual[spikes], 1e-12)))
    often = f"{times:.0f}" if times < 1000 else "more than 1000"  # where most are next to nothing
    highest = short(float(values[spikes].max()))
    changed = f"spiked {len(spikes)} times, up to {highest}, {often} times what is usual"
    return words.finding("gradient_spikes", int(gradients.steps[spikes[0]]), changed=changed)


def stalled(run: History) -> Finding | None:
    """Neither reward nor evaluation has risen for at least half of the run, and it is far from perfect; or both have
    lost most of what they were."""
    if found := stalls.lost(run):
        return words.finding("stalled", found.step, words.LOST, best=short(found.best), now=short(found.now))
    found = stalls.stalled(run)
    if found is None or (run.last < run.planned and run.last - found.step < run.planned / 2):
        return None
    return words.finding("stalled", found.step, last=run.last, best=short(found.best), now=short(found.now))


def overfitting(run: History) -> Finding | None:
    """What is trained on is answered ever better, and what is held out is not; a task that falls is hacking."""
    found = overfitted(run)
    if found is None or stalls.parting(run) is not None:
        return None
    return words.finding(
        "overfitting",
        found.step,
        tested=found.tested,
        then=percent(found.training_then),
        training=percent(found.training_now),
        now=percent(found.now),
    )


RULES = (
    entropy_collapse, entropy_explosion, length_collapse, length_explosion, truncation, reward_hacking, no_signal,
    kl_runaway, clip_saturation, sampler_mismatch, gradient_spikes, stalled, repetition, overfitting,
)  # fmt: skip


def _near_zero(past: np.ndarray) -> np.ndarray:
    """Entropies that are, after others: a fifth and at most 0.25 nats, or half and at most 0.03."""
    return np.maximum(np.minimum(0.2 * past, 0.25), np.minimum(0.5 * past, 0.03))


def _learns(run: History, since: int) -> bool:
    """Whether reward or evaluation has risen; of texts, which have no reward, whether the loss has fallen."""
    return improved(run, since) if _scored(run) else fallen(run["loss"], since)


def _grown(run: History, name: str, idle: Limit, learning: Limit, relative: bool = False) -> Departure | None:
    """What has grown beyond the one limit while nothing was learned, or beyond the other whatever was."""
    gross = departure(run[name], learning, True, relative)
    if gross is not None:
        return gross
    found = departure(run[name], idle, True, relative)
    if found is None or not _lasts(found, run[name]):
        return None
    return None if _excused(run, found) else found


def _always(run: History, name: str, high: float) -> Departure | None:
    """What has been high from the first step on and does not fall, in a run that does not learn."""
    series = run[name]
    found = departure(series, Above(high), True)
    if found is None or found.count < 12 or fallen(series, found.step):
        return None
    return None if _excused(run, found) else found


def _tells(run: History, found: Departure, gross: bool) -> bool:
    """Whether a change of lengths is gross, or has lasted in a run of which it is known whether it learns."""
    return gross or (_scored(run) and _lasts(found, run["completions/mean_length"]))


def _apart(heights: np.ndarray, spikes: np.ndarray, fewest: int) -> np.ndarray:
    """As many of the spikes, the highest ones, as stand apart from all lower heights; none where fewer than ``fewest``
    do.

    Heavy tails have high values without a gap below them: the gaps between sorted heights, the j-th from the top times
    j, are all of one size where the tail is exponential (Renyi, 1953), as that of logarithms commonly is.
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


def _crowded(spikes: np.ndarray, fewest: int, width: int) -> np.ndarray:
    """The places of spikes from the first of ``fewest`` on that are not further apart than ``width`` measurements; none
    where there are no such."""
    apart = spikes[fewest - 1 :] - spikes[: len(spikes) - fewest + 1]
    close = np.flatnonzero(apart < width)
    return spikes[close[0] :] if len(close) else spikes[:0]


def _scored(run: History) -> bool:
    """Whether there are rewards or evaluations to tell by."""
    return bool(len(run["reward/mean"]) or run.evaluations)


def _excused(run: History, found: Departure) -> bool:
    """Whether the run has learned since a change began, or has learned its task."""
    return improved(run, found.step) or learned(run)


def _lasts(found: Departure, series: Series) -> bool:
    """Whether a change has lasted for long."""
    return found.count >= max(lasting(len(series)), min(max(len(series) // 10, 8), 60))
