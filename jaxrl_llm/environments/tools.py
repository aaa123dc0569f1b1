"""Tools: Python functions that the model may call, with the schemas that its prompt shows."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.errors import InputError, require

LONGEST_REASON = 200
"""Maximum number of characters quoted from the reason why a schema cannot be made."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call by name.

    Attributes:
      function: called with the arguments by name; it may be ``async``.
      schema: ``{"type": "function", "function": {...}}``, for the chat template.
      apart: whether calls of one reply run at the same time, each on a thread of its own; methods of an environment
        share its state, and run one after the other.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    apart: bool = True


def schema_of(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """Return the JSON schema of a function, made of its type hints and its docstring in Google's style.

    ``name``: shown in refusals; the schema has the function's own.

    Raises:
      InputError: a hint, the docstring or an argument's description is missing, or a type is none of JSON's.
    """
    own = getattr(function, "__name__", "")
    shown = f"tool {name or own or type(function).__name__}"
    require(
        callable(function) and not isinstance(function, type),
        f"{shown} is a {'class' if isinstance(function, type) else type(function).__name__}: give a function",
    )
    require(
        own.isidentifier() and not isinstance(function, functools.partial),
        f"{shown} has no name that a model could call: write it as a function (def)",
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(f"{shown} does not tell its parameters: call it from a function of your own (def)") from None
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        require(by_name, f"{shown} takes {parameter}, and a model gives arguments by name: name each of them")
        require(
            parameter.annotation is not parameter.empty,
            f"{shown} has no type hint for {parameter.name}: write {parameter.name}: int, or another of JSON's types",
        )
    require(
        bool((function.__doc__ or "").strip()),
        f"{shown} has no docstring: its first line tells the model what it does, and Args: what it takes",
    )
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # noqa: BLE001  the exceptions of hints and docstrings, and of what hints name
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise InputError(
            f"{shown} has no schema ({reason}): give each argument a type of JSON and a line under Args:"
        ) from None


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name, of functions.

    Raises:
      InputError: a schema cannot be made (see ``schema_of``), or two have one name.
    """
    found: dict[str, Tool] = {}
    for function in functions:
        schema = schema_of(function)
        name = schema["function"]["name"]
        require(name not in found, f"two tools are called {name}: rename one")
        found[name] = Tool(function, schema)
    return found


def methods_of(instance: Any) -> dict[str, Tool]:
    """Return the tools of an environment after TRL's interface: its public methods but ``reset`` and ``get_reward``.

    Inherited methods count; properties are not looked at, as are attributes that are callable and no methods.

    Raises:
      InputError: a method has no schema (see ``schema_of``).
    """
    kind = type(instance)
    found: dict[str, Tool] = {}
    for name, _ in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        method = getattr(instance, name)
        function = getattr(method, "__func__", method)
        schema = _schema_of_method(function, function is not method, f"{kind.__name__}.{name}")
        found[name] = Tool(method, schema, apart=False)
    return found


@functools.lru_cache(maxsize=1024)
def _schema_of_method(function: Callable[..., Any], bound: bool, name: str) -> Mapping[str, Any]:
    """Return the schema of a method, made once, since each episode has an instance of its own."""
    return schema_of(types.MethodType(function, object()) if bound else function, name)
