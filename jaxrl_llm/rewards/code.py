"""Rewards of programs by tests in the forms of the public data sets, which a program cannot pass without solving them.

What a test expects never enters the process that runs the program: it gets the input, and what it prints or returns is
compared outside. Each test has a fresh process. Exit codes count for nothing, and a program that writes a result itself
has only said what it returns. Assertions that cannot be split (``code_tests``), and those that compare objects of the
program with each other, are not counted unless allowed.

Forms of tests:

- APPS and TACO: ``{"inputs": [...], "outputs": [...]}``, with ``"fn_name"`` for calls of a function; PRIME and Eurus-2:
  the same as JSON text. An input of a call is the list of its arguments, or a text with one JSON value on each line.
- LiveCodeBench: a list of ``{"input", "output", "testtype", "metadata"}``; of private tests only if they are JSON.
- ``assert`` statements as a text or a list of texts (KodCode, MBPP), also in functions ``test_*``, or in the words of
  unittest and ``numpy.testing`` (``code_tests``); HumanEval's ``check(candidate)``, with the function's name in a call
  ``check(name)``, or ``{"test": text, "entry_point": name}``.

Printed text is compared as LiveCodeBench does (``testing_util.py``, ``grade_stdio``): outer white space aside, line by
line, each line equal apart from white space or as decimal numbers. Returned values are compared by Python's ``==``;
where a test is JSON, tuples are lists and the keys of dictionaries text, as LiveCodeBench and APPS do. Floats of
HumanEval+ and MBPP+ are close as in EvalPlus (absolute 1e-6, relative 1e-7).

Values are JSON of ``sandbox.program.encode_value``, from a process that may have written anything: they are compared
member by member, so that no hash table is built from one that is larger than the expected value.
"""

import ast
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from jaxrl_llm.errors import InputError, naming, require
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.code_tests import AssertTest, split_asserts
from jaxrl_llm.rewards.functions import RewardCall
from jaxrl_llm.sandbox.client import START_S, ProgramEnd, SandboxError
from jaxrl_llm.sandbox.program import SCALARS, decode_value
from jaxrl_llm.sandbox.server import STARVED_TIMES
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import Problem

PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import bisect_left, bisect_right, insort
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import pow

class CaptureFixture:
    result = collections.namedtuple("CaptureResult", "out err")
    def __init__(self):
        self.readouterr()
    def readouterr(self):
        import io, sys
        texts = [getattr(one, "getvalue", str)() for one in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return self.result(*texts)
"""
"""Names that LeetCode's solutions take for granted, as LiveCodeBench and APPS provide them; pytest's ``capsys``."""
JUDGE = Path(__file__).with_name("code_judge.py").read_text()


FORMATS = (
    'give {"inputs", "outputs"} (APPS, TACO, PRIME), a list of {"input", "output", "testtype"} (LiveCodeBench), '
    "or assert statements"
)


@dataclasses.dataclass(frozen=True)
class OutputTest:
    """A program reads ``stdin`` and prints ``expected``."""

    stdin: str
    expected: str
    opaque = False


@dataclasses.dataclass(frozen=True)
class CallTest:
    """A function ``entry``, or method of ``Solution``, returns one of the values ``accepted``, as JSON."""

    entry: str
    args: list[Any]
    accepted: tuple[Any, ...]
    opaque = False


Test = OutputTest | CallTest | AssertTest


class Verdict(NamedTuple):
    """Result of a program's tests. ``score``: share passed, in [0, 1], of the tests with a verdict; None without any,
    or if the sandbox failed. No program can take out a test that it fails: only tests without a value of their own,
    such as ``V(1) + V(2) == V(3)``, can be opaque, and these can be passed without a solution. ``results``: for each
    test ``passed``, ``failed``, the status of ``Outcome`` that ended the program, ``opaque`` (nobody outside the
    program can tell: not counted) or ``not run``. ``note``: what else to know, in one line, or empty.
    """

    score: float | None
    results: tuple[str, ...]
    note: str


def extract_program(text: str) -> str:
    """Return the code of a completion: the last fenced block that is Python, else the last block, else all of it."""
    blocks = re.findall(r"```([^\n`]*)\n(.*?)(?:\n[ \t]*```|\Z)", text.rpartition("</think>")[2], re.DOTALL)
    language = re.compile(r"\W*(?:i?python|py)[\d.]*\b", re.IGNORECASE)
    programs = (body for mark, body in reversed(blocks) if language.match(mark) or _is_python(body))
    return next(programs, blocks[-1][1] if blocks else text)


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            lines = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call) for line in lines)


def grade(
    code: str,
    tests: Any,
    timeout_s: float = 2.0,
    memory_mb: int = 256,
    allow_opaque_asserts: bool = False,
    stop_early: bool = False,
) -> Verdict:
    """Run a program's tests; ``timeout_s`` and ``memory_mb`` are for each test, as in ``run_python``. ``code`` may be a
    completion (``extract_program``). ``stop_early`` ends at the first test that fails. After three tests that time out
    the rest are not run, and count as failed. InputError: the tests have no known form.
    """
    parsed_tests = parse_tests(tests)
    limits = timeout_s, memory_mb
    program = extract_program(code)
    results: list[str] = []
    try:
        if sandbox.level() == sandbox.LEVELS[0]:
            return Verdict(None, ("refused",) * len(parsed_tests), sandbox.REFUSED)
        for test in parsed_tests:
            if test.opaque and not allow_opaque_asserts:
                results.append("opaque")
            elif results.count("timeout") >= 3 or (stop_early and {*results} - {"passed", "opaque"}):
                results.append("not run")
            else:
                result = run_test(program, test, *limits)
                if result == "opaque" and allow_opaque_asserts:
                    result = run_test(program, AssertTest(test.source, (), "opaque"), *limits)
                results.append(result)
    except SandboxError as error:
        return Verdict(None, (*results, *["not run"] * (len(parsed_tests) - len(results))), str(error))
    counted = [result for result in results if result != "opaque"]
    opaque_count = sum(test.opaque for test in parsed_tests)
    uncounted = len(results) - len(counted) - (0 if allow_opaque_asserts else opaque_count)
    note = f"{opaque_count} of {len(parsed_tests)} tests are opaque" if opaque_count else ""
    note += " and not counted" if opaque_count and not allow_opaque_asserts else ""
    note += "; " if note and uncounted else ""
    note += f"{uncounted} of {len(parsed_tests)} compare only objects of the program: not counted" if uncounted else ""
    return Verdict(counted.count("passed") / len(counted) if counted else None, tuple(results), note)


def run_test(code: str, test: Test, timeout_s: float, memory_mb: int) -> str:
    """Return the result of one test of ``Verdict.results``. Raises ``SandboxError``."""
    request: dict[str, Any] = {"code": code}
    stdin = b""
    if isinstance(test, OutputTest):
        stdin = test.stdin.encode("utf-8", "surrogatepass")
    elif isinstance(test, CallTest):
        request |= {"prelude": PRELUDE, "entry": test.entry, "args": test.args}
    else:
        setup = JUDGE + test.setup if test.opaque and "apart_" in test.setup else test.setup
        request |= {"prelude": PRELUDE, "setup": setup, "expressions": test.expressions or ["True"]}
    end = sandbox.servers().run(request, stdin, timeout_s, memory_mb)
    outcome = sandbox.outcome(end)
    if isinstance(test, OutputTest):
        # Like the benchmarks: a program that printed the answer and then failed has not solved the test.
        right = outcome.status == "ok" and same_output(outcome.stdout, test.expected)
    else:
        values = _decoded_values(end, 1 if isinstance(test, CallTest) else len(test.expressions) or 1)
        right = values is not None and _is_right(test, values)
        larger = None if right or values is None else getattr(test, "larger", None)
        if larger and (test.judge != "truth" or foreign(values)):
            return run_test(code, larger, timeout_s, memory_mb)
    if right:
        return "passed"
    if right is None:
        return "opaque"
    return "failed" if outcome.status == "ok" else outcome.status


def _decoded_values(end: ProgramEnd, count: int) -> list[Any] | None:
    """Return the values that a program's process computed; None if it did not."""
    try:
        values = json.loads(end.result, parse_float=_bare, parse_constant=_bare)
        foreign(values)  # it may be too deep
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, list) and len(values) == count else None


def _bare(text: str) -> None:
    raise ValueError(f"the number {text} has no type")


def _is_right(test: CallTest | AssertTest, values: list[Any]) -> bool | None:
    """Return whether the values of a test's calls are right; None if nobody can tell."""
    try:
        if isinstance(test, CallTest):
            return any(same_value(values[0], expected, as_json=True) for expected in test.accepted)
        if test.judge == "equal":
            return same_value(values[0], test.expected)
        if test.judge == "close":
            return is_close(values[0], test.expected)
        if test.judge == "judged":
            return _judge_apart(test, values)
        return truth(values[0]) == (test.judge == "opaque" or test.expected)
    except (ValueError, TypeError, RecursionError, ArithmeticError):  # nothing encodes such a value
        return False


def _judge_apart(test: AssertTest, values: list[Any]) -> bool | None:
    names = {f"_{number}": value for number, value in enumerate(values)}
    expressions = [f"apart_verdict(lambda: {test.expected})"]
    request = {"prelude": JUDGE, "code": test.judge_setup, "names": names, "expressions": expressions}
    end = sandbox.servers(judge=True).run(request, b"", 10.0, 1024)
    verdict = _decoded_values(end, 1)
    if verdict is None and sandbox.outcome(end).status == "error":
        return None  # whatever the program returned: what the test itself needs is not there
    return None if verdict == [None] else verdict == [True]


@dataclasses.dataclass(frozen=True)
class CodeTests:
    """Share of a row's tests that the program in the completion passes, or whether it passes all.

    Completions run in ``rewards.sandbox``, in worker processes. If the sandbox fails there is no score: the completion
    is unscorable, and the failure is counted as that of a reward.

    Attributes:
      all_or_nothing: 1 if all tests pass, else 0; the first that fails is then the last that is run.
      column: of the row, with the tests.
      before: column of the row with the beginning of the program, which the completion continues; None without one.
      timeout_s: seconds for each test.
      memory_mb: MiB for each test.
      allow_opaque_asserts: count assertions that only the program's own process can judge, which it may deceive.
      weight: in the sum of the rewards.
      name: of its column in metrics and samples.
    """

    all_or_nothing: bool = True
    column: str = "tests"
    before: str | None = None
    timeout_s: Annotated[float, Range("(0, inf)")] = 2.0
    memory_mb: Annotated[int, Range("[16, inf]")] = 256
    allow_opaque_asserts: bool = False
    weight: float = 1.0
    name: ClassVar[str] = "code_tests"

    def call(self, problem: Problem, text: str) -> RewardCall:
        """Return the call that scores a completion's text, in a worker process."""
        tests = problem.metadata[self.column]
        text = text if self.before is None else problem.metadata[self.before] + extract_program(text)
        most = STARVED_TIMES * self.timeout_s * len(parse_tests(tests))
        return RewardCall(
            f"{__name__}:score_by_tests", [(self, (tests, text))], timeout_s=START_S + most, on_error=math.nan
        )

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuse problems without tests, with tests of no known form, or of which none counts."""
        for problem in problems:
            row = problem.metadata.get("row", problem.id)
            place = f"{row}, column {self.column}"
            has_beginning = self.before is None or isinstance(problem.metadata.get(self.before), str)
            remedy = "name the column with beginnings of programs (CodeTests.before), or leave it out"
            require(has_beginning, f"{row}, column {self.before}: there is no text; {remedy}")
            if self.column not in problem.metadata:
                raise InputError(f"{place}: there is none; name the column with the tests (CodeTests.column)")
            with naming(place):
                tests = parse_tests(problem.metadata[self.column])
            counts = self.allow_opaque_asserts or not all(test.opaque for test in tests)
            require(
                counts, f"{place}: only the program itself could judge its assertions; allow_opaque_asserts counts them"
            )


def score_by_tests(settings: CodeTests, tests_and_text: tuple[Any, str]) -> float:
    """Return the score of a completion's text by tests, in a worker process. SandboxError: the sandbox failed."""
    tests, text = tests_and_text
    limits = settings.timeout_s, settings.memory_mb
    verdict = grade(text, tests, *limits, settings.allow_opaque_asserts, stop_early=settings.all_or_nothing)
    if verdict.score is None:
        raise SandboxError(verdict.note)
    return float(verdict.score == 1) if settings.all_or_nothing else verdict.score


def parse_tests(tests: Any) -> list[Test]:
    """Return the tests that a value of any of the module's forms holds."""
    base64 = isinstance(tests, str) and re.fullmatch(r"(?:eJ|eN|eA|gA)[A-Za-z0-9+/\s]{40,}={0,2}\s*", tests)
    if isinstance(tests, (bytes, bytearray)) or base64:
        raise InputError(
            "they are compressed pickles, as LiveCodeBench's private tests, which could run anything when loaded: "
            "convert them to JSON on a machine that you can lose"
        )
    parsed: Sequence[Test]
    if isinstance(tests, str):
        json_tests = _json(tests)
        parsed = split_asserts(tests) if json_tests is None else parse_tests(json_tests)
    elif isinstance(tests, dict) and "inputs" in tests:
        parsed = _apps_tests(tests)
    elif isinstance(tests, dict) and isinstance(tests.get("test"), str):
        parsed = split_asserts(tests["test"], tests.get("entry_point") or "")
    elif isinstance(tests, Sequence) and tests and all(isinstance(part, str) for part in tests):
        parsed = split_asserts("\n".join(tests))
    elif isinstance(tests, Sequence) and tests and all(isinstance(part, dict) for part in tests):
        parsed = [_live_code_bench_test(part) for part in tests]
    else:
        raise InputError(f"{tests!r:.60} is no known form of tests: {FORMATS}")
    require(bool(parsed), f"{tests!r:.60} holds no test: {FORMATS}")
    return [*parsed]


def _json(text: str) -> Any:
    """Return the list or dictionary that a text holds; None if it is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _apps_tests(tests: dict[str, Any]) -> list[Test]:
    inputs, outputs, name = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        raise InputError(f'"inputs" and "outputs" must both be lists: {FORMATS}')
    require(len(inputs) == len(outputs), f"there are {len(inputs)} inputs and {len(outputs)} outputs: give as many")
    pairs = zip(inputs, outputs, strict=True)
    if not name:
        return [OutputTest(_joined_lines(test_input), _joined_lines(expected)) for test_input, expected in pairs]
    return [_call_test(str(name), test_input, expected) for test_input, expected in pairs]


def _joined_lines(lines: Any) -> str:
    """Return a text, which some rows give as a list of lines."""
    if isinstance(lines, (list, tuple)):
        return "\n".join(map(_joined_lines, lines))
    return lines if isinstance(lines, str) else str(lines)


def _live_code_bench_test(test: dict[str, Any]) -> Test:
    if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
        raise InputError(f'{test!r:.60} lacks the texts "input" and "output": {FORMATS}')
    kind = test.get("testtype") or "stdin"
    if kind == "stdin":
        return OutputTest(test["input"], test["output"])
    require(kind == "functional", f"testtype {kind!r} is unknown: give stdin or functional")
    metadata = test.get("metadata") or {}
    metadata = _json(metadata) if isinstance(metadata, str) else metadata
    name = (metadata or {}).get("func_name") or test.get("fn_name")
    require(bool(name), 'a functional test needs its function: give it "metadata": {"func_name": ...}')
    return _call_test(str(name), test["input"], test["output"])


def _call_test(name: str, arguments: Any, expected: Any) -> CallTest:
    """Return a call of arguments and a value, as values or JSON. APPS wraps values in lists of one: both are right."""
    name = name.rpartition(".")[2]
    require(name.isidentifier(), f"{name!r:.60} is no name of a function: correct it")
    as_text = isinstance(arguments, str)
    try:
        args = [json.loads(line) for line in arguments.splitlines() if line.strip()] if as_text else arguments
        value = json.loads(expected) if as_text and isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        raise InputError(f"the call {arguments!r:.60} or its value {expected!r:.60} is not JSON: correct it") from None
    fits = isinstance(args, (list, tuple))
    require(fits, f"the arguments {arguments!r:.60} are not a list: give one of all arguments")
    wrapped = expected if isinstance(expected, list) and len(expected) == 1 else []
    return CallTest(name, list(args), (value, *wrapped))


def same_output(printed: str, expected: str) -> bool:
    """Whether a printed text is the expected one.

    >>> same_output("1.50  2\\n", "1.5 2")
    True
    """
    lines, expected_lines = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    if len(lines) != len(expected_lines):
        return False
    wrong = [(line, other) for line, other in zip(lines, expected_lines, strict=True) if line != other]
    try:
        return all(len(a) == len(b) and [*map(Decimal, a)] == [*map(Decimal, b)] for a, b in wrong)
    except InvalidOperation:
        return False


def same_value(encoded: Any, expected: Any, as_json: bool = False) -> bool:
    """Whether an encoded value equals the expected one; ``as_json`` compares both as JSON would write them.

    >>> same_value({"tuple": [1, 2]}, (1, 2)), same_value({"tuple": [1, 2]}, [1, 2]), same_value([1], [True])
    (True, False, True)
    """
    kind, content = _kind(encoded)
    if kind in ("list", "tuple"):
        kinds = (list, tuple) if as_json else ({"list": list, "tuple": tuple}[kind],)
        alike = isinstance(expected, kinds) and len(expected) == len(content)
        return alike and all(same_value(a, b, as_json) for a, b in zip(content, expected, strict=True))
    if kind in ("set", "frozenset"):
        if not isinstance(expected, (set, frozenset)) or len(expected) != len(content):
            return False
        members = [decode_value(member) for member in content]
        return all(member in expected for member in members) and len(set(members)) == len(expected)
    if kind == "dict":
        if not isinstance(expected, dict) or len(expected) != len(content):
            return False
        keys = [_dict_key(key, as_json) for key, _ in content]
        if not all(key in expected for key in keys) or len(set(keys)) != len(expected):
            return False
        return all(same_value(member, expected[key], as_json) for key, (_, member) in zip(keys, content, strict=True))
    return kind == "scalar" and bool(decode_value(encoded) == expected)


def is_close(encoded: Any, expected: Any) -> bool:
    """Whether an encoded value equals the expected one, with floats within EvalPlus's tolerances."""
    if isinstance(expected, float) and _kind(encoded)[0] == "scalar":
        value = decode_value(encoded)
        alike = isinstance(value, (int, float)) and not isinstance(value, bool)
        near = alike and math.isfinite(expected) and abs(value - expected) <= 1e-6 + 1e-7 * abs(expected)
        return near or (alike and value == expected)
    kind, content = _kind(encoded)
    if isinstance(expected, (list, tuple)) and kind == type(expected).__name__ and len(content) == len(expected):
        return all(map(is_close, content, expected))
    return same_value(encoded, expected)


def truth(encoded: Any) -> bool:
    """Return the truth of an encoded value; of an object of another type, True, which is Python's default."""
    kind, content = _kind(encoded)
    return bool(decode_value(encoded)) if kind == "scalar" else kind == "other" or bool(content)


def _kind(encoded: Any) -> tuple[str, Any]:
    """Return the type of an encoded value and its content."""
    if isinstance(encoded, list):
        return "list", encoded
    if not isinstance(encoded, dict):
        return "scalar", encoded
    if len(encoded) != 1:
        raise ValueError("an encoded value has one type")
    ((kind, content),) = encoded.items()
    if kind in SCALARS:
        return "scalar", encoded
    members = isinstance(content, list) if kind in ("tuple", "set", "frozenset", "deque", "dict") else kind == "other"
    if not members or (kind == "dict" and not all(isinstance(pair, list) and len(pair) == 2 for pair in content)):
        raise ValueError(f"a value cannot be encoded as {kind!r:.40}")
    return kind, content


def _dict_key(encoded: Any, as_json: bool) -> Any:
    key = decode_value(encoded)
    if not as_json or isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(key) if not isinstance(key, float) or math.isfinite(key) else key


def foreign(encoded: Any) -> bool:
    """Whether an encoded value has an object in it that is no data."""
    if isinstance(encoded, list):
        return any(map(foreign, encoded))
    return isinstance(encoded, dict) and ("other" in encoded or any(map(foreign, encoded.values())))
