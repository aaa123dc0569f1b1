"""Fingerprints of a run's own code: its rewards, environments, tools and extractors, and what these use of their files.

A run is resumed by name, and its functions may have been edited meanwhile. A fingerprint is made of the definitions
that a function needs, in its own file and in those beside it, without comments and docstrings: other lines of a
configuration may change freely. Nothing is imported.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import linecache
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.files import to_json
from jaxrl_llm.config.trust import named
from jaxrl_llm.rewards.functions import name_of
from jaxrl_llm.system.setting import OURS, parts_of

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Begins each fingerprint: versions of Python write code differently, and only those of one are compared."""
Node = ast.stmt | ast.Lambda


def code_of(run: Any) -> dict[str, str]:
    """Return the fingerprint of each function and class of a person's own that a run names or holds, by name; those
    without a source, such as functions written in C, are left out."""
    found = {}
    for name, _ in named(to_json(run)):
        module, _, definition = name.partition(":")
        if module.partition(".")[0] != OURS and (file := _file_of(module)):
            found[name] = _fingerprint(_needed(file, definition))
    for part in parts_of(run):
        while isinstance(part, functools.partial):
            part = part.func
        if callable(part) and str(getattr(part, "__module__", OURS)).partition(".")[0] != OURS:
            found.setdefault(name_of(part), _fingerprint(_of_object(part)))
    return {name: print_ for name, print_ in found.items() if print_}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the names whose code has changed, as ``code of NAME: old -> new``; unknown code is not compared."""
    both = [name for name in sorted(now) if name in before and before[name] != now[name]]
    same = [name for name in both if before[name].partition(":")[0] == now[name].partition(":")[0]]
    return [f"code of {name}: {before[name]} -> {now[name]}" for name in same]


def _fingerprint(texts: Mapping[tuple[str, str], str]) -> str:
    text = json.dumps(sorted([*key, text] for key, text in texts.items()))
    return f"{VERSION}:{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}" if texts else ""


def _file_of(module: str) -> str:
    """Return the file of a module, which need not be imported; empty if it has none."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None and "." not in module:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return ""
        file = spec.origin if spec is not None else None
    return file if file and file.endswith(".py") else ""


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return _Bare().visit(ast.parse(text))


class _Bare(ast.NodeTransformer):
    """Removes docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[:1] = [] if len(body) > 1 or isinstance(node, ast.Module) else [ast.Pass()]
        return super().generic_visit(node)


def _module(file: str) -> ast.Module:
    """Return a file's syntax tree; an empty one if it cannot be read."""
    linecache.checkcache(file)
    try:
        return _parsed("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module's statements define, with the statement."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, inner, []))
        else:
            stored = (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            yield from ((name, node) for name in stored)


def _needed(file: str, *names: str) -> dict[tuple[str, str], str]:
    """Return the texts of these definitions and of all that they use, by file and name."""
    found: dict[tuple[str, str], str] = {}
    todo = [(file, name) for name in names]
    done = set()
    while todo:
        place, name = todo.pop()
        if (place, name) in done:
            continue
        done.add((place, name))
        nodes = [node for defined, node in _defined(_module(place).body) if defined == name]
        for node in nodes:
            found[Path(place).name, name] = found.get((Path(place).name, name), "") + ast.unparse(node)
            todo += [(place, used) for used in _used(node)]
            if isinstance(node, ast.Import | ast.ImportFrom):
                todo += _beside(place, node, name)
    return found


def _used(node: Node) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _beside(place: str, node: ast.Import | ast.ImportFrom, name: str) -> Iterator[tuple[str, str]]:
    """Yield the definitions that an imported name stands for, if they are in a file of the same folder."""
    for alias in node.names:
        if (alias.asname or alias.name.partition(".")[0]) != name:
            continue
        module = alias.name if isinstance(node, ast.Import) else node.module or alias.name
        file = Path(place).parent / f"{module.replace('.', '/')}.py"
        if file.is_file():
            whole = isinstance(node, ast.Import) or not node.module
            names = [one for one, _ in _defined(_module(str(file)).body)] if whole else [alias.name]
            yield from ((str(file), one) for one in names)


def _of_object(value: Any, depth: int = 8) -> dict[tuple[str, str], str]:
    """Return the texts of a function, a lambda, a class or a callable object, and of all that it uses."""
    kind = value if isinstance(value, type | types.FunctionType | types.MethodType) else type(value)
    if isinstance(kind, type):
        return _needed(_file_of(kind.__module__), kind.__qualname__.partition(".")[0])
    function = getattr(kind, "__func__", kind)
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    found: dict[tuple[str, str], str] = {}
    tree = _module(file)
    known = dict(_defined(tree.body))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) != line:
            continue
        found["", name_of(function)] = found.get(("", name_of(function)), "") + ast.unparse(node)
        for used in _used(node):
            other = function.__globals__.get(used)
            if used in known:
                found |= _needed(file, used)
            elif depth and isinstance(other, types.FunctionType) and other.__module__ == function.__module__:
                found |= _of_object(other, depth - 1)  # another cell of a notebook
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if found and isinstance(held, bool | int | float | str):
            found["", f"{name_of(function)}.{name}"] = repr(held)
    return found
