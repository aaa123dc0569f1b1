"""A command that several processes run as one: the flags that say so, and an end that all of them share."""

import contextlib
import sys
import traceback
from collections.abc import Generator

from jaxrl_llm.cli.flags import suggest, take
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.departure import Departure
from jaxrl_llm.sharding.distributed import Disagreement, Distributed, Peers, join
from jaxrl_llm.signals import farewell

FLAGS = ("coordinator", "processes", "process", "heartbeat-s")
MARKS_OF_LOSS = ("Gloo", "CoordinationService", "coordination service", "Connection reset", "heartbeat")
"""In errors of collectives and of the coordination service whose other side is gone."""


def take_distributed(arguments: list[str]) -> Distributed:
    """Remove ``--distributed.*``; they say where a run goes on, never what it is, so no config.json holds them.

    Raises:
      InputError: a number is none, or another of their names is given.
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
    """The link to the other processes; whatever ends the block early on one of them ends all, with one line each."""
    peers = join(given)
    if peers.departure is None:
        yield peers
        return
    try:
        with farewell(peers.departure.quit):
            yield peers
    except BaseException as error:
        end_all(peers.departure, error)
    peers.close()


def end_all(departure: Departure, error: BaseException) -> None:
    """Stop every process for the reason that this one has; does not return."""
    from jaxrl_llm.cli import WRONG_INPUT, explain

    reason = str(error) if isinstance(error, InputError) else explain(error, "train")
    if reason is not None:
        departure.stop(WRONG_INPUT, reason)
    if isinstance(error, Disagreement):
        departure.stop(1, str(error))
    if any(mark in str(error) for mark in MARKS_OF_LOSS):
        departure.lost(str(error))
    traceback.print_exception(error, file=sys.stderr)
    departure.stop(1, f"{type(error).__name__}: {error}"[:500])
