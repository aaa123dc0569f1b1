"""Where things lie that outlive a run, whether they can be written, and what libraries are told of it."""

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.signals import farewell

GPU_SHARE = 0.9
"""Of a GPU's memory, what JAX may take: by itself it takes 0.75. The rest is its libraries'."""
GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""One of these is there where NVIDIA's driver is; the last under Windows."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota and a file over its limit."""
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers of a lock that another process holds; any other says that the file system has none."""


class InUse(InputError):
    """Another process is at work in the folder."""


def cache_directory() -> Path:
    """Where fetched models and compiled programs lie: ``JAXRL_LLM_CACHE``, else the user's cache directory."""
    if given := os.environ.get("JAXRL_LLM_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl_llm"


@contextlib.contextmanager
def writable(place: Path, flag: str) -> Generator[None]:
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


def local(name: str, field: str = "") -> str:
    """The name, which must be of this machine: ``gs://bucket/x`` as a path would be the folder ``gs:`` here.

    ``field``: the field or flag that it stands behind.

    Raises:
      InputError: it is an address.
    """
    require(
        re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is None,
        f"{field} {name} is an address, and nothing is read from one or written to one: give a local or mounted "
        "folder (a model may be OWNER/MODEL of the hub)".strip(),
    )
    return name


def check_file(path: Path, flag: str) -> None:
    """Refuse a file that could not be written, before anything is computed for it.

    Raises:
      InputError: it is a folder, or its folder is not there.
    """
    require(not path.is_dir(), f"{flag} {path} is a folder: give a file in it")
    require(path.parent.is_dir(), f"{flag} {path}: there is no folder {path.parent}; make it first")


@contextlib.contextmanager
def new_file(target: Path) -> Generator[Path]:
    """A file beside ``target`` that takes its name when the block ends well, and vanishes otherwise.

    The folder may be another person's: what is there under the name of the part, left behind by a killed process or
    laid as a link to somewhere else, is removed, and never written through.
    """
    part = target.with_name(f".{target.name}.part")

    def remove(*reason: object) -> None:
        part.unlink(missing_ok=True)

    try:
        with farewell(remove):
            remove()
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            yield part
            os.replace(part, target)
    finally:
        remove()


def open_nofollow(path: Path, mode: str = "ab", encoding: str | None = None) -> IO[Any]:
    """A file of a run's directory, opened to write to it: to append, unless ``mode`` says else.

    Raises:
      InputError: a symbolic link lies there, which may lead to any file.
    """

    def direct(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding=encoding, opener=direct)
    except OSError as error:
        require(error.errno != errno.ELOOP, f"{path} is a symbolic link, and nothing is written through one: remove it")
        raise


@contextlib.contextmanager
def alone(directory: Path, remedy: str) -> Generator[Path]:
    """Hold a folder for this process; the kernel lets go of it when the process ends, however it ends.

    What shows it is the file ``lock``, which is yielded: it says who holds the folder and is removed at the end. Where
    the file system has no locks the folder is not held, which is said.

    Args:
      directory: exists.
      remedy: what else to do than to wait.

    Raises:
      InUse: another process holds it; the line names that process.
    """
    path = directory / "lock"
    with _locked(path, remedy) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, remedy: str) -> IO[str]:
    """The file, open and locked."""
    while True:
        file = open_nofollow(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                with file:
                    file.seek(0)
                    holder = file.read() or "another process"
                raise InUse(f"{path.parent} is in use by {holder}: wait until it ends, or {remedy}") from None
            print(f"jaxrl-llm: {path} cannot be locked ({error.strerror}): begin no second run there", file=sys.stderr)
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # the one who held it has removed it meanwhile


def prepare_libraries() -> None:
    """Before they are used: warnings stay off the terminal, and what XLA compiles is kept for the next run."""
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(cache_directory() / "compiled"),
        "TRANSFORMERS_VERBOSITY": "error",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE),
    }.items():
        os.environ.setdefault(name, value)
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):  # the CUDA plugin compiles here, and nothing else
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if "jax" in sys.modules:  # it has read its environment already
        sys.modules["jax"].config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
