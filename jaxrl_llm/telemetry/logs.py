"""A run's log: what it said, and what only those want to know who look for it."""

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import IO

from jaxrl_llm.folders import open_nofollow


class _Log(logging.FileHandler):
    """A full disk is told by the records, whose rows matter more than these lines."""

    def _open(self) -> IO[str]:
        return open_nofollow(Path(self.baseFilename), "a", self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextlib.contextmanager
def logged(path: Path) -> Generator[None]:
    """Append what the package logs to ``path`` within the block, each line with its time."""
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    package = logging.getLogger("jaxrl_llm")
    before = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # some libraries print on the terminal whatever comes to the root
    try:
        yield
    finally:
        package.setLevel(before[0])
        package.propagate = before[1]
        package.removeHandler(handler)
        handler.close()
