"""Tests of programs, in the forms of the public data sets.

- APPS and TACO: ``{"inputs": [...], "outputs": [...]}``, with ``"fn_name"`` for calls of a function; PRIME and Eurus-2:
  the same as JSON text. An input of a call is the list of its arguments, or a text with one JSON value on each line.
- LiveCodeBench: a list of ``{"input", "output", "testtype", "metadata"}``; of private tests only if they are JSON.
- ``assert`` statements as a text or a list of texts (KodCode, MBPP), also in functions ``test_*``, or in the words of
  unittest and ``numpy.testing`` (``code_tests``); HumanEval's
  ``check(candidate)``, with the function's name in a call ``check(name)``, or ``{"test": text, "entry_point": name}``.

Comparison of what a program printed or returned with what a test expects.

Printed text is compared as LiveCodeBench does (``testing_util.py``, ``grade_stdio``): outer white space aside, line by
line, each line equal apart from white space or as decimal numbers. Returned values are compared by Python's ``==``;
where a test is JSON, tuples are lists and the keys of dictionaries text, as LiveCodeBench and APPS do. Floats of
HumanEval+ and MBPP+ are close as in EvalPlus (absolute 1e-6, relative 1e-7).

A value comes as the JSON of ``sandbox.program.encoded``, from a process that may have written anything: it is compared
member by member, so that no hash table is built from it that is larger than the expected value.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.sandbox.program import SCALARS, decoded

FORMATS = (
    'give {"inputs", "outputs"} (APPS, TACO, PRIME), a list of {"input", "output", "testtype"} (LiveCodeBench), '
    "or assert statements"
)
PICKLED = (
    "they are compressed pickles, as LiveCodeBench's private tests, which could run anything when loaded: "
    "convert them to JSON on a machine that you can lose"
)
_BASE64 = re.compile(r"(?:eJ|eN|eA|gA)[A-Za-z0-9+/\s]{40,}={0,2}\s*")


@dataclasses.dataclass(frozen=True)
class Printed:
    """A program reads ``stdin`` and prints ``expected``."""

    stdin: str
    expected: str
    opaque = False


@dataclasses.dataclass(frozen=True)
class Called:
    """A function ``entry``, or method of ``Solution``, returns one of the values ``accepted``, as JSON."""

    entry: str
    args: list[Any]
    accepted: tuple[Any, ...]
    opaque = False


@dataclasses.dataclass(frozen=True)
class Asserted:
    """An assertion about what a program computes.

    Attributes:
      setup: statements before it.
      expressions: computed in the program's process.
      judge: how they decide: ``equal`` and ``close`` to ``expected``; their ``truth``; an expression over ``_0``,
        ``_1``, ... for them (``judged``), evaluated without the program after ``apart``; or in the program's own
        process, which could deceive it (``opaque``).
      expected: a value, or that expression.
      apart: statements before it that do not need the program.
      larger: the assertion with more computed by the program, such as ``list(f(3))`` for ``f(3)``, where the values of
        ``expressions`` may be no data; None if there is no more.
      whole: the setup and the statement itself.
    """

    setup: str
    expressions: tuple[str, ...]
    judge: Literal["equal", "close", "truth", "judged", "opaque"]
    expected: Any = None
    apart: str = ""
    larger: "Asserted | None" = None
    whole: str = ""

    @property
    def opaque(self) -> bool:
        """Whether the program's own process judges."""
        return self.judge == "opaque"


Test = Printed | Called | Asserted


def parse_tests(tests: Any, asserts: Callable[[str, str], list[Asserted]]) -> list[Test]:
    """Return the tests that a value of any of the module's forms holds; ``asserts`` splits texts of assertions, given
    with the entry point.

    Raises:
      InputError: it has none of the forms, or no test; the message has no place.
    """
    if isinstance(tests, (bytes, bytearray)) or (isinstance(tests, str) and _BASE64.fullmatch(tests)):
        raise InputError(PICKLED)
    found: Sequence[Test]
    if isinstance(tests, str):
        given = _json(tests)
        found = asserts(tests, "") if given is None else parse_tests(given, asserts)
    elif isinstance(tests, dict) and "inputs" in tests:
        found = _apps(tests)
    elif isinstance(tests, dict) and isinstance(tests.get("test"), str):
        found = asserts(tests["test"], tests.get("entry_point") or "")
    elif isinstance(tests, Sequence) and tests and all(isinstance(one, str) for one in tests):
        found = asserts("\n".join(tests), "")
    elif isinstance(tests, Sequence) and tests and all(isinstance(one, dict) for one in tests):
        found = [_live_code_bench(one) for one in tests]
    else:
        raise InputError(f"{_shown(tests)} is no known form of tests: {FORMATS}")
    require(bool(found), f"{_shown(tests)} holds no test: {FORMATS}")
    return [*found]


def _shown(tests: Any) -> str:
    return f"{tests!r:.60}"


def _json(text: str) -> Any:
    """Return the list or dictionary that a text holds; None if it is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _apps(tests: dict[str, Any]) -> list[Test]:
    inputs, outputs, name = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        raise InputError(f'"inputs" and "outputs" must both be lists: {FORMATS}')
    require(len(inputs) == len(outputs), f"there are {len(inputs)} inputs and {len(outputs)} outputs: give as many")
    pairs = zip(inputs, outputs, strict=True)
    if not name:
        return [Printed(_text(given), _text(expected)) for given, expected in pairs]
    return [_call(str(name), given, expected) for given, expected in pairs]


def _text(lines: Any) -> str:
    """Return a text, which some rows give as a list of lines."""
    if isinstance(lines, (list, tuple)):
        return "\n".join(map(_text, lines))
    return lines if isinstance(lines, str) else str(lines)


def _live_code_bench(test: dict[str, Any]) -> Test:
    if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
        raise InputError(f'{_shown(test)} lacks the texts "input" and "output": {FORMATS}')
    kind = test.get("testtype") or "stdin"
    if kind == "stdin":
        return Printed(test["input"], test["output"])
    require(kind == "functional", f"testtype {kind!r} is unknown: give stdin or functional")
    metadata = test.get("metadata") or {}
    metadata = _json(metadata) if isinstance(metadata, str) else metadata
    name = (metadata or {}).get("func_name") or test.get("fn_name")
    require(bool(name), 'a functional test needs its function: give it "metadata": {"func_name": ...}')
    return _call(str(name), test["input"], test["output"])


def _call(name: str, given: Any, expected: Any) -> Called:
    """Return a call from its arguments and its value, each as values or JSON text.

    APPS wraps values in a list of one: both are accepted, as its own grader does.
    """
    name = name.rpartition(".")[2]
    require(name.isidentifier(), f"{name!r:.60} is no name of a function: correct it")
    try:
        args = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
        wrapped = [] if isinstance(expected, str) or not isinstance(expected, list) or len(expected) != 1 else expected
        value = json.loads(expected) if isinstance(given, str) and isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        raise InputError(f"the call {given!r:.60} or its value {expected!r:.60} is not JSON: correct it") from None
    require(isinstance(args, (list, tuple)), f"the arguments {given!r:.60} are not a list: give one of all arguments")
    return Called(name, list(args), (value, *wrapped))


ABSOLUTE, RELATIVE = 1e-6, 1e-7
"""Tolerances of ``close``."""
_PAIRS = (list, tuple)


def same_output(printed: str, expected: str) -> bool:
    """Whether a printed text is the expected one.

    >>> same_output("1.50  2\\n", "1.5 2")
    True
    """
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: list[str], theirs: list[str]) -> bool:
    if ours == theirs:
        return True
    try:
        return len(ours) == len(theirs) and all(Decimal(a) == Decimal(b) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:
        return False


def same_value(found: Any, expected: Any, as_json: bool = False) -> bool:
    """Whether an encoded value equals the expected one; ``as_json`` compares both as JSON would write them.

    >>> same_value({"tuple": [1, 2]}, (1, 2)), same_value({"tuple": [1, 2]}, [1, 2]), same_value([1], [True])
    (True, False, True)
    """
    kind, content = _kind(found)
    if kind in ("list", "tuple"):
        wanted = _PAIRS if as_json else ({"list": list, "tuple": tuple}[kind],)
        alike = isinstance(expected, wanted) and len(expected) == len(content)
        return alike and all(same_value(a, b, as_json) for a, b in zip(content, expected, strict=True))
    if kind in ("set", "frozenset"):
        if not isinstance(expected, (set, frozenset)) or len(expected) != len(content):
            return False
        members = [decoded(one) for one in content]
        return all(one in expected for one in members) and len(set(members)) == len(expected)
    if kind == "dict":
        if not isinstance(expected, dict) or len(expected) != len(content):
            return False
        keys = [_key(key, as_json) for key, _ in content]
        if not all(key in expected for key in keys) or len(set(keys)) != len(expected):
            return False
        return all(same_value(one, expected[key], as_json) for key, (_, one) in zip(keys, content, strict=True))
    return kind == "scalar" and bool(decoded(found) == expected)


def close(found: Any, expected: Any) -> bool:
    """Whether an encoded value equals the expected one, with floats within EvalPlus's tolerances."""
    if isinstance(expected, float) and _kind(found)[0] == "scalar":
        value = decoded(found)
        alike = isinstance(value, (int, float)) and not isinstance(value, bool)
        near = alike and math.isfinite(expected) and abs(value - expected) <= ABSOLUTE + RELATIVE * abs(expected)
        return near or (alike and value == expected)
    kind, content = _kind(found)
    if isinstance(expected, _PAIRS) and kind == type(expected).__name__ and len(content) == len(expected):
        return all(map(close, content, expected))
    return same_value(found, expected)


def truth(found: Any) -> bool:
    """Return the truth of an encoded value; of an object of another type, True, which is Python's default."""
    kind, content = _kind(found)
    return bool(decoded(found)) if kind == "scalar" else kind == "other" or bool(content)


def _kind(found: Any) -> tuple[str, Any]:
    """Return the type of an encoded value and its content.

    Raises:
      ValueError: nothing encodes this.
    """
    if isinstance(found, list):
        return "list", found
    if not isinstance(found, dict):
        return "scalar", found
    if len(found) != 1:
        raise ValueError("an encoded value has one type")
    ((kind, content),) = found.items()
    if kind in SCALARS:
        return "scalar", found
    members = isinstance(content, list) if kind in ("tuple", "set", "frozenset", "deque", "dict") else kind == "other"
    if not members or (kind == "dict" and not all(isinstance(pair, list) and len(pair) == 2 for pair in content)):
        raise ValueError(f"a value cannot be encoded as {kind!r:.40}")
    return kind, content


def _key(encoded: Any, as_json: bool) -> Any:
    key = decoded(encoded)
    if not as_json or isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(key) if not isinstance(key, float) or math.isfinite(key) else key


def foreign(found: Any) -> bool:
    """Whether an encoded value has an object in it that is no data."""
    if isinstance(found, list):
        return any(map(foreign, found))
    return isinstance(found, dict) and ("other" in found or any(map(foreign, found.values())))
