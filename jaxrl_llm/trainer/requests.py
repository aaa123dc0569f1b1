"""Requests to a run in training: a small file in its folder, kept until the result is in a checkpoint."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints.snapshots import CHECKPOINTS
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.rules import ASKED, BY_HAND, Memory
from jaxrl_llm.system.paths import new_file

REQUEST = "reset.json"


def ask(directory: Path, with_optimiser: bool) -> None:
    """Request a reset of the reference after the current step of the run, or after its next one once it is resumed."""
    request = {"id": f"{time.time_ns()}-{os.getpid()}", "with_optimiser": with_optimiser}
    with new_file(directory / REQUEST) as part:
        part.write_text(json.dumps(request))


def asked(directory: Path) -> dict[str, Any]:
    """Return the pending request, if any, as input of the rules, which know whether it is new."""
    try:
        return {ASKED: json.loads((directory / REQUEST).read_text())}
    except FileNotFoundError:
        return {}


def forget(directory: Path, memory: Memory) -> None:
    """Remove the request once a complete checkpoint has its result.

    A run that is killed before that resumes without the result, and finds the file again.

    ``memory``: of the run's rules.
    """
    taken: Mapping[str, Any] = memory.get(BY_HAND, {})
    request = asked(directory).get(ASKED)
    if request is None or request["id"] != taken.get("id"):
        return
    if max(steps_in(directory / CHECKPOINTS), default=0) >= taken["step"]:
        (directory / REQUEST).unlink(missing_ok=True)
