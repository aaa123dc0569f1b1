"""Rewards from your own functions, given by name or as objects, and settings of those from models on the devices, which
``stages.judges`` loads and runs. The names of a function's parameters set how it is called.

One completion at a time, which returns a number:

- ``f(problem, completion)``: in this order, called as you like. ``f(completion)`` if its parameter has that name.
- ``f(data_source, solution_str, ground_truth, extra_info)``, verl's: the task's label, the text, the reference, and the
  row's column ``extra_info`` (all columns if that is missing).

A batch, which returns a list with one number for each completion; its arguments are lists too:

- ``f(problems, completions)``. With ``batch=True`` they may be called as you like.
- ``f(prompts, completions, completion_ids)`` or some of them, TRL's. Prompts and completions are texts, or chats if the
  rows' prompts are chats.
- ``f(data_sources, solution_strs, ground_truths, extra_infos)``, verl's.

Every further parameter is a column of the problem's row, by its name; if the row has none its default stays.
``**kwargs`` takes all columns. ``answer`` is the reference, unless a column has that name. Each form may be ``async``.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.setting import MODEL, Choice, Range
from jaxrl_llm.tasks.filters import importable, resolve
from jaxrl_llm.types import Completion, Problem

Item = tuple[Problem, Completion]

PLURAL = ("problems", "completions", "solution_strs")
"""Parameters that ask for a batch."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Calling convention of a function.

    Attributes:
      style: convention of its parameter names: ``own``, ``trl`` or ``verl``; ``plain`` if an item is its arguments.
      batch: all items in one call.
      waits: it is ``async``: many of its calls may wait at one time.
      first: parameters that are problem and completion by position, with any names.
      names: parameters given by name.
      optional: those with a default.
      rest: it takes all other arguments.
    """

    style: str = "own"
    batch: bool = False
    waits: bool = False
    first: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False


def form_of(function: Callable[..., Any], batch: bool | None = None) -> Form:
    """Return the form of a function; ``batch`` sets it if the names do not.

    Raises:
      InputError: the function cannot take a problem and a completion.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, it does not say
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("problem", "completion")]
    given = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in given]
    batch = any(name in names for name in PLURAL) if batch is None else batch
    style = "trl" if batch and "completions" in names and "problems" not in names else "own"
    if "solution_str" in names or "solution_strs" in names:
        style = "verl"
    first: tuple[str, ...] = ()
    if style == "own" and names[:1] not in (["completion"], ["completions"]):
        places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if any(p.kind == p.VAR_POSITIONAL for p in parameters):
            places += ["problem", "completion"]
        if len(places) < 2:
            raise InputError(
                f"{name_of(function)}({', '.join(places)}) cannot be a reward: write it as f(problem, completion), "
                f"f(problems, completions) or f(prompts, completions, **columns)"
            )
        first = tuple(places[:2])
    return Form(
        style,
        batch,
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),
        first,
        tuple(name for name in names if name not in first),
        tuple(p.name for p in given if p.default is not p.empty),
        any(p.kind == p.VAR_KEYWORD for p in parameters),
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, a lambda, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


class Own:
    """Base of the rewards that call the user's own function."""

    def to_save(self: Any) -> Any:
        """Return the value for config.json: itself, or ``Lost`` if no other process finds the function again."""
        if isinstance(getattr(self, "path", None), str) or dataclasses.is_dataclass(self.function):
            return self
        return Lost(self.name, self.weight, importable(self.function)[1])


@dataclasses.dataclass(frozen=True)
class Function(Own):
    """A function of your own that can be imported, called in a worker process, which is killed if it hangs.

    The module's docstring lists the forms: of one completion or of a batch, ``async`` or not, with the row's columns;
    TRL's and verl's too. It returns numbers; NaN (in a batch None too) is a completion that cannot be scored. It sees
    completions without ``extras``.

    Attributes:
      path: ``module:function``; or the function, which a configuration turns into that, or into a ``Local``.
      weight: in the sum.
      batch: whether it takes lists, if the names of its parameters do not show it.
      timeout_s: seconds for one completion, in place of ``scoring.timeout_s``; of a batch for all of it, in place of
        60 times that.
    """

    path: str
    weight: float = 1.0
    batch: bool | None = None
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Name of its column in metrics and samples."""
        return self.path.rpartition(":")[2]

    @property
    def function(self) -> Callable[..., Any]:
        """The function that ``path`` names, imported."""
        return resolve(self.path)


@dataclasses.dataclass(frozen=True)
class Local(Own):
    """A function of your own that another process cannot import: a closure, a lambda, a notebook's cell, an object.

    It is called like that of a ``Function``, but in this process, one call after the other in a separate thread. A call
    that hangs is abandoned after the same time and cannot be ended; signals, such as math-verify's own timeouts, need a
    main thread and so a module. A config.json cannot hold it: such a run is trained from the program that holds the
    function.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    batch: bool | None = None
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Name of its column in metrics and samples."""
        return name_of(self.function)


@dataclasses.dataclass(frozen=True)
class StepFunction(Own):
    """A function of your own that values each step of a completion: it returns ``[(position, value), ...]``.

    It is called like a ``Function`` (in a batch it returns a list of such lists), or like a ``Local`` if another
    process cannot import it. A position is the end of a step: in ``characters`` of ``completion.text`` the one after
    its last character, 1 to ``len(text)``; in ``tokens`` the index of its last token, 0 to T - 1. Their order does not
    matter; values of steps that end in one token are added up. Anything else (a position outside, a value that is not
    finite) is a failure: the completion then has no steps from this function, and is unscorable if ``scoring.on_error``
    is NaN.

    Steps do not count in the sum of the rewards: estimators that read ``step_rewards`` see them. Of several step
    rewards each token gets the weighted sum.

    Attributes:
      path: ``module:function``, or the function.
      weight: in that sum.
      positions: unit of the positions.
      batch: whether it takes lists, if the names of its parameters do not show it.
      timeout_s: as that of ``Function``.
      name: of its column in metrics and samples, the mean over a completion's steps, NaN if it has none.
    """

    path: str | Callable[..., Any]
    weight: float = 1.0
    positions: Literal["characters", "tokens"] = "characters"
    batch: bool | None = None
    timeout_s: float | None = None
    name: str = "steps"

    def __post_init__(self):
        function = of_this_program(self.path) if isinstance(self.path, str) else self.path
        if callable(function):
            object.__setattr__(self, "path", importable(function)[0] or function)

    @property
    def function(self) -> Callable[..., Any]:
        """The function to call, imported."""
        return resolve(self.path) if isinstance(self.path, str) else self.path


@dataclasses.dataclass(frozen=True)
class ModelReward:
    """Score of a completion by a reward model: the value of its scalar head at the last token.

    With several models (an ensemble) it is their mean, the lowest, or the mean minus ``spread`` standard deviations,
    which mistrusts disagreement. Every ensemble reports that as ``reward/<name>/disagreement``.

    Attributes:
      path: RUN[@STEP] or a Hugging Face directory of a sequence classifier with one label; or several of them. Each
        must have the policy's tokenizer.
      weight: in the sum of the rewards.
      of: "mean", "minimum" or "conservative", for several models.
      spread: k of "conservative"; deviations are those of the models at hand (ddof 0).
      name: of its column in metrics and samples.
    """

    path: Annotated[str | tuple[str, ...], MODEL]
    weight: float = 1.0
    of: Annotated[Literal["mean", "minimum", "conservative"], Choice("mean", "minimum", "conservative")] = "mean"
    spread: Annotated[float, Range("[0, inf]")] = 1.0
    name: str = "model"

    def __post_init__(self):
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all models."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def combined(self, scores: np.ndarray) -> np.ndarray:
        """Combine the models' scores float64[n, m] into one of each completion, float64[n]; [n] of one model stays."""
        if scores.ndim == 1:
            return scores
        if self.of == "minimum":
            return scores.min(axis=1)
        mean = scores.mean(axis=1)
        return mean - self.spread * scores.std(axis=1) if self.of == "conservative" else mean


@dataclasses.dataclass(frozen=True)
class StepReward:
    """Value of each step of a completion by a process reward model: ``sigmoid`` of its scalar head at the step's end.

    Steps are cut as ``data.Steps`` cuts the model's training data. Like those of a ``StepFunction`` they do not count
    in the sum of the rewards: estimators that read ``step_rewards`` see them.

    Attributes:
      path: RUN[@STEP] or a Hugging Face directory, with the policy's tokenizer.
      weight: in the sum of the step rewards.
      differences: each step is worth ``s_j - s_(j-1)``, the rise of its score (potential-based shaping: they sum to
        ``s_last - start``, however many steps there are); for GAE only, since an estimator that centres every step
        would leave a sum that depends on how many there are. Otherwise it is worth ``s_j``.
      start: s_0, the score before the first step.
      separator: ends a step, and belongs to it.
      name: of its column in metrics and samples: the mean over a completion's steps.
    """

    path: Annotated[str, MODEL]
    weight: float = 1.0
    differences: bool = False
    start: float = 0.0
    separator: str = "\n"
    name: str = "steps"
    positions: ClassVar[str] = "tokens"


ON_DEVICE = (ModelReward, StepReward)
"""Rewards that the devices compute."""
OF_STEPS = (StepFunction, StepReward)
"""Rewards of steps."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """Record in config.json of a function that it cannot hold, with the reason."""

    name: str
    weight: float
    reason: str


def as_reward(given: Any) -> Any:
    """Return a reward unchanged; turn a plain callable into a ``Function`` or ``Local``.

    Raises:
      InputError: the value is neither.
    """
    value = not isinstance(given, type)
    if isinstance(given, Function):
        function = given.path if callable(given.path) else of_this_program(given.path)
        settings = given.weight, given.batch, given.timeout_s
        if function is None:
            return given
    elif value and hasattr(given, "name") and hasattr(given, "weight"):
        return given
    elif value and callable(given):
        weight = getattr(given, "weight", 1.0)
        function, settings = given, (weight if isinstance(weight, (int, float)) else 1.0, None, None)
    else:
        raise InputError(
            f"scoring.rewards holds {given!r:.80}, which is not a reward: give a function, or one such as Accuracy()"
        )
    path, _ = importable(function)
    return Local(function, *settings) if path is None else Function(path, *settings)


def of_this_program(path: str) -> Callable[..., Any] | None:
    """Return the function that ``__main__:f`` names, which only this process has; None for other paths."""
    module, _, name = path.partition(":")
    return getattr(sys.modules[module], name, None) if module == "__main__" else None
