"""The lock of a run in object storage: an object with its holder, which the holder renews as long as it lives. Each
write names the version that it replaces, and the storage refuses it if there is another by now.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.paths import LOCK, InUse
from jaxrl_llm.system.storage import address, push, reaching, shown, system, warn

BEAT_S = 15.0
"""Seconds between two renewals."""
LEASE_S = 60.0
"""Seconds without renewal after which a lock counts as left behind."""
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
"""S3's codes for a write that names another version than there is."""
LEASES: dict[Path, "Lease"] = {}
"""The locks of this process, by the mirror of the run."""


class Refused(Exception):
    """The object has another version than the one to be replaced."""


def put(url: str, data: bytes, version: str | None) -> str:
    """Write an object in place of this version, None for none; return its new one. Refused: there is another."""
    files = system(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    try:
        if url.startswith("s3://"):
            condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
            return files.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)["ETag"]
        path = f"{files._location}/upload/storage/v1/b/{bucket}/o"
        kinds = {"uploadType": "media", "name": key, "ifGenerationMatch": version or "0"}
        headers = {"Content-Type": "application/octet-stream"}
        return str(files.call("POST", path, headers=headers, data=data, json_out=True, **kinds)["generation"])
    except FileExistsError:
        raise Refused from None
    except OSError as error:
        response = getattr(error.__cause__, "response", None) or {}
        gone = isinstance(error, FileNotFoundError) and version is not None
        if gone or response.get("Error", {}).get("Code") in REFUSED:
            raise Refused from None
        raise


def get(url: str) -> tuple[dict[str, Any], str] | None:
    """Return the content of a lock and its version; None without one."""
    files = system(url)
    try:
        info = files.info(url)
        content = json.loads(files.cat_file(url))
    except FileNotFoundError:
        return None
    except ValueError:
        content = {}
    return content, str(info.get("ETag") or info["generation"])


def whoami() -> dict[str, Any]:
    """Return what identifies this process on this machine until the machine's next start."""
    started = _begun(os.getpid())
    kernel = Path("/proc/sys/kernel/random/boot_id")
    boot = kernel.read_text().strip() if kernel.exists() else ""
    space = os.readlink("/proc/self/ns/pid") if boot else ""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": boot, "space": space, "begun": started}


def _begun(pid: int) -> str:
    """Return the time at which a process started, in the kernel's units; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def lives(holder: dict[str, Any]) -> bool | None:
    """Whether the holder of a lock, a process of this machine, still runs; None if it is of another machine."""
    me = whoami()
    if not me["boot"] or any(holder.get(name) != me[name] for name in ("boot", "space")):
        return None
    return _begun(holder["pid"]) == holder["begun"]


class Lease:
    """Owner of the lock of a run in object storage, renewed in a thread. ``path``: the run's mirror. ``remedy``: an
    alternative to waiting, for the message. ``beat_s``: seconds between renewals; ``lease_s``: without one until a lock
    counts as left behind.
    """

    def __init__(self, path: Path, remedy: str, beat_s: float = BEAT_S, lease_s: float = LEASE_S):
        self._run = address(path)
        self._lock = f"{self._run}/{LOCK}"
        self._me = whoami() | {"id": uuid.uuid4().hex, "beat": 0}
        self._remedy = remedy
        self._beat_s, self._lease_s = beat_s, lease_s
        self._version: str | None = None
        self._lost = ""
        self._one = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def take(self) -> None:
        """Lock the run; return once it is ours. InUse: a living process has it. InputError: storage out of reach."""
        with reaching(self._run):
            watched = None
            while not self._ours(watched):
                watched = self._watch()
        self._thread.start()

    def _ours(self, version: str | None) -> bool:
        """Write the lock in place of a version; return whether it is ours, by what is there now."""
        with contextlib.suppress(Refused):
            put(self._lock, json.dumps(self._me).encode(), version)
        there = get(self._lock)
        if there is None or there[0].get("id") != self._me["id"]:
            return False
        self._version = there[1]
        return True

    def _watch(self) -> str | None:
        """Return the version of a lock that was left behind, or None if there is none any more."""
        there = get(self._lock)
        if there is None:
            return None
        holder, version = there
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        alive = lives(holder)
        if alive is None:
            warn(f"{self._run} is locked by {who}: it is watched for up to {self._lease_s:.0f} s, whether it lives")
            until = time.monotonic() + self._lease_s
            while not alive and time.monotonic() < until:
                time.sleep(min(1.0, self._lease_s / 4))
                there = get(self._lock)
                if there is None:
                    return None
                alive = there[1] != version
        if alive:
            raise InUse(f"{self._run} is in use by {who}: wait until it ends, or {self._remedy}")
        warn(f"{self._run} was locked by {who}, which has ended: its lock is taken over")
        return version

    def renew(self) -> None:
        """Write the lock again. InputError: another process has taken it over; or the storage cannot be reached."""
        with self._one, reaching(self._run):
            if not self._lost:
                self._me["beat"] += 1
                if not self._ours(self._version):
                    there = get(self._lock)
                    holder = {} if there is None else there[0]
                    self._lost = f"process {holder.get('pid')} on {holder.get('host')}"
            if self._lost:
                raise InputError(
                    f"{self._run} was taken over by {self._lost}, since this process did not renew its lock for "
                    f"{self._lease_s:.0f} s: nothing more is written there"
                )

    def _beat(self) -> None:
        while not self._end.wait(self._beat_s):
            try:
                self.renew()
            except InputError as error:  # where the storage is away, the next renewal may succeed
                warn(f"the lock was not renewed: {error}")
                if self._lost:
                    return

    def close(self) -> None:
        """Remove the lock, if it is still ours."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._one:
            if not self._lost and self._version is not None:
                try:
                    there = get(self._lock)
                    if there is not None and there[0].get("id") == self._me["id"]:
                        system(self._lock).rm_file(self._lock)
                except Exception as error:  # noqa: BLE001  it is left behind, and counts as such after a while
                    warn(f"the lock of {self._run} could not be removed ({type(error).__name__}: {error})"[:300])


@contextlib.contextmanager
def leased(path: Path, remedy: str) -> Generator[None]:
    """Lock the run at the address of a mirror while the block runs; a folder of a file system needs no such lock.
    InUse: another process has it. InputError: the storage cannot be reached.
    """
    if not address(path):
        yield
        return
    lease = Lease(path, remedy)
    lease.take()
    LEASES[path] = lease
    try:
        yield
    finally:
        del LEASES[path]
        lease.close()


def before_commit(path: Path) -> None:
    """Check that this process still has the run before it completes a checkpoint, and upload the run's other files, or
    leave them for the next time, with a warning. InputError: another process has taken the run over.
    """
    if path in LEASES:
        LEASES[path].renew()
    try:
        push(path)
    except InputError as error:
        warn(shown(f"{error}; the files of the run are uploaded again at the next checkpoint"))


def upload_last(path: Path) -> None:
    """Upload a run's files as it ends, unless another process has taken the run over; a failure is a warning."""
    try:
        if path in LEASES:
            LEASES[path].renew()
        push(path)
    except InputError as error:
        warn(f"the last files of the run are only in {path}: {error}")
