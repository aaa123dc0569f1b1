"""Expressions of an assertion that the program's process may compute whole: ``list(f(3))``, ``n.left.value``, ``g(2)``.

A value that is no data cannot leave that process, but what the test makes of it can. The program could lie about each
step: an expression is taken only if it holds nothing that is expected, so that a lie needs the answer. ``f(2) - 4`` and
``f(2).startswith("ab")`` are not: an object whose subtraction returns 0 would be the answer.
"""

import ast
import builtins
from collections import deque
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards.code_names import bound, literal, loads

DECIDES = (ast.Compare, ast.BoolOp, ast.Not, ast.IfExp, ast.Assert)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DATA = (str, bytes, list, dict, set, int, float, complex, Fraction, Decimal, datetime, timedelta, deque, range)
_METHODS = frozenset(name for kind in _DATA for name in dir(kind))
_FORMS = frozenset(
    """
    abs all any bool bytes bytearray callable complex dict enumerate filter float frozenset getattr hasattr hash int
    isinstance issubclass iter len list map max min next range repr reversed round set sorted str sum tuple type vars
    zip islice chain from_iterable starmap reduce Counter OrderedDict deque deepcopy copy asdict astuple floor ceil sqrt
    isgenerator isgeneratorfunction iscoroutinefunction isclass isfunction asyncio.run
    """.split()
)
"""Functions that tell what a value is, by which no answer can be given away."""
_COUNTED = frozenset(("range", "islice", "round", "next", "getattr", "hasattr"))
"""Those of them that take constants."""
_APPLYING = frozenset(("map", "filter", "starmap", "reduce"))
_SLICED = (ast.Constant, ast.Slice, ast.UnaryOp, ast.USub, ast.Tuple, ast.Load)


def computable(scope: Any, node: ast.expr, certain: bool) -> bool:
    """Whether the program's process may compute an expression of a test.

    Args:
      scope: the names before it.
      node: the expression.
      certain: whether its value is compared with one that cannot be guessed; then functions of the test, and operators
        of the program's objects with constants, may be in it.
    """
    if not scope.needs(node):
        return _harmless(scope, node)

    def all_of(parts: Any) -> bool:
        return all(computable(scope, part, certain) for part in parts)

    match node:
        case ast.Name():
            return True
        case ast.Attribute(value) | ast.Starred(value) | ast.FormattedValue(value):
            return all_of([value])
        case ast.UnaryOp(op, operand):
            return not isinstance(op, ast.Not) and all_of([operand])
        case ast.Subscript(value, place):
            return all_of([value]) and (all(isinstance(one, _SLICED) for one in ast.walk(place)) or all_of([place]))
        case ast.BinOp(left, _, right):
            own = scope.is_instance(node) and not decides(node)
            return all_of(one for one in (left, right) if scope.needs(one) or not (own and certain))
        case ast.Compare(left, [ast.Is() | ast.IsNot()], [right]):
            return scope.needs(left) and scope.needs(right) and all_of([left, right])
        case ast.Compare(left, [ast.In() | ast.NotIn()], [right]):
            return scope.is_instance(right) and not decides(left) and all_of([right])
        case ast.JoinedStr(parts):
            return all_of(one for one in parts if not isinstance(one, ast.Constant))
        case ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
            return all_of(parts)
        case ast.Call():
            return _call(scope, node, certain)
    return isinstance(node, COMPREHENSIONS) and _comprehension(scope, node, certain)


def decides(node: ast.AST) -> bool:
    """Whether a statement or expression compares something itself."""
    return any(isinstance(part, DECIDES) for part in ast.walk(node))


def _call(scope: Any, node: ast.Call, certain: bool) -> bool:
    given = [*node.args, *(one.value for one in node.keywords)]
    function = node.func
    if scope.calls(node):
        return not decides(node)
    if isinstance(function, ast.Attribute) and scope.needs(function.value):
        plain = not given or function.attr not in _METHODS
        return plain and not any(map(decides, given)) and computable(scope, function.value, certain)
    name = getattr(function, "attr", getattr(function, "id", ""))
    if isinstance(getattr(function, "value", None), ast.Constant):
        return name == "join" and all(computable(scope, one, certain) for one in given)
    known = name in _FORMS or ast.unparse(function) in _FORMS
    helper = certain and any(getattr(one, "name", "") == name and _bare(scope, one) for one in scope.setup)
    bare = any(isinstance(one, ast.Name) and scope.is_object(one) for one in given)
    applied = name in _APPLYING and scope.needs(given[0]) and computable(scope, given[0], certain)
    if known and (bare or applied) and not decides(node):
        return True  # what else is given is given to the program
    counted = [one for one in given if not (name in _COUNTED and isinstance(one, ast.Constant))]
    return (known or helper) and all(computable(scope, one, certain) for one in counted)


def _comprehension(scope: Any, node: Any, certain: bool) -> bool:
    """Whether a comprehension only applies the program, or collects what it gave."""
    if any(isinstance(part, (ast.BinOp, *DECIDES)) for part in ast.walk(node)) or any(g.ifs for g in node.generators):
        return False
    inner = scope.inner()
    inner.tainted |= bound(node)
    for one in node.generators:
        if not scope.needs(one.iter) and not _inputs(scope, node, one):
            return False
        if inner.needs(one.iter) and not computable(inner, one.iter, certain):
            return False
    parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    return all(computable(inner, part, certain) for part in parts)


def _inputs(scope: Any, node: ast.expr, loop: ast.comprehension) -> bool:
    """Whether a loop runs through inputs of the program and nothing else."""
    if isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range":
        return all(literal(one, scope.literals) for one in loop.iter.args)
    parts = any(isinstance(part, ast.Subscript) for part in ast.walk(node))
    return isinstance(loop.target, ast.Name) and not parts and scope.items(loop.iter) is not None


def _harmless(scope: Any, node: ast.expr) -> bool:
    """Whether an expression without the program holds no values of the test."""
    places = {id(one) for part in ast.walk(node) if isinstance(part, ast.Subscript) for one in ast.walk(part.slice)}
    imported = {name for one in scope.setup if isinstance(one, (ast.Import, ast.ImportFrom)) for name in bound(one)}
    bare = {one.name for one in scope.setup if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and _bare(scope, one)}
    return loads(node) - bound(node) <= {*dir(builtins), *imported, *bare} and not any(
        isinstance(part, (ast.BinOp, *DECIDES)) or (isinstance(part, ast.Constant) and id(part) not in places)
        for part in ast.walk(node)
        if not isinstance(part, ast.Constant) or part.value not in (None, True, False)
    )


def _bare(scope: Any, node: ast.AST) -> bool:
    """Whether a function or class of the test holds no values of its own but the least."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return False
    values = {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    documents = {ast.get_docstring(one, clean=False) for one in ast.walk(node) if isinstance(one, type(node))}
    return values - documents <= {"None", "True", "False", "0", "1", ""} and not loads(node) & scope.literals.keys()
