"""Everything that a GPU or TPU can tell of this project, by one command: is it right there, and how fast is it.

    python tools/on_gpu.py [--minutes 12] [--only decode_1.5b,resume] [--out on_gpu]

For a bare machine with JAX and this checkout; notebooks/accelerator_check.ipynb is the same for a hosted notebook. But
for the quickstart's model nothing is downloaded. Each check is a command of its own, so that none keeps the device or
its memory from the next, in the order of what one would miss most; those for which no time is left are said to be
missing. Writes ``OUT/results.json`` and ``OUT/table.md`` after every check, and each command's output beside them; ends
with 1 where a check failed. A goal that is missed fails nothing.
``--small`` takes shapes of a laptop: it rehearses the commands on a CPU.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

TOOLS = Path(__file__).parent
TRAIN = (sys.executable, "-c", "from jaxrl_llm.cli import main; main()", "train")
DEVICE = """
import jax, jaxlib, json
d = jax.devices()
versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
versions["runtime"] = d[0].client.platform_version.splitlines()[0]
print(json.dumps({"device": d[0].device_kind, "count": len(d), "platform": d[0].platform} | versions))
"""
LONGEST_S = 240
"""That one command may take."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is checked.

    Attributes:
      out: the folder of the results; made anew.
      only: names of checks, separated by commas; all if empty.
      minutes: after which no check is begun any more.
      small: with shapes of a laptop.
    """

    out: Path = Path("on_gpu")
    only: str = ""
    minutes: float = 12.0
    small: bool = False


class Failed(Exception):
    """A check has not come to its end; the line says why."""


def environment() -> dict[str, str]:
    """Of each command: it finds this checkout, and the last line of a traceback says what is wrong."""
    path = os.pathsep.join(filter(None, (str(TOOLS.parent), os.environ.get("PYTHONPATH"))))
    return os.environ | {"JAX_TRACEBACK_FILTERING": "off", "PYTHONPATH": path}


def told(name: str, command: tuple[str, ...], options: Options) -> str:
    """What a command prints, kept in ``OUT/NAME.log`` too.

    Raises:
      Failed: it ends with another code than 0, or not at all; with its last line.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_S, check=False, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"it took longer than {LONGEST_S} s") from None
    (options.out / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise Failed(f"exit code {done.returncode}: {last[:300]}")
    return done.stdout


def row_of(name: str, program: Sequence[str], options: Options, *flags: str) -> dict[str, Any]:
    """The JSON line that a program of this checkout prints last."""
    return json.loads(told(name, (sys.executable, *program, *flags), options).splitlines()[-1])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(name: str, config: str, options: Options, *flags: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    folder = options.out / name
    told(name, (*TRAIN, config, "--run_dir", str(folder), *flags), options)
    return rows_of(folder)


def learned(rows: list[dict[str, Any]], staleness: int = 0) -> dict[str, Any]:
    """What a run's first and last step say; the gap is that of steps whose samples are of the policy that learns."""
    steps = [row for row in rows if row["step"]]
    gap = max(row["sampler/logp_abs_diff_mean"] for row in (steps[:staleness] or steps))
    first, last = steps[0]["reward/mean"], steps[-1]["reward/mean"]
    seconds = min(row["time/step_s"] for row in steps)
    return {"reward": [first, last], "step_s": seconds, "sampler_gap": gap, "ok": last > first and gap < 0.02}


def device(options: Options) -> dict[str, Any]:
    """What JAX finds."""
    return json.loads(told("device", (sys.executable, "-c", DEVICE), options).splitlines()[-1]) | {"ok": True}


def attention(options: Options) -> dict[str, Any]:
    """The device's fused attention against plain scores: our kernels for GPUs, or splash attention on a TPU; and its
    kernels of decoding against the plain form."""
    small = ("--model", "tiny-random", "--layers", "2", "--tokens", "256", "--rows", "2") if options.small else ()
    return row_of("attention", (str(TOOLS / "check_attention.py"),), options, *small)


def smoke(options: Options) -> dict[str, Any]:
    """The smallest run learns."""
    return learned(trained("smoke", "smoke", options))


def quickstart(options: Options) -> dict[str, Any]:
    """A real model learns sums; missing where its weights are not at hand."""
    try:
        rows = trained("quickstart", "quickstart", options)
    except Failed as error:
        if "exit code 2" in str(error):
            return {"missing": str(error)}
        raise
    accuracy = [row["eval/chain_sum/pass@1"] for row in rows if "eval/chain_sum/pass@1" in row]
    return learned(rows) | {"accuracy": accuracy, "ok": accuracy[-1] >= 0.9}


def staleness(options: Options) -> dict[str, Any]:
    """It learns as well while the next step is sampled."""
    return learned(trained("staleness", "smoke", options, "--rollout.collect.staleness", "1"), staleness=1)


def resume(options: Options) -> dict[str, Any]:
    """A run that is killed in its fourth step and begun again, against one that nobody touched."""
    flags = ("--output.checkpoint_every", "1")
    whole = trained("whole", "smoke", options, *flags)
    folder = options.out / "killed"
    with (options.out / "killed.log").open("w") as log:
        command = [*TRAIN, "smoke", "--run_dir", str(folder), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        limit = time.monotonic() + LONGEST_S
        while process.poll() is None and time.monotonic() < limit and len(rows_of(folder)) < 4:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = trained("killed", "smoke", options, *flags)
    spared = ("time/", "throughput/", "memory", "event/resumed")
    plain = [[{k: v for k, v in row.items() if not k.startswith(spared)} for row in rows] for rows in (whole, again)]
    rewards = [rows[-1]["reward/mean"] for rows in (whole, again)]
    return {"steps": len(again) - 1, "bit_for_bit": plain[0] == plain[1], "reward": rewards, "ok": plain[0] == plain[1]}


def decode(shape: str) -> Callable[[Options], dict[str, Any]]:
    """How fast a model of this published shape samples, in bfloat16, 64 completions at a time."""

    def check(options: Options) -> dict[str, Any]:
        work = (
            "--model",
            f"random:{shape}",
            "--slots",
            "64",
            "--prompt",
            "256",
            "--completion",
            "256",
            "--chunk",
            "16",
        )
        if options.small:
            work = ("--model", "tiny-random", "--slots", "8", "--prompt", "16", "--completion", "16")
        row = row_of(
            f"decode {shape.split('-')[-1]}", ("-m", "bench", "rollout"), options, *work, "--dtype", "bfloat16"
        )
        kept = ("parameters_m", "tokens_per_s", "mbu", "roofline", "seconds", "compile_s")
        return {name: row[name] for name in kept} | {"ok": True}

    return check


def update(shape: str) -> Callable[[Options], dict[str, Any]]:
    """How fast a model of this published shape learns, in bfloat16, from rows of 4,096 tokens."""

    def check(options: Options) -> dict[str, Any]:
        work = ("--model", f"random:{shape}", "--rows", "32", "--prompt", "256", "--completion", "960")
        sizes = ("--learner.compute.row_tokens", "4096", "--learner.compute.microbatch_rows", "4")
        rows = (*sizes, "--learner.compute.remat", "dots")
        if options.small:
            work = ("--model", "tiny-random", "--rows", "16", "--group", "2", "--prompt", "8", "--completion", "8")
            rows = ("--learner.compute.row_tokens", "32", "--learner.compute.microbatch_rows", "8")
        flags = ("--repeats", "3", *rows, "--learner.compute.dtype", "bfloat16")
        row = row_of(f"update {shape.split('-')[-1]}", ("-m", "bench", "update"), options, *work, *flags)
        row["update_s"] = row["seconds"]
        kept = ("parameters_m", "tokens_per_s", "mfu", "filled", "update_s", "backward_s", "temp_mb", "compile_s")
        return {name: row[name] for name in kept} | {"ok": True}

    return check


CHECKS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "device": device,
    "attention": attention,
    "smoke": smoke,
    "decode_0.5b": decode("Qwen/Qwen2.5-0.5B"),
    "update_0.5b": update("Qwen/Qwen2.5-0.5B"),
    "decode_1.5b": decode("Qwen/Qwen2.5-1.5B"),
    "update_1.5b": update("Qwen/Qwen2.5-1.5B"),
    "resume": resume,
    "staleness": staleness,
    "quickstart": quickstart,
}
GOALS = {"decode_0.5b": ("mbu", 0.5), "decode_1.5b": ("mbu", 0.5), "update_1.5b": ("mfu", 0.4)}
"""What is aimed at, of the bandwidth and of the speed of a matrix product that were measured there."""


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| check | found | goal |", "|---|---|---|"]
    for name, row in results.items():
        metric, goal = GOALS.get(name, ("", 0.0))
        reached = row.get(metric)
        aim = "" if reached is None else f"{metric} {goal}: {'met' if reached >= goal else '**missed**'}"
        word = row.get("missing") or row.get("failed") or ("right" if row.get("ok") else "**WRONG**")
        rest = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("ok", "missing", "failed"))
        lines.append(f"| {name} | {word}{': ' if rest else ''}{rest} | {aim} |")
    return "\n".join(lines) + "\n"


def run(options: Options) -> dict[str, dict[str, Any]]:
    """Every check's row, by name; a check that could not be made has ``failed`` or ``missing``."""
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only.split(",") if options.only else list(CHECKS)
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        if time.monotonic() - began > 60 * options.minutes:
            results[name] = {"missing": "no time was left"}
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            try:
                results[name] = CHECKS[name](options)
            except Failed as error:
                results[name] = {"failed": str(error)}
            results[name]["check_s"] = round(time.monotonic() - start, 1)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        (options.out / "table.md").write_text(table(results))
    return results


def main() -> None:
    """Check, print the table, and end with 1 where something is wrong."""
    options = tyro.cli(Options, description=__doc__)
    unknown = [name for name in options.only.split(",") if name and name not in CHECKS]
    if unknown:
        sys.exit(f"no check {unknown[0]}: there are {', '.join(CHECKS)}")
    if options.out.exists():
        sys.exit(f"{options.out} is there already: name another folder with --out")
    results = run(options)
    print(table(results))
    sys.exit(any("failed" in row or row.get("ok") is False for row in results.values()))


if __name__ == "__main__":
    main()
