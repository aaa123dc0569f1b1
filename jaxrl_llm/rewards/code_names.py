"""Names and literals of the statements in tests of programs."""

import ast
import functools
import sys
from typing import Any

_SOLUTION = ("solution", "main", "candidate", "your_module")
"""Modules from which tests import the program's names."""
_MAKERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "float": float}
_PYTEST = """
class pytest:
    class raises:
        def __init__(self, kinds, match=None):
            self.kinds = kinds
        def __enter__(self):
            return self
        def __exit__(self, kind, value, trace):
            assert kind is not None, "did not raise"
            return issubclass(kind, self.kinds)
    class approx:
        def __init__(self, value, rel=1e-6, abs=1e-12):
            self.value, self.rel, self.abs = value, rel, abs
        def __eq__(self, other):
            if isinstance(self.value, (list, tuple)):
                pairs = zip(self.value, other)
                alike = all(pytest.approx(a, self.rel, self.abs) == b for a, b in pairs)
                return alike and len(other) == len(self.value)
            limit = max(self.abs, self.rel * abs(self.value))
            return self.value == other or (limit < float("inf") and abs(other - self.value) <= limit)
"""
"""The two names of pytest that assertions need: programs have the standard library alone."""


@functools.lru_cache(maxsize=1 << 14)
def loads(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement or expression reads."""
    read = (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load))
    return frozenset(read)


@functools.lru_cache(maxsize=1 << 14)
def bound(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement or expression binds, arguments of its functions among them."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        return frozenset({node.name} | stored | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)})
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset((one.asname or one.name).partition(".")[0] for one in node.names)
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    return frozenset(names | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)})


def literal(node: ast.expr, names: dict[str, Any]) -> tuple[Any] | None:
    """Return the value of a literal, or of a name of one, in a tuple; None for other expressions."""
    if isinstance(node, ast.Name) and node.id in names:
        return (names[node.id],)
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) < 2:
            inner = [literal(one, names) for one in node.args]
            if node.func.id not in _MAKERS or None in inner:
                return None
            return (_MAKERS[node.func.id](*(one[0] for one in inner)),)
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def written(value: Any) -> str | None:
    """Return the text of a literal; None for one that has none, such as an infinite number."""
    text = repr(value)
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def named(target: ast.expr, value: Any) -> dict[str, Any] | None:
    """Return the values that an assignment gives to its names; None if it binds something else."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, (list, tuple)):
        return None
    inner = [named(one, part) for one, part in zip(target.elts, value, strict=False)]
    if len(target.elts) != len(value) or None in inner:
        return None
    return {name: part for one in inner for name, part in (one or {}).items()}


def available(node: ast.stmt) -> tuple[list[ast.stmt], frozenset[str]]:
    """Return the statements in place of one of a test's, and the names of packages that programs do not have.

    Imports of the program's names become assignments; what a test file does as a main program, and texts, are left out.
    """
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        if module in _SOLUTION:
            renamed = [one for one in node.names if one.asname]
            return [ast.parse(f"{one.asname} = {one.name}").body[0] for one in renamed], frozenset()
        return ([node], frozenset()) if module in sys.stdlib_module_names else ([], bound(node))
    if isinstance(node, ast.Import):
        names = [one.name.partition(".")[0] for one in node.names]
        kept = [one for one, name in zip(node.names, names, strict=True) if name in sys.stdlib_module_names]
        shim = ast.parse(_PYTEST).body if "pytest" in names else []
        others = bound(node) - bound(ast.Import(kept)) - {"pytest", *_SOLUTION}
        return ([ast.Import(kept)] if kept else []) + shim, others
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    guard = isinstance(node, ast.If) and "__name__" in loads(node.test)
    return ([] if documents or guard else [node]), frozenset()
