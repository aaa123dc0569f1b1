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

import asyncio
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError, escape_surrogates
from jaxrl_llm.system.setting import MODEL, Choice, Range
from jaxrl_llm.tasks.filters import importable, resolve
from jaxrl_llm.types import CHAT, OPTIONS, Completion, Problem

Item = tuple[Problem, Completion]


@dataclasses.dataclass(frozen=True)
class Form:
    """Calling convention of a function. ``style``: ``own``, ``trl`` or ``verl`` by its parameter names; ``plain`` if an
    item is its arguments. ``batch``: all items in one call. ``waits``: it is ``async``, so many calls may wait at one
    time. ``first``: parameters that are problem and completion by position, with any names; ``names``: those given by
    name; ``optional``: those with a default; ``rest``: it takes all other arguments.
    """

    style: str = "own"
    batch: bool = False
    waits: bool = False
    first: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False


def form_of(function: Callable[..., Any], batch: bool | None = None) -> Form:
    """Return the form of a function; ``batch`` sets it if the names do not."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, it does not say
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("problem", "completion")]
    explicit = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in explicit]
    if batch is None:
        batch = not {"problems", "completions", "solution_strs"}.isdisjoint(names)
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
                f"{function_name(function)}({', '.join(places)}) cannot be a reward: write it as "
                f"f(problem, completion), f(problems, completions) or f(prompts, completions, **columns)"
            )
        first = tuple(places[:2])
    return Form(
        style,
        batch,
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),
        first,
        tuple(name for name in names if name not in first),
        tuple(p.name for p in explicit if p.default is not p.empty),
        any(p.kind == p.VAR_KEYWORD for p in parameters),
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, a lambda, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


class UserFunction:
    """Base of the rewards that call the user's own function."""

    def to_save(self: Any) -> Any:
        """Return the value for config.json: itself, or ``Lost`` if no other process finds the function again."""
        if isinstance(getattr(self, "path", None), str) or dataclasses.is_dataclass(self.function):
            return self
        return Lost(self.name, self.weight, importable(self.function)[1])


@dataclasses.dataclass(frozen=True)
class Function(UserFunction):
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
class Local(UserFunction):
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
        return function_name(self.function)


@dataclasses.dataclass(frozen=True)
class StepFunction(UserFunction):
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
        function = main_function(self.path) if isinstance(self.path, str) else self.path
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


def as_reward(reward: Any) -> Any:
    """Return a reward unchanged; turn a plain callable into a ``Function`` or ``Local``."""
    is_instance = not isinstance(reward, type)
    if isinstance(reward, Function):
        function = reward.path if callable(reward.path) else main_function(reward.path)
        settings = reward.weight, reward.batch, reward.timeout_s
        if function is None:
            return reward
    elif is_instance and hasattr(reward, "name") and hasattr(reward, "weight"):
        return reward
    elif is_instance and callable(reward):
        weight = getattr(reward, "weight", 1.0)
        function, settings = reward, (weight if isinstance(weight, (int, float)) else 1.0, None, None)
    else:
        raise InputError(
            f"scoring.rewards holds {reward!r:.80}, which is not a reward: give a function, or one such as Accuracy()"
        )
    path, _ = importable(function)
    return Local(function, *settings) if path is None else Function(path, *settings)


def main_function(path: str) -> Callable[..., Any] | None:
    """Return the function that ``__main__:f`` names, which only this process has; None for other paths."""
    module, _, name = path.partition(":")
    return getattr(sys.modules[module], name, None) if module == "__main__" else None


AT_ONCE = 64
"""Maximum number of calls of one ``async`` function that wait at one time."""
LARGEST = 1e15
"""Maximum size of a reward: the squares of a million differences of such rewards have a sum in float32, in which
advantages are computed. Beyond it, all advantages would be 0.
"""

_OFFERS: dict[tuple[str, bool], dict[str, Callable[[Any, Any], Any]]] = {
    ("own", False): {"problem": lambda p, c: p, "completion": lambda p, c: c},
    ("verl", False): {
        "data_source": lambda p, c: p.metadata.get("data_source", p.task),
        "solution_str": lambda p, c: c.text,
        "ground_truth": lambda p, c: p.answer,
        "extra_info": lambda p, c: p.metadata.get("extra_info", p.metadata),
    },
    ("trl", True): {
        "prompts": lambda p, c: [dict(m) for m in p.prompt] if is_chat(p) else p.prompt[-1]["content"],
        "completions": lambda p, c: c.messages if is_chat(p) or c.episode is not None else c.text,
        "completion_ids": lambda p, c: c.tokens.tolist(),
    },
}
_OFFERS |= {(style, True): {f"{n}s": offer for n, offer in _OFFERS[style, False].items()} for style in ("own", "verl")}
"""Arguments offered by name in addition to the row's columns, for a style of names, one at a time or in a batch."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (
    *("<frozen ", _PACKAGE),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Prefixes of the file names of library code, as opposed to the user's own."""


class RewardCall(NamedTuple):
    """Call of a function for some items; without ``function`` it pickles, and goes to another process.

    ``path``: ``module:function``, or another name of it. ``items``: pairs to score; one, unless the form is a batch or
    waits. ``timeout_s``: for one item, or a whole batch. ``positions``: unit of those that a step function returns,
    empty if it returns numbers. ``function``: if no other process can import it. ``on_error``: score of an item without
    an outcome; None for the scorer's. ``extra_names``: of the further numbers that each result holds beside its
    ``score``.
    """

    path: str
    items: Sequence[tuple[Any, Any]]
    form: Form = Form("plain")
    timeout_s: float = 5.0
    positions: str = ""
    function: Callable[..., Any] | None = None
    on_error: float | None = None
    extra_names: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        """Seconds allowed for the whole call."""
        if self.form.batch or not self.form.waits:
            return self.timeout_s
        return self.timeout_s * (math.ceil(len(self.items) / AT_ONCE) + 1)  # its own limits end it before


class RewardOutcome(NamedTuple):
    """Outcome of one item: ``ok`` with a value, ``error`` (it raised or its process died) or ``timeout``. ``value``:
    the score, or the steps as pairs of a position and a value. ``message``: the error, in one line; ``place``:
    ``file:line`` of the function's own code, if known; ``trace``: the whole traceback, once for each call.
    ``extra_values``: further numbers, in the order of ``RewardCall.extra_names``.
    """

    status: str
    value: Any = 0.0
    message: str = ""
    place: str = ""
    trace: str = ""
    extra_values: Sequence[float] = ()


class UnreadableVerdict(ValueError):
    """A reply without a verdict: its ``numbers`` count, but there is no score."""

    def __init__(self, message: str, numbers: Mapping[str, float], reply: str):
        super().__init__(message)
        self.numbers, self.reply = numbers, reply


def bind_arguments(form: Form, items: Sequence[Item]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, by position and name, of a call for an item or a batch. LookupError: no such column."""
    if form.style == "plain":
        return items[0], {}
    offers = _OFFERS.get((form.style, form.batch), {})
    available = dict.fromkeys(name for problem, _ in items for name in row_columns(problem))
    names = [name for name in form.names if name in offers or name in available or name not in form.optional]
    if form.rest:
        extra = available if form.style == "own" else [*offers, *available]
        names += [name for name in extra if name not in (*names, *form.first)]
    missing = [name for name in names if name not in offers and name not in available]
    if missing:
        raise LookupError(f"it wants {', '.join(missing)}, and the row has only {', '.join(available)}")
    by_name = {}
    for name in names:  # a column is None where other rows have it and this one has not
        values = [offers[name](*item) if name in offers else row_columns(item[0]).get(name) for item in items]
        by_name[name] = values if form.batch else values[0]
    by_place = [[offer(*item) for item in items] for offer in _OFFERS["own", False].values()] if form.first else []
    return tuple(by_place if form.batch else (values[0] for values in by_place)), by_name


def row_columns(problem: Problem) -> dict[str, Any]:
    """Return the row that a problem came from, by column; ``answer`` is always included."""
    columns = {name: value for name, value in problem.metadata.items() if name not in (CHAT, OPTIONS)}
    return {"answer": problem.answer} | columns


def is_chat(problem: Problem) -> bool:
    """Whether its row's prompt was chat messages; a prompt of several messages always is."""
    return CHAT in problem.metadata or len(problem.prompt) > 1


def perform(function: Any, call: RewardCall, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[RewardOutcome]:
    """Return the outcome of each item, whatever the function raises; ``run`` waits for ``async`` results. In a batch
    None is NaN, and an invalid score or an exception in its place fails alone.
    """
    try:
        if call.form.waits and not call.form.batch:
            return run(call_concurrently(function, call))
        arguments, keywords = bind_arguments(call.form, call.items)
        result = function(*arguments, **keywords)
        if inspect.isawaitable(result):
            result = run(_await(result))
        if not call.form.batch:
            return [_score_outcome(result, call, call.items[0])]
        if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
            raise TypeError(f"returned {result!r:.80}, which is not a list of scores")
        if len(result) != len(call.items):
            raise ValueError(f"returned {len(result)} scores for {len(call.items)} completions")
        outcomes = []
        for score, item in zip(result, call.items, strict=True):
            try:
                outcomes.append(_score_outcome(math.nan if score is None else score, call, item))
            except Exception as error:  # noqa: BLE001  one that the function returned
                outcomes.append(_failure_outcome(error, function))
        return outcomes
    except BaseException as error:  # noqa: BLE001  SystemExit too: one bad item must not end what runs it
        first = _failure_outcome(error, function)
        return [first] + [first._replace(trace="")] * (len(call.items) - 1)


async def _await(result: Any) -> Any:
    return await result


async def call_concurrently(function: Callable[..., Any], call: RewardCall) -> list[RewardOutcome]:
    """Return the outcome of each item of a function that is ``async``; ``AT_ONCE`` of its calls wait at one time."""
    free = asyncio.Semaphore(AT_ONCE)
    return list(await asyncio.gather(*(_call_async(function, call, item, free) for item in call.items)))


async def _call_async(function: Any, call: RewardCall, item: tuple[Any, Any], free: Any) -> RewardOutcome:
    async with free:
        limit = asyncio.timeout(call.timeout_s)
        try:
            async with limit:
                arguments, keywords = bind_arguments(call.form, [item])
                return _score_outcome(await function(*arguments, **keywords), call, item)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a person's function raises whatever it likes
            if limit.expired():
                return RewardOutcome("timeout", message=timeout_message(call.timeout_s), place=definition_of(function))
            return _failure_outcome(error, function)


def timeout_message(seconds: float, what: str = "call") -> str:
    """Return the message about a call, or its import, that took too long."""
    return f"{what} not finished after {seconds:g} s"


def as_score(result: Any) -> float:
    """Return the score as a float; NaN: the completion cannot be scored. TypeError, ValueError: it is none."""
    if isinstance(result, Mapping) and "score" in result:  # verl's functions may say more than the score
        result = result["score"]
    if not isinstance(result, numbers.Real) and not hasattr(result, "__float__"):
        raise TypeError(f"returned {result!r:.80}, which is not a number")
    value = float(result)
    if math.isinf(value):
        raise ValueError(f"returned {value}; a reward is finite, or NaN where there is none")
    if abs(value) > LARGEST:
        raise ValueError(f"returned {value:g}; a reward is at most {LARGEST:g} in size, or NaN where there is none")
    return value


def as_steps(result: Any, completion: Any, positions: str) -> list[tuple[int, float]]:
    """Return values of a completion's steps in ``StepFunction``'s form. TypeError, ValueError: they have another."""
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__iter__"):
        raise TypeError(f"returned {result!r:.80}, which is not a list of pairs (position, value)")
    first, last = (1, len(completion.text)) if positions == "characters" else (0, len(completion.tokens) - 1)
    pairs = []
    for step in result:
        if isinstance(step, str) or not hasattr(step, "__len__") or len(step) != 2:
            raise TypeError(f"returned the step {step!r:.80}, which is not a pair (position, value)")
        position, value = step
        if not hasattr(position, "__index__"):
            raise TypeError(f"returned the position {position!r:.80}, which is not a whole number")
        if not first <= operator.index(position) <= last:
            raise ValueError(f"returned the position {position} of a completion with {positions} {first} to {last}")
        if math.isnan(as_score(value)):
            raise ValueError(f"returned nan for the step at {position}; the value of a step is finite")
        pairs.append((operator.index(position), as_score(value)))
    return pairs


def _score_outcome(result: Any, call: RewardCall, item: tuple[Any, Any]) -> RewardOutcome:
    if isinstance(result, UnreadableVerdict):
        extras = tuple(float(result.numbers.get(name, math.nan)) for name in call.extra_names)
        message, reply = escape_surrogates(str(result)), escape_surrogates(result.reply)
        return RewardOutcome("error", message=message, trace=reply, extra_values=extras)
    if isinstance(result, Exception):
        raise result
    score = as_steps(result, item[1], call.positions) if call.positions else as_score(result)
    return RewardOutcome("ok", score, extra_values=tuple(float(result[name]) for name in call.extra_names))


def _failure_outcome(error: BaseException, function: Callable[..., Any]) -> RewardOutcome:
    frames = traceback.extract_tb(error.__traceback__)
    # A complaint of what the function wants or returned: no trace shows it.
    complaint = frames[-1].filename == __file__
    trace = "" if complaint else escape_surrogates("".join(traceback.format_exception(error))[-20_000:])
    place = error_location(frames, function)
    return RewardOutcome("error", message=in_one_line(error), place=place, trace=trace)


def in_one_line(error: BaseException) -> str:
    """Format an error, as in ``ZeroDivisionError: division by zero``."""
    text = f"{error}" if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return escape_surrogates(" ".join(text.split()).removesuffix(":")[:500])


def error_location(frames: Sequence[traceback.FrameSummary], function: Callable[..., Any]) -> str:
    """Return the place in the user's own code: the innermost frame outside libraries, or the function's definition."""
    source_file = getattr(_code_of(function), "co_filename", None)
    for frame in reversed(frames):
        library = frame.filename.startswith(_LIBRARIES) or "-packages" + os.sep in frame.filename
        if frame.filename == source_file or not library:
            return _location(frame.filename, frame.lineno)
    return definition_of(function)


def definition_of(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function's definition; empty if unknown, or if it is one of this package."""
    code = _code_of(function)
    return (
        ""
        if code is None or code.co_filename.startswith(_PACKAGE)
        else _location(code.co_filename, code.co_firstlineno)
    )


def _code_of(function: Callable[..., Any]) -> Any:
    """Return the code of a function or of an object's ``__call__``; None if it is written in C."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code if code is not None else getattr(type(function).__call__, "__code__", None)


def _location(file: str, line: int | None) -> str:
    """Format ``file:line`` for people, relative to the current folder if the file is below it."""
    if "ipykernel_" in file or file.startswith("<ipython-input"):
        return f"notebook cell, line {line}"
    inside = file.startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(file) if inside else file}:{line}"
