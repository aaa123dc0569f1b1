"""The lines of a run in one output of a notebook's cell, which is updated in place."""

import html
import threading
from collections.abc import Sequence

KEPT = 100
"""Lines that stay in view; all are in the run's log.txt."""
STYLE = "white-space: pre; overflow-x: auto; line-height: 1.3"


class CellOutput:
    """One output of the cell that runs; any thread may update it."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display(self._bundle([], []), raw=True, display_id=True)
        self._lines: list[tuple[str, bool]] = []
        self._lock = threading.Lock()

    def add(self, text: str, strong: bool) -> None:
        """Append a line, which is shown with the next ``show``; a ``strong`` one stands out."""
        with self._lock:
            self._lines = [*self._lines, (text, strong)][-KEPT:]

    def show(self, below: Sequence[str]) -> None:
        """Show the lines and, under them, those of what is going on now."""
        with self._lock:
            self._handle.update(self._bundle(self._lines, below), raw=True)

    @staticmethod
    def _bundle(lines: Sequence[tuple[str, bool]], below: Sequence[str]) -> dict[str, str]:
        marked = [f"<b>{html.escape(text)}</b>" if strong else html.escape(text) for text, strong in lines]
        page = "\n".join([*marked, *map(html.escape, below)])
        plain = "\n".join([*(text for text, _ in lines), *below])
        return {"text/plain": plain, "text/html": f'<pre style="{STYLE}">{page}</pre>'}
