"""How a process finds the others of its run, what they tell each other, and how all end when one does."""

import json
import math
import signal
import socket
from pathlib import Path

import pytest
from several import codes, launch, said
from sharding.talking import scored

from jaxrl_llm.cli.train import take_distributed
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.distributed import ALONE, Distributed, join_arguments

PROGRAM = (Path(__file__).parent / "talking.py").read_text()
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip
TPU = {"TPU_ML_PLATFORM": "JAX"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit codes of two processes of which one refuses, crashes or is killed; and where they wrote what they said."""
    folder = tmp_path_factory.mktemp("ended")
    started = {how: launch(2, how, folder=folder / how, program=PROGRAM) for how in ("refuse", "crash", "die")}
    return {how: (codes(processes, 120), folder / how) for how, processes in started.items()}


def slurm_port():
    """A job whose number makes JAX choose a port that is free here."""
    for job in range(4096):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", 65535 - 4095 + job)) and not free.close():
                return str(job)


@pytest.mark.slow
def test_two_tasks_of_slurm_tell_each_other_everything(tmp_path):
    place = {"SLURM_JOB_ID": slurm_port(), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    both = []
    for number in ("0", "1"):
        task = place | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": number, "SLURM_LOCALID": number}
        both += launch(1, "talk", folder=tmp_path / number, program=PROGRAM, **task)
    assert codes(both, 120) == [0, 0], [said(tmp_path / number, 0) for number in ("0", "1")]
    one, other = (json.loads(said(tmp_path / number, 0)[-1]) for number in ("0", "1"))
    assert one == other
    assert one["gathered"] == repr([[0, math.pi, math.nan], [1, math.pi, math.nan]])
    assert (one["first"], one["long"], one["refused"]) == (0, 3_000_000, "no such thing")
    assert one["differs"] == "process 1 has other weather than process 0: rain and not sun"
    assert one["other"].keys() == {"loss", "reward", "token"}
    for line in one["other"].values():
        assert line.startswith("process 1 has other samples, scores or gradients in step 3 than process 0: ")
    assert one["stop"] == [False, True], "a signal to one is heard by both"
    # What hung and what raised, on the second process only, count for both as they do for one.
    assert one["scores"] == scored() and one["scores"][3:] == [1, 1, [5, 2], True]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "wanted", "line"), [
    ("refuse", [2, 2], "this will not do"),
    ("crash", [1, 1], "ZeroDivisionError: by nothing"),
])  # fmt: skip
def test_what_ends_one_process_ends_the_other_with_its_reason(ended, how, wanted, line):
    found, folder = ended[how]
    assert found == wanted
    assert f"jaxrl-llm: process 1 stopped: {line}" in said(folder, 0) and f"jaxrl-llm: {line}" in said(folder, 1)
    assert ("Traceback" in "".join(said(folder, 1))) == (how == "crash")


def test_when_the_leading_process_dies_the_other_says_so_and_ends(ended):
    (first, second), folder = ended["die"]
    # JAX may abort the process before it can leave by itself.
    assert first == -signal.SIGKILL and second in (1, -signal.SIGABRT)
    told = [line for line in said(folder, 1) if line.startswith("jaxrl-llm: ")]
    assert len(told) == 1 and "run the same command again" in told[0]


def test_flags_come_first_and_must_be_whole():
    given = "--steps 3 --distributed.coordinator a:1 --distributed.processes=2 --distributed.process 1".split()
    assert take_distributed(given) == Distributed("a:1", 2, 1) and given == ["--steps", "3"]
    arguments = join_arguments(Distributed("a:1", 2, 1), SLURM)
    assert arguments | {"cluster_detection_method": 0} == {
        "coordinator_address": "a:1", "num_processes": 2, "process_id": 1, "cluster_detection_method": 0,
    }  # fmt: skip
    assert join_arguments(Distributed(processes=1), SLURM) is None
    for wrong, message in {
        Distributed("a:1"): "--distributed.coordinator needs --distributed.processes and --distributed.process",
        Distributed("a", 2, 0): "--distributed.coordinator must be HOST:PORT, got 'a'",
        Distributed("a:1", 2, 2): "--distributed.process must be from 0 to 1, got 2",
    }.items():
        with pytest.raises(InputError, match=message):
            join_arguments(wrong, {})
    for given, message in {
        ("--distributed.process", "x"): "--distributed.process must be a number, got 'x'",
        ("--distributed.heartbeat_s", "9"): "--distributed.heartbeat_s at least 10",
        ("--distributed.coordinater", "a:1"): "no option .*: did you mean --distributed.coordinator",
    }.items():
        with pytest.raises(InputError, match=message):
            take_distributed(list(given))


def test_a_launcher_is_noticed_where_it_started_several():
    assert join_arguments(Distributed(), {}) is None
    assert join_arguments(Distributed(), SLURM | {"SLURM_NTASKS": "1"}) is None
    shell_of_sbatch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert join_arguments(Distributed(), shell_of_sbatch) is None
    assert join_arguments(Distributed(), TPU) == {}
    assert join_arguments(Distributed(), TPU | {"JAX_PLATFORMS": "cpu"}) is None
    alone = TPU | {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    assert join_arguments(Distributed(), alone) is None
    assert join_arguments(Distributed(), alone | {"TPU_WORKER_HOSTNAMES": "a,b"}) == {}
    assert join_arguments(Distributed(), KUBERNETES) is None
    with pytest.raises(InputError, match=r"an indexed Job, .* pip install kubernetes"):
        join_arguments(Distributed(), KUBERNETES | {"JOB_COMPLETION_INDEX": "0"})
    assert (
        join_arguments(Distributed("run-0.run:1", 4, 0), KUBERNETES | {"JOB_COMPLETION_INDEX": "0"})["num_processes"]
        == 4
    )


@pytest.mark.parametrize(("changes", "devices"), [
    ({}, list(range(8))),  # one task has its node
    ({"CUDA_VISIBLE_DEVICES": "4,5"}, [0, 1]),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NTASKS": "16"}, None),  # each takes the one of its number
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "3"}, [0]),  # each sees its own only
    ({"SLURM_GPUS_ON_NODE": "0"}, None),
])  # fmt: skip
def test_a_task_of_slurm_takes_the_gpus_that_are_its_own(changes, devices):
    assert join_arguments(Distributed(), SLURM | changes).get("local_device_ids") == devices


def test_one_process_has_nobody_to_ask():
    assert ALONE.gather([1]) == [[1]] and ALONE.first(lambda: {1}) == {1} and ALONE.leads
    ALONE.check_same("weather", "sun")
    ALONE.close()
