"""Names of a package that are imported when first used, so that ``--help`` need not load JAX's libraries."""

import importlib
from collections.abc import Callable
from typing import Any


def attach(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` for ``package``: ``homes`` maps each public name to the submodule it lives in."""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return __getattr__
