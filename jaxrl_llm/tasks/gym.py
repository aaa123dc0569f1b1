"""Problems of reasoning-gym, generated in a separate interpreter so that every run and every host gets equal ones.

In this process they would differ: some of its data sets walk through sets of strings, which change their order with
the interpreter's hash seed, and one draws from Python's global random numbers.
"""

import contextlib
import dataclasses
import json
import marshal
import os
import random
import subprocess
from collections.abc import Generator
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean, one_line, require
from jaxrl_llm.system.signals import child, interpreter

NAMED = "jaxrl-llm list tasks names those that it has"

_REFUSED = 2

KEPT = 4
"""Outputs of the generating process that are cached: starting it costs more than its problems, and several runs of one
program ask for equal ones.
"""
known: dict[str, bytes] = {}
_begun: dict[str, subprocess.Popen] = {}


def entries(wanted: str) -> list[dict[str, Any]]:
    """Return the entries (``question``, ``answer``, ``metadata``) that ``main`` writes for this argument.

    Raises:
      InputError: the data set or option is unknown, or the data set refuses a value.
      RuntimeError: the generating process failed; its messages are on the error output.
    """
    if wanted not in known:
        with generating(wanted):
            process = _begun[wanted]
            found, _ = process.communicate()
        if process.returncode == _REFUSED:
            raise InputError(found.decode())
        if process.returncode:
            raise RuntimeError(f"generating {json.loads(wanted)[0]} failed with exit code {process.returncode}")
        known[wanted] = found
        for oldest in list(known)[:-KEPT]:
            del known[oldest]
    return marshal.loads(known[wanted])


@contextlib.contextmanager
def generating(wanted: str) -> Generator[None]:
    """Generate the wanted entries in another process during the block, unless they are cached or already being
    generated.
    """
    if wanted in known or wanted in _begun:
        yield
        return
    command = interpreter("jaxrl_llm.tasks.gym", wanted)
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
        _begun[wanted] = process
        try:
            yield
        finally:
            del _begun[wanted]


def main(wanted: str) -> int:
    """Write entries to the standard output, or one line with the reason of the failure; return the exit code.

    ``wanted``: name, options, size and seed of a data set, as JSON.
    """
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
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise InputError(f"reasoning-gym has no data set {name!r}; {did_you_mean(name, DATASETS, NAMED)}")
    settings: Any = DATASETS[name][1]
    fields = [field.name for field in dataclasses.fields(settings)]
    for option in options:
        require(option not in ("size", "seed"), f"{option} is not an option of {name}: set the source's field {option}")
        if option not in fields:
            has = f"it has {', '.join(sorted(fields))}"
            raise InputError(f"reasoning-gym's {name} has no option {option!r}; {did_you_mean(option, fields, has)}")
    random.seed(seed)
    given = f"size {size}, seed {seed}, options {options}"
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning-gym's {name} refuses {given} ({one_line(error)}); change them") from error
    found = []
    for index in range(size):
        try:
            found.append(_plain(dataset[index]))
        except Exception as error:  # each data set has its own
            raise InputError(
                f"reasoning-gym's {name} fails at problem {index} of {given} ({one_line(error)}); change them"
            ) from error
    return found


def _plain(value: Any) -> Any:
    """Convert a value to Python's own types: marshal silently writes NumPy's scalars as bytes."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"reasoning-gym's entry holds a {type(value).__name__}, which cannot be handed on")
