"""The program of one reward worker: a fresh interpreter without JAX that calls functions by name.

Protocol over one connection. The parent sends ``(path, args)``. The worker sends JSON lists: ``["ready"]`` when it has
started, then for each call ``["started"]`` once the function is imported, and ``["ok", value]`` or
``["error", message]``. The parent therefore never unpickles what a worker says.
"""

import contextlib
import faulthandler
import json
import numbers
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.tasks.resolve import resolve

GRACE_S = 1.0


def main(handle: int, timeout_s: float) -> None:
    """Serves calls until the parent closes the connection.

    A call that is still running ``GRACE_S`` after its deadline ends the process from a thread that needs no
    interpreter lock: a parent that was killed itself cannot do it.
    """
    connection = Connection(handle)
    with contextlib.suppress(EOFError, ConnectionError), open(os.devnull, "w") as nowhere:
        _say(connection, "ready")
        while True:
            call = connection.recv_bytes()
            try:
                path, args = pickle.loads(call)  # from the parent that started this process
                function = resolve(path)
                _say(connection, "started")
                faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=nowhere)
                answer = ("ok", _value(function(*args)))
            except BaseException as error:  # SystemExit too: one bad item must not end the worker
                answer = ("error", " ".join(f"{type(error).__name__}: {error}".split())[:500])
            faulthandler.cancel_dump_traceback_later()
            _say(connection, *answer)


def _value(result: Any) -> float:
    """The score as a float; NaN is allowed and means that the completion cannot be scored."""
    if not isinstance(result, numbers.Real) and not hasattr(result, "__float__"):
        raise TypeError(f"returned {result!r:.80}, which is no number")
    value = float(result)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"returned {value}; a reward is finite, or NaN where there is none")
    return value


def _say(connection: Connection, *words: Any) -> None:
    connection.send_bytes(json.dumps(words).encode())
