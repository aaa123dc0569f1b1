"""How much a run says on its way, and to whom."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Voice:
    """What ``--quiet`` and ``--json`` ask for.

    Attributes:
      quiet: warnings alone on the way, and at the end how it ended.
      rows: called with each row as metrics.jsonl holds it, once it stands there; None for nobody.
    """

    quiet: bool = False
    rows: Callable[[dict[str, Any]], None] | None = None
