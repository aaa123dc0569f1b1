"""Runs of several processes: how a process finds the others, how they exchange values, and how they end together.
Arrays travel by JAX's collectives. Host values (scores, signals, files) are small and go through the store of JAX's
coordination service instead: exactly, without a program on any device, and without an order that devices must keep. The
first process to fail gives the reason, all exit alike, and none hangs.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.signals import on_exit, quit_now

FOREVER_MS = 7 * 24 * 3600 * 1000
"""Milliseconds of waits that end when the coordination service notices a dead process, not by the clock."""
AGAIN = "run the same command again, on fewer if need be, to resume"
LOST = f"another process of this run died or cannot be reached: {AGAIN}"


@dataclasses.dataclass(frozen=True)
class Distributed:
    """This process's place among those of the run; by default as SLURM, Cloud TPU, Kubernetes or Open MPI report it.

    Attributes:
      coordinator: HOST:PORT of process 0, a free port that the others reach.
      processes: how many; 1 for a run of this process alone, regardless of the environment.
      process: the number of this process, from 0.
      heartbeat_s: seconds after which a process that is not heard of counts as dead.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    heartbeat_s: int = 100


def join_arguments(settings: Distributed, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of ``jax.distributed.initialize``; None for a run of this process alone. ``environment`` is
    read after JAX's import, which marks a Cloud TPU there.
    """
    flags = {name: value for name, value in vars(settings).items() if name != "heartbeat_s" and value is not None}
    if settings.processes == 1:
        return None
    if flags:
        missing = [f"--distributed.{name}" for name in ("coordinator", "processes", "process") if name not in flags]
        if missing:
            raise InputError(f"--distributed.{next(iter(flags))} needs {' and '.join(missing)}, too")
        if not re.fullmatch(r".+:\d+", settings.coordinator or ""):
            raise InputError(f"--distributed.coordinator must be HOST:PORT, got {settings.coordinator!r}")
        if not 0 <= settings.process < settings.processes:
            raise InputError(
                f"--distributed.process must be from 0 to {settings.processes - 1}, got {settings.process}"
            )
        return {
            "coordinator_address": settings.coordinator, "num_processes": settings.processes,
            "process_id": settings.process, "cluster_detection_method": "deactivate",
        }  # fmt: skip
    # JAX finds the other processes if a launcher started several.
    if "OMPI_MCA_orte_hnp_uri" in environment and int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return {"cluster_detection_method": "ompi"}
    slurm = "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment
    if slurm and int(environment.get("SLURM_NTASKS", "1")) > 1:
        # The task's devices if it has its node, or sees only its own GPU: JAX would pick the GPU of its local number.
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        count = len(visible.split(",")) if visible else int(environment.get("SLURM_GPUS_ON_NODE", "0"))
        alone = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0] == "1"
        devices = {"local_device_ids": list(range(count))} if count and (alone or count == 1) else {}
        return {"cluster_detection_method": "slurm"} | devices
    # JAX found TPU chips on import and may use them, unless the environment excludes other hosts.
    if environment.get("TPU_ML_PLATFORM") == "JAX" and "tpu" in environment.get("JAX_PLATFORMS", "tpu"):
        hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
        if "," in hosts or "TPU_SKIP_MDS_QUERY" not in environment:
            return {}
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes") is None:
            raise InputError(
                "this is a pod of an indexed Job, which JAX asks Kubernetes about: pip install kubernetes, or give "
                "--distributed.coordinator, .processes and .process, or --distributed.processes 1 for this pod alone"
            )
        return {}
    return None


class Shutdown:
    """Owner of this process's exit, in agreement with the other processes of JAX's coordination service. Its methods
    may be called by any process at any time, from any thread; ``close`` by all. ``index``: this process's number; 0 has
    the service. ``client``: of the service.
    """

    def __init__(self, index: int, client: Any):
        self._index = index
        self._client = client
        self._service_s = 1.0 if index == 0 else 0.0  # in which the others can receive process 0's reason
        self._leaving = threading.Lock()
        self._witness = start_witness(f"this process was killed, or lost another one of its run: {AGAIN}")
        self._watch = threading.Thread(target=self._hear, daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Finish: all processes have reached the end of the run, and each now exits by itself."""
        if self._index == 0:
            self._client.key_value_set("stopped", "null")
        self._watch.join()
        dismiss_witness(self._witness)

    def lost(self, reason: str) -> None:
        """End this process after its collectives failed, with the reason of the first to end, if it gave one."""
        self._watch.join(3.0 + self._service_s)  # a failing process reports its reason after its connections close
        with self._leaving:
            self._exit(1, f"{LOST} ({' '.join(reason.split())[:200]})")

    def stop(self, code: int, line: str) -> None:
        """End this process at once, and the others with it: they print ``line`` too and exit with ``code``."""
        with self._leaving:  # for good: the first thread to know of an end speaks alone
            with contextlib.suppress(Exception):  # another was faster, or nobody is there to hear it
                self._client.key_value_set("stopped", json.dumps([self._index, code, line]))
            self._part(code, line)

    def quit(self, code: int, line: str) -> None:
        """Call ``stop`` for a process that is being quit, unless it is stopping already, which quits it too."""
        if not self._leaving.locked():
            self.stop(code, line)

    def _hear(self) -> None:
        """Wait, in a thread, until a process reports its reason to stop or the service misses a process."""
        try:
            stop = json.loads(self._client.blocking_key_value_get("stopped", FOREVER_MS))
        except Exception:  # noqa: BLE001  of JAX's own kinds; whatever it is, the others are out of reach
            with self._leaving:
                self._exit(1, LOST)  # before JAX aborts the process, which it does on the same news
        if stop is None or stop[0] == self._index:
            return
        with self._leaving:
            number, code, line = stop
            self._part(code, f"process {number} stopped: {line}")

    def _part(self, code: int, line: str) -> None:
        """Exit once all processes have the reason, process 0 last: the others are aborted when its service ends."""
        with contextlib.suppress(Exception):  # some are gone already
            self._client.wait_at_barrier("stopped", 5000)
        time.sleep(self._service_s)
        self._exit(code, line)

    def _exit(self, code: int, line: str) -> None:
        """Exit without Python's exit handlers, which would wait for every process."""
        dismiss_witness(self._witness)
        quit_now(code, line)


def start_witness(line: str) -> subprocess.Popen:
    """Start a shell that prints ``line`` if this process ends without ``dismiss_witness``, as when JAX aborts it."""
    command = ["/bin/sh", "-c", 'read farewell || echo "$0" >&2', f"jaxrl-llm: {line}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss_witness(shell: subprocess.Popen) -> None:
    """End a witness without output."""
    with contextlib.suppress(BrokenPipeError):
        shell.communicate(b"\n")


class Disagreement(RuntimeError):
    """Processes of one run have different results."""


class Peers:
    """Owner of this process's connection to the others of its run; without a ``client`` it is alone. All processes call
    every method in the same order. ``index``: this process's number. ``count``: of processes. ``shutdown``: ends this
    process together with the others; None for a process alone.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        self.index = index
        self.count = count
        self.shutdown = None if client is None else Shutdown(index, client)
        self._client = client
        self._rounds = itertools.count()

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every process's ``value`` (of JSON's kinds, NaN too), by process; wait for the slowest."""
        if self._client is None:
            return [value]
        number = next(self._rounds)
        self._client.key_value_set(f"gather/{number}/{self.index:06d}", json.dumps(value))
        self._client.wait_at_barrier(f"gather/{number}", FOREVER_MS)
        if number:  # which all have read by now
            self._client.key_value_delete(f"gather/{number - 1}/{self.index:06d}")
        return [json.loads(text) for _, text in sorted(self._client.key_value_dir_get(f"gather/{number}"))]

    def first(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` on process 0 only and return its result on all; its InputError is raised on all."""
        answer = None
        if self.leads:
            try:
                answer = {"value": call()}
            except InputError as error:
                answer = {"error": str(error)}
        answer = self.gather(answer)[0]
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["value"]

    def check_same(self, what: str, value: Any) -> None:
        """Raise a ``Disagreement`` that names ``what`` if ``value`` differs from that of process 0."""
        values = self.gather(value)
        other = next((i for i in range(len(values)) if values[i] != values[0]), None)
        if other is not None:
            raise Disagreement(f"process {other} has other {what} than process 0: {values[other]} and not {values[0]}")

    def close(self) -> None:
        """Close the connection after the run has ended on all processes; failures are not reported any more."""
        if self.shutdown is not None:
            self.gather(None)
            self.shutdown.close()


ALONE = Peers()


def join(settings: Distributed) -> Peers:
    """Connect to the other processes, before any backend starts; return ``ALONE`` for a run of one process."""
    import jax
    from jax._src.distributed import global_state  # the store has no public name

    arguments = join_arguments(settings, os.environ)
    if arguments is None:
        return ALONE
    # Signals are ours: JAX's own handler would swallow those that come before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = start_witness(
        "the processes of this run did not find each other: start all of them, with a coordinator that each can reach"
    )
    try:
        with on_exit(lambda *reason: dismiss_witness(waiting)):
            jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=settings.heartbeat_s)
    except Exception as error:  # launchers, name look-ups and RPCs fail each in their own way
        reason = " ".join(str(error).split())
        raise InputError(
            f"the other processes cannot be joined ({reason}): give --distributed.coordinator, .processes and "
            ".process, or --distributed.processes 1 for a run of this process alone"
        ) from error
    finally:
        dismiss_witness(waiting)
    if global_state.num_processes == 1:
        return ALONE
    return Peers(global_state.process_id, global_state.num_processes, global_state.client)
