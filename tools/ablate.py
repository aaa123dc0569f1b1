"""What each piece of a method is worth: a base recipe and one piece more at a time, each with several seeds.

    python tools/ablate.py CONFIG --ladder dapo [--seeds 3] [--steps N] [--folder DIR] [--json] [--field value ...]
    python tools/ablate.py CONFIG --ladder dapo --draw

Ladders are those of ladders.py: objectives, dapo, prorl, length, clip, arpo, routing, prolonged. Each rung with each
seed is a run of jaxrl-llm train in a process of its own, in DIR/RUNG/seed-N (DIR is runs/ablations/CONFIG). The recipe
is the ladder's, where it has one; all other settings are CONFIG's, or given as for train. Rungs that two ladders share
are run once. Ctrl-C lets the present run save itself; the same command goes on with it, and passes over what is done.
DIR/LADDER.md, .json and, with matplotlib, .svg are drawn from the runs' metrics.jsonl whenever a seed's last rung is
done; --draw does only that. --json prints the numbers as the last line.
"""

import dataclasses
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder_statistics import MANY, Line, Row, lines_of, picture, ranking, table
from ladders import LADDERS, Rung

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, parse_flags, take
from jaxrl_llm.config.phases import changed
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.runs import find_run, read_started_run
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import prepare_libraries, writable
from jaxrl_llm.system.signals import PREEMPTED, SIGNALS
from jaxrl_llm.trainer.launch import settings_changes

GUARDED = 3
"""Exit code of a run that a guard has stopped: what it has done counts, and the others go on."""
MAY_DIFFER = tuple(name for name in configs.FREE_TO_CHANGE if not name.startswith("evaluation."))
"""Settings that runs which are compared may differ in: a run goes on with other evaluations too, but what they tell is
compared here."""
MISSING = "a configuration is missing: python tools/ablate.py ablation_smoke --ladder dapo"
HELP = "--ladder NAME, --seeds N, --folder DIR, --draw and --json are ablate's own."


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be done.

    Attributes:
      ladder: its name.
      seeds: of each rung.
      folder: of the runs and of what is drawn.
      draw: only draw.
      as_json: print the numbers.
      found: the configuration, with what was given for all of its runs.
    """

    ladder: str
    seeds: int
    folder: Path
    draw: bool
    as_json: bool
    found: configs.LoadedConfig


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run.

    Attributes:
      rung: its name.
      run: settings, resolved.
      directory: where it lies.
    """

    rung: str
    run: configs.Run
    directory: Path

    @property
    def rows(self) -> list[Row]:
        """What it has measured so far."""
        return list(read_rows(self.directory / "metrics.jsonl"))

    @property
    def done(self) -> int:
        """Steps that it has made."""
        return max((row["step"] for row in self.rows), default=0)


def read(arguments: list[str]) -> Asked:
    """What the command line says.

    Raises:
      InputError: it cannot be done.
    """
    given = first(arguments, __doc__, MISSING)
    prepare_libraries()
    ladder = take(arguments, "--ladder", True)
    require(ladder is not None, f"which ladder? give --ladder {', '.join(LADDERS)}")
    hint = did_you_mean(ladder, LADDERS, f"there are {', '.join(LADDERS)}")
    require(ladder in LADDERS, f"no ladder {ladder!r}: {hint}")
    seeds = take(arguments, "--seeds", True) or "3"
    require(seeds.isdecimal() and int(seeds) > 0, f"--seeds {seeds}: give how many, at least 1")
    folder = take(arguments, "--folder", True)
    draw, as_json = take(arguments, "--draw", False), take(arguments, "--json", False)
    require(take(arguments, "--run_dir", True) is None, "--run_dir is each run's own: give --folder for all of them")
    found = configs.find_config(given)
    require(isinstance(found.run, configs.Run), f"{given} is no run of reinforcement learning: a ladder needs one")
    run = parse_flags(configs.Run, arguments, f"ablate {given}", HELP, found.run)
    place = Path(folder or Path("runs") / "ablations" / found.name)
    return Asked(ladder, int(seeds), place, draw, as_json, dataclasses.replace(found, run=run))


def settings_of(run: configs.Run, rungs: Sequence[Rung]) -> dict[str, configs.Run]:
    """The settings of each rung, by its name, resolved."""
    found: dict[str, configs.Run] = {}
    before = run
    for rung in rungs:
        before = changed(found[rung.onto] if rung.onto else before, rung.changes)
        found[rung.name] = before
    return {name: configs.resolved(one) for name, one in found.items()}


def planned(asked: Asked) -> list[Planned]:
    """All runs, seed by seed, so that each rung has one before any has two.

    Raises:
      InputError: one of them cannot work, or lies there with other settings.
    """
    runs = []
    for seed in range(asked.found.run.seed, asked.found.run.seed + asked.seeds):
        for name, run in settings_of(asked.found.run, LADDERS[asked.ladder]).items():
            directory = asked.folder / slug(name) / f"seed-{seed}"
            output = dataclasses.replace(run.output, run_dir=str(directory))
            runs.append(Planned(name, dataclasses.replace(run, seed=seed, output=output), directory))
    for one in runs:
        check_same(one)
    if not asked.draw:
        for one in runs[: len(LADDERS[asked.ladder])]:
            try:
                check(one.run)
            except InputError as error:
                raise InputError(f"{one.rung}: {error}") from None
        find_run(asked.found.located.model)
    return runs


def check(run: configs.Run) -> None:
    """Refuse a run that cannot work, or would have nothing to compare."""
    configs.validate(run)
    tested = run.evaluation.every > 0 and (run.evaluation.task is not None or run.holds_out[0])
    require(tested, "a ladder compares accuracies: set evaluation.every, and task.holdout or evaluation.task")


def check_same(one: Planned) -> None:
    """Refuse what lies there of a run with other settings: it would be told of as if it were this one."""
    before = read_started_run(one.directory)
    changes = () if before is None else settings_changes(before, one.run)
    other = [change for change in changes if not change.startswith(MAY_DIFFER)]
    away = "give another --folder, or move it away"
    require(not other, f"{one.directory} was run with other settings ({'; '.join(other[:2])}): {away}")
    done, steps = one.done, one.run.steps
    require(done <= steps, f"{one.directory} has made {done} steps, {steps} are asked for: give --steps {done}")


def slug(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


class Runner:
    """The one run that goes on, and what becomes of it when this process is asked to stop."""

    def __init__(self) -> None:
        self.child: subprocess.Popen | None = None
        self.asked = False
        for number in SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: Any) -> None:
        self.asked = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def run(self, one: Planned, origin: configs.Origin, say: Callable[[int], None]) -> int:
        """Train it until it is done or asked to stop; returns its exit code.

        What it says goes to seed-N.log beside its folder. It hears no Ctrl-C of the terminal: it is told here.
        """
        given = one.directory.with_suffix(".json")
        given.parent.mkdir(parents=True, exist_ok=True)
        configs.write(given, configs.to_json(one.run) | origin.to_json())
        program = [sys.executable, "-c", "from jaxrl_llm.cli import main; main()", "train", str(given), "--quiet"]
        with one.directory.with_suffix(".log").open("w") as log:
            self.child = subprocess.Popen(program, stdout=log, stderr=log, start_new_session=True)
            if self.asked:  # between the last look and now
                self.child.send_signal(signal.SIGTERM)
            while self.child.poll() is None:
                try:
                    self.child.wait(1)
                except subprocess.TimeoutExpired:
                    say(one.done)
        return self.child.returncode


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is said while a run goes on: one line that a terminal writes over.

    Attributes:
      head: which run it is.
      steps: that it ends with.
      behind: those of them that were made before now.
      left: of all runs, its own included.
      made: by this process before it.
      began: this process, by the clock ``time.monotonic``.
    """

    head: str
    steps: int
    behind: int
    left: int
    made: int
    began: float

    def __call__(self, done: int, ended: bool = False) -> None:
        """Say how far the run is."""
        own = done - self.behind
        each = (time.monotonic() - self.began) / max(1, self.made + own)
        rest = f"about {minutes(each * (self.left - own))} left" if self.made + own else "starting"
        line = f"{self.head}: step {done} of {self.steps}, {rest}"
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{line}", end="\n" if ended else "", file=sys.stderr, flush=True)
        elif ended:
            print(line, file=sys.stderr, flush=True)


def run_all(asked: Asked, runs: Sequence[Planned]) -> int:
    """Run what is not finished, one after the other; returns the exit code.

    Raises:
      InputError: a run was refused or has failed; its last line says why.
    """
    left = [one for one in runs if one.done < one.run.steps]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already", file=sys.stderr)
    runner, began, made = Runner(), time.monotonic(), 0
    for number, one in enumerate(left):
        steps = sum(other.run.steps - other.done for other in left[number:])
        head = f"run {number + 1} of {len(left)}: {one.rung}, seed {one.run.seed}"
        progress = Progress(head, one.run.steps, one.done, steps, made, began)
        code = runner.run(one, asked.found.origin, progress)
        progress(one.done, ended=True)
        made += one.done - progress.behind
        if runner.asked:
            print("stopped; the same command goes on from here", file=sys.stderr)
            return PREEMPTED
        if code not in (0, GUARDED):
            words = one.directory.with_suffix(".log").read_text().strip().splitlines() or ["it gave no reason"]
            raise InputError(f"{one.rung}, seed {one.run.seed}, ended with code {code}: {words[-1]}")
        if one.rung == LADDERS[asked.ladder][-1].name:
            draw(asked, runs)
    return 0


def minutes(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def draw(asked: Asked, runs: Sequence[Planned]) -> list[Line]:
    """Write table and numbers of the runs that are finished.

    Raises:
      InputError: none is.
    """
    rows: dict[str, dict[int, list[Row]]] = {rung.name: {} for rung in LADDERS[asked.ladder]}
    unfinished = []
    for one in runs:
        if one.done >= one.run.steps:
            rows[one.rung][one.run.seed] = one.rows
        elif one.done:
            unfinished.append(f"{one.rung}, seed {one.run.seed} (step {one.done})")
    lines = lines_of(LADDERS[asked.ladder], rows)
    left_out = f"\nNot finished and left out: {'; '.join(unfinished)}.\n" if unfinished else ""
    acts = acting(LADDERS[asked.ladder], rows)
    with writable(asked.folder, "--folder"):
        path = asked.folder / f"{asked.ladder}.md"
        path.write_text(f"{table(lines)}\nMeans over seeds, ± 95 % interval (t). {acts}\n{left_out}")
        path.with_suffix(".json").write_text(json.dumps(numbers(lines), indent=1))
        if importlib.util.find_spec("matplotlib"):
            drawn = path.with_suffix(".svg")
            if len(lines) > MANY:
                ranking(lines, drawn)
            else:
                picture(rows, drawn)
    return lines


def acting(rungs: Sequence[Rung], runs: Mapping[str, Mapping[int, Sequence[Row]]]) -> str:
    """Whether clipping ever cut a token: where it did not, a rung that moves the range shows nothing."""
    names = ("clip_fraction/low", "clip_fraction/high")
    shares = []
    for rung in rungs:
        rows = [row for seed in runs[rung.name].values() for row in seed]
        cut = [[row[name] for row in rows if row.get(name) is not None] for name in names]
        if all(cut):
            shares.append(f"{rung.name} {' and '.join(f'{sum(one) / len(one):.2%}' for one in cut)}")
    return f"Tokens that clipping cut, at the lower and the upper bound: {'; '.join(shares)}." if shares else ""


def numbers(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What the table says, for programs."""
    return [
        {
            "rung": line.rung.name,
            "onto": line.onto,
            **{name: dataclasses.asdict(one) for name, one in line.measures.items()},
            "gain": None if line.gain is None else dataclasses.asdict(line.gain),
            "total": None if line.total is None else dataclasses.asdict(line.total),
            "equal_tokens": None if line.equal is None else dataclasses.asdict(line.equal),
            "within_noise": None if line.gain is None else line.gain.holds_zero,
            "curves": {str(seed): [list(point) for point in points] for seed, points in line.curves.items()},
        }
        for line in lines
    ]


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for wrong use, 75 where it was asked to stop."""
    try:
        asked = read(arguments)
        runs = planned(asked)
        code = 0 if asked.draw else run_all(asked, runs)
        if code:
            return code
        lines = draw(asked, runs)
    except InputError as error:
        print(f"ablate: {error}", file=sys.stderr)
        return 2
    print((asked.folder / f"{asked.ladder}.md").read_text(), end="")
    if asked.as_json:
        print(json.dumps(numbers(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
