"""Tests in the words of unittest, numpy and pytest as plain assertions, which are split like all others.

``self.assertEqual(f(2), 4)`` and ``np.testing.assert_equal(f(2), 4)`` become ``assert f(2) == 4``. Each test of a
class has the statements of its ``setUp`` before it, and ``self.x`` becomes a name. The cases of ``parametrize`` become
a loop, and ``capsys`` an object of the program's process. What has no plain form, such as ``assertRaises``, is refused,
since nobody would notice if it were left out.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards.code_names import literal

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
_PLACE = re.compile(r"\{(\d)\}")


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
