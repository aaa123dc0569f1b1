"""Tests in unittest's and numpy's words as plain assertions, which are split like all others.

``self.assertEqual(f(2), 4)`` and ``np.testing.assert_equal(f(2), 4)`` become ``assert f(2) == 4``. Each test of a
class has the statements of its ``setUp`` before it, and ``self.x`` becomes a name. What has no plain form, such as
``assertRaises``, is refused, since nobody would notice if it were left out.
"""

import ast
import re
from collections.abc import Iterator
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
    "assertCountEqual": "sorted({0}) == sorted({1})", "assertAlmostEqual": "abs({0} - {1}) < {2}",
    "assertNotAlmostEqual": "abs({0} - {1}) >= {2}", "assertEquals": "{0} == {1}", "assert_equal": "{0} == {1}",
    "assert_array_equal": "list({0}) == list({1})", "assert_almost_equal": "abs({0} - {1}) < {2}",
    "assert_allclose": "abs({0} - {1}) <= {2} * abs({1})",
}  # fmt: skip
"""Assertions with the names of methods and functions, over their arguments."""
_PLACE = re.compile(r"\{(\d)\}")


def plain(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a module's statements with tests of unittest and numpy as assertions; others are returned as they are.

    Raises:
      InputError: a test has no plain form.
    """
    text = ast.unparse(ast.Module(body, []))
    if "TestCase" not in text and ".testing" not in text:
        return body
    found = [one for node in body for one in _statements(node)]
    kept = {one.id for node in found for one in ast.walk(node) if isinstance(one, ast.Name)}
    return [node for node in found if not isinstance(node, ast.Import | ast.ImportFrom) or _names(node) & kept]


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases):
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        before = [one for name in ("setUpClass", "setUp") for one in getattr(methods.get(name), "body", [])]
        for name, method in methods.items():
            if name.startswith("test"):
                none = ast.arguments([], [], None, [], [], None, [])
                whole = ast.fix_missing_locations(ast.FunctionDef(name, none, [*before, *method.body], []))
                whole = ast.parse(ast.unparse(whole)).body[0]  # its own copy of what is before it
                yield ast.fix_missing_locations(_Plain().visit(whole))
            elif not name.startswith(("setUp", "tearDown")):
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
        options = {one.arg: ast.unparse(one.value) for one in call.keywords}
        if name in ("assertAlmostEqual", "assertNotAlmostEqual"):
            places = options.get("places", given[2] if len(given) > 2 else "7")
            given = [*given[:2], options.get("delta", f"0.5 * 10 ** -{places}")]
        elif name == "assert_almost_equal":
            given = [*given[:2], f"1.5 * 10 ** -{options.get('decimal', given[2] if len(given) > 2 else '7')}"]
        elif name == "assert_allclose":
            given = [*given[:2], options.get("rtol", given[2] if len(given) > 2 else "1e-07")]
        wanted = [int(place) for place in _PLACE.findall(PLAIN.get(name, ""))]
        fits = bool(wanted) and len(given) > max(wanted)
        require(fits, f"the test {ast.unparse(node)!r:.60} has no plain form: write it as an assert")
        return ast.parse(f"assert {PLAIN[name].format(*given)}").body[0]

    def visit_With(self, node: ast.With) -> ast.stmt | list[ast.stmt]:
        text = ast.unparse(node.items[0].context_expr)
        require(".assert" not in text, f"the test {text!r:.60} has no plain form: write it as an assert")
        self.generic_visit(node)
        return node.body if ".subTest" in text else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and "assert" not in node.attr
        return ast.Name(f"own_{node.attr}", node.ctx) if own else self.generic_visit(node)
