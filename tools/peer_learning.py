"""Time to accuracy of a run of ours, by rewards or by a teacher, and of the same work by peers, for compare_peers."""

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_processes import PEERS, TRL, process_of, python_of

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.divergences import JensenShannon
from jaxrl_llm.config import Run
from jaxrl_llm.environments.examples import Products
from jaxrl_llm.errors import require
from jaxrl_llm.models import load_pretrained, save_pretrained
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.sharding import make_mesh

LEVELS = (0.95, 0.98)
"""Shares of right answers whose first reaching is timed; with the last one a contestant is done."""
STEPS = 12
"""At most."""
MICROBATCH = 16
"""Rows of one pass of the peers."""
EPISODE_STEPS = 4
"""Of a run of episodes; the first is not timed."""


@dataclasses.dataclass(frozen=True)
class Reached:
    """When a run first had this accuracy.

    Attributes:
      step: optimiser steps.
      seconds: since the process was started, evaluations left out.
      completions: sampled.
    """

    step: int
    seconds: float
    completions: int


def reached(lines: Sequence[dict[str, Any]], level: float) -> Reached | None:
    """When it was; None where it was not."""
    for line in lines:
        if line["accuracy"] >= level:
            return Reached(line["step"], line["seconds"], line["completions"])
    return None


def work_of(config: str, folder: Path) -> dict[str, Any]:
    """What all contestants are told of a configuration's run; its model is written to ``folder``."""
    run = configs.resolved(configs.find_config(config).run)
    refuse_what_peers_have_not(run, config)
    model, tokenizer = load_pretrained(run.model)
    save_pretrained(model, tokenizer, folder)
    loaded = tasks.load(run.task)
    prompts = tasks.Prompts(run.task, tokenizer)

    def told(problems: Sequence[Any]) -> list[dict[str, str]]:
        return [{"prompt": tokenizer.decode(prompts[one]), "answer": one.answer} for one in problems]

    surrogate, own = run.recipe.algorithm.surrogate, run.scoring.distillation
    teacher: dict[str, Any] = {}
    if own is not None:
        save_pretrained(load_model(own.teacher, "float32", make_mesh(run.mesh))[0], tokenizer, folder / "teacher")
        teacher = {"teacher": str(folder / "teacher"), "beta": own.divergence.beta}
    return teacher | {
        "model": str(folder),
        "config": config,
        "train": told(loaded.train),
        "test": told(loaded.held_out),
        "prompts": run.rollout.prompts,
        "group": run.rollout.group,
        "prompt": run.rollout.max_prompt_tokens,
        "completion": run.rollout.max_new_tokens,
        "temperature": run.rollout.temperature,
        "learning_rate": run.learner.optimiser.learning_rate,
        "clip_norm": run.learner.optimiser.clip_norm,
        "clip": [surrogate.low, surrogate.high],
        "microbatch": MICROBATCH,
        "turns": 0,
    }


def episodes_of(model_name: str, folder: Path, template: Path) -> dict[str, Any]:
    """What all contestants are told of episodes with a calculator: the model's weights with a template that writes
    tools, the same for all; GRPO without a KL.
    """
    model, tokenizer = load_pretrained(model_name)
    tokenizer.chat_template = template.read_text()
    save_pretrained(model, tokenizer, folder)
    rows = [
        {"prompt": [dict(message) for message in one.prompt], **{key: one.metadata[key] for key in ("a", "b")}}
        for one in Products(64).problems()
    ]
    work = {"model": str(folder), "config": "", "train": rows, "test": [], "prompts": 2, "group": 8, "prompt": 512}
    budget = {"completion": 128, "turns": 3, "temperature": 0.8, "learning_rate": 1e-6}
    return work | budget | {"clip_norm": 1.0, "clip": [0.2, 0.2], "microbatch": MICROBATCH}


def play(names: Sequence[str], repeats: int, folder: Path, model_name: str = "smollm2-135m") -> dict[str, Any]:
    """Each contestant's median seconds of a step of episodes after the first, in runs that take turns."""
    runs: dict[str, list[Any]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as model:
        # One that TRL knows; it is in its wheel.
        found = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
        wheel = subprocess.check_output([python_of(TRL, folder.absolute()), "-c", found], text=True).strip()
        template = Path(wheel) / "chat_templates" / "qwen2_5.jinja"
        work = episodes_of(model_name, Path(model), template) | {"steps": EPISODE_STEPS}
        for seed in range(repeats):
            for name in names:
                runs[name].append(run_of(name, work | {"seed": seed}, folder))
    rows = {}
    for name, seeds in runs.items():
        pairs = [pair for lines in seeds for pair in itertools.pairwise(line for line in lines if line["step"])]
        rows[name] = {
            "seconds": round(statistics.median(b["seconds"] - a["seconds"] for a, b in pairs), 2),
            "calls": round(statistics.mean(b["calls"] - a["calls"] for a, b in pairs), 1),
            "steps": len(pairs),
        }
    ours = rows["ours"]["seconds"]
    return {"rows": rows, "ratios": {name: round(row["seconds"] / ours, 2) for name, row in rows.items()}, "runs": runs}


def refuse_what_peers_have_not(run: Run, config: str) -> None:
    """Whatever would make another run of it.

    Raises:
      InputError: there is some.
    """
    own = run.scoring.distillation
    rewards = run.scoring.rewards == (Run.scoring.rewards if own is None else ())
    alike = {
        "rewards": rewards and run.task.extractor == "last_number",
        "loss": run.recipe.algorithm == PRESETS["dapo"],
        "teacher": own is None or own == configs.Distillation(own.teacher, JensenShannon(own.divergence.beta)),
        "long answers": run.recipe.overlong.share == 0 and not run.recipe.overlong.drop,
        "updates": run.learner.updates == 1,
    }
    other = [name for name, same in alike.items() if not same]
    require(not other, f"{config} has other {', '.join(other)} than compare_peers sets up in TRL and Tunix")


def script_of(name: str, work: dict[str, Any]) -> str:
    """Which of tools/peers trains; ours is the same command by rewards and by a teacher."""
    taught = "teacher" in work and name != "ours"
    return PEERS[name].script.replace("run_", "distil_" if taught else "learn_")


def peak_mb(pid: int) -> float | None:
    """The largest memory of a process so far, MB; None where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def steps_of(name: str, work: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a contestant's process, which ends when no more are asked for."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.time()
        process, log = process_of(name, script_of(name, work), folder, cache)
        try:
            process.stdin.write(json.dumps(work | {"began": began}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                yield json.loads(line) | {"peak_mb": peak_mb(process.pid)}
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
            log.close()


def run_of(name: str, work: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All lines of one contestant until it has the last level, or has made its steps."""
    lines = []
    for line in steps_of(name, work, folder):
        lines.append(line)
        told = f"{name} seed {work['seed']} step {line['step']}: {line['accuracy']:.3f} after {line['seconds']:.1f} s"
        print(told, file=sys.stderr, flush=True)
        if line["accuracy"] >= LEVELS[-1] or line["step"] == work["steps"]:
            return lines
    raise SystemExit(f"compare_peers: {name} ended after {len(lines)} steps; see {folder / name}.log")


def learn(config: str, names: Sequence[str], seeds: int, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Each contestant's run by each seed, one at a time, in turns."""
    runs: dict[str, list[Any]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as model:
        work = work_of(config, Path(model)) | {"steps": steps}
        for seed in range(seeds):
            for name in names:
                runs[name].append(run_of(name, work | {"seed": seed}, folder))
    levels = {str(x): summed_up(runs, x) for x in LEVELS}
    return {"config": config, "seeds": seeds, "runs": runs, "levels": levels, "steps": each_step(runs)}


def each_step(runs: dict[str, list[Any]]) -> dict[str, dict[str, float | None]]:
    """Median seconds of a contestant's steps after its first, their ratio to ours, and its largest memory."""
    found: dict[str, dict[str, float | None]] = {}
    for name, seeds in runs.items():
        times = [b["seconds"] - a["seconds"] for lines in seeds for a, b in itertools.pairwise(lines)]
        peaks = [line["peak_mb"] for lines in seeds for line in lines if line.get("peak_mb") is not None]
        found[name] = {"step_s": statistics.median(times) if times else None, "peak_mb": max(peaks, default=None)}
    ours = found["ours"]["step_s"]
    for one in found.values():
        one["ratio"] = round(one["step_s"] / ours, 2) if ours and one["step_s"] is not None else None
    return found


def summed_up(runs: dict[str, list[Any]], level: float) -> dict[str, dict[str, Any]]:
    """Of each contestant the medians over its seeds, and how many of them came there.

    A seed that did not counts as later than all others.
    """
    found = {}
    for name, seeds in runs.items():
        when = [reached(lines, level) for lines in seeds]
        there = sorted((one for one in when if one is not None), key=lambda one: one.seconds)
        found[name] = {"reached": len(there), "of": len(seeds)}
        if len(there) > len(seeds) / 2:
            late = [float("inf")] * (len(seeds) - len(there))
            for field in ("seconds", "completions", "step"):
                found[name][field] = statistics.median([*(getattr(one, field) for one in there), *late])
            found[name]["fastest"] = there[0].seconds
            found[name]["slowest"] = there[-1].seconds
    ours = found["ours"].get("seconds")
    for one in found.values():
        one["ratio"] = round(one["seconds"] / ours, 2) if ours and "seconds" in one else None
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    cells = [("", "accuracy", "seconds", "from", "to", "completions", "steps", "seeds", "ratio")]
    for level, rows in found["levels"].items():
        for name, one in rows.items():
            seconds = [f"{one[key]:.0f}" if key in one else "-" for key in ("seconds", "fastest", "slowest")]
            counts = [f"{one[key]:.0f}" if key in one else "-" for key in ("completions", "step")]
            cells.append((name, level, *seconds, *counts, f"{one['reached']}/{one['of']}", str(one["ratio"] or "-")))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
