"""Verdicts on programs by the tests of the public data sets' forms."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, CodeTests, Scorer
from jaxrl_llm.rewards.code import grade, parse_tests
from jaxrl_llm.types import Completion, Problem

pytestmark = pytest.mark.sandbox("landlock+seccomp")

ADDS = "print(sum(map(int, input().split())))"
PRINTED = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7.0\n"]}
FUNCTION = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."
SOLUTION = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b"
HUMAN_EVAL = """
def check(candidate):
    inputs = [[1, 2], [0.1, 0.2]]
    results = [3, 0.3]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
KODCODE = """
from solution import add
def test_numbers():
    assert add(1, 2) == 3
    expected = 7
    assert add(3, 4) == expected
def test_floats():
    assert abs(add(0.1, 0.2) - 0.3) < 1e-9
"""
SOLVED = [
    (ADDS, PRINTED, 2),
    (ADDS, json.dumps(PRINTED), 2),
    (FUNCTION, {"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7], "fn_name": "add"}, 2),
    (SOLUTION, {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, 1),
    (ADDS, [{"input": "1 2", "output": "3", "testtype": "stdin", "metadata": {}}], 1),
    (SOLUTION, [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": '{"func_name": "add"}'}], 1),
    (FUNCTION, ["assert add(1, 2) == 3", "assert 4 == add(2, 2)", "assert not add(1, -1)"], 3),
    (FUNCTION, KODCODE, 3),
    (FUNCTION, HUMAN_EVAL + "check(add)", 2),
    (FUNCTION, {"test": HUMAN_EVAL, "entry_point": "add"}, 2),
]
WRONG = ["print(4)", "def add(a, b): return a - b", "class Solution:\n    def add(self, a, b): return [a]", "", "1 / 0"]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "tests", "count"), SOLVED)
def test_a_right_program_passes_all_and_a_wrong_one_none(code, tests, count):
    assert grade(code, tests) == (1.0, ("passed",) * count, "")
    assert all(grade(wrong, tests).score == 0 for wrong in WRONG)


def test_the_score_is_the_share_of_tests_passed():
    found = grade("x = input()\nprint(3 if x == '1 2' else 1 / 0)", PRINTED)
    assert found == (0.5, ("passed", "error"), "")


def test_assertions_see_what_those_before_them_changed():
    code = "class Stack(list):\n    def push(self, x):\n        self.append(x)\n        return len(self)"
    tests = (
        "s = Stack()\nassert s.push(5) == 1\nassert s.push(6) == 2\nassert s.pop() == 6\nx = [3]\nassert len(s) == 1"
    )
    assert grade(code, tests).results == ("passed",) * 4


def test_an_opaque_assertion_counts_only_if_allowed():
    tests = "assert all(add(i, 1) == i + 1 for i in range(3))\nassert add(1, 1) == 2"
    assert grade(FUNCTION, tests) == (1.0, ("opaque", "passed"), "1 of 2 tests are opaque and not counted")
    assert grade(FUNCTION, tests, allow_opaque_asserts=True).results == ("passed", "passed")


CLASS = """
import unittest
import numpy as np
from solution import add
class TestAdd(unittest.TestCase):
    def setUp(self):
        self.base = 2
    def test_sums(self):
        self.assertEqual(add(self.base, 2), 4, "two and two")
        self.assertAlmostEqual(add(0.1, 0.2), 0.3)
        with self.subTest(x=1):
            self.assertIn(add(1, 1), [1, 2, 3])
    def test_more(self):
        self.base += 1
        self.assertTrue(add(self.base, 1) == 4)
        np.testing.assert_allclose(add(1, 2), 3.0, rtol=1e-3)
if __name__ == "__main__":
    unittest.main()
"""


def test_tests_in_the_words_of_unittest_and_numpy_are_assertions():
    assert grade(FUNCTION, CLASS) == (1.0, ("passed",) * 5, "")
    assert grade("def add(a, b):\n    return a - b - 1", CLASS).results == ("failed",) * 5
    equal = "class Liar(int):\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Liar(9)"
    assert grade(equal, CLASS).results[0] == "failed", "what is expected stays outside the program's process"
    for lost in ("with self.assertRaises(ValueError):\n            add(1)", "self.assertRegex(add(1, 2), 'x')"):
        with pytest.raises(InputError, match="has no plain form: write it as an assert"):
            grade(FUNCTION, CLASS.replace('self.assertEqual(add(self.base, 2), 4, "two and two")', lost))


def test_after_three_timeouts_the_rest_is_not_run():
    tests = {"inputs": [""] * 5, "outputs": ["1"] * 5}
    found = grade("while True: pass", tests, timeout_s=0.1)
    assert found == (0.0, ("timeout",) * 3 + ("not run",) * 2, "")


KEPT_APART = """
d = {"in": 2, "out": 777}
assert f(d["in"]) == d["out"]
x, y = 2, 777
assert f(x) == y
for case in [(1, 777), (2, 777)]:
    assert f(case[0]) == case[1], f"not {case[1]}"
for key, value in {1: 777}.items():
    assert f(key) == value
for case in [{"given": [1], "wanted": 777}]:
    given, wanted = case["given"], case["wanted"]
    assert f(*given) == wanted
expected = [777]
expected.append(778)
assert f(2) == expected
def reference(x): return 777
assert f(2) == reference(2)
class Wanted:
    value = 777
assert f(2) == Wanted.value
assert f(2).__eq__(777)
assert (f(2) == 777) is True
assert [f(2), f(3)] == [777, 778] or f(4) != 777
result = f(2)
assert result == 777 and str(result).startswith("777")
"""


def test_nothing_expected_is_in_what_the_program_s_process_gets():
    found = parse_tests(KEPT_APART)
    assert len(found) == 13
    for test in found:
        assert not test.opaque and "77" not in test.setup + "".join(test.expressions), test


def test_what_compares_in_variables_is_opaque():
    assert [test.opaque for test in parse_tests("right = f(2) == 777\nassert right")] == [True]


REFUSED = [
    (b"\x80\x04", "compressed pickles"),
    ("eJxVjEEOwiAQRe8ya9MwQBnq0r1naIYZkKqBpLQr491tky50+/57/w0Tr0ueppamcWI4g4bT7yww31PeFXnkfM+dF3sx84OXP", "pickles"),
    (3, "no known form"),
    ([], "no known form"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ("words", "holds no test"),
    ("assert f(", "not Python"),
    ("import numpy as np\nassert np.sum(f()) == 3", "standard library alone"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], "func_name"),
    (HUMAN_EVAL, "entry_point"),
]


@pytest.mark.parametrize(("tests", "reason"), REFUSED)
def test_tests_of_no_known_form_are_refused(tests, reason):
    with pytest.raises(InputError, match=reason):
        parse_tests(tests)


def problem(tests, verifier="none"):
    return Problem(
        "1", ({"role": "user", "content": "?"},), "", "code", "whole", verifier, {"tests": tests, "row": "row 7"}
    )


def completion(text):
    tokens = np.zeros(3, np.int32)
    return Completion(tokens, np.zeros(3), "stop", np.ones(3, bool), tokens, text=text)


def test_the_reward_and_the_verifier_run_in_workers(tmp_path):
    items = [(problem(PRINTED, "code"), completion(text)) for text in (ADDS, "print(3)", "print(0)")]
    with Scorer([Accuracy(), CodeTests(all_or_nothing=False)], workers=2, folder=tmp_path) as scorer:
        assert scorer.check([items[0][0]]) == ["programs run in the sandbox, level " + level_of(tmp_path)]
        scores = scorer.score(items)
    np.testing.assert_array_equal(scores.accuracy, [1, 0, 0])
    np.testing.assert_array_equal(scores.parts["code_tests"], [1, 0.5, 0])
    assert scores.failures.errors == 0


def level_of(folder):
    return json.loads((folder / "sandbox.json").read_text())["level"]


def test_a_row_without_tests_is_refused_with_its_place():
    for tests, reason in ((None, "row 7, column tests: None"), ("assert f() == g", "opaque")):
        with Scorer([CodeTests()]) as scorer, pytest.raises(InputError, match=reason):
            scorer.check([problem(tests)])


def test_a_failure_of_the_sandbox_is_no_score():
    with Scorer([CodeTests(memory_mb=16)], workers=1, on_error=0.5) as scorer:
        lost = problem(PRINTED).metadata | {"tests": Unreadable()}
        scores = scorer.score([(Problem("1", (), "", "code", "whole", "none", lost), completion(ADDS))])
    assert math.isnan(scores.reward[0])
    assert scores.failures.of["code_tests"] == (1, 1)


class Unreadable(dict):
    """Tests that end the worker process which reads them."""

    def __init__(self):
        super().__init__(inputs=["1 2"], outputs=["3"])

    def __reduce__(self):
        return exec, ("import os; os._exit(1)",)
