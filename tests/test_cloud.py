"""The files of docs/cloud, which no cloud has run: against schemas, the shell, and this program's own flags."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.cli.train import take_distributed
from jaxrl_llm.models.decoder import count_parameters
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.rules import DONE, GUARD
from jaxrl_llm.sharding.distributed import join_arguments
from jaxrl_llm.system.signals import PREEMPTED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "cloud"
FILES = sorted(FOLDER.iterdir())
PAGE = ROOT / "docs" / "cloud.md"
WRONG = 2
TEXT, LIST, NUMBER = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}


def strict(required=(), **properties):
    """The schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


JOBSET = strict(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"}, kind={"const": "JobSet"}, metadata={"type": "object"},
    spec=strict(
        ["replicatedJobs"],
        failurePolicy=strict(
            maxRestarts=NUMBER,
            rules={"type": "array", "items": strict(
                ["name", "action"], name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                onJobFailureReasons=LIST, onJobFailureMessagePatterns=LIST, targetReplicatedJobs=LIST,
            )},
        ),
        replicatedJobs={"type": "array", "items": strict(
            ["name", "template"], name=TEXT, replicas=NUMBER, template=strict(["spec"], spec={"type": "object"})
        )},
    ),
)  # fmt: skip
"""JobSet's own fields, as its API of version 0.10 has them; what is in ``template`` is a Job's."""
SKY = strict(
    ["name", "resources", "setup", "run"],
    name=TEXT, workdir=TEXT, num_nodes=NUMBER, setup=TEXT, run=TEXT, secrets=strict(HF_TOKEN={"type": "null"}),
    resources=strict(
        ["accelerators"], infra=TEXT, accelerators=TEXT, accelerator_args=strict(runtime_version=TEXT),
        use_spot={"type": "boolean"}, disk_size=NUMBER,
        job_recovery=strict(max_restarts_on_errors=NUMBER, recover_on_exit_codes={"type": "array", "items": NUMBER}),
    ),
    file_mounts={"type": "object", "additionalProperties": strict(
        ["source"], source=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}
    )},
)  # fmt: skip
"""The fields of a task that these files use, as SkyPilot 0.14 has them."""


def documents(name):
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobs():
    """The specifications of all Jobs by file, those within a JobSet too."""
    for path in FOLDER.glob("gke_*.yaml"):
        for one in documents(path.name):
            if one["kind"] == "Job":
                yield path.stem, one["spec"]
            for inner in one["spec"].get("replicatedJobs", ()):
                yield path.stem, inner["template"]["spec"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("gke_*.yaml")), ids=lambda path: path.stem)
def test_manifests_of_kubernetes_are_valid(path):
    for one in documents(path.name):
        if one["kind"] == "JobSet":
            jsonschema.validate(one, JOBSET)
            for inner in one["spec"]["replicatedJobs"]:
                one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **inner["template"]}
        kubernetes_validate.validate(one, "1.34", strict=True)
    claims = {one["metadata"]["name"] for one in documents("gke_storage.yaml")}
    for _, job in jobs():
        volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] in claims
        (container,) = job["template"]["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()


def test_a_manifest_with_a_misspelt_field_is_refused():
    (jobset,) = documents("gke_tpu.yaml")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.validate(jobset, JOBSET)
    job = documents("gke_gpu.yaml")[1]
    job["spec"]["podFailurePolicies"] = job["spec"].pop("podFailurePolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.34", strict=True)


def test_what_is_done_after_a_run_ends_fits_its_exit_codes():
    assert (DONE, WRONG, GUARD, PREEMPTED) == (0, 2, 3, 75)
    rules = {name: job["podFailurePolicy"]["rules"] for name, job in jobs() if "podFailurePolicy" in job}
    codes = {name: {c: rule["action"] for rule in all_ for c in rule.get("onExitCodes", {}).get("values", ())}
             for name, all_ in rules.items()}  # fmt: skip
    assert codes["gke_gpu"] == {WRONG: "FailJob", GUARD: "FailJob", PREEMPTED: "Ignore"}
    assert codes["gke_tpu"] == dict.fromkeys((WRONG, GUARD, PREEMPTED), "FailJob")
    final, again = documents("gke_tpu.yaml")[0]["spec"]["failurePolicy"]["rules"]
    (pattern,) = final["onJobFailureMessagePatterns"]
    message = "Container train for pod default/grpo-slice-0-3 failed with exit code {} matching FailJob rule at index 0"
    stopped = [code for code in range(256) if re.search(pattern, message.format(code))]
    assert stopped == [WRONG, GUARD] and final["action"] == "FailJobSet"
    assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts" and "onJobFailureMessagePatterns" not in again
    for name in ("sky_gpu.yaml", "sky_tpu.yaml"):
        (task,) = documents(name)
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("sky_*.yaml")), ids=lambda path: path.stem)
def test_tasks_of_skypilot_are_valid(path):
    (task,) = documents(path.name)
    jsonschema.validate(task, SKY)
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def starts():
    """The script that starts the program, by the file that has it."""
    found = {name: documents(f"{name}.yaml")[0]["run"] for name in ("sky_gpu", "sky_tpu")}
    found["slurm"] = (FOLDER / "slurm.sh").read_text()
    for name, job in jobs():
        (container,) = job["template"]["spec"]["containers"]
        if container["name"] == "train":
            found[name] = shlex.join(container["command"] + container["args"])
    return found


SET = {
    "JOB_COMPLETION_INDEX": "1", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SLURM_JOB_ID": "7",
}  # fmt: skip
"""What schedulers have in the environment."""
FAKES = {
    "jaxrl-llm": 'printf "%s\\n" "$@" > "$HOME/arguments"; exit "${CODE:-0}"',
    "srun": 'exec "$@"',
    "scontrol": 'echo "$@" > "$HOME/requeued"',
    "gcloud": 'printf "%s " "$@" | tr "\\n" " " >> "$HOME/log"; echo >> "$HOME/log"; '
              'case "$*" in *describe*) cat "$HOME/state" ;; *create*) echo ACTIVE > "$HOME/state" ;; '
              '*exit_code*) case "$*" in *"cat "*) echo 0 ;; esac ;; esac',
}  # fmt: skip
"""Programs that write down what they are asked."""


@pytest.fixture
def shell(tmp_path):
    """Runs a script beside these programs in a home of its own; the result has ``home``."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)

    def run(script, *arguments, **more):
        environment = os.environ | SET | {"HOME": str(tmp_path), "PATH": f"{folder}:{os.environ['PATH']}"} | more
        command = ["bash", "-c", script, "script", *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    run.home = tmp_path
    return run


@pytest.mark.filterwarnings("ignore:get_parser")
@pytest.mark.parametrize("name", starts())
def test_the_program_understands_the_commands(shell, name):
    done = shell(starts()[name])
    assert done.returncode == 0, done.stderr
    command, config, *flags = (shell.home / "arguments").read_text().splitlines()
    given = take_distributed(flags)
    run = parse_flags(configs.Run, flags, "train", "", configs.load_config(config)[1])
    configs.validate(configs.resolved(run))
    assert command == "train" and run.output.run_dir == "/shared/runs/grpo"
    if given.coordinator is not None:
        joined = join_arguments(given, {})
        assert (joined["num_processes"], joined["process_id"]) == (2, 1)
        assert joined["coordinator_address"] == {"gke_gpu": "grpo-0.grpo:12345", "sky_gpu": "10.0.0.1:12345"}[name]


@pytest.mark.parametrize(("code", "restarts", "again"), [
    (0, 0, False), (WRONG, 0, False), (GUARD, 0, False), (PREEMPTED, 40, True), (1, 4, True), (1, 5, False),
    (134, 0, True), (137, 0, True),
])  # fmt: skip
def test_slurm_queues_a_run_again_that_was_preempted(shell, code, restarts, again):
    done = shell(starts()["slurm"], CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == code and (shell.home / "requeued").exists() == again


def test_a_tpu_is_made_and_made_again_until_the_run_is_done(shell):
    settings = {"NAME": "grpo", "ZONE": "Z", "TYPE": "v5p-64", "RUNTIME": "v2-alpha-tpuv5", "NFS": "10.0.0.2:/share"}
    (shell.home / "state").write_text("SUSPENDED\n")
    done = shell((FOLDER / "tpu_vm.sh").read_text().replace('"$0"', "docs/cloud/tpu_vm.sh"), "keep", "smoke",
                 "--steps", "4", POLL="0", SPOT="yes", **settings)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in (shell.home / "log").read_text().splitlines() if "describe" not in line]
    queue, vm = "compute tpus queued-resources", "compute tpus tpu-vm"
    assert lines[0] == f"{queue} delete grpo --zone Z --force --quiet "
    assert lines[1].startswith(f"{queue} create grpo --node-id grpo --zone Z --accelerator-type v5p-64 ")
    assert lines[1].endswith("--runtime-version v2-alpha-tpuv5 --spot ")
    assert lines[2].startswith(f"{vm} ssh grpo --zone Z --worker=all") and lines[3].startswith(f"{vm} scp --recurse")
    assert all((ROOT / name).exists() for name in lines[3].split("--recurse ")[1].split(" grpo:")[0].split())
    assert "sudo mount -t nfs 10.0.0.2:/share /shared" in lines[4]
    assert "~/env/bin/jaxrl-llm train smoke --steps 4 2>&1" in lines[5] and "tmux new-session -d -s train" in lines[5]
    assert lines[6].endswith("--command cat ~/exit_code ")
    assert shell((FOLDER / "tpu_vm.sh").read_text(), "create").returncode != 0, "without NAME"


def test_the_image_installs_this_package():
    lines = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    assert [word for word, _ in steps if word not in ("ARG", "ENV", "WORKDIR", "COPY")] == ["FROM", "RUN", "ENTRYPOINT"]
    said = {word: rest for word, rest in steps}
    assert re.fullmatch(r"python:3\.1[1-9]-slim", said["FROM"]), "a public image, without a host"
    assert said["RUN"] == 'pip install --no-cache-dir ".[${EXTRA}]"' and json.loads(said["ENTRYPOINT"]) == ["jaxrl-llm"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said["ARG"] == "EXTRA=tpu" and {"tpu", "cuda"} <= project["optional-dependencies"].keys()
    copied = {name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]} < copied, "the build reads them"


@pytest.mark.parametrize("path", [*FILES, PAGE], ids=lambda path: path.name)
def test_no_address_is_written_down(path):
    assert not re.findall(r"\w+://(?!bucket/x|BUCKET)\w|index-url|extra-index", path.read_text())


def test_the_page_shows_lines_of_the_files():
    page = PAGE.read_text()
    assert {path.name for path in FILES} == set(re.findall(r"\]\(cloud/([\w.]+)\)", page))
    lines = {line.strip() for path in FILES for line in path.read_text().splitlines()}
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert blocks and not [line for block in blocks for line in block.splitlines() if line.strip() not in lines]


def test_sizes_of_checkpoints_and_device_hours_are_right():
    page = PAGE.read_text()
    groups = json.loads((ROOT / "jaxrl_llm" / "plan" / "published.json").read_text())
    published = {name: group["config"] for group in groups for name in group["names"]}
    total = count_parameters(read_config(published["Qwen/Qwen2.5-1.5B-Instruct"]))[0]
    sizes = re.search(r"a checkpoint has ([\d.]+) GB, a snapshot ([\d.]+) GB; disk needed: ([\d.]+) GB", page)
    assert [float(size) for size in sizes.groups()] == [round(4 * each * total / 1e9, 1) for each in (4, 1, 16)]
    minutes, hours, cost = map(
        float, re.search(r"least (\d+) min .*: ([\d.]+) device hours, cost ([\d.]+)", page).groups()
    )
    assert hours == pytest.approx(8 * minutes / 60, rel=0.03) and cost == pytest.approx(1.2 * hours, rel=0.03)
