"""What people ask of a run while it trains: a small file in its folder, until what was asked for is safe."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.folders import new_file
from jaxrl_llm.rules import ASKED, BY_HAND, Memory
from jaxrl_llm.snapshots import CHECKPOINTS

REQUEST = "reset.json"


def ask(directory: Path, with_optimiser: bool) -> None:
    """Have the run reset its reference after the step that it is in, or after its next one once it is gone on with."""
    request = {"id": f"{time.time_ns()}-{os.getpid()}", "with_optimiser": with_optimiser}
    with new_file(directory / REQUEST) as part:
        part.write_text(json.dumps(request))


def asked(directory: Path) -> dict[str, Any]:
    """What rules are told of the request that is there, if there is one; whether it is new, they know."""
    try:
        return {ASKED: json.loads((directory / REQUEST).read_text())}
    except FileNotFoundError:
        return {}


def forget(directory: Path, memory: Memory) -> None:
    """Remove the request once a complete checkpoint has what was asked for: a run that is killed before that goes on
    without it, and finds the file again.

    ``memory``: of the run's rules.
    """
    taken: Mapping[str, Any] = memory.get(BY_HAND, {})
    request = asked(directory).get(ASKED)
    if request is None or request["id"] != taken.get("id"):
        return
    if max(steps_in(directory / CHECKPOINTS), default=0) >= taken["step"]:
        (directory / REQUEST).unlink(missing_ok=True)
