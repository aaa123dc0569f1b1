"""Tests in the words of unittest, numpy and pytest as plain assertions, which are split like all others.

``self.assertEqual(f(2), 4)`` and ``np.testing.assert_equal(f(2), 4)`` become ``assert f(2) == 4``. Each test of a
class has the statements of its ``setUp`` before it, and ``self.x`` becomes a name. The cases of ``parametrize`` become
a loop, a fixture the statements of its function, and ``capsys`` an object of the program's process. What has no plain
form, such as ``assertRaises``, is refused, since nobody would notice if it were left out.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError, require

PLAIN = {
    "assertEqual": "{0} == {1}", "assertNotEqual": "{0} != {1}", "assertTrue": "{0}", "assertFalse": "not {0}",
    "assertIs": "{0} is {1}", "assertIsNot": "{0} is not {1}", "assertIsNone": "{0} is None",
    "assertIsNotNone": "{0} is not None", "assertIn": "{0} in {1}", "assertNotIn": "{0} not in {1}",
    "assertIsInstance": "isinstance({0}, {1})", "assertGreater": "{0} > {1}", "assertGreaterEqual": "{0} >= {1}",
    "assertLess": "{0} < {1}", "assertLessEqual": "{0} <= {1}", "assertListEqual": "{0} == {1}",
    "assertTupleEqual": "{0} == {1}", "assertSetEqual": "{0} == {1}", "assertDictEqual": "{0} == {1}",
    "assertSequenceEqual": "list({0}) == list({1})", "assertMultiLineEqual": "{0} == {1}",
    "assertCountEqual": "sorted({0}) == sorted({1})", "assertAlmostEqual": "apart_almost({0}, {1}, {2})",
    "assertNotAlmostEqual": "not apart_almost({0}, {1}, {2})", "assertEquals": "{0} == {1}",
    "assert_equal": "{0} == {1}", "assert_array_equal": "list({0}) == list({1})",
    "assert_almost_equal": "apart_close({0}, {1}, 0, {2})",
    "assert_array_almost_equal": "apart_close({0}, {1}, 0, {2})", "assert_allclose": "apart_close({0}, {1}, {2}, {3})",
}  # fmt: skip
"""Assertions with the names of methods and functions, over their arguments."""
_BEFORE = "setUpClass", "setup_class", "setUp", "setup_method"
_CAPTURES = "capsys", "capfd"
_PLACE = re.compile(r"\{(\d)\}")


def plain(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a module's statements with tests of unittest and numpy as assertions; others are returned as they are.

    Raises:
      InputError: a test has no plain form.
    """
    text = ast.unparse(ast.Module(body, []))
    if not re.search(r"TestCase|\.testing|pytest|class Test|capsys", text):
        return body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    fixtures = {node.name: node for node in functions if "fixture" in " ".join(map(ast.unparse, node.decorator_list))}
    body = [node for node in body if node not in fixtures.values()]
    found = [_cased(one, fixtures) for node in body for one in _statements(node)]
    kept = {one.id for node in found for one in ast.walk(node) if isinstance(one, ast.Name)}
    return [node for node in found if not isinstance(node, ast.Import | ast.ImportFrom) or _names(node) & kept]


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _cased(node: ast.stmt, fixtures: Mapping[str, ast.FunctionDef]) -> ast.stmt:
    """Return a test of pytest's with its cases as loops, and the values of its fixtures before it."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return node
    wanted = [one.arg for one in node.args.args]
    body = "\n".join(map(ast.unparse, [*_values(wanted, fixtures), *node.body]))
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            given = dict(zip(("argnames", "argvalues"), call.args, strict=False))
            given |= {one.arg: one.value for one in call.keywords}
            names: Any = ast.literal_eval(given["argnames"])
            names = names.strip(", ") if isinstance(names, str) else "".join(f"{name}, " for name in names)
            body = f"for {names} in {ast.unparse(given['argvalues'])}:\n{textwrap.indent(body, '    ')}"
            wanted = [one for one in wanted if one not in re.split(r"\W+", names)]
    others = ", ".join(one for one in wanted if one not in (*_CAPTURES, *fixtures))
    return ast.parse(f"def {node.name}({others}):\n{textwrap.indent(body, '    ')}").body[0]


def _values(names: Sequence[str], fixtures: Mapping[str, ast.FunctionDef]) -> Iterator[ast.stmt]:
    """Yield the statements that give fixtures their values."""
    for name in names:
        if name in _CAPTURES:
            yield ast.parse(f"{name} = CaptureFixture()").body[0]
        elif name in fixtures:
            *first, last = fixtures[name].body
            yield from _values([one.arg for one in fixtures[name].args.args], fixtures)
            yield from first
            value: Any = getattr(last, "value", None)
            value = value.value if isinstance(value, ast.Yield) else value
            yield ast.Assign([ast.Name(name, ast.Store())], value or ast.Constant(None), lineno=0)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or "TestCase" in map(_last, node.bases)):
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
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


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


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
        options = {one.arg: ast.unparse(one.value) for one in call.keywords}
        if name in ("assertAlmostEqual", "assertNotAlmostEqual"):
            places = options.get("places", given[2] if len(given) > 2 else "7")
            given = [*given[:2], options.get("delta", f"0.5 * 10 ** -{places}")]
        elif name in ("assert_almost_equal", "assert_array_almost_equal"):
            usual = "7" if name == "assert_almost_equal" else "6"
            given = [*given[:2], f"1.5 * 10 ** -{options.get('decimal', given[2] if len(given) > 2 else usual)}"]
        elif name == "assert_allclose":
            tolerances = [options.get("rtol", "1e-07"), options.get("atol", "0")]
            given = [*given, *tolerances[len(given) - 2 :]][:4]
        wanted = [int(place) for place in _PLACE.findall(PLAIN.get(name, ""))]
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
