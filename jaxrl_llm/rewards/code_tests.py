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
from typing import Any, Literal

from jaxrl_llm.errors import InputError, require


@dataclasses.dataclass(frozen=True)
class AssertTest:
    """An assertion about what a program computes.

    Attributes:
      expressions: computed in the program's process.
      judge: ``equal`` and ``close`` compare with ``expected``; ``truth``; ``judged`` evaluates an expression over
        ``_0``, ``_1``, ... without the program; ``opaque``: the program's process judges, which it could deceive.
      expected: a value, or that expression.
      larger: the assertion with more computed by the program, such as ``list(f(3))`` for ``f(3)``; None without more.
      source: the setup and the statement itself.
    """

    setup: str
    expressions: tuple[str, ...]
    judge: Literal["equal", "close", "truth", "judged", "opaque"]
    expected: Any = None
    judge_setup: str = ""
    larger: "AssertTest | None" = None
    source: str = ""

    @property
    def opaque(self) -> bool:
        """Whether the program's own process judges."""
        return self.judge == "opaque"


_SOLUTION = ("solution", "main", "candidate", "your_module")
"""Modules from which tests import the program's names."""
_CONSTRUCTORS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "float": float}
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
def reads(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement or expression reads."""
    names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
    return frozenset(name.id for name in names if isinstance(name.ctx, ast.Load))


@functools.lru_cache(maxsize=1 << 14)
def binds(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement or expression binds, arguments of its functions among them."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    defines = isinstance(node, (ast.FunctionDef, ast.ClassDef))
    names = {node.name} if defines else set()
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store if defines else (ast.Store, ast.Del)):
            names.add(child.id)
    return frozenset(names)


def literal(node: ast.expr, names: dict[str, Any]) -> tuple[Any] | None:
    """Return the value of a literal, or of a name of one, in a tuple; None for other expressions."""
    if isinstance(node, ast.Name) and node.id in names:
        return (names[node.id],)
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) < 2:
            inner = [literal(part, names) for part in node.args]
            if node.func.id not in _CONSTRUCTORS or None in inner:
                return None
            return (_CONSTRUCTORS[node.func.id](*(part[0] for part in inner)),)
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def literal_text(value: Any) -> str | None:
    """Return the text of a literal; None for one that has none, such as an infinite number."""
    text = repr(value)
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def assigned_values(target: ast.expr, value: Any) -> dict[str, Any] | None:
    """Return the values that an assignment gives to its names; None if it binds something else."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, (list, tuple)):
        return None
    inner = [assigned_values(child, part) for child, part in zip(target.elts, value, strict=False)]
    if len(target.elts) != len(value) or None in inner:
        return None
    return {name: part for child in inner for name, part in (child or {}).items()}


def available_statements(node: ast.stmt) -> tuple[list[ast.stmt], frozenset[str]]:
    """Return the statements in place of a test file's one, and the names of packages that programs do not have."""
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        if module in _SOLUTION:
            renamed = [alias for alias in node.names if alias.asname]
            return [ast.parse(f"{alias.asname} = {alias.name}").body[0] for alias in renamed], frozenset()
        return ([node], frozenset()) if module in sys.stdlib_module_names else ([], binds(node))
    if isinstance(node, ast.Import):
        names = [alias.name.partition(".")[0] for alias in node.names]
        standard = [alias for alias, name in zip(node.names, names, strict=True) if name in sys.stdlib_module_names]
        shim = ast.parse(_PYTEST).body if "pytest" in names else []
        missing = binds(node) - binds(ast.Import(standard)) - {"pytest", *_SOLUTION}
        return ([ast.Import(standard)] if standard else []) + shim, missing
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    guard = isinstance(node, ast.If) and "__name__" in reads(node.test)
    return ([] if documents or guard else [node]), frozenset()


_ASSERT_METHODS = {
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
_SETUP_METHODS = "setUpClass", "setup_class", "setUp", "setup_method"
_CAPTURES = {"capsys", "capfd"}


def plain_assertions(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a module's statements with tests of unittest and numpy as assertions; others are returned as they are."""
    text = ast.unparse(ast.Module(body, []))
    if not re.search(r"TestCase|\.testing|pytest|class Test|capsys", text):
        return body
    statements = [_unparametrized(child) for node in body for child in _without_test_class(node)]
    used_names = {child.id for node in statements for child in ast.walk(node) if isinstance(child, ast.Name)}
    imports = (ast.Import, ast.ImportFrom)
    return [node for node in statements if not isinstance(node, imports) or binds(node) & used_names]


def _unparametrized(node: ast.stmt) -> ast.stmt:
    """Return a test of pytest's with its cases as loops, and what captures its output as a variable."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return node
    arguments = {arg.arg for arg in node.args.args}
    body = [f"{name} = CaptureFixture()" for name in arguments & _CAPTURES] + [*map(ast.unparse, node.body)]
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            parameters = dict(zip(("argnames", "argvalues"), call.args, strict=False))
            parameters |= {str(arg.arg): arg.value for arg in call.keywords}
            argnames = literal(parameters.get("argnames", call), {})
            fits = argnames is not None and len(parameters) > 1
            require(fits, f"{ast.unparse(call)!r:.60} has no plain form: write a loop")
            (names,) = argnames or ("",)
            names = names.strip(", ") if isinstance(names, str) else "".join(f"{name}, " for name in names)
            body = [f"for {names} in {ast.unparse(parameters['argvalues'])}:", textwrap.indent("\n".join(body), "    ")]
            arguments -= {*re.split(r"\W+", names)}
    text = textwrap.indent("\n".join(body), "    ")
    return ast.parse(f"def {node.name}({', '.join(arguments - _CAPTURES)}):\n{text}").body[0]


def _without_test_class(node: ast.stmt) -> Iterator[ast.stmt]:
    methods = {stmt.name: stmt for stmt in getattr(node, "body", []) if isinstance(stmt, ast.FunctionDef)}
    tests = any(name.startswith("test") for name in methods)
    if isinstance(node, ast.ClassDef) and (tests or any(ast.unparse(base).endswith("TestCase") for base in node.bases)):
        setup = [stmt for name in _SETUP_METHODS for stmt in getattr(methods.get(name), "body", [])]
        for name, method in methods.items():
            if name.startswith("test"):
                arguments = ast.arguments([], method.args.args[1:], None, [], [], None, [])
                test = ast.FunctionDef(name, arguments, [*setup, *method.body], method.decorator_list)
                test = ast.parse(ast.unparse(ast.fix_missing_locations(test))).body[0]  # its own copy of what is before
                yield ast.fix_missing_locations(_PlainAssertions().visit(test))
            elif name not in _SETUP_METHODS and not name.lower().startswith("teardown"):
                raise InputError(f"the test class {node.name} has a method {name}: move it out of the class")
    elif not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
        yield ast.fix_missing_locations(_PlainAssertions().visit(node))


class _PlainAssertions(ast.NodeTransformer):
    """Turns calls of assertions into statements, and attributes of ``self`` into names."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        self.generic_visit(node)
        call: Any = node.value
        function = call.func if isinstance(call, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", ""))
        if not name.startswith("assert"):
            return node
        arguments = [f"({ast.unparse(arg)})" for arg in call.args]
        if "lmost" in name or name == "assert_allclose":  # functions of code_judge
            call.func = ast.Name(f"apart_{name.replace('Not', '')}", ast.Load())
            return ast.parse(f"assert {'not ' * ('Not' in name)}{ast.unparse(call)}").body[0]
        places = [int(place) for place in re.findall(r"\{(\d)\}", _ASSERT_METHODS.get(name, ""))]
        fits = bool(places) and len(arguments) > max(places)
        require(fits, f"the test {ast.unparse(node)!r:.60} has no plain form: write it as an assert")
        return ast.parse(f"assert {_ASSERT_METHODS[name].format(*arguments)}").body[0]

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
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and "assert" not in node.attr
        return ast.Name(f"own_{node.attr}", node.ctx) if of_self else self.generic_visit(node)


_MOST_UNROLLED = 2000
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.Pass, ast.Delete)
_DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_BUILT_IN = frozenset(dir(builtins))
_APART = re.compile(r"_\d+|apart_\w+")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_METHODS = frozenset().union(
    *map(dir, (str, bytes, list, dict, set, int, float, complex, Fraction, Decimal, datetime, timedelta, deque, range))
)
_FORMS = frozenset(
    """
    abs all any bool bytes bytearray callable complex dict enumerate filter float frozenset getattr hasattr hash int
    isinstance issubclass iter len list map max min next range repr reversed round set sorted str sum tuple type vars
    zip islice chain from_iterable starmap reduce Counter OrderedDict deque deepcopy copy asdict astuple floor ceil sqrt
    isgenerator isgeneratorfunction iscoroutinefunction isclass isfunction run
    """.split()
)
"""Functions that tell what a value is, by which no answer can be given away."""


def computable(scope: Any, node: ast.AST, certain: bool) -> bool:
    """Whether the program's process may compute an expression of a test: ``list(f(3))``, ``n.left.value``.

    A value that is no data cannot leave that process, but what the test makes of it can. The program could lie about
    each step, so the expression may hold nothing that is expected: ``f(2) - 4`` and ``f(2).startswith("ab")`` are
    refused, since an object whose subtraction returns 0 would be the answer. ``scope``: the names before it.
    ``certain``: its value is compared with one that cannot be guessed; then functions of the test, and operators of the
    program's objects with constants, may be in it.
    """
    if not scope.needs(node):  # it holds no values of the test
        imports = [stmt for stmt in scope.setup if isinstance(stmt, (ast.Import, ast.ImportFrom))]
        standard = reads(node) - binds(node) <= frozenset(dir(builtins)).union(*map(binds, imports))
        return standard and not (_holds_values(node) or _computes(node))
    ours = partial(computable, scope, certain=certain)
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    match node:
        case ast.Name():
            return True
        case ast.Subscript() | ast.Slice() | ast.JoinedStr():
            return all(ours(child) for child in parts if reads(child))
        case ast.BinOp():
            with_constants = certain and scope.is_instance(node) and not compares(node)
            return all(ours(child) for child in parts if scope.needs(child) or not with_constants)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return all(scope.needs(child) and ours(child) for child in parts)
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return scope.is_instance(parts[1]) and ours(parts[1]) and not compares(parts[0])
        case ast.Call():
            return _computable_call(scope, node, certain)
    if isinstance(node, COMPREHENSIONS):
        inner = scope.inner()
        inner.tainted |= binds(node)
        has_subscripts = any(isinstance(part, ast.Subscript) for part in ast.walk(node))
        inputs = [] if has_subscripts else [child for child in node.generators if isinstance(child.target, ast.Name)]
        loops = [child.iter for child in node.generators if child not in inputs or scope.items(child.iter) is None]
        parts += [child for loop in node.generators for child in loop.ifs]
        return not any(map(_computes, parts)) and all(computable(inner, child, certain) for child in loops + parts)
    through = (ast.Attribute, ast.Starred, ast.FormattedValue, ast.UnaryOp, ast.List, ast.Tuple, ast.Set)
    return isinstance(node, through) and not isinstance(getattr(node, "op", None), ast.Not) and all(map(ours, parts))


def compares(node: ast.AST) -> bool:
    """Whether a statement or expression compares something itself."""
    return any(isinstance(part, (ast.Compare, ast.BoolOp, ast.Not, ast.IfExp, ast.Assert)) for part in ast.walk(node))


def _computes(node: ast.AST) -> bool:
    return compares(node) or any(isinstance(part, ast.BinOp) for part in ast.walk(node))


def _holds_values(node: ast.AST) -> bool:
    """Whether a part of the test holds values, but for the least."""
    values = {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return not values <= {"None", "True", "False", "0", "1", ""}


def _computable_call(scope: Any, node: ast.Call, certain: bool) -> bool:
    arguments = [*node.args, *(arg.value for arg in node.keywords)]
    function: Any = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if scope.calls(node):
        return not compares(node)
    if isinstance(function, ast.Attribute) and scope.needs(function.value):
        harmless = not arguments or name not in _METHODS
        return harmless and not any(map(compares, arguments)) and computable(scope, function.value, certain)
    inspects = name in _FORMS or (name == "join" and isinstance(function.value, ast.Constant))
    calls_program = any(isinstance(arg, ast.Name) and scope.is_object(arg) for arg in arguments)
    calls_program |= name in ("map", "filter", "starmap", "reduce") and scope.needs(arguments[0])
    if inspects and calls_program and not compares(node):
        return True  # what else is given is given to the program
    helpers = [stmt for stmt in scope.setup if isinstance(stmt, ast.FunctionDef) and stmt.name == name]
    helps = certain and helpers and not _holds_values(helpers[-1]) and not reads(helpers[-1]) & scope.literals.keys()
    takes_constants = name in ("range", "islice", "round", "next", "getattr", "hasattr")
    operands = [arg for arg in arguments if not (takes_constants and isinstance(arg, ast.Constant))]
    return bool(inspects or helps) and all(computable(scope, arg, certain) for arg in operands)


@functools.lru_cache(maxsize=1024)
def split_asserts(text: str, entry: str = "") -> list[AssertTest]:
    """Return the assertions of a Python text, in order; ``entry`` is the function that ``check(candidate)`` checks."""
    try:
        body = plain_assertions(ast.parse(text).body)
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"the assertions {text!r:.60} are not Python ({error}): correct them") from None
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args]
    entries = [name for name in map(_check_argument, body) if name] or ([entry] if entry else [])
    require(not checks or bool(entries), 'check(candidate) is never called: give {"test": text, "entry_point": name}')
    scope = _Scope()
    assertions = _block_assertions(scope, [node for node in body if node not in checks and not _check_argument(node)])
    for name in entries:
        for check in checks:
            first = ast.parse(f"{check.args.args[0].arg} = {name}").body[0]
            assertions += _function_assertions(scope.inner(), check, [first])
    return assertions


def _check_argument(node: ast.stmt) -> str:
    """Return the name in a statement ``check(name)``; empty for other statements."""
    call = node.value if isinstance(node, ast.Expr) else None
    fits = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    return ast.unparse(call.args[0]) if fits and len(call.args) == 1 else ""


@dataclasses.dataclass
class _Scope:
    """The statements so far (``setup``), and what is known of names. ``tainted``: those whose values depend on the
    program; of them ``objects`` are its functions or objects, ``instances`` instances of its classes. ``literals``:
    values of names of literals. ``missing``: names of packages that programs do not have. ``computed``: texts of the
    expressions that earlier assertions computed.
    """

    setup: list[ast.stmt] = dataclasses.field(default_factory=list)
    tainted: set[str] = dataclasses.field(default_factory=set)
    objects: set[str] = dataclasses.field(default_factory=set)
    instances: set[str] = dataclasses.field(default_factory=set)
    literals: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: set[str] = dataclasses.field(default_factory=set)
    computed: list[str] = dataclasses.field(default_factory=list)

    def inner(self) -> "_Scope":
        """Return a copy, for a block of its own."""
        return _Scope(*(copy.copy(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def add(self, node: ast.stmt) -> None:
        """Add a statement to the setup."""
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        value = None
        if isinstance(node, ast.Assign):
            value = literal(_FoldLiterals(self.literals).visit(copy.deepcopy(node.value)), self.literals)
        if value is not None and target is not None and self.bind(target, value[0]):
            return
        names = set() if isinstance(node, ast.Expr) else set(binds(node))
        self.instances -= names
        if not isinstance(node, _DEFINES) and self.needs(node):
            # A call may change its arguments: all variables that such a statement names depend on the program.
            names |= {name for name in reads(node) if name in self.literals or name in self.tainted}
            self.tainted |= names
            if isinstance(node, ast.Assign) and self.is_object(node.value):
                self.objects |= binds(node)
            if isinstance(node, ast.Assign) and self.is_instance(node.value):
                self.instances |= binds(node)
        for name in names | (reads(node) if isinstance(node, (ast.Expr, ast.AugAssign)) else frozenset()):
            self.literals.pop(name, None)
        self.setup.append(node)

    def bind(self, target: ast.expr, value: Any) -> bool:
        """Bind a target's names to parts of a literal, each by a statement; return False if some cannot be written."""
        parts = assigned_values(target, value)
        texts = {name: literal_text(part) for name, part in (parts or {}).items()}
        if not parts or None in texts.values():
            return False
        for name, part in parts.items():
            self.literals[name] = part
            self.tainted.discard(name)
            self.setup.append(ast.parse(f"{name} = {texts[name]}").body[0])
        return True

    @property
    def prints(self) -> bool:
        """Whether what the program prints is looked at."""
        return any("CaptureFixture" in reads(node) for node in self.setup)

    def needs(self, node: ast.AST) -> bool:
        """Whether it names something of the program."""
        names = {name for name in reads(node) if not _APART.fullmatch(name)}
        names -= binds(node) if isinstance(node, ast.expr) else set()
        unbound = names - _BUILT_IN - binds(node) - self.missing
        return bool(names & self.tainted or unbound.difference(*map(binds, self.setup)))

    def is_program(self, node: ast.AST) -> bool:
        """Whether an expression is a value from the program: a call, an operation of instances, or tainted."""
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
        constructor = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
        return constructor and self.is_object(node.func)

    def needed(self, nodes: list[Any]) -> list[ast.stmt]:
        """Return the statements of the setup that these need, by the names that they bind or may change."""
        names = {name for stmt in nodes for name in reads(stmt)}
        prints = self.prints
        variables = {name for stmt in self.setup if not isinstance(stmt, _DEFINES) for name in binds(stmt)}
        statements = []
        for node in reversed(self.setup):
            changes = not isinstance(node, (*_DEFINES, ast.AnnAssign)) and reads(node) & names
            calls = reads(node) & names & self.tainted and any(isinstance(part, ast.Call) for part in ast.walk(node))
            changes = changes and (calls or not (isinstance(node, ast.Assign) and binds(node)))
            modules = isinstance(node, ast.Expr) and not reads(node) & variables  # such as random.seed(0)
            modules |= prints and self.needs(node)
            if binds(node) & names or changes or modules:
                statements.append(node)
                names |= reads(node)
        missing = names & self.missing
        require(
            not missing, f"an assertion needs {', '.join(sorted(missing))}: programs have the standard library alone"
        )
        return statements[::-1]

    def items(self, node: ast.expr) -> list[Any] | None:
        """Return the values that a loop over this runs through, if they are literals; None otherwise."""
        value = literal(node, self.literals)
        if value is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            inner = [items for arg in node.args if (items := self.items(arg)) is not None]
            if node.func.id == "zip" and len(inner) == len(node.args):
                value = (list(zip(*inner, strict=False)),)
            elif node.func.id == "range":
                with contextlib.suppress(TypeError, ValueError):
                    limits = [literal(arg, self.literals)[0] for arg in node.args]
                    value = (range(*limits)[: _MOST_UNROLLED + 1],)
            elif node.func.id == "enumerate" and len(inner) == len(node.args) == 1:
                value = (list(enumerate(inner[0])),)
        if value is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            mapping = literal(node.func.value, self.literals) if node.func.attr == "items" else None
            value = (list(mapping[0].items()),) if mapping and isinstance(mapping[0], dict) else None
        items = None if value is None else value[0]
        return list(items) if isinstance(items, (list, tuple, range)) and len(items) <= _MOST_UNROLLED else None


def _block_assertions(scope: _Scope, body: list[ast.stmt]) -> list[AssertTest]:
    """Return the assertions of a block; its other statements join the setup."""
    assertions: list[AssertTest] = []
    for node in body:
        asserts = _contains_assertion(node) or "assertion" in reads(node)
        unrolled = _loop_assertions(scope, node) if asserts and isinstance(node, ast.For) else None
        if isinstance(node, ast.Assert):
            assertions.append(_split_assertion(scope, node))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            assertions += _function_assertions(scope.inner(), node, [])
        elif unrolled is not None:
            assertions += unrolled
        elif _contains_assertion(node) and not isinstance(node, _DEFINES):
            assertions.append(_opaque(scope, node))
        else:
            statements, missing = available_statements(node)
            scope.missing |= missing
            for stmt in statements:
                scope.add(stmt)
    return assertions


def _function_assertions(scope: _Scope, node: ast.FunctionDef, first: list[ast.stmt]) -> list[AssertTest]:
    """Return the assertions of a function's body after ``first``: one opaque one unless the body is a plain block."""
    bound_all = len(first) == len(node.args.args)
    plain = (*_SIMPLE, ast.Assert, ast.For, ast.FunctionDef)
    if bound_all and all(isinstance(stmt, plain) for stmt in node.body):
        for stmt in first:
            scope.add(stmt)
        return _block_assertions(scope, node.body)
    arguments = ", ".join(ast.unparse(stmt.value) for stmt in first if isinstance(stmt, ast.Assign))
    scope.setup.append(node)
    return [_opaque(scope, ast.parse(f"{node.name}({arguments})").body[0])]


def _split_assertion(scope: _Scope, node: ast.Assert) -> AssertTest:
    """Return one assertion, split if possible."""
    test = _FoldLiterals(scope.literals).visit(copy.deepcopy(node.test))
    certain = _is_certain(scope, test)
    assertion, computed = _form(scope, test, node, scope.is_program)
    takes = lambda part: scope.needs(part) and computable(scope, part, certain)  # noqa: E731
    larger, more_computed = _form(scope, test, node, takes, True)
    if not larger.opaque:
        differs = larger != assertion
        assertion = larger if assertion.opaque else dataclasses.replace(assertion, larger=larger if differs else None)
    _repeat(scope, more_computed or computed)
    return assertion


def _is_certain(scope: _Scope, test: ast.expr) -> bool:
    """Whether an assertion is an equation with a value that nobody guesses, or compares values of the program alone."""
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    outside = [side for side in (test.left, test.comparators[0]) if not scope.needs(side)]
    value = literal(outside[0], scope.literals) if outside else None
    guessable = value is not None and (not value[0] or value[0] == 1)
    return not outside or (isinstance(test.ops[0], ast.Eq) and not guessable)


def _form(
    scope: _Scope, test: ast.expr, node: ast.Assert, takes: Callable[[ast.expr], bool], largest: bool = False
) -> tuple[AssertTest, list[ast.expr]]:
    """Return an assertion of which the program computes what ``takes`` takes, and these expressions."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for computed, expected in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            value = literal(expected, scope.literals)
            if value is not None and takes(computed):
                return _assertion(scope, "equal", [computed], value[0], node, largest), [computed]
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    truth: Any = test.operand if negated else test
    if takes(truth):
        computed = ast.Call(ast.Name("bool", ast.Load()), [truth], []) if largest else truth
        return _assertion(scope, "truth", [computed], not negated, node, largest), [truth]
    calls = _ProgramCalls(scope, takes, largest)
    judgement = copy.deepcopy(calls.visit(copy.deepcopy(test)))  # ``reads`` and ``binds`` cache by node
    if calls.hidden or not calls.expressions:
        return _opaque(scope, node), calls.expressions
    return _assertion(scope, "judged", calls.expressions, judgement, node, largest), calls.expressions


def _assertion(
    scope: _Scope, judge: Any, computed: list[ast.expr], expected: Any, node: ast.stmt, largest: bool = False
) -> AssertTest:
    """Return an assertion about computed expressions; opaque if what they need compares something itself."""
    setup = scope.needed(computed)
    bare_names = [part for part in computed if isinstance(part, ast.Name) and scope.is_object(part)]
    bare = any(name.id not in scope.tainted for name in bare_names)
    evaluated = [part for part in setup if not isinstance(part, _DEFINES)] + ([] if largest else computed)
    mixed_names = {name for part in setup if _mixes(scope, part) for name in binds(part)}
    shared = any(sum(name in reads(part) for part in computed) > 1 for name in mixed_names)
    if bare or shared or any(map(compares, evaluated)):
        return _opaque(scope, node)
    judge_setup = ""
    if judge == "judged":
        judge_setup = _unparse([part for part in scope.needed([expected]) if not scope.needs(part)])
        expected = ast.unparse(expected)
    earlier = [ast.Expr(part) for part in computed for _ in range(scope.computed.count(ast.unparse(part)))]
    setup_text, source = _unparse([*setup, *earlier]), _opaque(scope, node).setup
    return AssertTest(setup_text, tuple(map(ast.unparse, computed)), judge, expected, judge_setup, None, source)


def _repeat(scope: _Scope, computed: list[ast.expr]) -> None:
    """Let the assertions that follow repeat what was computed for one, where that may change what they see."""
    mutable = {name for name, value in scope.literals.items() if isinstance(value, (list, dict, set))}
    changing = scope.objects | scope.tainted | mutable
    for expression in computed:
        if not (scope.prints or reads(expression) & changing):
            scope.computed.append(ast.unparse(expression))
        elif not compares(expression):
            scope.add(ast.Expr(expression))


def _opaque(scope: _Scope, node: ast.stmt) -> AssertTest:
    """Return a statement as an assertion that the program's process judges."""
    return AssertTest(_unparse([*scope.needed([node]), node]), (), "opaque")


def _loop_assertions(scope: _Scope, loop: ast.For) -> list[AssertTest] | None:
    """Return the assertions of a loop over literals; None if it is another."""
    values = scope.items(loop.iter)
    plain = (*_SIMPLE, ast.Assert, ast.For)
    if values is None or loop.orelse or not all(isinstance(stmt, plain) for stmt in loop.body):
        return None
    assertions: list[AssertTest] = []
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
                assertions.append(_assertion(inner, "close", [call.args[0]], expected[0], node))
                _repeat(inner, [call.args[0]])
            else:
                assertions += _block_assertions(inner, [node])
        state = (scope.tainted - scope.objects) | scope.instances
        if any(reads(node) & state and inner.needs(node) for node in inner.setup[len(scope.setup) :]):
            vars(scope).update(vars(inner))  # what it changed, the next value sees
    return assertions


class _ProgramCalls(ast.NodeTransformer):
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
            node.args[:2] = sorted(node.args[:2], key=lambda side: not any(map(_APART.fullmatch, reads(side))))
        return node

    def _members(self, node: ast.expr) -> ast.expr:
        """Return an expression visited, the list of it where it may be an iterator."""
        if self.largest and self.takes(node):
            node = ast.Call(ast.Name("list", ast.Load()), [node], [])
        return self.visit(node)


class _FoldLiterals(ast.NodeTransformer):
    """Replaces parts of literals, ``case[0]``, by their values: the whole may hold what is expected."""

    def __init__(self, literals: dict[str, Any]):
        self.literals = literals

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        plain = (ast.Subscript, ast.Name, ast.Constant, ast.Slice, ast.UnaryOp, ast.USub, ast.Load)
        if all(isinstance(child, plain) for child in ast.walk(node)) and reads(node) <= self.literals.keys():
            try:
                text = literal_text(eval(ast.unparse(node), {"__builtins__": {}}, self.literals))
            except (LookupError, TypeError):
                return node
            return node if text is None else ast.parse(text, mode="eval").body
        return self.generic_visit(node)


def _mixes(scope: _Scope, node: ast.stmt) -> bool:
    """Whether a statement binds objects of the program together with values, which may be what is expected of them."""
    value = getattr(node, "value", None)
    parts = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return len({scope.needs(part) for part in parts}) > 1


def _contains_assertion(node: ast.AST) -> bool:
    return any(isinstance(child, (ast.Assert, ast.With, ast.Try)) for child in ast.walk(node))


def _unparse(body: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))
