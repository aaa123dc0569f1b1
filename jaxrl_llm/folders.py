"""Where things lie that outlive a run, whether they can be written, and what libraries are told of it."""

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.errors import InputError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota and a file over its limit."""


def cache_directory() -> Path:
    """Where fetched models and compiled programs lie: ``JAXRL_LLM_CACHE``, else the user's cache directory."""
    if given := os.environ.get("JAXRL_LLM_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl_llm"


@contextlib.contextmanager
def writable(place: Path, flag: str) -> Iterator[None]:
    """Turn what the system says of a place that cannot be written into a line that names the flag; not a full disk.

    Raises:
      InputError: the place is read-only, below a file, or belongs to another user.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise InputError(
            f"{place} cannot be written ({error.strerror or error}): give another folder with {flag}"
        ) from error


def prepare_libraries() -> None:
    """Before they are used: warnings stay off the terminal, and what XLA compiles is kept for the next run."""
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(cache_directory() / "compiled"),
        "TRANSFORMERS_VERBOSITY": "error",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    if "jax" in sys.modules:  # it has read its environment already
        sys.modules["jax"].config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
