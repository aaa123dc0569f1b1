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
from functools import partial
from typing import Any

from jaxrl_llm.rewards.code_names import bound, loads

DECIDES = (ast.Compare, ast.BoolOp, ast.Not, ast.IfExp, ast.Assert)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DATA = (str, bytes, list, dict, set, int, float, complex, Fraction, Decimal, datetime, timedelta, deque, range)
_METHODS = frozenset(name for kind in _DATA for name in dir(kind))
_FORMS = frozenset(
    """
    abs all any bool bytes bytearray callable complex dict enumerate filter float frozenset getattr hasattr hash int
    isinstance issubclass iter len list map max min next range repr reversed round set sorted str sum tuple type vars
    zip islice chain from_iterable starmap reduce Counter OrderedDict deque deepcopy copy asdict astuple floor ceil sqrt
    isgenerator isgeneratorfunction iscoroutinefunction isclass isfunction run
    """.split()
)
"""Functions that tell what a value is, by which no answer can be given away."""
_COUNTED = frozenset(("range", "islice", "round", "next", "getattr", "hasattr"))
"""Those of them that take constants."""
_APPLYING = frozenset(("map", "filter", "starmap", "reduce"))
"""Those of them that call their first argument."""


def computable(scope: Any, node: ast.AST, certain: bool) -> bool:
    """Whether the program's process may compute an expression of a test.

    Args:
      scope: the names before it.
      node: the expression.
      certain: whether its value is compared with one that cannot be guessed; then functions of the test, and operators
        of the program's objects with constants, may be in it.
    """
    if not scope.needs(node):  # it holds no values of the test
        imports = {name for one in scope.setup if isinstance(one, (ast.Import, ast.ImportFrom)) for name in bound(one)}
        known = loads(node) - bound(node) <= imports.union(dir(builtins))
        return known and not (_valued(node) or _computes(node))
    ours = partial(computable, scope, certain=certain)
    parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    match node:
        case ast.Name():
            return True
        case ast.Subscript() | ast.Slice() | ast.JoinedStr():
            return all(ours(one) for one in parts if loads(one))
        case ast.BinOp():
            given = certain and scope.is_instance(node) and not decides(node)
            return all(ours(one) for one in parts if scope.needs(one) or not given)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return all(scope.needs(one) and ours(one) for one in parts)
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return scope.is_instance(parts[1]) and ours(parts[1]) and not decides(parts[0])
        case ast.Call():
            return _call(scope, node, certain)
    if isinstance(node, COMPREHENSIONS):
        inner = scope.inner()
        inner.tainted |= bound(node)
        parted = any(isinstance(part, ast.Subscript) for part in ast.walk(node))
        inputs = [] if parted else [one for one in node.generators if isinstance(one.target, ast.Name)]
        loops = [one.iter for one in node.generators if one not in inputs or scope.items(one.iter) is None]
        parts += [one for loop in node.generators for one in loop.ifs]
        return not any(map(_computes, parts)) and all(computable(inner, one, certain) for one in loops + parts)
    through = (ast.Attribute, ast.Starred, ast.FormattedValue, ast.UnaryOp, ast.List, ast.Tuple, ast.Set)
    return isinstance(node, through) and not isinstance(getattr(node, "op", None), ast.Not) and all(map(ours, parts))


def decides(node: ast.AST) -> bool:
    """Whether a statement or expression compares something itself."""
    return any(isinstance(part, DECIDES) for part in ast.walk(node))


def _computes(node: ast.AST) -> bool:
    return decides(node) or any(isinstance(part, ast.BinOp) for part in ast.walk(node))


def _valued(node: ast.AST) -> bool:
    """Whether a part of the test holds values, but for the least."""
    values = {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return not values <= {"None", "True", "False", "0", "1", ""}


def _call(scope: Any, node: ast.Call, certain: bool) -> bool:
    given = [*node.args, *(one.value for one in node.keywords)]
    function: Any = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if scope.calls(node):
        return not decides(node)
    if isinstance(function, ast.Attribute) and scope.needs(function.value):
        plain = not given or name not in _METHODS
        return plain and not any(map(decides, given)) and computable(scope, function.value, certain)
    known = name in _FORMS or (name == "join" and isinstance(function.value, ast.Constant))
    applied = any(isinstance(one, ast.Name) and scope.is_object(one) for one in given)
    if known and (applied or (name in _APPLYING and scope.needs(given[0]))) and not decides(node):
        return True  # what else is given is given to the program
    helpers = [one for one in scope.setup if isinstance(one, ast.FunctionDef) and one.name == name]
    helps = certain and helpers and not _valued(helpers[-1]) and not loads(helpers[-1]) & scope.literals.keys()
    counted = [one for one in given if not (name in _COUNTED and isinstance(one, ast.Constant))]
    return bool(known or helps) and all(computable(scope, one, certain) for one in counted)
