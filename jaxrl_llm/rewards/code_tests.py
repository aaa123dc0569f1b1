"""Assertions, split: the program's process computes the program's calls, and what was expected stays outside it.

``assert f(2) == 4`` has the call ``f(2)``, whose value is compared here. Of ``assert abs(f(2) - 4) < 0.1`` the
program's process computes ``f(2)``, and another, which never saw the program, ``abs(_0 - 4) < 0.1``. Each gets those
statements before the assertion that it needs, so that a variable ``expected`` stays outside too. Where such a value is
no data, the program's process computes more (``computable``). Assertions in loops over literals are unrolled. The rest
is opaque: the process that runs the program says whether it holds.

Tests in the words of unittest, numpy and pytest as plain assertions, which are split like all others.
``self.assertEqual(f(2), 4)`` and ``np.testing.assert_equal(f(2), 4)`` become ``assert f(2) == 4``. Each test of a class
has the statements of its ``setUp`` before it, and ``self.x`` becomes a name. The cases of ``parametrize`` become a
loop, and ``capsys`` an object of the program's process. What has no plain form, such as ``assertRaises``, is refused,
since nobody would notice if it were left out.
"""

import ast
import builtins
import contextlib
import copy
import dataclasses
import functools
import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards.code_formats import Asserted

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


PLAIN = {
    "assertEqual": "{0} == {1}", "assertNotEqual": "{0} != {1}", "assertTrue": "{0}", "assertFalse": "not {0}",
    "assertIs": "{0} is {1}", "assertIsNot": "{0} is not {1}", "assertIsNone": "{0} is None",
    "assertIsNotNone": "{0} is not None", "assertIn": "{0} in {1}", "assertNotIn": "{0} not in {1}",
    "assertIsInstance": "isinstance({0}, {1})", "assertGreater": "{0} > {1}", "assertGreaterEqual": "{0} >= {1}",
    "assertLess": "{0} < {1}", "assertLessEqual": "{0} <= {1}", "assertListEqual": "{0} == {1}",
    "assertTupleEqual": "{0} == {1}", "assertSetEqual": "{0} == {1}", "assertDictEqual": "{0} == {1}",
    "assertSequenceEqual": "list({0}) == list({1})", "assertMultiLineEqual": "{0} == {1}",
    "assertCountEqual": "sorted({0}) == sorted({1})", "assertEquals": "{0} == {1}", "assert_equal": "{0} == {1}",
    "assert_array_equal": "list({0}) == list({1})",
}  # fmt: skip
"""Assertions with the names of methods and functions, over their arguments."""
_BEFORE = "setUpClass", "setup_class", "setUp", "setup_method"
_CAPTURES = {"capsys", "capfd"}


def plain(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a module's statements with tests of unittest and numpy as assertions; others are returned as they are.

    Raises:
      InputError: a test has no plain form.
    """
    text = ast.unparse(ast.Module(body, []))
    if not re.search(r"TestCase|\.testing|pytest|class Test|capsys", text):
        return body
    found = [_cased(one) for node in body for one in _statements(node)]
    kept = {one.id for node in found for one in ast.walk(node) if isinstance(one, ast.Name)}
    return [node for node in found if not isinstance(node, ast.Import | ast.ImportFrom) or _names(node) & kept]


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _cased(node: ast.stmt) -> ast.stmt:
    """Return a test of pytest's with its cases as loops, and what captures its output as a variable."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return node
    wanted = {one.arg for one in node.args.args}
    body = [f"{name} = CaptureFixture()" for name in wanted & _CAPTURES] + [*map(ast.unparse, node.body)]
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            given = dict(zip(("argnames", "argvalues"), call.args, strict=False))
            given |= {str(one.arg): one.value for one in call.keywords}
            known = literal(given.get("argnames", call), {})
            require(known is not None and len(given) > 1, f"{ast.unparse(call)!r:.60} has no plain form: write a loop")
            names = known[0].strip(", ") if isinstance(known[0], str) else "".join(f"{name}, " for name in known[0])
            body = [f"for {names} in {ast.unparse(given['argvalues'])}:", textwrap.indent("\n".join(body), "    ")]
            wanted -= {*re.split(r"\W+", names)}
    text = textwrap.indent("\n".join(body), "    ")
    return ast.parse(f"def {node.name}({', '.join(wanted - _CAPTURES)}):\n{text}").body[0]


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    methods = {one.name: one for one in getattr(node, "body", []) if isinstance(one, ast.FunctionDef)}
    tests = any(name.startswith("test") for name in methods)
    if isinstance(node, ast.ClassDef) and (tests or any(ast.unparse(base).endswith("TestCase") for base in node.bases)):
        before = [one for name in _BEFORE for one in getattr(methods.get(name), "body", [])]
        for name, method in methods.items():
            if name.startswith("test"):
                given = ast.arguments([], method.args.args[1:], None, [], [], None, [])
                whole = ast.FunctionDef(name, given, [*before, *method.body], method.decorator_list)
                whole = ast.parse(ast.unparse(ast.fix_missing_locations(whole))).body[
                    0
                ]  # its own copy of what is before
                yield ast.fix_missing_locations(_Plain().visit(whole))
            elif name not in _BEFORE and not name.lower().startswith("teardown"):
                raise InputError(f"the test class {node.name} has a method {name}: move it out of the class")
    elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
        yield ast.fix_missing_locations(_Plain().visit(node))


class _Plain(ast.NodeTransformer):
    """Turns calls of assertions into statements, and attributes of ``self`` into names."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        self.generic_visit(node)
        call: Any = node.value
        function = call.func if isinstance(call, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", ""))
        if not name.startswith("assert"):
            return node
        given = [f"({ast.unparse(one)})" for one in call.args]
        if "lmost" in name or name == "assert_allclose":  # functions of code_judge
            call.func = ast.Name(f"apart_{name.replace('Not', '')}", ast.Load())
            return ast.parse(f"assert {'not ' * ('Not' in name)}{ast.unparse(call)}").body[0]
        wanted = [int(place) for place in re.findall(r"\{(\d)\}", PLAIN.get(name, ""))]
        fits = bool(wanted) and len(given) > max(wanted)
        require(fits, f"the test {ast.unparse(node)!r:.60} has no plain form: write it as an assert")
        return ast.parse(f"assert {PLAIN[name].format(*given)}").body[0]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        case = ast.unparse(node.func) == "pytest.param"
        return (ast.Tuple(node.args, ast.Load()) if len(node.args) > 1 else node.args[0]) if case else node

    def visit_With(self, node: ast.With) -> ast.stmt | list[ast.stmt]:
        text = ast.unparse(node.items[0].context_expr)
        require(".assert" not in text, f"the test {text!r:.60} has no plain form: write it as an assert")
        self.generic_visit(node)
        return node.body if ".subTest" in text else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and "assert" not in node.attr
        return ast.Name(f"own_{node.attr}", node.ctx) if own else self.generic_visit(node)


_MOST_UNROLLED = 2000
_PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.Pass, ast.Delete)
_DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_FOLDED = (ast.Subscript, ast.Name, ast.Constant, ast.Slice, ast.UnaryOp, ast.USub, ast.Load)
_BUILT_IN = frozenset(dir(builtins))
_APART = re.compile(r"_\d+|apart_\w+")
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
    """Whether the program's process may compute an expression of a test: ``list(f(3))``, ``n.left.value``.

    A value that is no data cannot leave that process, but what the test makes of it can. The program could lie about
    each step: an expression is taken only if it holds nothing that is expected, so that a lie needs the answer.
    ``f(2) - 4`` and ``f(2).startswith("ab")`` are not: an object whose subtraction returns 0 would be the answer.

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
    return any(isinstance(part, (ast.Compare, ast.BoolOp, ast.Not, ast.IfExp, ast.Assert)) for part in ast.walk(node))


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


def split_asserts(text: str, entry: str = "") -> list[Asserted]:
    """Return the assertions of a Python text, in order; ``entry`` is the function that ``check(candidate)`` checks.

    Raises:
      InputError: it is not Python, or needs a package beyond the standard library.
    """
    try:
        body = plain(ast.parse(text).body)
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"the assertions {text!r:.60} are not Python ({error}): correct them") from None
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args]
    called = [name for name in map(_checked, body) if name] or ([entry] if entry else [])
    require(not checks or bool(called), 'check(candidate) is never called: give {"test": text, "entry_point": name}')
    scope = _Scope()
    found = _block(scope, [node for node in body if node not in checks and not _checked(node)])
    for name in called:
        for check in checks:
            first = ast.parse(f"{check.args.args[0].arg} = {name}").body[0]
            found += _function(scope.inner(), check, [first])
    return found


def _checked(node: ast.stmt) -> str:
    """Return the name in a statement ``check(name)``; empty for other statements."""
    call = node.value if isinstance(node, ast.Expr) else None
    fits = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    return ast.unparse(call.args[0]) if fits and len(call.args) == 1 else ""


@dataclasses.dataclass
class _Scope:
    """The statements so far, and what they say of names.

    Attributes:
      setup: the statements.
      tainted: names whose values depend on the program.
      objects: those of them that are functions or objects of the program.
      instances: those of them that are instances of its classes.
      literals: names of literals, and their values.
      missing: names of packages that programs do not have.
      asked: texts of what assertions have had computed.
    """

    setup: list[ast.stmt] = dataclasses.field(default_factory=list)
    tainted: set[str] = dataclasses.field(default_factory=set)
    objects: set[str] = dataclasses.field(default_factory=set)
    instances: set[str] = dataclasses.field(default_factory=set)
    literals: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: set[str] = dataclasses.field(default_factory=set)
    asked: list[str] = dataclasses.field(default_factory=list)

    def inner(self) -> "_Scope":
        """Return a copy, for a block of its own."""
        return _Scope(*(copy.copy(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def add(self, node: ast.stmt) -> None:
        """Add a statement to the setup."""
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        value = None
        if isinstance(node, ast.Assign):
            value = literal(_Folded(self.literals).visit(copy.deepcopy(node.value)), self.literals)
        if value is not None and target is not None and self.bind(target, value[0]):
            return
        names = set() if isinstance(node, ast.Expr) else set(bound(node))
        self.instances -= names
        if not isinstance(node, _DEFINES) and self.needs(node):
            # A call may change its arguments: all variables that such a statement names depend on the program.
            names |= {name for name in loads(node) if name in self.literals or name in self.tainted}
            self.tainted |= names
            if isinstance(node, ast.Assign) and self.is_object(node.value):
                self.objects |= bound(node)
            if isinstance(node, ast.Assign) and self.is_instance(node.value):
                self.instances |= bound(node)
        for name in names | (loads(node) if isinstance(node, (ast.Expr, ast.AugAssign)) else frozenset()):
            self.literals.pop(name, None)
        self.setup.append(node)

    def bind(self, target: ast.expr, value: Any) -> bool:
        """Bind a target's names to parts of a literal, each by a statement of its own: one may be what is expected.
        Return False if they cannot be written so.
        """
        parts = named(target, value)
        texts = {name: written(part) for name, part in (parts or {}).items()}
        if not parts or None in texts.values():
            return False
        for name, part in parts.items():
            self.literals[name] = part
            self.tainted.discard(name)
            self.setup.append(ast.parse(f"{name} = {texts[name]}").body[0])
        return True

    def known(self) -> set[str]:
        """Return the names that the setup binds."""
        return {name for node in self.setup for name in bound(node)}

    @property
    def prints(self) -> bool:
        """Whether what the program prints is looked at."""
        return any("CaptureFixture" in loads(node) for node in self.setup)

    def needs(self, node: ast.AST) -> bool:
        """Whether it names something of the program."""
        names = {name for name in loads(node) if not _APART.fullmatch(name)}
        names -= bound(node) if isinstance(node, ast.expr) else set()
        return bool(names & self.tainted or names - _BUILT_IN - self.known() - bound(node) - self.missing)

    def is_program(self, node: ast.AST) -> bool:
        """Whether an expression is a value from the program: a call of its functions, of a method of its objects or of
        what it returned, an operation of its instances, or a variable that depends on it.
        """
        if isinstance(node, ast.Name):
            return self.needs(node)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return self.is_instance(node) and computable(self, node, False)
        if isinstance(node, ast.Call):
            return self.calls(node)
        return isinstance(node, (ast.Attribute, ast.Subscript)) and self.is_object(node)

    def calls(self, node: ast.Call) -> bool:
        """Whether a call is one of the program's functions, of a method of its objects, or of what it returned."""
        returned = isinstance(node.func, (ast.Name, ast.Call, ast.Subscript)) and self.needs(node.func)
        return returned or self.is_object(node.func)

    def is_object(self, node: ast.AST) -> bool:
        """Whether an expression is a function or object of the program, or a part of one, and not plain data."""
        if isinstance(node, ast.Name):
            return node.id in self.objects or (self.needs(node) and node.id not in self.tainted)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return self.is_object(node.value)
        return self.is_instance(node)

    def is_instance(self, node: ast.AST) -> bool:
        """Whether an expression is an instance of one of the program's classes, or an operation of such."""
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return any(map(self.is_instance, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Name):
            return node.id in self.instances
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
        return made and self.is_object(node.func)

    def needed(self, asked: list[Any]) -> list[ast.stmt]:
        """Return the statements of the setup that these need, by the names that they bind or may change.

        Raises:
          InputError: one of them is of a package that programs do not have.
        """
        names = {name for one in asked for name in loads(one)}
        prints = self.prints
        variables = {name for one in self.setup if not isinstance(one, _DEFINES) for name in bound(one)}
        found = []
        for node in reversed(self.setup):
            changes = not isinstance(node, (*_DEFINES, ast.AnnAssign)) and loads(node) & names
            called = loads(node) & names & self.tainted and any(isinstance(part, ast.Call) for part in ast.walk(node))
            changes = changes and (called or not (isinstance(node, ast.Assign) and bound(node)))
            modules = isinstance(node, ast.Expr) and not loads(node) & variables  # such as random.seed(0)
            modules |= prints and self.needs(node)
            if bound(node) & names or changes or modules:
                found.append(node)
                names |= loads(node)
        lacking = names & self.missing
        require(
            not lacking, f"an assertion needs {', '.join(sorted(lacking))}: programs have the standard library alone"
        )
        return found[::-1]

    def items(self, node: ast.expr) -> list[Any] | None:
        """Return the values that a loop over this runs through, if they are literals; None otherwise."""
        value = literal(node, self.literals)
        if value is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            inner = [items for one in node.args if (items := self.items(one)) is not None]
            if node.func.id == "zip" and len(inner) == len(node.args):
                value = (list(zip(*inner, strict=False)),)
            elif node.func.id == "range":
                with contextlib.suppress(TypeError, ValueError):
                    limits = [literal(one, self.literals)[0] for one in node.args]
                    value = (range(*limits)[: _MOST_UNROLLED + 1],)
            elif node.func.id == "enumerate" and len(inner) == len(node.args) == 1:
                value = (list(enumerate(inner[0])),)
        if value is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            of = literal(node.func.value, self.literals) if node.func.attr == "items" else None
            value = (list(of[0].items()),) if of and isinstance(of[0], dict) else None
        items = None if value is None else value[0]
        return list(items) if isinstance(items, (list, tuple, range)) and len(items) <= _MOST_UNROLLED else None


def _block(scope: _Scope, body: list[ast.stmt]) -> list[Asserted]:
    """Return the assertions of a block; its other statements join the setup."""
    found: list[Asserted] = []
    for node in body:
        asserts = _asserts(node) or "assertion" in loads(node)
        unrolled = _unrolled(scope, node) if asserts and isinstance(node, ast.For) else None
        if isinstance(node, ast.Assert):
            found.append(_split(scope, node))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found += _function(scope.inner(), node, [])
        elif unrolled is not None:
            found += unrolled
        elif _asserts(node) and not isinstance(node, _DEFINES):
            found.append(_opaque(scope, node))
        else:
            kept, missing = available(node)
            scope.missing |= missing
            for one in kept:
                scope.add(one)
    return found


def _function(scope: _Scope, node: ast.FunctionDef, first: list[ast.stmt]) -> list[Asserted]:
    """Return the assertions of a function's body after ``first``; all of it is one opaque assertion unless it is a
    plain block.
    """
    bound_all = len(first) == len(node.args.args)
    if bound_all and all(isinstance(one, (*_PLAIN, ast.Assert, ast.For, ast.FunctionDef)) for one in node.body):
        for one in first:
            scope.add(one)
        return _block(scope, node.body)
    arguments = ", ".join(ast.unparse(one.value) for one in first if isinstance(one, ast.Assign))
    scope.setup.append(node)
    return [_opaque(scope, ast.parse(f"{node.name}({arguments})").body[0])]


def _split(scope: _Scope, node: ast.Assert) -> Asserted:
    """Return one assertion, split if possible."""
    test = _Folded(scope.literals).visit(copy.deepcopy(node.test))
    certain = _certain(scope, test)
    found, computed = _form(scope, test, node, scope.is_program)
    larger, more = _form(scope, test, node, lambda one: scope.needs(one) and computable(scope, one, certain), True)
    if not larger.opaque:
        found = larger if found.opaque else dataclasses.replace(found, larger=larger if larger != found else None)
    _repeat(scope, more or computed)
    return found


def _certain(scope: _Scope, test: ast.expr) -> bool:
    """Whether an assertion is an equation with a value that nobody guesses, or compares values of the program alone."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    apart = [side for side in (test.left, test.comparators[0]) if not scope.needs(side)]
    value = literal(apart[0], scope.literals) if apart else None
    guessed = value is not None and (not value[0] or value[0] == 1)
    return not apart or (isinstance(test.ops[0], ast.Eq) and not guessed)


def _form(
    scope: _Scope, test: ast.expr, node: ast.Assert, takes: Callable[[ast.expr], bool], largest: bool = False
) -> tuple[Asserted, list[ast.expr]]:
    """Return an assertion of which the program computes what ``takes`` takes, and these expressions."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for computed, expected in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            value = literal(expected, scope.literals)
            if value is not None and takes(computed):
                return _asserted(scope, "equal", [computed], value[0], node, largest), [computed]
    turned = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    truth: Any = test.operand if turned else test
    if takes(truth):
        computed = ast.Call(ast.Name("bool", ast.Load()), [truth], []) if largest else truth
        return _asserted(scope, "truth", [computed], not turned, node, largest), [truth]
    taken = _Taken(scope, takes, largest)
    rest = copy.deepcopy(taken.visit(copy.deepcopy(test)))  # what is known of the names of nodes is kept by node
    if taken.hidden or not taken.expressions:
        return _opaque(scope, node), taken.expressions
    return _asserted(scope, "judged", taken.expressions, rest, node, largest), taken.expressions


def _asserted(
    scope: _Scope, judge: Any, computed: list[ast.expr], expected: Any, node: ast.stmt, largest: bool = False
) -> Asserted:
    """Return an assertion about computed expressions; opaque if what they need compares something itself."""
    setup = scope.needed(computed)
    bare = any(isinstance(one, ast.Name) and scope.is_object(one) and one.id not in scope.tainted for one in computed)
    own = [one for one in setup if not isinstance(one, _DEFINES)] + ([] if largest else computed)
    mixed = {name for one in setup if _mixes(scope, one) for name in bound(one)}
    shared = any(sum(name in loads(one) for one in computed) > 1 for name in mixed)
    if bare or shared or any(map(decides, own)):
        return _opaque(scope, node)
    apart = ""
    if judge == "judged":
        apart = _text([one for one in scope.needed([expected]) if not scope.needs(one)])
        expected = ast.unparse(expected)
    before = [ast.Expr(one) for one in computed for _ in range(scope.asked.count(ast.unparse(one)))]
    whole = _text([*scope.needed([node]), node])
    return Asserted(_text([*setup, *before]), tuple(map(ast.unparse, computed)), judge, expected, apart, None, whole)


def _repeat(scope: _Scope, computed: list[ast.expr]) -> None:
    """Let the assertions that follow repeat what was computed for one, where that may change what they see."""
    changing = scope.objects | scope.tainted | {name for name, value in scope.literals.items() if _changes(value)}
    for one in computed:
        if not (scope.prints or loads(one) & changing):
            scope.asked.append(ast.unparse(one))
        elif not decides(one):
            scope.add(ast.Expr(one))


def _opaque(scope: _Scope, node: ast.stmt) -> Asserted:
    """Return a statement as an assertion that the program's process judges."""
    return Asserted(_text([*scope.needed([node]), node]), (), "opaque")


def _unrolled(scope: _Scope, loop: ast.For) -> list[Asserted] | None:
    """Return the assertions of a loop over literals; None if it is another."""
    values = scope.items(loop.iter)
    if values is None or loop.orelse or not all(isinstance(one, (*_PLAIN, ast.Assert, ast.For)) for one in loop.body):
        return None
    found: list[Asserted] = []
    for value in values:
        inner = scope.inner()
        if not inner.bind(loop.target, value):
            return None
        for node in loop.body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "assertion" and len(call.args) >= 2:
                expected = literal(call.args[1], inner.literals)
                if expected is None or not inner.is_program(call.args[0]):
                    return None
                found.append(_asserted(inner, "close", [call.args[0]], expected[0], node))
                _repeat(inner, [call.args[0]])
            else:
                found += _block(inner, [node])
        state = (scope.tainted - scope.objects) | scope.instances
        if any(loads(node) & state and inner.needs(node) for node in inner.setup[len(scope.setup) :]):
            vars(scope).update(vars(inner))  # what it changed, the next value sees
    return found


class _Taken(ast.NodeTransformer):
    """Replaces what an expression asks of the program by ``_0``, ``_1``, ...; ``hidden`` if it asks inside a scope."""

    def __init__(self, scope: _Scope, takes: Callable[[ast.expr], bool], largest: bool):
        self.scope = scope
        self.takes = takes
        self.largest = largest
        self.expressions: list[ast.expr] = []
        self.hidden = False

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and self.takes(node):
            self.expressions.append(node)
            return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())
        if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            if isinstance(node, COMPREHENSIONS):
                node.generators[0].iter = self._members(node.generators[0].iter)
            self.hidden |= self.scope.needs(copy.deepcopy(node))
            return node
        if isinstance(node, ast.Compare) and isinstance(node.ops[-1], (ast.In, ast.NotIn)):
            node.comparators[-1] = self._members(node.comparators[-1])
        node = super().visit(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "apart_assert_allclose":
            # A tolerance relative to what the program says would be its own.
            node.args[:2] = sorted(node.args[:2], key=lambda one: not any(map(_APART.fullmatch, loads(one))))
        return node

    def _members(self, node: ast.expr) -> ast.expr:
        """Return an expression visited, the list of it where it may be an iterator."""
        if self.largest and self.takes(node):
            node = ast.Call(ast.Name("list", ast.Load()), [node], [])
        return self.visit(node)


class _Folded(ast.NodeTransformer):
    """Replaces parts of literals, ``case[0]``, by their values: the whole may hold what is expected."""

    def __init__(self, literals: dict[str, Any]):
        self.literals = literals

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if all(isinstance(one, _FOLDED) for one in ast.walk(node)) and loads(node) <= self.literals.keys():
            try:
                text = written(eval(ast.unparse(node), {"__builtins__": {}}, self.literals))
            except (LookupError, TypeError):
                return node
            return node if text is None else ast.parse(text, mode="eval").body
        return self.generic_visit(node)


def _mixes(scope: _Scope, node: ast.stmt) -> bool:
    """Whether a statement binds objects of the program together with values, which may be what is expected of them."""
    value = getattr(node, "value", None)
    parts = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return len({scope.needs(part) for part in parts}) > 1


def _changes(value: Any) -> bool:
    return isinstance(value, (list, dict, set))


def _asserts(node: ast.AST) -> bool:
    return any(isinstance(one, (ast.Assert, ast.With, ast.Try)) for one in ast.walk(node))


def _text(body: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))
