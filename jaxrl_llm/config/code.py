"""Copies of a run's own code: ``RUN/code/N`` has the configuration's file and the local modules that it imports, found
without importing them. What the command line names is executed where it lies; a run alone imports its newest copy.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.files import to_json
from jaxrl_llm.config.origin import PREFIX, Origin, copies_of, copy_of, named, own_modules
from jaxrl_llm.errors import require
from jaxrl_llm.system import storage
from jaxrl_llm.system.copies import COPIES
from jaxrl_llm.system.paths import open_nofollow
from jaxrl_llm.system.setting import OURS, parts_of

MOST_COPIED = 5_000_000
"""The most bytes of a run's own code that are copied; modules beyond are imported from where they lie."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, which are not copied."""


def own_code(run: Any, origin: Origin, directory: Path | None) -> tuple[Origin, dict[str, bytes]]:
    """Return the origin with the run's own modules and their fingerprints, and the bytes of those to copy, by name.
    ``directory``: of a run that was given alone, whose copies are its code; None for what is executed where it lies.
    """
    modules, code = own_modules(run), {}
    names = {name.partition(":")[0] for name, _ in named(to_json(run))}
    if directory is not None:
        for name, (place, file, digest) in copies_of(directory, origin).items():
            content = Path(place).read_bytes() if digest else b""
            trusted = origin.code[name], COPIES.get(name, ("", "", ""))[2]
            if digest and hashlib.sha256(content).hexdigest() in trusted:  # as it was looked at when it was read
                modules[name], code[name] = file, content
    for part in parts_of(run):
        while isinstance(part, functools.partial):
            part = part.func
        name = getattr(part, "__module__", None) if callable(part) else None
        names |= {name} if isinstance(name, str) else set()
        if name == "__main__" and not hasattr(sys.modules[name], "__file__"):  # a notebook's
            with contextlib.suppress(OSError, TypeError):
                modules[name], code[name] = "notebook.py", code.get(name, b"") + inspect.getsource(part).encode()
    files = {} if directory or not origin.config else {f"{PREFIX}{Path(origin.config).stem}": origin.config}
    files |= {name: _local_file(name) for name in sorted(names) if name not in files}
    todo = [(name, file) for name, file in files.items() if file]
    folders = set()
    for folder in (Path(file).absolute().parent for _, file in todo):
        folders.add(folder)
        while all((place / "__init__.py").is_file() for place in (folder, folder.parent)):  # the whole package
            folder = folder.parent
        folders.add(folder)
    for name, file in todo:  # which grows
        if name in code or not os.access(file, os.R_OK):
            continue
        place, _, digest = COPIES.get(name, (file, "", ""))
        content = Path(place).read_bytes()
        same = digest in ("", hashlib.sha256(content).hexdigest())  # as it was imported
        if same and len(content) + sum(map(len, code.values())) <= MOST_COPIED:
            modules[name], code[name] = file, content
        for other in _imports(content, name, file):
            if other not in files:
                files[other] = _local_file(other, folders)
                todo += [(other, files[other])] * bool(files[other])
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in code.items()}
    return dataclasses.replace(origin, modules=modules, code=digests), code


def write_code(directory: Path, origin: Origin, code: Mapping[str, bytes]) -> None:
    """Write the newest copy of a run's own code, unless it is there. InputError: its folder is a link."""
    folder = directory / storage.CODE / str(origin.copy)
    paths = {folder / copy_of(name, origin): content for name, content in code.items()}
    if all(path.is_file() and path.read_bytes() == content for path, content in paths.items()):
        return
    for place in (folder.parent, folder):
        require(not place.is_symlink(), f"{place} is a symbolic link, and nothing is written through one: remove it")
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_nofollow(path, "xb") as file:
            file.write(content)


def _local_file(name: str, folders: Collection[Path] = ()) -> str:
    """Return the Python file of a module in one of the ``folders``, if any are given, that is not installed, a link or
    of this package; else empty.
    """
    top = name.partition(".")[0]
    spec = inside = None
    file = str(getattr(sys.modules.get(name), "__file__", None) or "")
    if name != "__main__" and not name.startswith(PREFIX):
        if top in (OURS, *sys.stdlib_module_names) or not all(map(str.isidentifier, name.split("."))):
            return ""
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            specs = (finder.find_spec(part, inside) for finder in sys.meta_path if part == top or inside)
            spec = next((spec for spec in specs if spec is not None), None)
            inside = getattr(spec, "submodule_search_locations", None)
        file = str(getattr(spec, "origin", None) or "")
    if not file.endswith(".py") or {*Path(file).parts} & {*INSTALLED} or os.path.islink(file):
        return ""
    plain = (os.path.join(os.path.realpath(folder), os.path.relpath(file, folder)) for folder in folders)
    return os.path.abspath(file) if not folders or os.path.realpath(file) in plain else ""


def _imports(content: bytes, name: str, file: str) -> Iterator[str]:
    """Yield the modules that a module may import, with the packages around each."""
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, ImportError):
        for node in ast.walk(ast.parse(content)):
            names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
            if isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names = [base, *(f"{base}.{alias}" for alias in names)]
            for imported in names:
                yield from itertools.accumulate(imported.split("."), "{}.{}".format)
