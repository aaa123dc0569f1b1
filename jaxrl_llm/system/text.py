"""Text for people: numbers, durations, and any text as one line, free of control characters and cut to a width."""

import math
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size

ELLIPSIS = "…"


def harmless(text: str) -> str:
    """Return ``text`` on one line: control characters, of direction too, become spaces, and white space is joined."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def abridge(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """Cut ``text`` to a line of at most ``limit`` columns, ``mark`` in its middle, since answers come last."""
    text = harmless(text)
    if cell_len(text) <= limit:
        return text
    half = (limit - cell_len(mark) - 2) // 2
    if half < 1:
        return head(text, limit, mark)
    # Whole words, where there are any.
    start = set_cell_size(text, half).rstrip().rsplit(" ", 1)[0].rstrip()
    return f"{start} {mark} {_end(text, half).split(' ', 1)[-1]}"


def head(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """Return the beginning of a line, in at most ``limit`` columns."""
    return text if cell_len(text) <= limit else set_cell_size(text, max(limit - cell_len(mark), 0)).rstrip() + mark


def tail(text: str, limit: int, mark: str = ELLIPSIS) -> str:
    """Return the end of a line, in at most ``limit`` columns: questions come last in prompts."""
    return text if cell_len(text) <= limit else mark + _end(text, limit - cell_len(mark)).lstrip()


def _end(text: str, columns: int) -> str:
    """Return as much of the end as fits in ``columns``; a character may take two."""
    begin = len(text)
    room = columns
    while begin and (room := room - cell_len(text[begin - 1])) >= 0:
        begin -= 1
    return text[begin:]


def seconds(value: float) -> str:
    """Format a duration: ``8.2 s``, ``3m05``, ``2h07``, ``4d03h``."""
    if value < 99.95:
        return f"{value:.1f} s"
    minutes = int(value // 60)
    hours = int(value // 3600)
    if hours < 1:
        return f"{minutes}m{int(value % 60):02d}"
    if hours < 48:
        return f"{hours}h{minutes % 60:02d}"
    return f"{hours // 24}d{hours % 24:02d}h"


def short(value: float) -> str:
    """Format a number of any size in at most 8 characters: ``0.312``, ``0.0312``, ``12.3``, ``1.2e+07``."""
    size = abs(value)
    if size == 0 or 0.1 <= size < 10:
        return f"{value:.3f}"
    if 0.001 <= size < 0.1:
        return f"{value:.4f}"
    return f"{value:.1f}" if 10 <= size < 1e5 else f"{value:.1e}"


def count(value: int) -> str:
    """Format a count for people: ``960``, ``90.6 k``, ``134.5 M``, ``32.8 B``."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def shown(value: float | None, style: Callable[[float], str] = short) -> str:
    """Format a number in its style; ``-`` for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return style(float(value)) if math.isfinite(value) else str(float(value))


def percent(share: float) -> str:
    """Format a share as a percentage: ``60 %``, ``2.0 %``."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
