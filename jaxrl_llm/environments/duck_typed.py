"""Environments after TRL's interface, which derive from nothing."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, has
from jaxrl_llm.environments.tools import methods_of


class DuckTyped(Environment):
    """An environment after TRL's interface: any object with ``reset(**row)`` that returns None or text.

    The text is appended to the last user message. Every public method is a tool, ``get_reward()`` is optional.

    Args:
      instance: the object.
    """

    joint = ""

    def __init__(self, instance: Any):
        self.instance = instance
        self.methods = methods_of(instance)
        self.tools = tuple(tool.schema for tool in self.methods.values())

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin the episode with the columns that the object's ``reset`` takes, and with ``seed`` if it names it."""
        parameters = inspect.signature(self.instance.reset).parameters
        given = {"seed": seed, **row} if "seed" in parameters else dict(row)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        result = self.instance.reset(**given)
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
    return type(environment) is Environment or has(environment, "copy")
