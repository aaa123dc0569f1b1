"""Reward functions for the tests: good ones, and ones that hang, crash, raise or answer nonsense."""

import ctypes
import os
import pathlib
import subprocess
import sys
import time


def length(problem, completion):
    return len(completion.text)


def obey(problem, completion):
    """Does what the text says; anything else is a number."""
    return ACTIONS.get(completion.text, lambda: float(completion.text))()


def jax_is_loaded(problem, completion):
    return float("jax" in sys.modules)


def worker_id(problem, completion):
    return os.getpid()


def meet(problem, completion):
    """Returns only when two workers are in here at once, in the folder that the text names; the process id."""
    folder = pathlib.Path(completion.text)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return os.getpid()


def extras(problem, completion):
    return len(completion.extras)


def _hang():
    while True:
        time.sleep(0.05)


def _hang_with_the_lock():
    """Holds the interpreter's lock and never returns, as a stuck C function does."""
    return ctypes.PyDLL(None).pause()


def _leave_a_child():
    child = subprocess.Popen(["sleep", "600"])
    with open(os.environ["CHILD_ID_FILE"], "w") as file:
        file.write(str(child.pid))
    _hang()


def _raise():
    raise KeyError("no such\nkey")


def _raise_no_text():
    raise ValueError("half a pair: \ud800")


ACTIONS = {
    "hang": _hang,
    "hang with the lock": _hang_with_the_lock,
    "leave a child": _leave_a_child,
    "raise": _raise,
    "raise no text": _raise_no_text,
    "exit": lambda: sys.exit(3),
    "end of file": lambda: input(),
    "die": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "None": lambda: None,
    "text": lambda: "1",
    "list": lambda: [1.0],
    "infinite": lambda: float("inf"),
    "huge": lambda: -1e39,
    "nan": lambda: float("nan"),
    "true": lambda: True,
}
