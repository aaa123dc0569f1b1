"""The program of one reward worker: a fresh interpreter without JAX that calls functions by name.

Protocol over one connection. The parent sends a ``Call``. The worker sends JSON lists: ``["ready"]`` when it has
started, then for each call ``["received"]``, ``["started"]`` once the function is imported, and ``["done", outcomes]``,
one for each item, or one for all where it could not be called. The parent therefore never unpickles what a worker says.
"""

import contextlib
import faulthandler
import json
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.rewards.calls import Call, Outcome, Runner, in_one_line, perform
from jaxrl_llm.signals import while_read
from jaxrl_llm.tasks.resolve import resolve

GRACE_S = 1.0


def main(handle: str) -> None:
    """Serves calls until the parent closes the connection.

    A call that is still running ``GRACE_S`` after its deadline ends the process from a thread that needs no
    interpreter lock: a parent that was killed itself cannot do it.
    """
    connection = Connection(int(handle))
    sys.stdout, sys.stderr = while_read(sys.stdout), while_read(sys.stderr)  # no reward fails for what it prints
    with contextlib.suppress(EOFError, ConnectionError), open(os.devnull, "w") as nowhere, Runner() as runner:
        _say(connection, "ready")
        while True:
            said = connection.recv_bytes()
            _say(connection, "received")
            try:
                call: Call = pickle.loads(said)  # from the parent that started this process
                function = resolve(call.path)
            except BaseException as error:  # whatever a person's module raises at import, SystemExit too
                _say(connection, "done", [Outcome("error", message=in_one_line(error))])
                continue
            _say(connection, "started")
            faulthandler.dump_traceback_later(call.limit_s + GRACE_S, exit=True, file=nowhere)
            outcomes = perform(function, call, runner.run)
            faulthandler.cancel_dump_traceback_later()
            _say(connection, "done", outcomes)


def _say(connection: Connection, *words: Any) -> None:
    connection.send_bytes(json.dumps(words).encode())
