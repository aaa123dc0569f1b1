"""Helpers for Python and the operating system; here: lazy imports, so that ``--help`` does not load JAX's libraries."""

import importlib
from collections.abc import Callable
from typing import Any


def attach(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package``; ``homes`` maps each public name to its submodule."""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{package}.{homes[name]}")
        except AttributeError as error:  # of a library: Python would blame this package for it
            raise ImportError(f"{package}.{homes[name]} cannot be imported: {error}") from error
        return getattr(home, name)

    return __getattr__
