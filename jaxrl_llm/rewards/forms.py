"""How a function of your own is called: the names of its parameters say what it wants.

One completion at a time, which returns a number:

- ``f(problem, completion)``: in this order, called as you like. ``f(completion)`` where it is called that.
- ``f(data_source, solution_str, ground_truth, extra_info)``, verl's: the task's label, the text, the reference, and the
  row's column ``extra_info`` (all columns where there is none).

A batch, which returns a list with one number for each completion; what it is given are lists too:

- ``f(problems, completions)``. With ``batch=True`` they may be called as you like.
- ``f(prompts, completions, completion_ids)`` or some of them, TRL's. Prompts and completions are texts, or chats where
  the rows' prompts are chats.
- ``f(data_sources, solution_strs, ground_truths, extra_infos)``, verl's.

Every further parameter is a column of the problem's row, by its name; where the row has none its default stays.
``**kwargs`` takes all columns. ``answer`` is the reference, unless a column is called so. Each form may be ``async``.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.rows import CHAT
from jaxrl_llm.types import Completion, Problem

Item = tuple[Problem, Completion]

PLURAL = ("problems", "completions", "solution_strs")
"""Parameters that ask for a batch."""

_OWN = {"problem": lambda p, c: p, "completion": lambda p, c: c}
_VERL = {
    "data_source": lambda p, c: p.metadata.get("data_source", p.task),
    "solution_str": lambda p, c: c.text,
    "ground_truth": lambda p, c: p.answer,
    "extra_info": lambda p, c: p.metadata.get("extra_info", p.metadata),
}
_TRL = {
    "prompts": lambda p, c: [dict(m) for m in p.prompt] if is_chat(p) else p.prompt[-1]["content"],
    "completions": lambda p, c: [{"role": "assistant", "content": c.text}] if is_chat(p) else c.text,
    "completion_ids": lambda p, c: c.tokens.tolist(),
}
_OFFERS = {("own", False): _OWN, ("verl", False): _VERL, ("trl", True): _TRL}
_OFFERS |= {(style, True): {f"{n}s": offer for n, offer in _OFFERS[style, False].items()} for style in ("own", "verl")}
"""What is offered by name beside the row's columns, for a style of names, one at a time or in a batch."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a function is called.

    Attributes:
      style: whose names its parameters have: ``own``, ``trl`` or ``verl``; ``plain`` where an item is its arguments.
      batch: all items in one call.
      waits: it is ``async``: many of its calls may wait at one time.
      first: parameters that are problem and completion by their place, whatever they are called.
      names: parameters given by name.
      optional: those of them that have a default.
      rest: it takes whatever else there is.
    """

    style: str = "own"
    batch: bool = False
    waits: bool = False
    first: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False


PLAIN = Form("plain")


def form_of(function: Callable[..., Any], batch: bool | None = None) -> Form:
    """The form of a function; ``batch`` says it where the names do not.

    Raises:
      InputError: it cannot take a problem and a completion.
    """
    parameters = _parameters(function)
    given = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in given]
    batch = any(name in names for name in PLURAL) if batch is None else batch
    style = _style(names, batch)
    first = () if style != "own" or names[:1] in (["completion"], ["completions"]) else _first(function, parameters)
    return Form(
        style,
        batch,
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),
        first,
        tuple(name for name in names if name not in first),
        tuple(p.name for p in given if p.default is not p.empty),
        any(p.kind == p.VAR_KEYWORD for p in parameters),
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, it does not say
        return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("problem", "completion")]


def _style(names: Sequence[str], batch: bool) -> str:
    if "solution_str" in names or "solution_strs" in names:
        return "verl"
    return "trl" if batch and "completions" in names and "problems" not in names else "own"


def _first(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        places += ["problem", "completion"]
    if len(places) < 2:
        raise InputError(
            f"{name_of(function)}({', '.join(places)}) cannot be a reward: write it as f(problem, completion), "
            f"f(problems, completions) or f(prompts, completions, **columns)"
        )
    return tuple(places[:2])


def name_of(function: Callable[..., Any]) -> str:
    """What a function, a lambda, a partial or a callable object is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def bind(form: Form, items: Sequence[Item]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, by place and by name, of one call for these items: one, unless it is a batch.

    Raises:
      LookupError: it wants a column that the row has not.
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
    by_name = {name: _each(offers.get(name, _Column(name)), items, form.batch) for name in wanted}
    by_place = [_each(offer, items, form.batch) for offer in _OWN.values()] if form.first else []
    return tuple(by_place), by_name


def _each(offer: Callable[[Problem, Completion], Any], items: Sequence[Item], batch: bool) -> Any:
    return [offer(*item) for item in items] if batch else offer(*items[0])


@dataclasses.dataclass(frozen=True)
class _Column:
    """A row's value; None where other rows have the column and this one has not."""

    name: str

    def __call__(self, problem: Problem, completion: Completion) -> Any:
        return columns(problem).get(self.name)


def columns(problem: Problem) -> dict[str, Any]:
    """The row that a problem came from, by column; ``answer`` is always there."""
    return {"answer": problem.answer} | {name: value for name, value in problem.metadata.items() if name != CHAT}


def is_chat(problem: Problem) -> bool:
    """Whether its row's prompt was chat messages; several are in any case."""
    return CHAT in problem.metadata or len(problem.prompt) > 1
