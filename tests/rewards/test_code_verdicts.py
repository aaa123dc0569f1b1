"""Verdicts have three values: honest programs pass whatever type they return, liars do not, the rest is not told."""

import threading

import pytest
from rewards.test_code import problem

from jaxrl_llm.rewards import CodeTests, Scorer
from jaxrl_llm.rewards.code import extract_program, grade, is_close, parse_tests, same_value, truth
from jaxrl_llm.sandbox.program import decode_value, encode_value

pytestmark = pytest.mark.sandbox("landlock+seccomp")

GENERATOR = "def f(n):\n    yield from range(n)\n"
CLASS = """
class V:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return V(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return V(self.x * k, self.y * k)
    def __neg__(self): return V(-self.x, -self.y)
    def __eq__(self, o): return isinstance(o, V) and (self.x, self.y) == (o.x, o.y)
    def __lt__(self, o): return self.x < o.x
    def __hash__(self): return hash((self.x, self.y))
    def __str__(self): return f"V({self.x}, {self.y})"
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __bool__(self): return bool(self.x or self.y)
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __contains__(self, a): return a in (self.x, self.y)
    def __call__(self, k): return self.x * k
def f(x, y): return V(x, y)
"""
NODES = """
class Node:
    def __init__(self, value, left=None): self.value, self.left, self.right = value, left, None
    def search(self, x): return x == self.value
def build(xs):
    n = None
    for x in reversed(xs): n = Node(x, n)
    return n
"""
CLOSURES = """
def adder(n): return lambda x: x + n
def counter():
    c = 0
    def inc():
        nonlocal c
        c += 1
        return c
    return inc
def account(b):
    class Account:
        balance = b
        def withdraw(self, k):
            self.balance -= k
            return self.balance
    return Account()
"""
LIBRARY = """
import enum, collections, datetime, decimal, fractions
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def half(): return fractions.Fraction(1, 2)
def price(): return decimal.Decimal("1.10")
def day(): return datetime.date(2024, 2, 29)
def now(): return datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.timezone.utc)
def noon(): return datetime.time(12)
def wait(): return datetime.timedelta(hours=3)
def color(i): return Color(i)
def two(): return collections.deque([1, 2])
def rng(): return range(3)
def point(): return collections.namedtuple("P", "x y")(1, 2)
def mixed(): return [fractions.Fraction(1, 3), {"d": datetime.date(2020, 1, 1)}]
def raw(): return [1 + 2j, b"ab", frozenset([1, 2]), collections.Counter("aab")]
async def later(): return 4
"""
IMPORTS = "import asyncio, itertools, types\nfrom fractions import Fraction\nfrom decimal import Decimal\n" + (
    "from datetime import date, datetime, time, timedelta, timezone\nfrom collections import deque, Counter\n"
)
IDENTITY = "def f(x):\n    print('hi', x)\n    return x"
HONEST = {
    "generators": (
        GENERATOR,
        """
assert list(f(3)) == [0, 1, 2]
assert [0, 1, 2] == list(f(3))
assert sorted(f(3), reverse=True) == [2, 1, 0]
assert set(f(3)) == {0, 1, 2}
assert tuple(f(3)) == (0, 1, 2)
assert sum(f(3)) == 3 and max(f(3)) == 2
assert len(list(f(3))) == 3
assert not list(f(0))
assert next(f(3)) == 0
assert [x for x in f(3)] == list(range(3))
assert {x: x for x in f(2)} == {0: 0, 1: 1}
assert ", ".join(map(str, f(3))) == "0, 1, 2"
assert list(zip(f(2), f(3))) == [(0, 0), (1, 1)]
assert all(x >= 0 for x in f(3))
assert 2 in f(3)
assert 4 not in f(3)
assert list(itertools.islice(f(10), 2)) == [0, 1]
assert isinstance(f(3), types.GeneratorType)
g = f(5)
assert next(g) == 0
assert next(g) == 1
assert [next(g) for _ in range(2)] == [2, 3]
assert list(g) == [4]
assert next(g, None) is None""",
    ),
    "closures": (
        CLOSURES,
        """
assert adder(2)(3) == 5
g = adder(2)
assert g(3) == 5
assert callable(g)
assert list(map(adder(1), [1, 2])) == [2, 3]
c = counter()
assert c() == 1
assert c() == 2
adders = [adder(i) for i in range(3)]
assert adders[1](2) == 3
assert [a(1) for a in adders] == [1, 2, 3]
acc = account(100)
assert acc.withdraw(30) == 70
assert acc.balance == 70""",
    ),
    "nodes": (
        NODES,
        """
def to_list(n):
    out = []
    while n is not None:
        out.append(n.value)
        n = n.left
    return out
n = build([1, 2])
assert n.left is not None
assert n.left.value == 2
assert n.left.left is None
assert n and n.search(1)
assert not n.search(3)
m = n
assert m is n
assert build([1]) is not n
assert to_list(build([1, 2, 3])) == [1, 2, 3]""",
    ),
    "operators": (
        CLASS,
        """
assert str(V(1, 2)) == "V(1, 2)"
assert f"{V(1, 2) + V(3, 4)}" == "V(4, 6)"
assert (V(1, 2) * 3).y == 6
assert (-V(1, 2)).x == -1
assert abs(V(3, 4)) == 5
assert tuple(V(1, 2)) == (1, 2)
assert 1 in V(1, 2)
assert not V(0, 0)
assert bool(V(0, 0)) is False
assert V(2, 0)(3) == 6
assert hash(V(1, 2)) == hash(V(1, 2))
assert isinstance(V(1, 2) + V(1, 1), V)
assert sorted([V(2, 0), V(1, 0)])[0].x == 1
assert len({V(1, 2), V(1, 2)}) == 1
v = V(1, 2)
w = v * 2
assert (v + w).y == 6""",
    ),
    "types of the library": (
        LIBRARY,
        """
assert half() == Fraction(1, 2)
assert half() == 0.5
assert price() == Decimal("1.10")
assert day() == date(2024, 2, 29)
assert now() == datetime(2024, 2, 29, 1, 2, 3, tzinfo=timezone.utc)
assert noon() == time(12, 0)
assert wait() == timedelta(hours=3)
assert color(1) == Color.RED
assert color(1) is Color.RED
assert color(1) != Color.BLUE
assert color(1).name == "RED"
assert str(color(1)) == "Color.RED"
assert two() == deque([1, 2])
assert rng() == range(3)
assert point().x == 1
assert mixed() == [Fraction(1, 3), {"d": date(2020, 1, 1)}]
assert raw() == [1 + 2j, b"ab", frozenset({1, 2}), Counter({"a": 2, "b": 1})]
assert asyncio.run(later()) == 4""",
    ),
    "words of pytest": (
        IDENTITY,
        """
import pytest
CASES = [(3, 3)]
@pytest.mark.parametrize("x, y", [(1, 1), pytest.param(2, 2, id="two")])
def test_f(x, y):
    assert f(x) == y
@pytest.mark.parametrize("z", [1, 2])
@pytest.mark.parametrize(argnames=("x", "y"), argvalues=CASES)
def test_g(x, y, z):
    assert f(x) == y
    assert f(z) == z
class TestF:
    @pytest.mark.parametrize("x", ["a"])
    def test_f(self, x):
        assert f(x) == "a"
def test_prints(capsys):
    x = 3
    f(x)
    captured = capsys.readouterr()
    assert captured.out == "hi 3\\n"
    assert f(4) == 4
    assert capsys.readouterr().out.strip() == "hi 4"
    assert capsys.readouterr().err == "" """,
    ),
    "words of unittest and numpy": (
        IDENTITY,
        """
import unittest
import numpy as np
class T(unittest.TestCase):
    def test(self):
        self.assertAlmostEqual(f(1.0), 1.4, delta=0.5)
        self.assertAlmostEqual(f(1), 2, delta=1)
        self.assertAlmostEqual(f(float("inf")), float("inf"))
        self.assertAlmostEqual(f(1.00001), 1, 3)
        self.assertNotAlmostEqual(f(1.1), 1)
        np.testing.assert_allclose(f([1.0, 2.0]), [1.0, 2.0])
        np.testing.assert_allclose(f([1.0, 2.0]), [1.0, 2.05], atol=0.1)
        np.testing.assert_allclose(f([[1.0], [2.0]]), [[1.0], [2.1]], rtol=0.1)
        np.testing.assert_allclose(f(2.1), 4, 0.5)
        np.testing.assert_allclose(2.0, f(2.0))
        np.testing.assert_allclose(f([float("-inf"), 1.0]), [float("-inf"), 1.0])
        np.testing.assert_array_almost_equal(f([1.0]), [1.0])
        np.testing.assert_almost_equal(f(1.0), 1.0, decimal=3)""",
    ),
    "state": (
        "class S:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\nn = 0\n"
        "def tick():\n    global n\n    n += 1\n    return n",
        "s = S()\nfor i in range(3):\n    s.push(i)\nassert s.a.pop() == 2\nassert s.a.pop() == 1\n"
        "assert len(s.a) == 1\nassert tick() == 1\nassert tick() == 2",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes_whatever_it_returns(name):
    code, tests = HONEST[name]
    found = grade(code, IMPORTS + tests)
    missed = [one for one, said in zip(parse_tests(IMPORTS + tests), found.results, strict=True) if said != "passed"]
    assert found.score == 1 and not missed, (found, missed)
    wrong = "f = adder = counter = account = build = V = half = color = tick = S = lambda *given: given"
    assert grade(wrong, IMPORTS + tests).score < 0.5


LIAR = """
class L:
    def __init__(self, *given): pass
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __call__ = lambda *given: True
    __ne__ = lambda *given: False
    __hash__ = lambda self: 0
    __sub__ = __rsub__ = __mod__ = __xor__ = __rxor__ = __abs__ = __float__ = __round__ = __next__ = lambda *given: 0
    __add__ = __mul__ = __rmul__ = __neg__ = lambda self, *given: self
    __len__ = lambda self: 0
    __iter__ = lambda self: iter(())
    __getitem__ = lambda self, place: L()
    __str__ = lambda self: ""
    __class__ = property(lambda self: int)
    startswith = issubset = count = index = lambda *given: True
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return L()
f = g = lambda *given: L()
V = L
"""
LIARS = {
    "objects": LIAR,
    "built-ins": LIAR + "import builtins\nfor n in ('isinstance', 'all', 'any', 'callable', 'hasattr', 'bool'):\n"
    "    setattr(builtins, n, lambda *given: True)\nfor n in ('len', 'abs', 'sum', 'round', 'hash'):\n"
    "    setattr(builtins, n, lambda *given: 0)",
    **{name: f"f = g = V = lambda *given: float('{name}')" for name in ("inf", "-inf", "nan")},
    **{f"list of {name}": f"f = g = V = lambda *given: [float('{name}')] * 2" for name in ("inf", "nan")},
    "empty": "f = g = V = lambda *given: []",
    "endless": "def f(*given):\n    yield 0\ng = V = f",
}
KEPT = """
assert f(2) == 777
assert f(2) in (777, 778)
assert abs(f(2) - 777) < 0.1
assert abs(f(2) - 777) <= 1e-6 * abs(f(2))
assert abs(777 - f(2)) <= 1e-6 * max(1, abs(f(2)))
assert not abs(f(2) - 777) > 0.1
assert not (f(2) > 777.5 or f(2) < 776.5)
assert f(2) - 777 == 0
assert f(2).__eq__(777)
assert f(2).startswith("777")
assert str(f(2)) == "777"
assert sorted(f(2)) == [7, 77]
assert list(f(2)) == [7, 77]
assert set(f(2)).issubset({7, 77}) and f(2)[0] == 7
assert not set(f(2)) ^ {7, 77}
assert 777 in f(2)
assert f(2)[0] == 777
assert f(2).x == 777
assert f(2)(3) == 777
assert g(f(2)) == 777
assert f(2).count(777) == 1
assert math.isclose(f(2), 777, rel_tol=0.1)
assert math.isclose(777, f(2))
assert pytest.approx(f(2)) == 777
assert [777, 778] == pytest.approx(f(2))
assert f(2) == [777, g(3)]
assert (f(2), g(2)) == (777, 778)
assert V(1, 2) == (777, 2)
assert V(1, 2).x == 777
assert abs(V(2) - 777) < 0.1
assert Fraction(777, 2) == f(2)
assert Decimal("777") == f(2)
assert date(2024, 7, 7) == f(2)
assert near(f(2), 777)
assert same(f(2), [777]) == 1
assert isinstance(f(2), int) and f(2) == 777
assert operator.eq(f(2), 777)
assert any(x == 777 for x in f(2))
"""
HELP = """
def near(a, b): return abs(a - b) <= 1e-6 * abs(a)
def same(a, b): return sum(x == y for x, y in zip(a, b))
"""
WORDS = """
self.assertAlmostEqual(777, f(2))
self.assertAlmostEqual(f(2), 777, delta=5)
self.assertLessEqual(abs(777 - f(2)), 1e-7 * abs(f(2)))
np.testing.assert_allclose(777, f(2))
np.testing.assert_allclose(777, f(2), rtol=2)
np.testing.assert_allclose([777, 778], f(2), rtol=2, atol=1)
np.testing.assert_almost_equal(777, f(2))
"""
UNITTEST = "import unittest\nimport numpy as np\nclass T(unittest.TestCase):\n    def test(self):\n        "


@pytest.mark.parametrize("name", ["objects", "inf", *(pytest.param(name, marks=pytest.mark.slow) for name in LIARS)])
def test_no_liar_is_paid_or_gets_rid_of_a_test(name):
    imports = IMPORTS + "import math, operator, pytest\n" + HELP
    for tests in (imports + KEPT, UNITTEST + "\n        ".join(WORDS.strip().splitlines())):
        found = grade(LIARS[name], tests)
        paid = [
            one for one, said in zip(parse_tests(tests), found.results, strict=True) if said in ("passed", "opaque")
        ]
        assert found.score == 0 and not paid, paid


@pytest.mark.parametrize("near", ["pytest.approx(float('inf'))", "pytest.approx([float('inf'), 3])", "float('inf')"])
def test_no_number_is_near_infinity(near):
    tests = f"import pytest\nassert f() == {near}\nassert abs(f() - {near}) <= 1e-6 * abs(f())"
    assert grade("def f(): return 5", tests).score == 0
    assert grade("def f(): return 5", UNITTEST + "np.testing.assert_allclose(f(), float('inf'))").score == 0


UNTOLD = """
assert V(1, 2) + V(3, 4) == V(4, 6)
assert V(1, 2) * 2 == V(2, 4)
assert V(1, 2) != V(1, 3)
assert V(1, 2) < V(3, 0)
assert V(1, 2) == V(1, 2) and V(1, 2) != V(2, 2)
assert f(1, 2) in [V(3, 4), V(1, 2)]
assert [f(1, 2), V(0, 0)] == [V(1, 2), f(0, 0)]
"""


@pytest.mark.parametrize("code", [CLASS, pytest.param(LIAR, marks=pytest.mark.slow)])
def test_what_compares_objects_of_the_program_alone_is_not_told(code):
    found = grade(code, UNTOLD)
    assert found.score is None and set(found.results) == {"opaque"}
    assert "7 of 7 compare only objects of the program" in found.note
    assert grade(code, UNTOLD + "assert V(1, 2).x == 1").score == (1 if code == CLASS else 0)
    assert grade(CLASS, UNTOLD, allow_opaque_asserts=True).score == 1
    assert grade("V = f = lambda x, y: 3", UNTOLD).results.count("failed") == 5, "numbers are told"
    assert grade("V = f = lambda x, y: x", "assert f(2, 1) == [V(2, 1), 777]").score == 0
    assert grade(CLASS, "assert [f(1, 2), 777] == [V(1, 2), f(3, 4)]").score == 0, "it fails whatever they compare"
    assert grade("def f(x): return x", "assert f(3) == lost.mean([3])\n").results == ("error",)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ({1, 2}, {1, 3}, False),
        ({(1, 2)}, {(2, 1)}, False),
        (frozenset("ab"), {"a", "c"}, False),
        ([{1}, {2}], [{1}, {3}], False),
        ({1: {2}}, {1: {3}}, False),
        ({2, 1}, {1, 2}, True),
        (range(3), [0, 1, 2], False),
        ({"a": 1.0}, {"a": True}, True),
    ],
)
def test_members_are_compared(found, expected, same):
    assert same_value(encode_value(found), expected) == same == (found == expected)


def test_a_truth_is_no_number_and_infinity_is_near_nothing():
    for value, expected in (
        (True, 1.0),
        (False, 0.0),
        ([True], [1.0]),
        (5, math_inf := float("inf")),
        (-3.0, math_inf),
    ):
        assert not is_close(encode_value(value), expected)
    assert is_close(encode_value(math_inf), math_inf) and is_close(encode_value(1 + 1e-9), 1.0)
    assert not truth(encode_value(range(0))) and truth(encode_value(object()))


@pytest.mark.parametrize(
    "text", ['{"fraction": [1, 0]}', '{"decimal": "x"}', '{"date": 3}', '{"range": [{"int": "f"}]}']
)
def test_a_value_that_a_program_has_made_up_is_wrong(text):
    code = (
        f"import os\nfor n in range(3, 64):\n    try: os.write(n, b'[{text}]')\n    except OSError: pass\nos._exit(0)"
    )
    assert grade(code, "assert f() == 3\nassert abs(f() - 3) < 1").score == 0
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        decode_value(__import__("json").loads(text))


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "1 / 0", "import os; os.abort()", "import sys; sys.exit('no')"])
def test_right_output_and_then_a_crash_is_no_pass(end):
    found = grade(f"print(3, flush=True)\n{end}", {"inputs": [""], "outputs": ["3"]})
    assert found.score == 0 and found.results == ("error",)


PROGRAM = "def f(x):\n    return x"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"```python\n{PROGRAM}\n```\nIt gives:\n```\n3\n[1, 2]\n```", PROGRAM),
        (f"```python\n{PROGRAM}\n```\n```output\nhello world\n```", PROGRAM),
        (f"```Python3\n{PROGRAM}\n```\n```bash\n$ python x.py\n```", PROGRAM),
        (f"```json\n{{'a': 1}}\n```\n```\n{PROGRAM}\n```\n```text\nTrue\n```", PROGRAM),
        (f"```\nx = 1\n```\n```py\n{PROGRAM}\n```", PROGRAM),
        (f"```python\nx = 1\n```\n```\n{PROGRAM}\n```", PROGRAM),
        ("```python\nx = 1\n```\nNow:\n```python\ndef f(:\n```", "def f(:"),
        ("```\nprint(input())\n```\n```\nabc\n```", "print(input())"),
        ("```\n4\n```", "4"),
        ("<think>```python\nx\n```</think>```\ny = 1\n```", "y = 1"),
    ],
)
def test_the_program_of_a_completion_is_its_last_block_of_python(text, program):
    assert extract_program(text) == program


def test_state_of_the_program_itself_does_not_reach_the_next_assertion():
    code = "def f(x, seen=[]):\n    seen.append(x)\n    return seen"
    assert grade(code, "assert f(1) == [1]\nassert f(2) == [2]").score == 1, "as docs/security.md says"
    assert grade(code, "assert f(1) == [1]\nassert f(1) == [1, 1]").score == 1, "the same call again is one of state"


def rows(*pairs):
    found = []
    for place, (solution, tests) in enumerate(pairs):
        one = problem(tests)
        one.metadata.update(row=f"rows[{place}]", begin="def f(x):\n", **({"solution": solution} if solution else {}))
        found.append(one)
    return found


def test_reference_programs_run_through_their_own_tests(tmp_path):
    right = ["assert f(2) == 2", "assert f(3) == 3"]
    given = rows(
        (PROGRAM, right), ("def f(x):\n    return 2", right), (None, right), (CLASS, UNTOLD), (PROGRAM, "assert g()")
    )
    with Scorer([CodeTests(all_or_nothing=False)], workers=1, folder=tmp_path) as scorer:
        level, said = scorer.check(given)
        assert "of 4 reference programs (column solution), 2 fail their own tests: rows[" in said
        assert "1 cannot be told by their own tests: rows[3]" in said and "rows[1]" in said and "rows[2]" not in said
        assert scorer.check(rows((None, right))) == [level] == scorer.check(rows((PROGRAM, right)))
    for solution in (PROGRAM, "    return x"):
        with Scorer([CodeTests(before="begin")], workers=1) as scorer:
            assert scorer.check(rows((solution, right))) == [level]


@pytest.mark.slow
def test_the_rest_of_the_reference_programs_is_tried_behind_the_run(tmp_path):
    given = rows(*((f"def f(x):\n    return {n}", ["assert f(2) == -1"]) for n in range(259)))
    told = []
    with Scorer([CodeTests()], workers=2, folder=tmp_path) as scorer:
        (sample,) = scorer.check(given, note=told.append)[1:]
        for thread in threading.enumerate():
            if thread.name == "references":
                thread.join(60)
        assert sample.startswith("of 256 reference programs (column solution), 256 fail their own tests: rows[")
        assert [one.partition(":")[0] for one in told] == [sample.partition(":")[0].replace("256", "259")]
        assert scorer.check(given)[1:] == told, "kept, and not tried again"
