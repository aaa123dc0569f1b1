"""reasoning-gym's problems, generated in an interpreter of their own: the same ones on every run and every host.

In this process they would not be: some of its data sets walk through sets of strings, whose order changes with the
interpreter's hash seed, and one draws from Python's global random numbers.
"""

import contextlib
import dataclasses
import difflib
import json
import marshal
import os
import random
import subprocess
from collections.abc import Generator, Iterable
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.signals import child, interpreter

NAMED = "jaxrl-llm list tasks names those that it has"

_REFUSED = 2

KEPT = 4
"""Answers of the generating process that are remembered: one costs more than its problems, and several runs of one
program ask for the same ones."""
_known: dict[str, bytes] = {}
_begun: dict[str, subprocess.Popen] = {}


def forget() -> None:
    """Have everything generated anew."""
    _known.clear()


def entries(name: str, options: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """The first ``size`` entries (``question``, ``answer``, ``metadata``) of a data set of reasoning-gym.

    Raises:
      InputError: no such data set or option, or a value that the data set refuses.
      RuntimeError: the generating process failed; its messages are on the error output.
    """
    return marshal.loads(_written(_wanted(name, options, size, seed)))


@contextlib.contextmanager
def begun(name: str, options: dict[str, Any], size: int, seed: int) -> Generator[None]:
    """Within the block these entries are generated beside whatever else it does; ``entries`` waits for the rest."""
    with _interpreter(_wanted(name, options, size, seed)):
        yield


def _wanted(*arguments: Any) -> str:
    """The argument of ``main``."""
    return json.dumps(arguments)


@contextlib.contextmanager
def _interpreter(wanted: str) -> Generator[None]:
    """Within the block a process generates what is wanted, unless it is known, or another block's is at it."""
    if wanted in _known or wanted in _begun:
        yield
        return
    command = interpreter("jaxrl_llm.tasks.generate", wanted)
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
        _begun[wanted] = process
        try:
            yield
        finally:
            del _begun[wanted]


def _written(wanted: str) -> bytes:
    """What ``main`` writes."""
    if wanted not in _known:
        with _interpreter(wanted):
            process = _begun[wanted]
            found, _ = process.communicate()
        if process.returncode == _REFUSED:
            raise InputError(found.decode())
        if process.returncode:
            raise RuntimeError(f"generating {json.loads(wanted)[0]} failed with exit code {process.returncode}")
        _known[wanted] = found
        for oldest in list(_known)[:-KEPT]:
            del _known[oldest]
    return _known[wanted]


def main(wanted: str) -> int:
    """Writes the entries to the standard output, or one line that says why there are none; returns the exit code."""
    name, options, size, seed = json.loads(wanted)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what a data set prints must not stand among the entries
        try:
            output.write(marshal.dumps(_generate(name, options, size, seed)))
        except InputError as error:
            output.write(str(error).encode())
            return _REFUSED
    return 0


def _generate(name: str, options: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    import reasoning_gym

    _check_names(name, options)
    random.seed(seed)
    given = f"size {size}, seed {seed}, options {options}"
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning-gym's {name} refuses {given} ({_in_one_line(error)}); change them") from error
    found = []
    for index in range(size):
        try:
            found.append(_plain(dataset[index]))
        except Exception as error:  # each data set has its own
            raise InputError(
                f"reasoning-gym's {name} fails at problem {index} of {given} ({_in_one_line(error)}); change them"
            ) from error
    return found


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _plain(value: Any) -> Any:
    """The same value of Python's own types: marshal writes NumPy's scalars as bytes without a word."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"reasoning-gym's entry holds a {type(value).__name__}, which cannot be handed on")


def _check_names(name: str, options: dict[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise InputError(f"reasoning-gym has no data set {name!r}; {_nearest(name, DATASETS) or NAMED}")
    fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for option in options:
        if option in ("size", "seed"):
            raise InputError(f"{option} is no option of {name}: set the source's own field {option}")
        if option not in fields:
            has = f"it has {', '.join(sorted(fields))}"
            raise InputError(f"reasoning-gym's {name} has no option {option!r}; {_nearest(option, fields) or has}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
