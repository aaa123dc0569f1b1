"""Rows in memory, as one opaque value of a configuration."""

import json
from collections.abc import Iterator
from typing import Any

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError

LARGEST_SAVED = 1_000_000
"""Characters of JSON up to which rows are written into a config.json: it should stay a file that one can open."""
MISSING = "missing: "
"""What stands in a config.json in place of rows that are not there begins with this."""


class Memory:
    """Rows that somebody holds: a list of dictionaries, or a ``datasets.Dataset``, which is not copied.

    Args:
      rows: the rows, or what ``to_save`` wrote of them.

    Raises:
      InputError: it is no table of rows.
    """

    def __init__(self, rows):  # without an annotation: what has one becomes a flag of the command line
        self._missing = rows if isinstance(rows, str) and rows.startswith(MISSING) else ""
        if self._missing:
            rows = []
        elif isinstance(rows, str) and rows.startswith("["):
            rows = codec.from_json(json.loads(rows))
        _refuse_others(rows)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        if self._missing:
            reason = self._missing.removeprefix(MISSING)
            raise InputError(
                f"config.json does not hold this run's problems ({reason}): give them again, in Python or "
                f"by a configuration that has them (--config)"
            )
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and (self._rows is other._rows or self.to_save() == other.to_save())

    def __hash__(self) -> int:
        return hash(self.to_save())

    def __repr__(self) -> str:
        return self._missing or f"{len(self):,} rows in memory"

    def to_save(self) -> str:
        """The rows as JSON text, exact; or, where they are too many or not plain values, a sentence that says so."""
        if self._missing:
            return self._missing
        parts = []
        size = 0
        for index, row in enumerate(self._rows):
            try:
                parts.append(json.dumps(codec.to_json(row)))
            except TypeError as error:
                return f"{MISSING}of {len(self):,} rows in memory rows[{index}] holds a value of type {error}"
            size += len(parts[-1])
            if size > LARGEST_SAVED:
                return f"{MISSING}{len(self):,} rows in memory are more than {LARGEST_SAVED:,} characters of JSON"
        return f"[{', '.join(parts)}]"


def _refuse_others(rows: Any) -> None:
    table = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str | bytes | dict)
    if not table:
        raise InputError(
            f"a task's source is a {type(rows).__name__}: give a list of dictionaries, a datasets.Dataset "
            f"(one split of it), a Table, a HubDataset, a ReasoningGym, or a dataclass with problems()"
        )
