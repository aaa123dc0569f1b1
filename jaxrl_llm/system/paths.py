"""Files and folders: cache, locks, atomic writes; and the environment of libraries."""

import contextlib
import errno
import fcntl
import importlib
import logging
import os
import re
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.signals import on_exit

COLLECTED = "collected.jsonl"
"""The file in a run's directory with its collected data."""
SANDBOX = "sandbox.json"
"""The file in a run's directory with the level of the sandbox that its programs ran in."""
REWARD_ERROR = "reward_error.txt"
"""The file in a run's directory with the traceback of a reward that failed."""
PROFILE = "profile"
"""The folder in a run's directory with a trace of one step by JAX's profiler."""
GPU_SHARE = 0.9
"""The share of a GPU's memory that JAX may take (its own default is 0.75); the rest is for its libraries."""
GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""Paths of NVIDIA's driver, at least one of which exists where it is installed; the last is that of Windows (WSL)."""
TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""The PCI devices of Google that are TPUs, those that JAX knows."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota and a file over its limit."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""The beginning of an address."""
LOCK = "lock"
"""The name of the file, or object, that only the run in training has."""
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers of a lock that another process holds; any other means that the file system has no locks."""


class InUse(InputError):
    """Another process is using the folder."""


def cache_directory() -> Path:
    """Return the folder of fetched models and compiled programs: ``JAXRL_LLM_CACHE``, or in the user's cache."""
    if configured := os.environ.get("JAXRL_LLM_CACHE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl_llm"


def part_of(path: Path) -> Path:
    """Return the file of the finished problems while others remain: one line each, after a line with the settings."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def writable(place: Path, flag: str) -> Generator[None]:
    """Turn an operating system error about writing to ``place`` into one line with the flag to change; not a full disk.
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
    """Return the name of an output after checking that it is local: as a path, ``gs://bucket/x`` would be the folder
    ``gs:`` here. ``field``: the field or flag that has this value. InputError: it is an address.
    """
    require(
        ADDRESS.match(name) is None,
        f"{field} {name} is an address, and this is written to a file system: give a local or mounted folder".strip(),
    )
    return name


def check_file(path: Path, flag: str) -> None:
    """Refuse a path that cannot be written as a file, before anything is computed for it. InputError: it is a folder,
    or its folder does not exist.
    """
    require(not path.is_dir(), f"{flag} {path} is a folder: give a file in it")
    require(path.parent.is_dir(), f"{flag} {path}: there is no folder {path.parent}; make it first")


def relative_path(path: Path) -> str:
    """Return a path for people: within the current folder as seen from there, else whole."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@contextlib.contextmanager
def new_file(target: Path) -> Generator[Path]:
    """Yield a temporary file next to ``target`` that replaces it if the block succeeds, and is removed otherwise. Its
    name may exist, left by a killed process, or as another person's link to elsewhere: it is removed, never written
    through.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        with on_exit(lambda *reason: part.unlink(missing_ok=True)):
            part.unlink(missing_ok=True)
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            yield part
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def open_nofollow(path: Path, mode: str = "ab", encoding: str | None = None) -> Any:
    """Open a file of a run's directory for writing: to append, unless ``mode`` says otherwise. InputError: the path is
    a symbolic link, which may lead to any file.
    """
    try:
        return open(
            path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)
        )
    except OSError as error:
        require(error.errno != errno.ELOOP, f"{path} is a symbolic link, and nothing is written through one: remove it")
        raise


@contextlib.contextmanager
def alone(directory: Path, remedy: str) -> Generator[Path]:
    """Lock a folder, which exists, for this process; the kernel releases the lock when it ends, in any way. The file
    ``lock``, which is yielded, names the holder and is removed at the end. Where a file system has no locks there is a
    warning instead. ``remedy``: an alternative to waiting, for the message. InUse: another process, named in the line,
    has it.
    """
    path = directory / LOCK
    while True:
        file = open_nofollow(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                with file:
                    file.seek(0)
                    holder = file.read() or "another process"
                raise InUse(f"{directory} is in use by {holder}: wait until it ends, or {remedy}") from None
            print(f"jaxrl-llm: {path} cannot be locked ({error.strerror}): begin no second run there", file=sys.stderr)
            break
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # the one who held it has removed it meanwhile
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def prepare_libraries() -> None:
    """Set up libraries before their import: warnings stay off the terminal, and XLA's compiled programs are cached."""
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


def hint_accelerator(root: Path = Path("/")) -> None:
    """Print a hint if the machine has an accelerator that this JAX cannot use; ``root`` holds its /proc and /sys."""
    if (root / "proc/driver/nvidia/version").exists():
        extra, device = "cuda", "an NVIDIA GPU"
    elif any(
        (device / "vendor").exists()
        and (device / "vendor").read_text().strip() == "0x1ae0"  # of TPUs, and of network cards of Google's machines
        and (device / "device").read_text().strip() in TPUS
        for device in root.glob("sys/bus/pci/devices/*")
    ):  # told as JAX tells it: /dev differs between generations
        extra, device = "tpu", "a TPU"
    else:
        return
    import jax

    if jax.default_backend() == "cpu":
        print(
            f"jaxrl-llm: this machine has {device}, but this JAX runs on the CPU only: pip install -e '.[{extra}]'",
            file=sys.stderr,
        )


def config_folder() -> Path:
    """Return the folder of the shipped configurations: beside the package in a source tree, else inside it."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file() and (tree / "configs").is_dir():
        return tree / "configs"
    return Path(importlib.import_module("jaxrl_llm.configs").__path__[0])


def config_names() -> list[str]:
    """Return the names of the shipped configurations, sorted."""
    return sorted(p.stem for p in config_folder().glob("*.py") if p.stem != "__init__")
