"""Checks of what environments return; each raises what the episode's error then says."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, Step

LARGEST = 1e15
"""Maximum size of a reward, as that of all rewards."""
WORLD = ("user", "tool", "system")
"""Roles of messages that answer the model."""
ROLES = (*WORLD, "assistant")


def readable(text: str) -> str:
    """Escape characters that no tokenizer can take, such as half a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def finite(value: Any, what: str, nan: bool = False) -> float:
    """Return a number as a float; NaN is refused unless ``nan``.

    Raises:
      TypeError: it is no number.
      ValueError: it is infinite, too large, or NaN.
    """
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r:.80}, which is not a number")
    found = float(value)
    if abs(found) > LARGEST or (math.isnan(found) and not nan):
        raise ValueError(f"{what} is {found:g}; it must be finite, and at most {LARGEST:g} in size")
    return found


def checked_messages(value: Any, roles: Sequence[str] = ROLES) -> tuple[Message, ...]:
    """Return messages as new dictionaries.

    Raises:
      TypeError: it is no list of chat messages.
      ValueError: a role is none of ``roles``.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"it returned a {type(value).__name__} for messages; return a list of chat messages")
    found = []
    for message in value:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            raise TypeError(f"it returned the message {message!r:.80}; write {{'role': ..., 'content': text}}")
        if message.get("role") not in roles:
            raise ValueError(f"it returned a message of role {message.get('role')!r:.40}; it is {', '.join(roles)}")
        found.append(plain(message, "a message"))
    return tuple(found)


def plain(value: Any, where: str) -> Any:
    """Return a copy in Python's own JSON types, as which it is saved; a member of an ``Enum`` of texts becomes text.

    Raises:
      TypeError: a part is none of these; ``where`` says which.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return readable(str.__str__(value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(str(key), where): plain(one, f"{where}, {key!r:.40}") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one, where) for one in value]
    raise TypeError(f"it returned {where}: {value!r:.80}, which is no JSON value and cannot be saved; give text")


def checked_reset(value: Any) -> tuple[Message, ...]:
    """Return the messages of a ``reset``; None is none.

    Raises:
      TypeError, ValueError: as ``checked_messages``.
    """
    return () if value is None else checked_messages(value)


def checked_step(value: Any) -> Step:
    """Return a step with messages, reward and metrics as Python's own values.

    Raises:
      TypeError, ValueError: it is no ``Step``, or a part has another type or value than it should.
    """
    if not isinstance(value, Step):
        raise TypeError(f"it returned a {type(value).__name__}; return a Step")
    if not isinstance(value.metrics, Mapping):
        raise TypeError(f"metrics is a {type(value.metrics).__name__}; give a dict of numbers")
    if not isinstance(value.state, str):
        raise TypeError(f"state is {value.state!r:.80}; give text, such as str(position)")
    return dataclasses.replace(
        value,
        messages=checked_messages(value.messages, WORLD),
        reward=finite(value.reward, "reward"),
        done=bool(value.done),
        state=plain(value.state, "state"),
        metrics={str(name): finite(number, f"metric {name}", nan=True) for name, number in value.metrics.items()},
    )


def checked_copy(value: Any) -> Environment:
    """Return the result of a ``copy``.

    Raises:
      TypeError: it is no environment.
    """
    if not isinstance(value, Environment):
        raise TypeError(f"it returned a {type(value).__name__}; return an Environment")
    return value
