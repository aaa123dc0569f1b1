"""Tools: Python functions that the model may call, with the schemas that its prompt shows; and TRL's environments."""

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, overrides
from jaxrl_llm.errors import InputError, require


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
    """Return the JSON schema of a function, of its hints and docstring in Google's style; ``name`` is for refusals."""
    function_name = getattr(function, "__name__", "")
    label = f"tool {name or function_name or type(function).__name__}"
    require(
        callable(function) and not isinstance(function, type),
        f"{label} is a {'class' if isinstance(function, type) else type(function).__name__}: give a function",
    )
    require(
        function_name.isidentifier() and not isinstance(function, functools.partial),
        f"{label} has no name that a model could call: write it as a function (def)",
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(f"{label} does not tell its parameters: call it from a function of your own (def)") from None
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        require(by_name, f"{label} takes {parameter}, and a model gives arguments by name: name each of them")
        require(
            parameter.annotation is not parameter.empty,
            f"{label} has no type hint for {parameter.name}: write {parameter.name}: int, or another of JSON's types",
        )
    require(
        bool((function.__doc__ or "").strip()),
        f"{label} has no docstring: its first line tells the model what it does, and Args: what it takes",
    )
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # noqa: BLE001  the exceptions of hints and docstrings, and of what hints name
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{label} has no schema ({reason}): give each argument a type of JSON and a line under Args:"
        ) from None


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name, of functions."""
    tools: dict[str, Tool] = {}
    for function in functions:
        schema = schema_of(function)
        name = schema["function"]["name"]
        require(name not in tools, f"two tools are called {name}: rename one")
        tools[name] = Tool(function, schema)
    return tools


def methods_of(instance: Any) -> dict[str, Tool]:
    """Return the tools of an environment after TRL's interface: its public methods but ``reset`` and ``get_reward``.

    Inherited methods count; properties are not looked at, as are attributes that are callable and no methods.
    """
    kind = type(instance)
    methods: dict[str, Tool] = {}
    for name, _ in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        method = getattr(instance, name)
        function = getattr(method, "__func__", method)
        schema = _schema_of_method(function, function is not method, f"{kind.__name__}.{name}")
        methods[name] = Tool(method, schema, apart=False)
    return methods


@functools.lru_cache(maxsize=1024)
def _schema_of_method(function: Callable[..., Any], bound: bool, name: str) -> Mapping[str, Any]:
    """Return the schema of a method, made once, since each episode has an instance of its own."""
    return schema_of(types.MethodType(function, object()) if bound else function, name)


class DuckTyped(Environment):
    """An environment after TRL's interface: any object with ``reset(**row)`` that returns None or text.

    The text is appended to the last user message. Every public method is a tool, ``get_reward()`` is optional.
    """

    joint = ""

    def __init__(self, instance: Any):
        self.instance = instance
        self.methods = methods_of(instance)
        self.tools = tuple(tool.schema for tool in self.methods.values())

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin the episode with the columns that the object's ``reset`` takes, and with ``seed`` if it names it."""
        parameters = inspect.signature(self.instance.reset).parameters
        arguments = {"seed": seed, **row} if "seed" in parameters else dict(row)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        result = self.instance.reset(**arguments)
        return self._later(result) if inspect.isawaitable(result) else self._messages(result)

    async def _later(self, result: Any) -> Sequence[Message]:
        return self._messages(await result)

    def _messages(self, result: Any) -> Sequence[Message]:
        if result is None:
            return ()
        if not isinstance(result, str):
            raise TypeError(f"reset returned a {type(result).__name__}; return None or text")
        return [{"role": "user", "content": result}]

    @property
    def reward(self) -> Callable[[], Any] | None:
        """The object's ``get_reward``; None if its class has none."""
        return self.instance.get_reward if callable(getattr(type(self.instance), "get_reward", None)) else None

    def copy(self) -> "DuckTyped":
        """Return one with a deep copy of the object, which its class must define (``__deepcopy__``)."""
        return DuckTyped(copy.deepcopy(self.instance))


def can_copy(environment: Environment) -> bool:
    """Whether an environment can be copied in the middle of an episode.

    One after TRL's interface may hold what no copy can share: it says by ``__deepcopy__`` that it does not.
    """
    if isinstance(environment, DuckTyped):
        return hasattr(type(environment.instance), "__deepcopy__")
    return type(environment) is Environment or overrides(environment, "copy")
