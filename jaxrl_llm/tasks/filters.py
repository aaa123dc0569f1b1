"""Import of functions named as ``module:function`` in a configuration, and filters that ``Task.keep`` may name."""

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean, one_line, require
from jaxrl_llm.tasks.extract import parse_number
from jaxrl_llm.tasks.instructions import CHECKS, IDS
from jaxrl_llm.types import Problem


def nonnegative_answer(problem: Problem) -> bool:
    """Whether the reference is a number of 0 or more."""
    value = parse_number(problem.answer)
    return value is not None and value >= 0


def checkable_instructions(problem: Problem) -> bool:
    """Whether the verifier ``instructions`` knows each of the problem's instructions."""
    return all(name in CHECKS for name in problem.metadata.get(IDS) or ())


def resolve(path: str) -> Callable[..., Any]:
    """Import the function that ``path`` names, for example ``jaxrl_llm.tasks.filters:nonnegative_answer``. Modules of
    the current folder are found too: an installed command does not have that folder on its search path. InputError: the
    path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise InputError(f"{path!r} names no function; write module:function, such as my_rewards:brevity")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    if module_name not in sys.modules:  # one thread's look for new files could break another's
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a person's module raises at import
        raise InputError(
            f"{path} cannot be imported ({one_line(error)}); "
            f"check the name, and that the module is in the current folder or is installed"
        ) from error
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module), "check the spelling")
        raise InputError(f"{path}: {module_name} has no {name}; {hint}")
    function = getattr(module, name)
    require(callable(function), f"{path} is a {type(function).__name__}; name a function")
    return function


def importable(function: Callable[..., Any]) -> tuple[str | None, str]:
    """Return the ``module:function`` by which another process finds it; or None, and the reason."""
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
    package = module.partition(".")[0]
    finders = (getattr(finder, "find_spec", None) for finder in (*sys.meta_path, importlib.machinery.PathFinder))
    exists = package in sys.builtin_module_names or any(find(package, None) is not None for find in finders if find)
    if module not in sys.modules or not exists:  # a new interpreter does not know files loaded by their path
        return None, "it belongs to a file that was run, not imported"
    if getattr(sys.modules[module], name, None) is not function:
        return None, f"{module}:{name} is something else"
    return f"{module}:{name}", ""
