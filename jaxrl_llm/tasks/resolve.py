"""Functions named in a configuration as ``module:function``."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import InputError


def resolve(path: str) -> Callable[..., Any]:
    """Imports the function that ``path`` names, for example ``jaxrl_llm.tasks.filters:nonnegative_answer``.

    Modules of the current folder are found too: an installed command does not have that folder on its search path.

    Raises:
      InputError: the path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise InputError(f"{path!r} names no function; write module:function, such as my_rewards:brevity")
    module = _import(module_name, path)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"did you mean {near[0]}?" if near else "check the spelling"
        raise InputError(f"{path}: {module_name} has no {name}; {hint}")
    function = getattr(module, name)
    if not callable(function):
        raise InputError(f"{path} is a {type(function).__name__}; name a function")
    return function


def _import(module_name: str, path: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever a person's module raises at import
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} cannot be imported ({type(error).__name__}: {reason}); "
            f"check the name, and that the module lies in the current folder or is installed"
        ) from error
