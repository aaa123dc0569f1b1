"""Functions of your own as rewards: by their name, or as they are."""

import dataclasses
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.forms import Form, form_of, name_of
from jaxrl_llm.tasks.resolve import resolve


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of your own that can be imported, called in a worker process, which is killed where it hangs.

    ``jaxrl_llm.rewards.forms`` says what it may be: of one completion or of a batch, ``async`` or not, with the row's
    columns; TRL's and verl's too. It returns numbers; NaN (in a batch None too) is a completion that cannot be scored.
    It sees completions without ``extras``.

    Attributes:
      path: ``module:function``; or the function, which a configuration turns into that, or into a ``Local``.
      weight: in the sum.
      batch: whether it takes lists, where the names of its parameters do not say it.
      timeout_s: seconds for one completion, in place of ``scoring.timeout_s``; of a batch for all of it, in place of
        60 times that.
    """

    path: str
    weight: float = 1.0
    batch: bool | None = None
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return self.path.rpartition(":")[2]

    @property
    def function(self) -> Callable[..., Any]:
        """What ``path`` names, imported."""
        return resolve(self.path)

    @property
    def form(self) -> Form:
        """How it is called."""
        return form_of(self.function, self.batch)


@dataclasses.dataclass(frozen=True)
class Local:
    """A function of your own that another process cannot import: a closure, a lambda, a notebook's cell, an object.

    It is called as ``Function``'s is, in this process, one call after the other in a thread of their own. One that
    hangs is given up after the same time and cannot be ended; signals, such as math-verify's own timeouts, need a main
    thread and so a module. A config.json cannot hold it: such a run is trained from where the function is.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    batch: bool | None = None
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return name_of(self.function)

    @property
    def form(self) -> Form:
        """How it is called."""
        return form_of(self.function, self.batch)

    def to_save(self) -> "Local | Lost":
        """What config.json holds in its place; an object that is a value is held itself."""
        if dataclasses.is_dataclass(self.function):
            return self
        return Lost(self.name, self.weight, importable(self.function)[1])


@dataclasses.dataclass(frozen=True)
class Lost:
    """What config.json holds of a function that it cannot: that there was one, and why it is not there."""

    name: str
    weight: float
    reason: str


def importable(function: Callable[..., Any]) -> tuple[str | None, str]:
    """The ``module:function`` by which another process finds it; or None, and the reason."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if not name or not module:
        return None, f"it is an object of type {type(function).__name__}"
    if "<lambda>" in name:
        return None, "it is a lambda"
    if "<locals>" in name:
        return None, "it is made inside another function"
    if not name.isidentifier():
        return None, "it belongs to a class"
    if module == "__main__":
        return None, "it belongs to the notebook or script that was run"
    if module not in sys.modules or not _found(module.partition(".")[0]):
        return None, "it belongs to a file that was run, not imported"
    if getattr(sys.modules[module], name, None) is not function:
        return None, f"{module}:{name} is something else"
    return f"{module}:{name}", ""


def _found(package: str) -> bool:
    """Whether a new interpreter finds it: what was loaded from a file, as configurations are, has no name there."""
    if package in sys.builtin_module_names:
        return True
    finders = (getattr(finder, "find_spec", None) for finder in (*sys.meta_path, importlib.machinery.PathFinder))
    return any(find(package, None) is not None for find in finders if find is not None)


def as_reward(given: Any) -> Any:
    """A reward as it is; a plain callable as ``Function`` or ``Local``.

    Raises:
      InputError: neither.
    """
    if isinstance(given, Function):
        function = given.path if callable(given.path) else of_this_program(given.path)
        return given if function is None else _as_function(function, given.weight, given.batch, given.timeout_s)
    value = not isinstance(given, type)
    if value and hasattr(given, "name") and hasattr(given, "weight"):
        return given
    if not (value and callable(given)):
        raise InputError(
            f"scoring.rewards holds {given!r:.80}, which is no reward: give a function, or one such as Accuracy()"
        )
    weight = getattr(given, "weight", 1.0)
    return _as_function(given, weight if isinstance(weight, (int, float)) else 1.0, None, None)


def of_this_program(path: str) -> Callable[..., Any] | None:
    """What ``__main__:f`` names: no other process has it."""
    module, _, name = path.partition(":")
    return getattr(sys.modules[module], name, None) if module == "__main__" else None


def _as_function(function: Callable[..., Any], *settings: Any) -> Function | Local:
    path, _ = importable(function)
    return Local(function, *settings) if path is None else Function(path, *settings)
