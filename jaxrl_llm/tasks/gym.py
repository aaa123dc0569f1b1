"""Problems of reasoning-gym, generated in a separate interpreter so that every run and every host gets equal ones. In
this process they would differ: some of its data sets walk through sets of strings, which change their order with the
interpreter's hash seed, and one draws from Python's global random numbers.
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

_REFUSED = 2
CACHE: dict[str, bytes] = {}
"""Last outputs: starting the process takes longer than its problems, and runs of one program ask for equal ones."""
_RUNNING: dict[str, subprocess.Popen] = {}


def entries(request: str) -> list[dict[str, Any]]:
    """Return the entries (``question``, ``answer``, ``metadata``) of ``main``. RuntimeError: its process failed."""
    if request not in CACHE:
        with generating(request):
            process = _RUNNING[request]
            output, _ = process.communicate()
        if process.returncode == _REFUSED:
            raise InputError(output.decode())
        if process.returncode:
            raise RuntimeError(f"generating {json.loads(request)[0]} failed with exit code {process.returncode}")
        CACHE[request] = output
        for oldest in list(CACHE)[:-4]:
            del CACHE[oldest]
    return marshal.loads(CACHE[request])


@contextlib.contextmanager
def generating(request: str) -> Generator[None]:
    """Generate entries in another process during the block, unless they are cached or already being generated."""
    if request in CACHE or request in _RUNNING:
        yield
        return
    command = interpreter("jaxrl_llm.tasks.gym", request)
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
        _RUNNING[request] = process
        try:
            yield
        finally:
            del _RUNNING[request]


def main(request: str) -> int:
    """Write entries (``request``: JSON of name, options, size, seed) or why there are none; return the exit code."""
    name, options, size, seed = json.loads(request)
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
        hint = did_you_mean(name, DATASETS, "jaxrl-llm list tasks names those that it has")
        raise InputError(f"reasoning-gym has no data set {name!r}; {hint}")
    settings: Any = DATASETS[name][1]
    fields = [field.name for field in dataclasses.fields(settings)]
    for option in options:
        require(option not in ("size", "seed"), f"{option} is not an option of {name}: set the source's field {option}")
        if option not in fields:
            has = f"it has {', '.join(sorted(fields))}"
            raise InputError(f"reasoning-gym's {name} has no option {option!r}; {did_you_mean(option, fields, has)}")
    random.seed(seed)
    settings_text = f"size {size}, seed {seed}, options {options}"
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"reasoning-gym's {name} refuses {settings_text} ({one_line(error)}); change them") from error
    generated = []
    for index in range(size):
        try:
            generated.append(_plain(dataset[index]))
        except Exception as error:  # each data set has its own
            raise InputError(
                f"reasoning-gym's {name} fails at problem {index} of {settings_text} ({one_line(error)}); change them"
            ) from error
    return generated


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
