"""The directory of a run in training: made, locked, shown to all processes, and removed if the run does not begin."""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Generator
from pathlib import Path

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.dependents import drop_copies
from jaxrl_llm.errors import InputError
from jaxrl_llm.runs.load import has_begun
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.system import lease, storage
from jaxrl_llm.system.paths import REWARD_ERROR, InUse, alone, writable
from jaxrl_llm.system.signals import on_exit

OTHERWISE = "take --fresh for a new folder"
"""An alternative to waiting for a run in use."""
FILE_SYSTEM_S = 20.0
"""The most seconds until another host sees a file that one host writes."""


@contextlib.contextmanager
def claimed(directory: Path, found: configs.Found) -> Generator[None]:
    """Create and lock the run's directory with its config.json. A directory made here is removed if the run does not
    begin, except for the traceback of a reward, which the message names.
    """
    run = found.run
    if found.directory is not None and run.output.run_dir == str(found.directory):  # a run lies where its directory is
        run = dataclasses.replace(run, output=dataclasses.replace(run.output, run_dir=None))
    settings = configs.to_json(run) | {"chosen": configs.chosen(found.run)}
    made = next((p for p in reversed([directory, *directory.parents]) if not p.exists()), None)

    def remove(*reason: object) -> None:
        if made is None or has_begun(directory):
            return
        if not (directory / REWARD_ERROR).exists():
            shutil.rmtree(directory, ignore_errors=True)
            if storage.address(directory):
                drop_copies(directory, ())
                lease.upload_last(directory)
            with contextlib.suppress(OSError):  # other runs may lie beside it by now
                for parent in directory.parents[: len(directory.parts) - len(made.parts)]:
                    parent.rmdir()
            return
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != REWARD_ERROR:
                path.unlink(missing_ok=True)

    with contextlib.ExitStack() as stack:
        try:
            with writable(directory, "--run_dir"):
                directory.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(alone(directory, OTHERWISE))
            stack.enter_context(lease.leased(directory, OTHERWISE))
            if storage.address(directory):  # another machine may have trained it since it was chosen
                storage.fetch(directory)
            with writable(directory, "--run_dir"):
                configs.write(directory / "config.json", settings | found.origin.to_json())
            if storage.address(directory):
                storage.push(directory)
                stack.callback(lease.upload_last, directory)
            with on_exit(lambda *reason: lock.unlink(missing_ok=True)), on_exit(remove):
                yield
        except InUse:
            raise
        except BaseException:
            remove()
            raise


def check_shared(peers: Peers, path: Path) -> None:
    """Refuse a run directory that is not shared by all hosts.

    ``path``: a file that process 0 has just written.

    Raises:
      InputError: a process does not see it, or sees other content.
    """
    content = peers.first(path.read_text)
    limit = time.monotonic() + FILE_SYSTEM_S
    while not (seen := _holds(path, content)) and time.monotonic() < limit:
        time.sleep(0.2)
    blind = [i for i, sees in enumerate(peers.gather(seen)) if not sees]
    if blind:
        raise InputError(
            f"process {blind[0]} does not see {path}: all processes write the checkpoints, so give a folder that they "
            "share with --run_dir"
        )


def _holds(path: Path, content: str) -> bool:
    storage.refreshed(path.parent)
    return path.is_file() and path.read_text() == content
