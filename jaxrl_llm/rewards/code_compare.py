"""Comparison of what a program printed or returned with what a test expects.

Printed text is compared as LiveCodeBench does (``testing_util.py``, ``grade_stdio``): outer white space aside, line by
line, each line equal apart from white space or as decimal numbers. Returned values are compared by Python's ``==``;
where a test is JSON, tuples are lists and the keys of dictionaries text, as LiveCodeBench and APPS do. Floats of
HumanEval+ and MBPP+ are close as in EvalPlus (absolute 1e-6, relative 1e-7).

A value comes as the JSON of ``sandbox.program.encoded``, from a process that may have written anything: it is compared
member by member, so that no hash table is built from it that is larger than the expected value.
"""

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl_llm.sandbox.program import SCALARS, decoded

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
