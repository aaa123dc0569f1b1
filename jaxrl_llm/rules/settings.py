"""Settings of the rules between a run's steps, except the resets of its recipe: values, quick to import."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxrl_llm.errors import require
from jaxrl_llm.rewards.functions import Function, as_reward
from jaxrl_llm.system.setting import RECORDED, Range, Setting


@dataclasses.dataclass(frozen=True)
class Reaches(Setting):
    """A condition: a metric was above (or below) a bound in ``times`` measured steps in a row.

    Attributes:
      metric: a name in the rows of metrics.jsonl.
      above: the bound; None for no such bound.
      below: the other one; exactly one of the two is given.
      times: consecutive measured steps beyond the bound; unmeasured ones are skipped.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    times: Annotated[int, Range("[1, inf]")] = 1

    def check(self, run: Any, where: str) -> None:
        """Refuse a metric without a name, and any number of bounds but one."""
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        require(
            len(bounds) == 1 and math.isfinite(bounds[0]),
            f"{where.removesuffix('.')} needs one finite bound, above or below, got {self}",
        )
        require(bool(self.metric), f"{where}metric is empty: give a metric's name (docs/metrics.md)")


@dataclasses.dataclass(frozen=True)
class Stalls(Setting):
    """A condition, early stopping: so many evaluations in a row no better than the phase's best, step 0's included.

    Attributes:
      evaluations: how many; the patience.
      metric: a name in the rows of metrics.jsonl whose measurements are counted; empty for the result of evaluations.
      lower: lower values of the metric are better.
    """

    evaluations: Annotated[int, Range("[1, inf]")]
    metric: str = ""
    lower: bool = False


Until = Reaches | Stalls


@dataclasses.dataclass(frozen=True)
class Phase(Setting):
    """A part of a run with settings of its own, which ends after some steps or once a condition holds.

    Attributes:
      name: for people: in the summary, the report and the event ``event/phase`` at its beginning.
      steps: the most steps of the phase; None for no limit. The last phase lasts until the run's steps are made.
      until: it ends after the step at which this holds, and in the last phase the run does; None for ``steps`` alone.
      changes: settings by dotted names, as on the command line (``{"rollout.group": 32}``), for this and later phases.
        A value may be a whole part: ``{"task": Mixture(...)}``. Your own functions among rewards become ``Function``.
      reset: the reference becomes the policy when it begins.
      reset_optimiser: the optimiser is reset when it begins.
    """

    name: str
    steps: int | None = None
    until: Until | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reset: bool = False
    reset_optimiser: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.changes, Mapping):  # what it is else is refused with the other settings
            changes = {name: _with_rewards(value) for name, value in self.changes.items() if name in SCORES}
            object.__setattr__(self, "changes", {**self.changes, **changes})

    def check(self, run: Any, where: str) -> None:
        """Refuse a phase without a unique name, one that never ends, and a last one that would end early."""
        names = [phase.name for phase in run.rules.phases]
        last = self is run.rules.phases[-1]
        require(bool(self.name), f"{where}name is empty: say what it is, for the summary and the report")
        require(
            names.count(self.name) == 1, f"{where}name {self.name!r} is another phase's too: give it one of its own"
        )
        require(self.steps is None or self.steps >= 1, f"{where}steps must be at least 1, got {self.steps}")
        ends = self.steps is not None or self.until is not None
        phase = where.removesuffix(".")
        require(
            not last or self.steps is None,
            f"{phase} is the last phase, which lasts until the run's steps are made: leave out its steps (until may "
            "end it before)",
        )
        require(last or ends, f"{phase} never ends, and others come after it: give it steps, or until")


SCORES = ("scoring.rewards", "scoring.refusals")
"""Settings in which a function may be given as a reward."""


def _with_rewards(value: Any) -> Any:
    """Replace functions in the value by rewards; other values are checked where the settings are made."""
    if isinstance(value, (tuple, list)):
        return tuple(_with_rewards(item) for item in value)
    is_single = isinstance(value, Function) or (callable(value) and not isinstance(value, type))
    return as_reward(value) if is_single else value


@dataclasses.dataclass(frozen=True)
class Rules(Setting):
    """The rules between steps.

    Attributes:
      phases: parts of the run with settings of their own, in turn; empty for a run without phases.
      guards: kinds of findings to act on when they begin; "all" for all of them. ``--guard KIND`` adds one.
      on_guard: "stop" saves and stops with exit code 3. "rollback" resumes from the newest checkpoint before the
        finding began, with ``slower`` times the learning rate; the data continues at its place.
      slower: the factor on the learning rate at each rollback, above 0 and at most 1.
      rollbacks: after so many the next finding stops the run.
      until: the run ends, done, after the step at which this holds; None for its steps alone. With phases: in the last.
      own: your rules: functions ``rule(row, memory)``, or ``Function("module:function")``, that return a ``Decision``,
        a pair of it and the new memory, or None. ``row``: the step's row of metrics.jsonl; ``memory``: the rule's own
        dict, empty at first and saved with the run. Every process calls them with equal arguments.
    """

    phases: tuple[Phase, ...] = ()
    guards: Annotated[tuple[str, ...], RECORDED] = ()
    on_guard: Annotated[Literal["stop", "rollback"], RECORDED] = "stop"
    slower: Annotated[float, Range("(0, 1]"), RECORDED] = 0.5
    rollbacks: Annotated[int, Range("[1, inf]"), RECORDED] = 3
    until: Annotated[Until | None, RECORDED] = None
    own: Annotated[tuple[Any, ...], RECORDED] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", tuple(as_reward(rule) for rule in self.own))

    def check(self, run: Any, where: str) -> None:
        """Refuse rollbacks without a guard, two conditions for the end, and rules that cannot be found or called."""
        for rule in self.own:
            require(callable(getattr(rule, "function", None)), f"{where}own holds {rule}, which is not a function")
        names = [rule.name for rule in self.own]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"{where}own has two rules of the name {', '.join(twice)}: rename one")
        require(
            self.until is None or not self.phases,
            f"{where}until would end the last phase: give it to that phase (Phase(until=...))",
        )
        require(
            bool(self.guards) or self.on_guard == "stop",
            f"{where}on_guard rollback waits for no guard: add --guard KIND, or set it to stop",
        )
