"""Runs of several processes: how a process finds the others, and how they exchange values.

Arrays travel by JAX's collectives. Host values (scores, signals, files) are small and go through the store of JAX's
coordination service instead: exactly, without a program on any device, and without an order that devices must keep.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.shutdown import FOREVER_MS, Shutdown, dismiss, witness
from jaxrl_llm.system.signals import on_exit

UNMET = "the processes of this run did not find each other: start all of them, with a coordinator that each can reach"


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


def joining(given: Distributed, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of ``jax.distributed.initialize``; None for a run of this process alone.

    ``environment`` is read after JAX's import, which marks a Cloud TPU there.

    Raises:
      InputError: only some of the three are given, or they contradict each other.
    """
    named = {name: value for name, value in vars(given).items() if name != "heartbeat_s" and value is not None}
    if given.processes == 1:
        return None
    if not named:
        return _detected(environment)
    missing = [f"--distributed.{name}" for name in ("coordinator", "processes", "process") if name not in named]
    if missing:
        raise InputError(f"--distributed.{next(iter(named))} needs {' and '.join(missing)} beside it")
    if not re.fullmatch(r".+:\d+", given.coordinator or ""):
        raise InputError(f"--distributed.coordinator must be HOST:PORT, got {given.coordinator!r}")
    if not 0 <= given.process < given.processes:
        raise InputError(f"--distributed.process must be from 0 to {given.processes - 1}, got {given.process}")
    return {
        "coordinator_address": given.coordinator, "num_processes": given.processes, "process_id": given.process,
        "cluster_detection_method": "deactivate",
    }  # fmt: skip


def _detected(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments for JAX to find the other processes if a launcher started several; else None."""
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


class Disagreement(RuntimeError):
    """Processes of one run have different results."""


class Peers:
    """Owner of this process's connection to the others of its run; without a ``client`` it is alone.

    All processes call every method in the same order.

    Attributes:
      index: this process's number.
      count: of processes.
      shutdown: ends this process together with the others; None for a process alone.
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
        return [json.loads(found) for _, found in sorted(self._client.key_value_dir_get(f"gather/{number}"))]

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
        """Refuse to continue if ``value`` differs from that of process 0.

        Raises:
          Disagreement: one line that names ``what`` and the first process that differs.
        """
        values = self.gather(value)
        other = next((i for i, found in enumerate(values) if found != values[0]), None)
        if other is not None:
            raise Disagreement(f"process {other} has other {what} than process 0: {values[other]} and not {values[0]}")

    def close(self) -> None:
        """Close the connection after the run has ended on all processes; failures are not reported any more."""
        if self.shutdown is not None:
            self.gather(None)
            self.shutdown.close()


ALONE = Peers()


def join(given: Distributed) -> Peers:
    """Connect to the other processes, before any backend starts; return ``ALONE`` for a run of one process.

    Raises:
      InputError: the others cannot be found or reached.
    """
    import jax
    from jax._src.distributed import global_state  # the store has no public name

    arguments = joining(given, os.environ)
    if arguments is None:
        return ALONE
    # Signals are ours: JAX's own handler would swallow those that come before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = witness(UNMET)
    try:
        with on_exit(lambda *reason: dismiss(waiting)):
            jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=given.heartbeat_s)
    except Exception as error:  # launchers, name look-ups and RPCs fail each in their own way
        reason = " ".join(str(error).split())
        raise InputError(
            f"the other processes cannot be joined ({reason}): give --distributed.coordinator, .processes and "
            ".process, or --distributed.processes 1 for a run of this process alone"
        ) from error
    finally:
        dismiss(waiting)
    if global_state.num_processes == 1:
        return ALONE
    return Peers(global_state.process_id, global_state.num_processes, global_state.client)
