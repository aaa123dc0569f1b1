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


def run_program(request: bytes, channel: int) -> int:
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
        return _run_module(json.loads(request), channel)
    except MemoryError:
        return OUT_OF_MEMORY


def _run_module(request: dict[str, Any], channel: int) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = 0
    try:
        for text in (request.get("prelude", ""), request["code"], request.get("setup", "")):
            if text:
                exec(compile(text, NAME, "exec", dont_inherit=True), module.__dict__)
        values = _computed_values(request, module.__dict__)
        if values is not None:
            message = json.dumps(values).encode()
            while message:
                message = message[os.write(channel, message) :]
    except SystemExit as error:
        number = error.code is None or isinstance(error.code, int)
        code = (error.code or 0) & 0xFF if number else FAILED
        if not number:
            print(error.code, file=sys.stderr)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001  whatever a program raises
        code = FAILED
        _print_error(error, request["code"])
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001
        code = code or FAILED
    return code


def _computed_values(request: dict[str, Any], names: dict[str, Any]) -> list[Any] | None:
    if "entry" in request:
        name, solution = request["entry"], names.get("Solution")  # a function, or a method of a new ``Solution``
        method = isinstance(solution, type) and hasattr(solution, name)
        return [encode_value((getattr(solution(), name) if method else names[name])(*request["args"]))]
    if "expressions" not in request:
        return None
    names |= {name: decode_value(value, names.get("DECODERS", {})) for name, value in request.get("names", {}).items()}
    return [
        encode_value(eval(compile(text, NAME, "eval", dont_inherit=True), names)) for text in request["expressions"]
    ]


def _print_error(error: BaseException, code: str) -> None:
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # noqa: BLE001  an exception whose text raises
        print(type(error).__name__, file=sys.stderr)


def encode_value(value: Any, depth: int = 0) -> Any:
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
            members = [encode_value(member, depth + 1) for member in base.__iter__(value)]
            return members if base is list else {base.__name__: members}
    if issubclass(kind, dict):
        pairs = [[encode_value(key, depth + 1), encode_value(member, depth + 1)] for key, member in dict.items(value)]
        return {"dict": pairs}
    for base in (Fraction, Decimal, datetime, date, time, timedelta, range, Enum):
        if issubclass(kind, base):
            return {base.__name__.lower(): _PARTS.get(base, base.__str__)(value)}
    return {"other": kind.__name__}


def decode_value(value: Any, decoders: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})) -> Any:
    """Return the value that ``encode_value`` has written; ``decoders`` make those of some types. ValueError, TypeError,
    ArithmeticError: it is malformed.
    """
    if not isinstance(value, (dict, list)):
        return value
    if isinstance(value, list):
        return [decode_value(member, decoders) for member in value]
    (kind, content), *other_pairs = value.items()
    if not other_pairs:
        if kind in decoders or kind in SCALARS:
            return (decoders if kind in decoders else SCALARS)[kind](content)
        if kind in _MEMBERS:
            return _MEMBERS[kind](decode_value(member, decoders) for member in content)
        if kind == "dict":
            return {decode_value(key, decoders): decode_value(member, decoders) for key, member in content}
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
"""Functions that make values without members from what ``encode_value`` has written."""
