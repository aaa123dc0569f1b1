"""Golden runs: what this tree's runs compute is, bit for bit, what another revision's compute.

    python tests/golden/compare.py REV           # the first difference of each run
    python tests/golden/compare.py REV --all     # every difference, with the largest of each array
    python tests/golden/compare.py REV --only dpo,kto

Both trees run the configurations of this one (tests/golden/runs/, configs/ and one of tests/fixtures/runs/) on the
machine at hand, in the Python environment that runs this command, two commands at a time; 3 to 6 minutes for a tree.
Compared are the rows of
metrics.jsonl (all but clocks), samples.jsonl, each array and host value of the last checkpoint and of snapshots,
exported weights, collected rows, exit codes, and the lines on stdout and stderr without what the clock decides.

XLA's bits depend on the processor and on versions, so nothing is committed: the other revision's runs are kept in
build/golden/ under its commit, this folder's text, the processor's flags and all versions.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

from differences import differences, of_said, without_clocks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "golden"
FIXTURES = ROOT / "tests" / "fixtures" / "runs"
RENAMED = {
    "left": "carryover",
    "carried": "surplus",
    "good": "recent_informative",
    "seen": "recent_scored",
    "stream": "stream_memory",
    "underway": "step_progress",
    "unscored": "pending",
    "asked": "open_groups",
    "returned": "sampled_numbers",
    "held": "unfinished",
    "limits": "target_lengths",
    "pending": "unanswered",
    "idle": "stalled_stops",
    "$Solved": "$ProblemSuccesses",
    "share": "mean_credit",
}
"""New names of metrics, arrays and host values by their names at the other revision."""
CHAINS: dict[str, tuple[str, ...]] = {
    "grpo": (
        "train {configs}/smoke.py --steps 4 --run_dir grpo",
        "eval grpo --json --limit 5",
        "collect grpo --out collected.jsonl --limit 5 --temperature 1.0",
        "export grpo --out exported",
        "generate grpo --prompt 1+1 --max_new_tokens 8",
    ),
    "phases": ("train {runs}/phases.py --run_dir phases",),
    "dapo": ("train {runs}/dapo.py --run_dir dapo",),
    "killed": ("train {runs}/dapo.py --run_dir killed", "train {runs}/dapo.py --run_dir killed"),
    "killed_dpo": ("train {runs}/dpo.py --run_dir killed_dpo", "train {runs}/dpo.py --run_dir killed_dpo"),
    "devices": (
        "train {configs}/smoke.py --steps 2 --run_dir devices --mesh.data 2 --mesh.fsdp 2",
        "train {runs}/sft.py --run_dir devices_sft --mesh.data 2 --mesh.tensor 2",
    ),
    "judged": ("train {runs}/reward.py --run_dir reward", "train {runs}/judged.py --run_dir judged"),
    "distilled": ("train {runs}/sft.py --run_dir sft", "train {runs}/distilled.py --run_dir distilled"),
    "episodes": (
        "train {configs}/guessing_smoke.py --recipe arpo --recipe.branch.credit hard --recipe.observation_coef 0.1 "
        "--steps 2 --rollout.prompts 4 --rollout.group 8 --evaluation.limit 8 "
        "--output.checkpoint_every 1 --run_dir episodes",
        "train {configs}/guessing_smoke.py --steps 2 --rollout.prompts 4 --rollout.group 8 --evaluation.limit 8 "
        "--output.checkpoint_every 1 --run_dir turns",
    ),
    "ppo": ("train {fixtures}/ppo.py --run_dir ppo",),
    "ahead": ("train {runs}/ahead.py --run_dir ahead",),
    "experts": ("train {configs}/moe_smoke.py --steps 2 --run_dir experts",),
    "code": ("train {configs}/code_smoke.py --steps 2 --output.checkpoint_every 1 --run_dir code",),
    "constraints": ("train {configs}/safety_smoke.py --steps 3 --output.checkpoint_every 1 --run_dir constraints",),
    "steps": ("train {configs}/process_smoke.py --steps 2 --output.checkpoint_every 1 --run_dir steps",),
    "dpo": ("train {runs}/dpo.py --run_dir dpo",),
    "kto": ("train {runs}/kto.py --run_dir kto",),
    "plans": (
        "plan {configs}/smoke.py --quick --topology v5e:2x2",
        "plan {configs}/grpo_qwen2_5_1_5b_gsm8k.py --quick --topology h100:8",
        "plan {configs}/gspo_qwen3_30b_a3b.py --quick --topology v5p:4x4x4",
        "plan {fixtures}/ppo.py --quick --topology v5e:2x2",
        "plan {runs}/dpo.py --quick --topology v5e:2x2",
    ),
}
"""Commands that follow each other, by name; the longest first, since two chains run at a time."""
KILLED_AT = 3
"""The row of metrics.jsonl at which the first command of a chain whose name begins with "killed" is killed."""


def run_chain(name: str, tree: Path, out: Path) -> None:
    """Run a chain's commands with a tree's package, and write down what each said: ``<name>.said.json``."""
    said = []
    for number, line in enumerate(CHAINS[name]):
        arguments = line.format(configs=ROOT / "configs", runs=HERE / "runs", fixtures=FIXTURES).split()
        logs = [out / f"{name}.{number}.{stream}" for stream in ("out", "err")]
        with logs[0].open("w") as stdout, logs[1].open("w") as stderr:
            command = [sys.executable, "-m", "jaxrl_llm", *arguments]
            process = subprocess.Popen(command, cwd=out, env=environment(name, tree), stdout=stdout, stderr=stderr)
            killed = name.startswith("killed") and number == 0
            if killed:
                kill_at(process, out / name / "metrics.jsonl")
            code = process.wait()
        lines = [] if killed else [shown(path, name, tree, out) for path in logs]
        said.append({"command": line, "code": code, "lines": lines})
    (out / f"{name}.said.json").write_text(json.dumps(said, indent=1))


def environment(name: str, tree: Path) -> dict[str, str]:
    """Return the environment of a chain's commands."""
    own = {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4" if name == "devices" else "1",
        "PJRT_NPROC": "32",
        "JAX_COMPILATION_CACHE_DIR": str(BUILD / "jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }
    return os.environ | own


def kill_at(process: subprocess.Popen, metrics: Path) -> None:
    """Kill a run as soon as it has written the row of step ``KILLED_AT``."""
    while process.poll() is None:
        if metrics.exists() and f'"step": {KILLED_AT},' in metrics.read_text():
            process.send_signal(signal.SIGKILL)
            return
        time.sleep(0.005)


def shown(path: Path, name: str, tree: Path, out: Path) -> list[str]:
    """Return the lines of a stream without progress, paths of this machine and what the clock decides."""
    text = path.read_text(errors="replace").replace(str(out), "OUT").replace(str(tree), "TREE")
    lines = [line for line in text.splitlines() if not line.startswith(("... ", "step 1 takes longer"))]
    if name != "plans":
        lines = [without_clocks(line) for line in lines]
    if name.startswith("killed"):
        lines = [line for line in lines if not line.startswith(("step ", "continuing ", "evaluation "))]
    return lines


def run_tree(tree: Path, out: Path, names: list[str], title: str) -> None:
    """Run chains that have not run yet, two at a time."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in names if not (out / f"{name}.said.json").exists()]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run_chain, name, tree, out): name for name in wanted}
        for number, done in enumerate(concurrent.futures.as_completed(running), 1):
            done.result()
            print(f"{title}: {number}/{len(wanted)} {running[done]}, {time.monotonic() - began:.0f} s", flush=True)


def checked_out(commit: str) -> Path:
    """Return a folder with the files of a commit."""
    tree = BUILD / "trees" / commit
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", tree], input=archive, check=True)
    return tree


def key_of(commit: str) -> str:
    """Return the name of a revision's recordings: they hold for these files, this processor and these versions."""
    files = [*sorted(HERE.rglob("*.py")), *sorted((ROOT / "configs").glob("*smoke.py")), FIXTURES / "ppo.py"]
    texts = [path.read_bytes() for path in files if path.name != "differences.py"]
    cpu = re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = sorted(f"{one.name}=={one.version}" for one in distributions() if one.name != "jaxrl-llm")
    digest = hashlib.sha256(b"\0".join(texts) + "\n".join([*sorted(set(cpu)), *versions]).encode()).hexdigest()
    return f"{commit[:12]}-{digest[:12]}"


def compare(before: Path, after: Path, name: str):
    """Yield the differences of one chain."""
    yield from of_said(*(json.loads((out / f"{name}.said.json").read_text()) for out in (before, after)))
    folders = re.findall(r"--run_dir (\w+)", " ".join(CHAINS[name]))
    for folder in dict.fromkeys(folders):
        for line in differences(before / folder, after / folder, RENAMED):
            yield f"{folder}: {line}"
    for place in ("collected.jsonl", "exported/model.safetensors", "exported/config.json") if name == "grpo" else ():
        if (before / place).read_bytes() != (after / place).read_bytes():
            yield f"{place} differs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--all", action="store_true", help="every difference, not the first of each run")
    parser.add_argument("--only", default=",".join(CHAINS), help="names of runs, with commas between")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in CHAINS]:
        parser.error(f"no golden run {', '.join(unknown)}: there are {', '.join(CHAINS)}")
    command = ["git", "rev-parse", "--verify", "--quiet", f"{asked.revision}^{{commit}}"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not commit:
        parser.error(f"no revision {asked.revision} in this repository")
    before, after = BUILD / key_of(commit), BUILD / "here"
    shutil.rmtree(after, ignore_errors=True)
    run_tree(checked_out(commit), before, names, asked.revision)
    run_tree(ROOT, after, names, "this tree")
    apart = 0
    for name in names:
        lines = list(compare(before, after, name))
        apart += bool(lines)
        for line in lines if asked.all else lines[:1]:
            print(f"{name}: {line}")
    print(f"{len(names) - apart} of {len(names)} golden runs are equal")
    return min(apart, 1)


if __name__ == "__main__":
    sys.exit(main())
