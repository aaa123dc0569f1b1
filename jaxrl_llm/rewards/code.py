"""Rewards of programs by tests, in the forms of ``code_formats``, which a program cannot pass without solving them.

What a test expects never enters the process that runs the program: it gets the input, and what it prints or returns is
compared outside. Each test has a fresh process. Exit codes count for nothing, and a program that writes a result itself
has only said what it returns. Assertions that cannot be split (``code_asserts``) are not counted unless allowed.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.calls import Call
from jaxrl_llm.rewards.code_asserts import split_asserts
from jaxrl_llm.rewards.code_compare import close, same_output, same_value, truth
from jaxrl_llm.rewards.code_formats import Asserted, Called, Printed, Test, parse_tests
from jaxrl_llm.sandbox.client import START_S, Ended, SandboxError, Servers
from jaxrl_llm.sandbox.server import STARVED_TIMES
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import Problem

MOST_TIMEOUTS = 3
"""Number of tests of a program that may time out; after it, the rest are not run and count as failed."""
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
"""
"""Names that solutions of LeetCode's form take for granted, as LiveCodeBench and APPS provide them."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


class Verdict(NamedTuple):
    """Result of a program's tests.

    Attributes:
      score: share of the tests passed, in [0, 1]; None without a verdict: the sandbox failed, or no test counts.
      results: for each test ``passed``, ``failed``, the status of ``Outcome`` that the program ended with, ``opaque``
        (not counted), or ``not run``.
      note: what else to know, in one line; empty if nothing.
    """

    score: float | None
    results: tuple[str, ...]
    note: str


@functools.cache
def referees() -> Servers:
    """Return the fork servers that see what is expected, and never a program."""
    return Servers()


def extracted(text: str) -> str:
    """Return the code of a completion: its last fenced block, or all of it if it has none."""
    blocks = _BLOCK.findall(text.rpartition("</think>")[2])
    return blocks[-1] if blocks else text


@functools.lru_cache(maxsize=1024)
def _split(text: str, entry: str) -> list[Asserted]:
    return split_asserts(text, entry)


def read_tests(tests: Any) -> list[Test]:
    """Return the tests of a row's column.

    Raises:
      InputError: its form is unknown; the message has no place.
    """
    return parse_tests(tests, _split)


def grade(
    code: str, tests: Any, timeout_s: float = 2.0, memory_mb: int = 256, allow_opaque_asserts: bool = False,
    stop_early: bool = False,
) -> Verdict:  # fmt: skip
    """Run a program's tests; ``timeout_s`` and ``memory_mb`` are for each test, as in ``run_python``.

    ``code`` may be a completion: its last fenced block is taken. ``stop_early`` ends at the first test that fails.

    Raises:
      InputError: the tests have no known form, or are not counted because all are opaque.
    """
    found = read_tests(tests)
    opaque = sum(test.opaque for test in found)
    note = f"{opaque} of {len(found)} tests are opaque" if opaque else ""
    note += " and not counted" if opaque and not allow_opaque_asserts else ""
    limits = timeout_s, memory_mb
    program = extracted(code)
    results: list[str] = []
    try:
        if sandbox.level() == sandbox.LEVELS[0]:
            return Verdict(None, ("refused",) * len(found), sandbox.REFUSED)
        for test in found:
            if test.opaque and not allow_opaque_asserts:
                results.append("opaque")
            elif results.count("timeout") >= MOST_TIMEOUTS or (stop_early and {*results} - {"passed", "opaque"}):
                results.append("not run")
            else:
                results.append(run_test(program, test, *limits))
    except SandboxError as error:
        return Verdict(None, (*results, *["not run"] * (len(found) - len(results))), str(error))
    counted = [result for result in results if result != "opaque"]
    return Verdict(counted.count("passed") / len(counted) if counted else None, tuple(results), note)


def run_test(code: str, test: Test, timeout_s: float, memory_mb: int) -> str:
    """Return the result of one test of ``Verdict.results``. Raises ``SandboxError``."""
    asked: dict[str, Any] = {"code": code}
    stdin = b""
    if isinstance(test, Printed):
        stdin = test.stdin.encode("utf-8", "surrogatepass")
    elif isinstance(test, Called):
        asked |= {"prelude": PRELUDE, "entry": test.entry, "args": test.args}
    else:
        asked |= {"prelude": PRELUDE, "setup": test.setup, "expressions": test.expressions or ["True"]}
    ended = sandbox.servers().run(asked, stdin, timeout_s, memory_mb)
    outcome = sandbox.outcome(ended)
    if isinstance(test, Printed):
        # Like the benchmarks: a program that printed the answer and then failed has not solved the test.
        right = outcome.status == "ok" and same_output(outcome.stdout, test.expected)
    else:
        values = _values(ended, 1 if isinstance(test, Called) else len(test.expressions) or 1)
        right = values is not None and _right(test, values)
    if right:
        return "passed"
    return "failed" if outcome.status == "ok" else outcome.status


def _values(ended: Ended, count: int) -> list[Any] | None:
    """Return the values that a program's process computed; None if it did not."""
    try:
        found = json.loads(ended.result)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and len(found) == count else None


def _right(test: Called | Asserted, values: list[Any]) -> bool:
    try:
        if isinstance(test, Called):
            return any(same_value(values[0], one, as_json=True) for one in test.accepted)
        if test.judge == "equal":
            return same_value(values[0], test.expected)
        if test.judge == "close":
            return close(values[0], test.expected)
        if test.judge == "judged":
            return _judged(test, values)
        return truth(values[0]) == (test.judge == "opaque" or test.expected)
    except (ValueError, TypeError, RecursionError, OverflowError):  # nothing encodes such a value
        return False


def _judged(test: Asserted, values: list[Any]) -> bool:
    names = {f"_{number}": value for number, value in enumerate(values)}
    asked = {"code": test.apart, "names": names, "expressions": [f"bool({test.expected})"]}
    found = _values(referees().run(asked, b"", 10.0, 1024), 1)
    return found == [True]


@dataclasses.dataclass(frozen=True)
class CodeTests:
    """Share of a row's tests that the program in the completion passes, or whether it passes all.

    Completions run in ``rewards.sandbox``, in worker processes. If the sandbox fails there is no score: the completion
    is unscorable, and the failure is counted as that of a reward.

    Attributes:
      all_or_nothing: 1 if all tests pass, else 0; the first that fails is then the last that is run.
      column: of the row, with the tests (``code_formats``).
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

    def call(self, problem: Problem, text: str) -> Call:
        """Return the call that scores a completion's text, in a worker process."""
        tests = problem.metadata[self.column]
        text = text if self.before is None else problem.metadata[self.before] + extracted(text)
        most = STARVED_TIMES * self.timeout_s * len(read_tests(tests))
        return Call(f"{__name__}:score", [(self, (tests, text))], timeout_s=START_S + most, on_error=math.nan)

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuse problems with tests that cannot be run.

        Raises:
          InputError: a row lacks the column, or its tests have no known form, or none of them counts.
        """
        for problem in problems:
            place = f"{problem.metadata.get('row', problem.id)}, column {self.column}"
            begun = self.before is None or isinstance(problem.metadata.get(self.before), str)
            remedy = "name the column with beginnings of programs (CodeTests.before), or leave it out"
            require(
                begun, f"{problem.metadata.get('row', problem.id)}, column {self.before}: there is no text; {remedy}"
            )
            if self.column not in problem.metadata:
                raise InputError(f"{place}: there is none; name the column with the tests (CodeTests.column)")
            try:
                found = read_tests(problem.metadata[self.column])
            except InputError as error:
                raise InputError(f"{place}: {error}") from None
            counts = self.allow_opaque_asserts or not all(test.opaque for test in found)
            require(
                counts, f"{place}: only the program itself could judge its assertions; allow_opaque_asserts counts them"
            )


def score(settings: CodeTests, asked: tuple[Any, str]) -> float:
    """Return the score of a completion's text by tests, in a worker process; ``asked`` is the tests and the text.

    Raises:
      SandboxError: there is no verdict.
    """
    tests, text = asked
    limits = settings.timeout_s, settings.memory_mb
    found = grade(text, tests, *limits, settings.allow_opaque_asserts, stop_early=settings.all_or_nothing)
    if found.score is None:
        raise SandboxError(found.note)
    return float(found.score == 1) if settings.all_or_nothing else found.score
