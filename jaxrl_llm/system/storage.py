"""Object storage: runs and models at addresses, ``gs://BUCKET/FOLDER`` and ``s3://BUCKET/FOLDER``.

Each address has a mirror, a folder in the cache directory whose path tells the address, so all other modules work with
folders. The files of a run or model are copied to its mirror before they are read (``folder``), and a run that trains
uploads its own at each checkpoint (``push``). Checkpoints stay in the storage, and are complete once they have a
marker: Orbax writes those of ``gs://`` directly, those of ``s3://`` are written to the mirror and uploaded.
"""

import contextlib
import fcntl
import importlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.paths import ADDRESS, HELD, LOCK, cache_directory

SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""By the scheme of an address: the module that reads it, and the extra that installs this."""
CREDENTIALS = {
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=KEY.json",
    "s3": "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
"""Ways to give credentials, by the scheme of an address."""
STEPS = ("checkpoints", "snapshots", "best")
"""The folders of a run with steps."""
CODE = "code"
"""The folder of a run with the copies of its own modules."""
BEGINNINGS = ("config.json", "adapter_config.json")
"""Files of which a folder has at least one, if it holds a run or a model."""
FRESH_S = 5.0
"""Seconds during which a mirror is not compared with its address again."""
DENIED = (
    "401",
    "403",
    "Forbidden",
    "Anonymous caller",
    "credentials",
    "AccessDenied",
    "InvalidAccessKeyId",
    "Unable to",
)
"""Parts of errors about missing rights."""
_compared: dict[Path, float] = {}


def split(name: str, field: str = "") -> tuple[str, str] | None:
    """Split an address into the scheme and the rest, without a final slash; None for the path of a file system.
    ``field``: the field or flag with this value. InputError: an address of another kind, or without a folder of a
    bucket.
    """
    if ADDRESS.match(name) is None:
        return None
    scheme, _, rest = name.partition("://")
    rest = rest.rstrip("/")
    kinds = " and ".join(f"{kind}://BUCKET/FOLDER" for kind in SCHEMES)
    require(
        scheme in SCHEMES,
        f"{field} {name} is an address, of which {kinds} are read and written: give one of these, or a folder (a model "
        "may be OWNER/MODEL of the hub)".strip(),
    )
    parts = rest.split("/")
    plain = len(parts) > 1 and not {"", ".", ".."} & set(parts) and not re.search(r"[*?#\[\]]", rest)
    require(plain, f"{field} {name} names no folder of a bucket: give {scheme}://BUCKET/FOLDER".strip())
    return scheme, rest


def mirror(name: str, field: str = "") -> Path:
    """Return the mirror of an address, which need not exist; any other name is a path, and returned as one."""
    parts = split(name, field)
    return Path(os.path.expanduser(name)) if parts is None else _root() / parts[0] / parts[1]


def folder(name: str) -> Path:
    """Return the folder (or ``.gguf`` file) of a name; that of an address is its mirror, with the present files.
    InputError: the storage cannot be reached; or its package is not installed.
    """
    return refreshed(mirror(name))


def refreshed(path: Path) -> Path:
    """Return the path; if it is a mirror, first bring its files up to date, unless a run on this machine writes it."""
    if address(path) and time.monotonic() - _compared.get(path, -FRESH_S) >= FRESH_S and not _in_training(path):
        fetch(path)
    return path


def _root() -> Path:
    return cache_directory().absolute() / "storage"


def address(path: Path) -> str:
    """Return the address of a mirror, or of a path in one; empty for any other path."""
    path = Path(path).absolute()
    if not path.is_relative_to(_root()) or len(path.relative_to(_root()).parts) < 3:
        return ""
    scheme, *rest = path.relative_to(_root()).parts
    return f"{scheme}://{'/'.join(rest)}"


def named(path: Path) -> str:
    """Return the name by which a folder is found from every machine: its address, or its path."""
    return address(path) or str(path)


def shown(text: str) -> str:
    """Return a text for people with addresses in place of the paths of mirrors."""
    return re.sub(rf"{re.escape(str(_root()))}/({'|'.join(SCHEMES)})/", r"\1://", text)


def place(path: Path) -> Any:
    """Return the path by which a file, perhaps in object storage, is read and written: an epath for a mirror's."""
    if not (url := address(path)):
        return Path(path).absolute()
    system(url)
    from etils import epath

    return epath.Path(url)


def written_directly(path: Path) -> bool:
    """Whether Orbax writes the steps in this folder to their final place: a file system, or ``gs://``."""
    return not address(path).startswith("s3://")


def system(url: str) -> Any:
    """Return fsspec's file system of an address; it caches no listings, as other programs write there too. InputError:
    its package is not installed.
    """
    scheme = url.partition("://")[0]
    module, extra = SCHEMES[scheme]
    # Else gcsfs asks another service for the kind of each bucket, which needs a right of its own.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger(module).setLevel(logging.CRITICAL)  # its errors are raised, too
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        raise InputError(f"{url} needs {module}: pip install -e '.[{extra}]' in the checkout") from None
    import fsspec
    from fsspec.config import conf

    conf.setdefault(scheme, {})["use_listings_cache"] = False
    return fsspec.filesystem(scheme)


@contextlib.contextmanager
def reaching(url: str) -> Generator[None]:
    """Turn the errors of a storage's package into one line with the remedy. InputError: no such bucket, no right to use
    it, or no connection.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        scheme, _, rest = url.partition("://")
        words = f"{type(error).__name__}: {error}".replace("\n", " ")
        if isinstance(error, FileNotFoundError):
            bucket = rest.partition("/")[0]
            raise InputError(f"{url}: there is no bucket {bucket}, or it is not yours: make it first") from error
        if isinstance(error, PermissionError) or any(mark in words for mark in DENIED):
            remedy = f"give credentials that may use it ({CREDENTIALS[scheme]})"
            raise InputError(f"{url} cannot be used ({words[:200]}): {remedy}") from error
        raise InputError(f"{url} cannot be reached ({words[:200]}): run the same command again") from error


@contextlib.contextmanager
def _index(path: Path) -> Generator[dict[str, list[Any]]]:
    """Lock a mirror against other readers and writers of its files, and yield the record of these, to be changed. For
    each file, by name: the storage's mark of its version, its size, and its time in nanoseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.index"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            index = json.loads(file.read() or "{}")
        except ValueError:  # cut off: all files are copied again
            index = {}
        yield index
        file.seek(0)
        file.truncate()
        json.dump(index, file)


def _in_training(path: Path) -> bool:
    """Whether a run on this machine writes the mirror: then it is newer than the storage."""
    try:
        with open(path / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    return False


def fetch(path: Path) -> None:
    """Make a mirror equal to its address: its own files and its code are copied, other folders below it are not.
    Without a run or model there, the mirror is removed. InputError: the storage cannot be reached.
    """
    url = address(path)
    files = system(url)
    with reaching(url), _index(path) as index:
        objects = _listing(files, url)
        if not objects:
            index.clear()
            _clear(path)
        single = path.suffix == ".gguf"
        stale = []
        for name, mark in objects.items():
            local = path if single else path / name
            if index.get(name) != [mark, *_state(local)]:
                stale.append((name, local, mark))
        for name, local, mark in stale:
            local.parent.mkdir(parents=True, exist_ok=True)
            part = local.with_name(f".{local.name}.part")
            files.get_file(url if single else f"{url}/{name}", str(part))
            part.replace(local)
            index[name] = [mark, *_state(local)]
        for local in [*path.iterdir(), *(path / CODE).rglob("*")] if objects and not single else ():
            name = str(local.relative_to(path))
            if local.is_file() and name not in objects and name != LOCK:
                local.unlink()
                index.pop(name, None)
    _compared[path] = time.monotonic()


def _clear(path: Path) -> None:
    """Remove a mirror, or, while its lock is held, all else in it."""
    if path.is_file():
        path.unlink()
    for local in path.iterdir() if path.is_dir() else ():
        if local.is_dir():
            shutil.rmtree(local, ignore_errors=True)
        elif local.name != LOCK:
            local.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def _listing(files: Any, url: str) -> dict[str, str]:
    """Return the versions of the files at an address, and in its code, by name; {} without a run or model there."""
    try:
        entries = files.ls(url, detail=True)
    except FileNotFoundError:
        return {}
    if any(entry["name"].rstrip("/").endswith(f"/{CODE}") for entry in entries):
        entries += files.find(f"{url}/{CODE}", detail=True).values()
    root = url.partition("://")[2].rpartition("/")[0] if url.endswith(".gguf") else url.partition("://")[2]
    objects = {
        entry["name"].removeprefix(f"{root}/"): str(entry.get("generation") or entry["ETag"])
        for entry in entries
        if entry["type"] == "file" and not {"", ".", ".."} & set(entry["name"].split("/"))
    }
    objects.pop(LOCK, None)
    return objects if url.endswith(".gguf") or objects.keys() & set(BEGINNINGS) else {}


def _state(local: Path) -> list[int]:
    """Return size and time of a file; zeros without one."""
    try:
        status = local.stat()
    except FileNotFoundError:
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


def push(path: Path) -> None:
    """Make an address equal to the mirror, whose run trains here: files that are new, changed or gone since the last
    time, also in folders below, but for those of steps. InputError: the storage cannot be reached.
    """
    url = address(path)
    files = system(url)
    with reaching(url), _index(path) as index:
        here = {str(local.relative_to(path)): local for local in _own_files(path)}
        for name, local in here.items():
            state = _state(local)
            if index.get(name, [None])[1:] != state and (content := _content(local)) is not None:
                files.pipe_file(f"{url}/{name}", content)
                index[name] = ["", *state]
        for name in index.keys() - here.keys():
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(f"{url}/{name}")
            del index[name]
        for name, mark in _listing(files, url).items() if here else ():
            if name in index:
                index[name][0] = mark


def _content(local: Path) -> bytes | None:
    """Return the content of a file, which a run may go on to append to; None if it has been removed meanwhile."""
    try:
        return local.read_bytes()
    except FileNotFoundError:
        return None


def _own_files(path: Path) -> list[Path]:
    """Return the files of a run that are uploaded: none of its steps, nothing hidden, and no other run below it."""
    files = sorted(local for local in path.rglob("*") if local.is_file() and not local.is_symlink())
    nested = [local.parent for local in files if local.name in BEGINNINGS and local.parent != path]
    # The folders of a run with steps.
    return [
        local
        for local in files
        if not any(part.startswith(".") for part in local.relative_to(path).parts)
        and local.relative_to(path).parts[0] not in ("checkpoints", "snapshots", "best", LOCK)
        and not any(local.is_relative_to(other) for other in nested)
    ]


def warn(line: str) -> None:
    """Print a line about the storage."""
    print(f"jaxrl-llm: {line}", file=sys.stderr)
