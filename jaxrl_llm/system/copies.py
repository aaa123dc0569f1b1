"""Import of modules from the copies of a run's own code (``config.code``), in this process and in workers."""

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from jaxrl_llm.errors import require

COPIES: dict[str, tuple[str, str, str]] = {}
"""Modules that are imported from a run's copies, by name: the copy, the module's own file, the SHA-256 of its bytes."""


class CopyLoader(importlib.machinery.SourceFileLoader):
    """Imports a module from a run's copy, without cached bytecode; ``__file__`` is its own file while that exists."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module in ``COPIES``, or of a package without a file around one."""
        if name in COPIES:
            copy, file, _ = COPIES[name]
            place = file if os.path.exists(file) else copy
            spec: Any = importlib.util.spec_from_file_location(name, place, loader=cls(name, copy))
            if spec.submodule_search_locations:
                spec.submodule_search_locations[:] = [os.path.dirname(file)]
            return spec
        inside = any(other.startswith(f"{name}.") for other in COPIES)
        bare = inside and importlib.machinery.PathFinder.find_spec(name, path) is None
        return ModuleSpec(name, None, is_package=True) if bare else None

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file; those of the copy are the ones that were trusted."""
        code = super().get_data(path)
        copy = COPIES.get(self.name)
        changed = copy and path == copy[0] and hashlib.sha256(code).hexdigest() != copy[2]
        require(not changed, f"{path} has changed while the run was loaded: run the same command again")
        return code

    def path_stats(self, path: str) -> Any:
        """Refuse, so that no cached bytecode is used."""
        raise OSError


def import_copies(copies: dict[str, tuple[str, str, str]]) -> None:
    """Import modules from these copies (``COPIES``) from now on."""
    COPIES.update(copies)
    if copies and CopyLoader not in sys.meta_path:
        sys.meta_path.insert(0, CopyLoader)
