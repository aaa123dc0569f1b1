"""Records and display of a run: metric rows, curves, progress, findings, and the final summary."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_llm.system import attach

__getattr__ = attach("jaxrl_llm", {"Finding": "diagnosis", "diagnose": "diagnosis", "read_rows": "system.json_lines"})


@dataclasses.dataclass(frozen=True)
class Verbosity:
    """Output during a run, as set by ``--quiet`` and ``--json``. ``quiet``: only warnings, and the result at the end.
    ``rows``: called with each row as metrics.jsonl holds it, once it is written there; None for nobody.
    """

    quiet: bool = False
    rows: Callable[[dict[str, Any]], None] | None = None
