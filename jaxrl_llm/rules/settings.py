"""What a run says about what decides between its steps, beside the resets of its recipe: values, quick to import."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.rewards.functions import Function, as_reward


@dataclasses.dataclass(frozen=True)
class Reaches:
    """True once a metric has been above (or below) a bound in so many measured steps in a row.

    Attributes:
      metric: a name in the rows of metrics.jsonl.
      above: the bound; None for no such bound.
      below: the other one; exactly one of the two is given.
      times: steps in a row in which it was measured and beyond; steps that did not measure it are passed over.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Stalls:
    """True once so many evaluations in a row have found nothing better than the best one of the phase.

    Attributes:
      evaluations: how many.
    """

    evaluations: int


Until = Reaches | Stalls


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run with settings of its own, until so many steps are made or something is so.

    Attributes:
      name: for people: in the summary, the report and the event ``event/phase`` at its beginning.
      steps: it lasts at most; None for no such end. The last phase lasts until the run's steps are made.
      until: it ends after the step after which this is so; None for ``steps`` alone.
      changes: settings by their dotted names, as on the command line (``{"rollout.group": 32}``), from here on: what a
        later phase does not change stays. A value may be a whole part: ``{"task": Mixture(...)}``. Functions of your
        own among rewards become such rewards as ``Scoring`` makes of them, which a config.json holds as it holds those.
      reset: the reference becomes the policy when it begins.
      reset_optimiser: the optimiser begins anew when it begins.
    """

    name: str
    steps: int | None = None
    until: Until | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reset: bool = False
    reset_optimiser: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.changes, Mapping):  # what it is else is refused with the other settings
            made = {name: _with_rewards(value) for name, value in self.changes.items() if name in SCORES}
            object.__setattr__(self, "changes", {**self.changes, **made})


SCORES = ("scoring.rewards", "scoring.refusals")
"""Settings in which a function may stand for a reward."""


def _with_rewards(value: Any) -> Any:
    """The value, with rewards in place of functions; what is neither is refused where the settings are made."""
    if isinstance(value, (tuple, list)):
        return tuple(_with_rewards(item) for item in value)
    given = isinstance(value, Function) or (callable(value) and not isinstance(value, type))
    return as_reward(value) if given else value


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides between steps.

    Attributes:
      phases: parts of the run with settings of their own, in turn; none for a run of one piece.
      guards: kinds of findings (``telemetry.diagnose``) that are acted on when they begin; "all" for all of them.
        ``--guard KIND`` adds one.
      on_guard: "stop" saves and stops with exit code 3. "rollback" goes on from the newest checkpoint of before the
        finding began, with ``slower`` times the learning rate; data goes on where it is.
      slower: what each rollback multiplies the learning rate with, above 0 and at most 1.
      rollbacks: after so many the next finding stops the run.
    """

    phases: tuple[Phase, ...] = ()
    guards: tuple[str, ...] = ()
    on_guard: Literal["stop", "rollback"] = "stop"
    slower: float = 0.5
    rollbacks: int = 3
