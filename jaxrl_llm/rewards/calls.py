"""Calls of reward functions and their outcomes, in any process."""

import asyncio
import functools
import inspect
import math
import numbers
import operator
import os
import sysconfig
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import Form, Item
from jaxrl_llm.types import CHAT, OPTIONS, Problem

AT_ONCE = 64
"""Maximum number of calls of one ``async`` function that wait at one time."""
LARGEST = 1e15
"""Maximum size of a reward: the squares of a million differences of such rewards have a sum in float32, in which
advantages are computed. Beyond it, all advantages would be 0.
"""

_OWN = {"problem": lambda p, c: p, "completion": lambda p, c: c}
_VERL = {
    "data_source": lambda p, c: p.metadata.get("data_source", p.task),
    "solution_str": lambda p, c: c.text,
    "ground_truth": lambda p, c: p.answer,
    "extra_info": lambda p, c: p.metadata.get("extra_info", p.metadata),
}
_TRL = {
    "prompts": lambda p, c: [dict(m) for m in p.prompt] if is_chat(p) else p.prompt[-1]["content"],
    "completions": lambda p, c: c.messages if is_chat(p) or c.episode is not None else c.text,
    "completion_ids": lambda p, c: c.tokens.tolist(),
}
_OFFERS = {("own", False): _OWN, ("verl", False): _VERL, ("trl", True): _TRL}
_OFFERS |= {(style, True): {f"{n}s": offer for n, offer in _OFFERS[style, False].items()} for style in ("own", "verl")}
"""Arguments offered by name in addition to the row's columns, for a style of names, one at a time or in a batch."""

_LONGEST_TRACE = 20_000
_FOLDERS = {str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = ("<frozen ", *(folder + os.sep for folder in _FOLDERS))
"""Prefixes of the file names of library code, as opposed to the user's own."""


class Call(NamedTuple):
    """Call of a function for some items; without ``function`` it pickles, and goes to another process.

    Attributes:
      path: ``module:function``, or another name of the function.
      items: pairs to score; one, unless the form is a batch or waits.
      form: calling convention of the function.
      timeout_s: for one item, or for the whole of a batch.
      positions: unit of the positions that a step function returns (``StepFunction``); empty if it returns numbers.
      function: if no other process can import it; None if ``path`` names it.
      on_error: score of an item without an outcome, in place of the scorer's own; None for that.
      also: names of the further numbers that each result holds beside its ``score``.
    """

    path: str
    items: Sequence[tuple[Any, Any]]
    form: Form = Form("plain")
    timeout_s: float = 5.0
    positions: str = ""
    function: Callable[..., Any] | None = None
    on_error: float | None = None
    also: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        """Seconds allowed for the whole call."""
        if self.form.batch or not self.form.waits:
            return self.timeout_s
        return self.timeout_s * (math.ceil(len(self.items) / AT_ONCE) + 1)  # its own limits end it before


class Outcome(NamedTuple):
    """Outcome of one item: ``ok`` with a value, ``error`` (it raised or its process died) or ``timeout``.

    Attributes:
      status: one of these.
      value: the score, or the steps as pairs of a position and a value.
      message: the error, in one line.
      place: ``file:line`` of the function's own code, if known.
      trace: the whole traceback, given once for each call.
      also: further numbers, as ``Call.also`` names them.
    """

    status: str
    value: Any = 0.0
    message: str = ""
    place: str = ""
    trace: str = ""
    also: Sequence[float] = ()


class Unread(ValueError):
    """A reply that is no verdict: it was counted, and is no score.

    Args:
      message: what it was, and what was wanted.
      numbers: of the call, as ``Call.also`` names them.
      reply: whole.
    """

    def __init__(self, message: str, numbers: Mapping[str, float], reply: str):
        super().__init__(message)
        self.numbers, self.reply = numbers, reply


def bind(form: Form, items: Sequence[Item]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, by position and by name, of one call for these items: one, unless it is a batch.

    Raises:
      LookupError: the function wants a column that the row lacks.
    """
    if form.style == "plain":
        return items[0], {}
    offers = _OFFERS.get((form.style, form.batch), {})
    held = dict.fromkeys(name for problem, _ in items for name in columns(problem))
    wanted = [name for name in form.names if name in offers or name in held or name not in form.optional]
    if form.rest:
        others = held if form.style == "own" else [*offers, *held]
        wanted += [name for name in others if name not in (*wanted, *form.first)]
    lacking = [name for name in wanted if name not in offers and name not in held]
    if lacking:
        raise LookupError(f"it wants {', '.join(lacking)}, and the row has only {', '.join(held)}")
    by_name = {}
    for name in wanted:  # a column is None where other rows have it and this one has not
        values = [offers[name](*item) if name in offers else columns(item[0]).get(name) for item in items]
        by_name[name] = values if form.batch else values[0]
    by_place = [[offer(*item) for item in items] for offer in _OWN.values()] if form.first else []
    return tuple(by_place if form.batch else (values[0] for values in by_place)), by_name


def columns(problem: Problem) -> dict[str, Any]:
    """Return the row that a problem came from, by column; ``answer`` is always included."""
    found = {name: value for name, value in problem.metadata.items() if name not in (CHAT, OPTIONS)}
    return {"answer": problem.answer} | found


def is_chat(problem: Problem) -> bool:
    """Whether its row's prompt was chat messages; a prompt of several messages always is."""
    return CHAT in problem.metadata or len(problem.prompt) > 1


def perform(function: Callable[..., Any], call: Call, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[Outcome]:
    """Return the outcome of each item, whatever the function raises; ``run`` waits for ``async`` results.

    In a batch None is NaN, and an invalid score or an exception in its place fails alone.
    """
    try:
        if call.form.waits and not call.form.batch:
            return run(together(function, call))
        arguments, named = bind(call.form, call.items)
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            result = run(_awaited(result))
        if not call.form.batch:
            return [_scored(result, call, call.items[0])]
        if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
            raise TypeError(f"returned {result!r:.80}, which is not a list of scores")
        if len(result) != len(call.items):
            raise ValueError(f"returned {len(result)} scores for {len(call.items)} completions")
        outcomes = []
        for score, item in zip(result, call.items, strict=True):
            try:
                outcomes.append(_scored(math.nan if score is None else score, call, item))
            except Exception as error:  # noqa: BLE001  one that the function returned
                outcomes.append(_failed(error, function))
        return outcomes
    except BaseException as error:  # noqa: BLE001  SystemExit too: one bad item must not end what runs it
        first = _failed(error, function)
        return [first] + [first._replace(trace="")] * (len(call.items) - 1)


async def _awaited(result: Any) -> Any:
    return await result


async def together(function: Callable[..., Any], call: Call) -> list[Outcome]:
    """Return the outcome of each item of a function that is ``async``; ``AT_ONCE`` of its calls wait at one time."""
    free = asyncio.Semaphore(AT_ONCE)
    return list(await asyncio.gather(*(_one(function, call, item, free) for item in call.items)))


async def _one(function: Callable[..., Any], call: Call, item: tuple[Any, Any], free: Any) -> Outcome:
    async with free:
        limit = asyncio.timeout(call.timeout_s)
        try:
            async with limit:
                arguments, named = bind(call.form, [item])
                return _scored(await function(*arguments, **named), call, item)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a person's function raises whatever it likes
            if limit.expired():
                return Outcome("timeout", message=overdue(call.timeout_s), place=defined(function))
            return _failed(error, function)


def overdue(seconds: float, what: str = "call") -> str:
    """Return the message about a call, or its import, that took too long."""
    return f"{what} not finished after {seconds:g} s"


def number(result: Any) -> float:
    """Return the score as a float; NaN is allowed and means that the completion cannot be scored.

    Raises:
      TypeError: the result is not a number.
      ValueError: it is infinite, or beyond ``LARGEST``.
    """
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


def steps(result: Any, completion: Any, positions: str) -> list[tuple[int, float]]:
    """Return a function's values of a completion's steps, in the form that ``StepFunction`` describes.

    Raises:
      TypeError: the result is not a list of pairs of a whole number and a number.
      ValueError: a position is outside the completion, or a value is not finite.
    """
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__iter__"):
        raise TypeError(f"returned {result!r:.80}, which is not a list of pairs (position, value)")
    first, last = (1, len(completion.text)) if positions == "characters" else (0, len(completion.tokens) - 1)
    found = []
    for step in result:
        if isinstance(step, str) or not hasattr(step, "__len__") or len(step) != 2:
            raise TypeError(f"returned the step {step!r:.80}, which is not a pair (position, value)")
        position, value = step
        if not hasattr(position, "__index__"):
            raise TypeError(f"returned the position {position!r:.80}, which is not a whole number")
        if not first <= operator.index(position) <= last:
            raise ValueError(f"returned the position {position} of a completion with {positions} {first} to {last}")
        if math.isnan(number(value)):
            raise ValueError(f"returned nan for the step at {position}; the value of a step is finite")
        found.append((operator.index(position), number(value)))
    return found


def _scored(result: Any, call: Call, item: tuple[Any, Any]) -> Outcome:
    if isinstance(result, Unread):
        also = tuple(float(result.numbers.get(name, math.nan)) for name in call.also)
        return Outcome("error", message=_in_utf_8(str(result)), trace=_in_utf_8(result.reply), also=also)
    if isinstance(result, Exception):
        raise result
    also = tuple(float(result[name]) for name in call.also)
    return Outcome("ok", steps(result, item[1], call.positions) if call.positions else number(result), also=also)


def _failed(error: BaseException, function: Callable[..., Any]) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    # A complaint of what the function wants or returned: no trace shows it.
    complaint = frames[-1].filename == __file__
    trace = "" if complaint else _in_utf_8("".join(traceback.format_exception(error))[-_LONGEST_TRACE:])
    place = place_in(frames, function)
    return Outcome("error", message=in_one_line(error), place=place, trace=trace)


def in_one_line(error: BaseException) -> str:
    """Format an error, as in ``ZeroDivisionError: division by zero``."""
    text = f"{error}" if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return _in_utf_8(" ".join(text.split()).removesuffix(":")[:500])


def _in_utf_8(text: str) -> str:
    """Escape characters that no file can hold, such as half a surrogate pair, which a message may quote."""
    return text.encode("utf-8", "backslashreplace").decode()


def place_in(frames: Sequence[traceback.FrameSummary], function: Callable[..., Any]) -> str:
    """Return the place in the user's own code: the innermost frame outside libraries, or the function's definition."""
    own = getattr(_code_of(function), "co_filename", None)
    for frame in reversed(frames):
        library = frame.filename.startswith(_LIBRARIES) or "-packages" + os.sep in frame.filename
        if frame.filename == own or not library:
            return _shown(frame.filename, frame.lineno)
    return defined(function)


def defined(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function's definition; empty if unknown, or if it is one of this package."""
    code = _code_of(function)
    return (
        "" if code is None or code.co_filename.startswith(_PACKAGE) else _shown(code.co_filename, code.co_firstlineno)
    )


def _code_of(function: Callable[..., Any]) -> Any:
    """Return the code of a function or of an object's ``__call__``; None if it is written in C."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    found = getattr(function, "__code__", None)
    return found if found is not None else getattr(type(function).__call__, "__code__", None)


def _shown(file: str, line: int | None) -> str:
    """Format ``file:line`` for people, relative to the current folder if the file is below it."""
    if "ipykernel_" in file or file.startswith("<ipython-input"):
        return f"notebook cell, line {line}"
    inside = file.startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(file) if inside else file}:{line}"
