"""Commands that several processes run as one: their flags, and a common end."""

import contextlib
import sys
import traceback
from collections.abc import Generator

from jaxrl_llm.cli.flags import suggest, take
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.distributed import Disagreement, Distributed, Peers, Shutdown, join
from jaxrl_llm.system.signals import on_exit

FLAGS = ("coordinator", "processes", "process", "heartbeat-s")
MARKS_OF_LOSS = ("Gloo", "CoordinationService", "coordination service", "Connection reset", "heartbeat")
"""Texts in errors of collectives and of the coordination service after the loss of a process."""


def take_distributed(arguments: list[str]) -> Distributed:
    """Remove ``--distributed.*``; they depend on the place of a run, not its settings, so no config.json holds them.

    Raises:
      InputError: a value is not a number, or such an option is unknown.
    """
    found: dict[str, str | int] = {}
    for name in FLAGS:
        value = take(arguments, f"--distributed.{name}", True)
        if value is None:
            continue
        if name != "coordinator" and not value.isdecimal():
            raise InputError(f"--distributed.{name.replace('-', '_')} must be a number, got {value!r}")
        found[name.replace("-", "_")] = value if name == "coordinator" else int(value)
    for argument in arguments:
        if argument.startswith("--distributed"):
            raise InputError(f"no option {argument}: {suggest(argument, [f'--distributed.{name}' for name in FLAGS])}")
    if found.get("processes", 1) == 0 or found.get("heartbeat_s", 10) < 10:
        raise InputError("--distributed.processes must be at least 1, and --distributed.heartbeat_s at least 10")
    return Distributed(**found)


@contextlib.contextmanager
def together(given: Distributed) -> Generator[Peers]:
    """Yield the link to the other processes; an early end of the block on one process ends all, with one line each."""
    peers = join(given)
    if peers.shutdown is None:
        yield peers
        return
    try:
        with on_exit(peers.shutdown.quit):
            yield peers
    except BaseException as error:  # noqa: BLE001  the other processes hear of whatever ends this one
        _end_all(peers.shutdown, error)
    peers.close()


def _end_all(shutdown: Shutdown, error: BaseException) -> None:
    """Stop every process for this process's reason; never return."""
    from jaxrl_llm.cli import WRONG_INPUT, explain

    reason = str(error) if isinstance(error, InputError) else explain(error, "train")
    if reason is not None:
        shutdown.stop(WRONG_INPUT, reason)
    if isinstance(error, Disagreement):
        shutdown.stop(1, str(error))
    if any(mark in str(error) for mark in MARKS_OF_LOSS):
        shutdown.lost(str(error))
    traceback.print_exception(error, file=sys.stderr)
    shutdown.stop(1, f"{type(error).__name__}: {error}"[:500])
