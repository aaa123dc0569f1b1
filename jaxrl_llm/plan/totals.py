"""The whole of a run, from the least time of a step: hours, costs, checkpoints on disk, and a signal to stop."""

import dataclasses
import math

import jax

from jaxrl_llm.checkpoints.snapshots import snapshot_of
from jaxrl_llm.checkpoints.store import flatten
from jaxrl_llm.plan.planning import Plan
from jaxrl_llm.types import TrainState

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Totals:
    """A run from its first step to its last, at the least time of a step.

    Attributes:
      steps: of the run.
      run_s: seconds of all steps.
      checkpoint_every_s: seconds between two checkpoints.
      device_hours: of all devices together.
      cost: in the currency of the price; None without a price.
      checkpoint_bytes: of one checkpoint on disk.
      snapshot_bytes: of one snapshot on disk.
      best_bytes: of the models of the best evaluation, as of now and of each checkpoint, at most; 0 if none is kept.
      disk_bytes: of ``output.keep`` checkpoints, one in writing, and one of an interruption.
      step_grace_s: the half of ``output.grace_s`` that a step has to end in after a signal; None if that is infinite.
    """

    steps: int
    run_s: float
    checkpoint_every_s: float
    device_hours: float
    cost: float | None
    checkpoint_bytes: int
    snapshot_bytes: int
    best_bytes: int
    disk_bytes: int
    step_grace_s: float | None


def totals_of(plan: Plan, price: float | None = None) -> Totals:
    """Return the whole of a planned run; ``price``: of one device for an hour."""
    run, step = plan.run, plan.seconds
    output = run.output
    run_s = run.steps * step
    # A step ends before a checkpoint is due by minutes, and the last step has one.
    minutes = math.ceil(60 * output.checkpoint_minutes / step) * step if output.checkpoint_minutes else math.inf
    hours = plan.machine.devices * run_s / 3600
    checkpoint, snapshot = stored_bytes(plan.state), stored_bytes(snapshot_of(plan.state))
    return Totals(
        run.steps, run_s, min(output.checkpoint_every * step, minutes, run_s), hours,
        None if price is None else hours * price,
        checkpoint, snapshot, output.keep_best * (output.keep + 2) * snapshot, (output.keep + 2) * checkpoint,
        None if math.isinf(output.grace_s) else output.grace_s / 2,
    )  # fmt: skip


def stored_bytes(state: TrainState) -> int:
    """Return the bytes of a state on disk, before compression: the arrays of a checkpoint."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(flatten(state)))


def lines_of_totals(plan: Plan, found: Totals) -> list[str]:
    """Return the lines about the whole run."""
    hours = f"{found.device_hours:,.1f}" if found.device_hours >= 1 else f"{found.device_hours:.2g}"
    cost = "" if found.cost is None else f", cost {found.cost:,.2f} (at your price)"
    best = f", up to {size(found.best_bytes)} for the best models (output.keep_best)" if found.best_bytes else ""
    return [
        f"the run takes at least {span(found.run_s)} ({found.steps} steps): {hours} device "
        f"hours{cost}; a checkpoint every {span(found.checkpoint_every_s)}",
        f"a checkpoint has {size(found.checkpoint_bytes)}, a snapshot {size(found.snapshot_bytes)}; disk needed: "
        f"{size(found.disk_bytes)} for {plan.run.output.keep + 2} checkpoints (output.keep + 2){best}, and snapshots",
        _stop(plan, found),
    ]


def _stop(plan: Plan, found: Totals) -> str:
    """Return the line about a signal: whether a step ends in its half of ``output.grace_s``."""
    half, grace = found.step_grace_s, plan.run.output.grace_s
    if half is None:
        return "a signal to stop: the step is finished, however long it takes (output.grace_s inf)"
    given = f"{half:g} s (half of output.grace_s)"
    save = f"saving in the other half needs {found.checkpoint_bytes / half / GB:.2g} GB/s"
    if plan.seconds <= half:
        return f"a signal to stop: a step can end in {given}; {save}"
    update = sum(p.seconds for p in plan.phases if p.learns)
    if plan.sampling is None or plan.run.rollout.collect.staleness:
        return (
            f"a signal to stop: a step does not end in {given}, and is finished all the same: set output.grace_s to "
            f"{math.ceil(2 * plan.seconds)} or more where the machine gives it ({grace:g} now); {save}"
        )
    late = "" if update <= half else f"; once it learns, it is finished ({span(update)})"
    return f"a signal to stop: a step does not end in {given}, and is stopped within its sampling{late}; {save}"


def size(count: float) -> str:
    """Return bytes for people, in powers of 1000.

    >>> size(18_521_000_000), size(1_087_000), size(1.2e12)
    ('18.5 GB', '1.1 MB', '1.2 TB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e6:.1f} MB"


def span(seconds: float) -> str:
    """Return a time for people.

    >>> span(0.25), span(75), span(5400), span(1e6)
    ('0.25 s', '75 s', '1.5 h', '11.6 days')
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
