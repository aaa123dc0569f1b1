"""The interface of an environment, its tools, the limits of an episode, and the checks of what environments return."""

import copy
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from jaxrl_llm.errors import InputError, escape_surrogates, require
from jaxrl_llm.system.setting import Choice, Count, Range, Setting
from jaxrl_llm.types import Message

ENDS = (
    "completed", "tool_stopped", "max_turns", "max_tokens", "max_tool_calls", "context_overflow", "parse_error",
    "environment_error", "timeout",
)  # fmt: skip
"""Why an episode ends. ``completed``: no answer needed or environment done; ``tool_stopped``: done after calls."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Answer of an environment to one reply of the model.

    Attributes:
      messages: what the model reads next, of the roles user, tool or system.
      reward: of this turn; an episode's reward has the sum of them.
      done: whether the episode ends here.
      metrics: numbers by name.
      state: name of the environment's state now, for estimators that compare turns (``GiGPO``): equal names are equal
        states of one row and seed. Empty: the state is all that was said so far.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    state: str = ""


class Environment:
    """Base of environments: each episode has an instance of its own. Its methods run on one thread, and may be
    ``async``; draws should come from ``seed``, so that an episode is the same whenever it runs.

    Attributes:
      tools: JSON schemas, each ``{"type": "function", "function": {...}}``, of the calls that ``step`` answers.
      joint: text between the row's last user message and a user message that ``reset`` returns first.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    joint: str = "\n\n"

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin the episode of a row; return the messages that follow the row's own."""
        return ()

    def step(self, reply: Message) -> Step:
        """Answer the model's reply: an assistant's message, with ``tool_calls`` if it has calls, arguments as dicts."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the episode held; called once at its end."""

    def copy(self) -> "Environment":
        """Return an environment in the same state, for another branch of the episode."""
        raise NotImplementedError


def overrides(environment: Any, method: str) -> bool:
    """Whether the environment defines this method itself, such as ``step`` or ``copy``."""
    return getattr(type(environment), method) is not getattr(Environment, method)


@dataclasses.dataclass(frozen=True)
class Limits(Setting):
    """Limits of an episode.

    Attributes:
      max_turns: replies of the model; the calls of the last one are still made.
      max_turn_tokens: tokens of one reply; a longer one is cut and answered as it is; 0 for ``rollout.max_new_tokens``.
      max_tool_calls: calls in an episode; those beyond it are not made, and the episode ends; 0 for no limit.
      tool_timeout_s: seconds for a call of a tool, and for each call of the environment.
      max_result_chars: characters of a tool's result that the model sees; a mark says how many are missing.
      cut: the part of a longer result that is left out: its end, middle or start.
      max_parse_errors: replies with unreadable calls that are answered with the reason; the next one ends the episode.
      history: where the template writes earlier turns otherwise than sampled, as without reasoning: "append_only" keeps
        every token; "fork" begins a new row as the template writes now, and the episode learns from all rows.
    """

    max_turns: Annotated[int, Count(1)] = 8
    max_turn_tokens: Annotated[int, Count(0)] = 0
    max_tool_calls: Annotated[int, Count(0)] = 0
    tool_timeout_s: Annotated[float, Range("(0, inf)")] = 30.0
    max_result_chars: Annotated[int, Count(1)] = 2000
    cut: Annotated[Literal["end", "middle", "start"], Choice("end", "middle", "start")] = "end"
    max_parse_errors: Annotated[int, Count(0)] = 2
    history: Annotated[Literal["append_only", "fork"], Choice("append_only", "fork")] = "append_only"

    def shortened(self, text: str) -> str:
        """Return a text with at most ``max_result_chars`` of its characters."""
        limit = self.max_result_chars
        if len(text) <= limit:
            return text
        mark = f"[{len(text) - limit:,} characters left out]"
        first = {"end": limit, "middle": (limit + 1) // 2, "start": 0}[self.cut]
        return f"{text[:first]}{mark}{text[len(text) - (limit - first) :]}"


LARGEST = 1e15
"""Maximum size of a reward, as that of all rewards."""
WORLD_ROLES = ("user", "tool", "system")


def finite(value: Any, what: str, nan: bool = False) -> float:
    """Return a number as a float. TypeError: it is none. ValueError: it is not finite; NaN is allowed with ``nan``."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r:.80}, which is not a number")
    number = float(value)
    if abs(number) > LARGEST or (math.isnan(number) and not nan):
        raise ValueError(f"{what} is {number:g}; it must be finite, and at most {LARGEST:g} in size")
    return number


def check_messages(value: Any, roles: Sequence[str] = (*WORLD_ROLES, "assistant")) -> tuple[Message, ...]:
    """Return messages as new dictionaries. TypeError, ValueError: they are none."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"it returned a {type(value).__name__} for messages; return a list of chat messages")
    messages = []
    for message in value:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise TypeError(f"it returned the message {message!r:.80}; write {{'role': ..., 'content': text}}")
        if message.get("role") not in roles:
            raise ValueError(f"it returned a message of role {message.get('role')!r:.40}; it is {', '.join(roles)}")
        messages.append(as_json(message, "a message"))
    return tuple(messages)


def as_json(value: Any, where: str) -> Any:
    """Return a copy in Python's own JSON types; an ``Enum``'s text becomes text. TypeError: it has none."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return escape_surrogates(str.__str__(value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        return {as_json(str(key), where): as_json(part, f"{where}, {key!r:.40}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part, where) for part in value]
    raise TypeError(f"it returned {where}: {value!r:.80}, which is no JSON value and cannot be saved; give text")


def check_step(value: Any) -> Step:
    """Return a step with messages, reward and metrics as Python's own values. TypeError, ValueError: it has others."""
    if not isinstance(value, Step):
        raise TypeError(f"it returned a {type(value).__name__}; return a Step")
    if not isinstance(value.metrics, Mapping):
        raise TypeError(f"metrics is a {type(value.metrics).__name__}; give a dict of numbers")
    if not isinstance(value.state, str):
        raise TypeError(f"state is {value.state!r:.80}; give text, such as str(position)")
    return dataclasses.replace(
        value,
        messages=check_messages(value.messages, WORLD_ROLES),
        reward=finite(value.reward, "reward"),
        done=bool(value.done),
        state=as_json(value.state, "state"),
        metrics={str(name): finite(number, f"metric {name}", nan=True) for name, number in value.metrics.items()},
    )


def check_copy(value: Any) -> Environment:
    """Return an environment's copy of itself; TypeError if it is none."""
    if not isinstance(value, Environment):
        raise TypeError(f"it returned a {type(value).__name__}; return an Environment")
    return value


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function, maybe ``async``, that the model may call by name; ``schema``, for the chat template, is ``{"type":
    "function", "function": {...}}``. Calls of one reply run at the same time, each on a thread of its own, if they are
    ``apart``; methods of an environment share its state.
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
    """Return the tools of an environment after TRL's interface: its public methods, inherited ones too, but ``reset``
    and ``get_reward``. Properties and attributes that are callable and no methods are not looked at.
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
    """An environment after TRL's interface: any object with ``reset(**row)`` that returns None, or text to append to
    the last user message. Every public method is a tool, ``get_reward()`` is optional.
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
    """Whether an environment can be copied within an episode; one after TRL's interface refuses by ``__deepcopy__``."""
    if isinstance(environment, DuckTyped):
        return hasattr(type(environment.instance), "__deepcopy__")
    return type(environment) is Environment or overrides(environment, "copy")
