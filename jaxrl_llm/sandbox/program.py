"""What a child of the fork server does: run one program, and say what its calls returned.

Values leave it as JSON, in which an object that lies about equality cannot be expressed.
"""

import atexit
import builtins
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

FAILED, OUT_OF_MEMORY = 1, 97
"""Exit codes of a program that raised, and that ran out of memory."""
NAME = "<program>"
_LARGEST_DIGITS = 4000
"""Digits of the largest integer that JSON's readers take."""


def run(request: bytes, channel: int) -> int:
    """Run the program that the request holds, and return its exit code.

    The request is JSON: ``code``, between ``prelude`` and ``setup``; then either ``expressions``, texts that are
    evaluated, with encoded values for ``names`` (by the code's own ``DECODERS``, where it has them), or ``entry`` and
    ``args``, a call. Their values are written to ``channel`` as a JSON list.
    """
    lenient: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin = open(0, **lenient)  # noqa: SIM115
    sys.stdout = open(1, "w", **lenient)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = [NAME]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # without site-packages nothing else defines them
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    try:
        return _ended(json.loads(request), channel)
    except MemoryError:
        return OUT_OF_MEMORY


def _ended(asked: dict[str, Any], channel: int) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = 0
    try:
        for text in (asked.get("prelude", ""), asked["code"], asked.get("setup", "")):
            if text:
                exec(compile(text, NAME, "exec", dont_inherit=True), module.__dict__)
        values = _values(asked, module.__dict__)
        if values is not None:
            said = json.dumps(values).encode()
            while said:
                said = said[os.write(channel, said) :]
    except SystemExit as error:
        code = _exit_code(error)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001  whatever a program raises
        code = FAILED
        _show(error, asked["code"])
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001
        code = code or FAILED
    return code


def _values(asked: dict[str, Any], names: dict[str, Any]) -> list[Any] | None:
    if "entry" in asked:
        return [encoded(_entry(asked["entry"], names)(*asked["args"]))]
    if "expressions" not in asked:
        return None
    names |= {name: decoded(value, names.get("DECODERS", {})) for name, value in asked.get("names", {}).items()}
    return [encoded(eval(compile(text, NAME, "eval", dont_inherit=True), names)) for text in asked["expressions"]]


def _entry(name: str, names: dict[str, Any]) -> Any:
    """Return the function, or the method of a new ``Solution``, of this name."""
    solution = names.get("Solution")
    return getattr(solution(), name) if isinstance(solution, type) and hasattr(solution, name) else names[name]


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return FAILED


def _show(error: BaseException, code: str) -> None:
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # noqa: BLE001  an exception whose text raises
        print(type(error).__name__, file=sys.stderr)


def encoded(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON that keeps its type: ``{"tuple": [1, 2]}``; ``{"other": "Name"}`` for other types.

    A subclass of a container is written as that container, and a value that equals no literal as its type's name.
    """
    if depth > 200:
        return {"other": "too deep"}
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        small = -(10**_LARGEST_DIGITS) < int(value) < 10**_LARGEST_DIGITS
        return int.__int__(value) if small else {"int": hex(int.__int__(value))}
    if issubclass(kind, float):
        return {"float": float.__repr__(value)}
    if issubclass(kind, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if issubclass(kind, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            members = [encoded(one, depth + 1) for one in base.__iter__(value)]
            return members if base is list else {base.__name__: members}
    if issubclass(kind, dict):
        pairs = [[encoded(key, depth + 1), encoded(one, depth + 1)] for key, one in dict.items(value)]
        return {"dict": pairs}
    for base in (Fraction, Decimal, datetime, date, time, timedelta, range, Enum):
        if issubclass(kind, base):
            return {base.__name__.lower(): _PARTS.get(base, base.__str__)(value)}
    return {"other": kind.__name__}


def decoded(value: Any, own: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})) -> Any:
    """Return the value that ``encoded`` has written; ``own`` are functions that make those of some types.

    Raises:
      ValueError, TypeError, ArithmeticError: it is of another type, or malformed.
    """
    if not isinstance(value, (dict, list)):
        return value
    if isinstance(value, list):
        return [decoded(one, own) for one in value]
    (kind, content), *more = value.items()
    if not more:
        if kind in own or kind in SCALARS:
            return (own if kind in own else SCALARS)[kind](content)
        if kind in _MEMBERS:
            return _MEMBERS[kind](decoded(one, own) for one in content)
        if kind == "dict":
            return {decoded(key, own): decoded(one, own) for key, one in content}
    raise ValueError(f"a value of the type {content!r:.80} cannot be compared")


_MEMBERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_PARTS: dict[type, Callable[[Any], Any]] = {
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    range: lambda value: [value.start, value.stop, value.step],
    Enum: lambda value: [type(value).__name__, value._name_],
}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": bytes.fromhex,
    "fraction": lambda text: Fraction(*map(int, str(text).split("/"))),
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "range": lambda parts: range(*parts),
    "enum": lambda names: ("a member of an enumeration", *names),
}
"""Functions that make values without members from what ``encoded`` has written."""
