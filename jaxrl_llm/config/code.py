"""A person's own Python beside a configuration: found as long as the process lives, and named in the run's config.json.

Reading a run runs none of it unless the run has values of own classes. Then the files that config.json records are run,
as the configuration itself was: a run that a stranger gives you is as much a program as a stranger's configuration.
"""

import dataclasses
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.config.origin import Origin
from jaxrl_llm.config.parts import parts_of
from jaxrl_llm.errors import InputError

OURS = __name__.partition(".")[0]
PREFIX = f"{OURS}_config_"
"""Of a configuration's own module, before its file's name."""
FOLDERS: list[str] = []
"""Configurations' folders on ``sys.path``, the newest first. Like that, they are the process's."""


def execute(path: Path) -> ModuleType:
    """Run a configuration's file; it can import the modules beside it.

    Raises:
      InputError: whatever it raises, with file and line.
    """
    folder = path.absolute().parent
    make_findable(folder)
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a person's file raises
        del sys.modules[name]
        if isinstance(error, InputError):
            raise
        where = _where(error, folder) or path
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct the configuration") from error
    return module


def _where(error: Exception, folder: Path) -> str:
    """File and line of an error: the last ones in the configuration's folder."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).absolute().parent == folder]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def make_findable(folder: Path) -> None:
    """Let the modules in a configuration's folder be imported by name, here and in processes that are started later.

    What is installed is found first; what lies beside an earlier configuration gives way.
    """
    here = str(folder)
    earlier = [place for place in FOLDERS if place != here]
    _forget(earlier, folder)
    before = next((index for index, place in enumerate(sys.path) if place in earlier), len(sys.path))
    if here not in sys.path[:before]:
        sys.path[:] = [*sys.path[:before], here, *(place for place in sys.path[before:] if place != here)]
    FOLDERS[:] = [here, *earlier]
    importlib.invalidate_caches()


def _forget(earlier: list[str], folder: Path) -> None:
    """Drop modules that lie in one of the folders ``earlier``, where ``folder`` has some of the same name."""
    if not earlier:
        return
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    stale = {name for name in names if name in sys.modules and str(_home(sys.modules[name])) in earlier}
    for name in [name for name in sys.modules if name.partition(".")[0] in stale]:
        del sys.modules[name]


def _home(module: ModuleType) -> Path | None:
    """The folder from which a module is found by its name; None for one without a file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    depth = module.__name__.count(".") + (Path(file).name == "__init__.py")
    return Path(file).absolute().parents[depth]


def own_modules(value: Any) -> dict[str, str]:
    """Files of modules outside this package that define classes of the values inside ``value``, by name."""
    kinds = {type(part) for part in parts_of(value) if dataclasses.is_dataclass(part)}
    names = {kind.__module__ for kind in kinds if not is_ours(kind)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names - {"__main__"})}
    return {name: os.path.abspath(file) for name, file in files.items() if file}


def is_ours(kind: type) -> bool:
    """Whether a class comes with this package."""
    return kind.__module__.partition(".")[0] == OURS


def why_not_found(kind: type) -> str:
    """Why a class cannot be found again by the name of its module; empty where it can."""
    if is_ours(kind) and "<locals>" not in kind.__qualname__:
        return ""
    if kind.__module__ == "__main__":
        return f"its class {kind.__qualname__} is defined in the program itself or in a notebook: put it into a module"
    module = sys.modules.get(kind.__module__)
    found = "<locals>" not in kind.__qualname__ and getattr(module, "__file__", None) is not None
    return "" if found else f"its class {kind.__qualname__} is not at the top of a file: put it there"


def find_class(name: str, origin: Origin | None) -> type | None:
    """The dataclass that ``module:class`` names, of this package or of the origin's modules; None for anything else.

    Raises:
      InputError: the file of such a module is not found, or is another.
      ImportError: the module raises it.
    """
    module_name, _, path = name.partition(":")
    if module_name.partition(".")[0] == OURS:
        kind = importlib.import_module(module_name)
    elif origin is not None and module_name in origin.modules:
        kind = _own_module(module_name, origin)
    else:
        return None
    for part in path.split("."):
        kind = getattr(kind, part, None)
        if not isinstance(kind, type):
            return None
    known = is_ours(kind) or (origin is not None and kind.__module__ in origin.modules)
    return kind if known and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _own_module(name: str, origin: Origin) -> ModuleType:
    path = _moved(Path(origin.modules[name]), Path(origin.folder))
    loaded = sys.modules.get(name)
    if loaded is not None and _same(loaded, path):
        return loaded
    if name.startswith(PREFIX):
        return execute(path)
    make_findable(path.parents[name.count(".") + (path.name == "__init__.py")])
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a person's file raises
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
    if not _same(module, path):
        raise InputError(f"the module {name} is {module.__file__} here, and the run has {path}: rename one of them")
    return module


def _same(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.exists(file) and os.path.samefile(file, path)


def _moved(path: Path, folder: Path) -> Path:
    """Where a recorded file lies now: as recorded, or below the current folder as it was below ``folder``."""
    if path.is_file():
        return path
    here = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
    if not here.is_file():
        raise InputError(
            f"it has classes of {path}, which is not there any more: go to the folder that has it as {here}"
        )
    return here.absolute()
