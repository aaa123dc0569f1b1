"""``jaxrl-llm report``, a page about runs for a browser, and ``jaxrl-llm reset``, a manual reset of the reference."""

from pathlib import Path
from typing import Any

from jaxrl_llm.cli.flags import first, take
from jaxrl_llm.errors import require
from jaxrl_llm.system import storage
from jaxrl_llm.system.paths import check_file, writable

REPORT_USAGE = """usage: jaxrl-llm report RUN [RUN ...] [--out FILE]

Writes one page about runs: curves, findings, where the time went, completions, settings.
Several runs are drawn over each other. The page needs no network. Without --out it is RUN/report.html; of several
runs it is report.html in this folder. Training also writes RUN/report.html, at evaluations and at its end."""
RESET_USAGE = """usage: jaxrl-llm reset RUN [--with_optimiser]

Makes the policy of a run its reference; with --with_optimiser the optimiser is reset too. A run that is training
does this after its current step, a stopped run after its next step, once it is resumed. The reset is an event of that
step, and the models of the step are kept for good as RUN@STEP."""


def report_command(arguments: list[str]) -> int:
    """Run ``report RUN [RUN ...] [--out FILE]``; return the exit code."""
    out = take(arguments, "--out", True)
    runs = [first(arguments, REPORT_USAGE, "report needs a run: jaxrl-llm report runs/quickstart", True), *arguments]
    unknown = [argument for argument in arguments if argument.startswith("-")]
    require(not unknown, f"report does not know {' '.join(unknown)}: jaxrl-llm report RUN [RUN ...] [--out FILE]")
    directories = list(dict.fromkeys(storage.folder(run) for run in runs))
    for directory in directories:
        require(directory.is_dir(), f"{directory} is not a run: give the folder that holds its metrics.jsonl")
    path = Path(out or ("report.html" if len(directories) > 1 else directories[0] / "report.html"))
    check_file(path, "--out")
    from jaxrl_llm.telemetry.report import write_report

    with writable(path, "--out"):
        write_report(directories, path)
    print(f"{path} is written: open it in a browser")
    return 0


def reset_command(arguments: list[str]) -> int:
    """Run ``reset RUN [--with_optimiser]``; return the exit code. InputError: no such run, or no reference now."""
    name = first(arguments, RESET_USAGE, "reset needs a run: jaxrl-llm reset runs/quickstart", True)
    with_optimiser = take(arguments, "--with_optimiser", False)
    require(not arguments, f"reset does not know {' '.join(arguments)}: jaxrl-llm reset RUN [--with_optimiser]")
    from jaxrl_llm import config as configs
    from jaxrl_llm.runs import current_phase
    from jaxrl_llm.trainer.state import request_reset

    directory = storage.folder(name)
    path = directory / "config.json"
    require(configs.is_run(path), f"{name} is not a run: give the folder that holds its config.json")
    # Classes of its own are looked for only where the method, or a phase, is made of some.
    run: Any = configs.read(path, own=False).run
    phased = bool(run.rules.phases)
    if not configs.is_whole(run if phased else getattr(run, "recipe", None)):
        run = configs.read(path).run
    number = current_phase(directory)
    kept_by = isinstance(run, configs.Run)
    require(kept_by, f"{name} is a {type(run).__name__} run, which keeps no reference that could be reset")
    phase = configs.phases_of(run)[number].name
    where = f" in phase {phase}" if phase else ""
    run = configs.in_phase(run, number)
    require(
        configs.keeps_reference(run),
        f"{name} keeps no reference{where}, since its recipe.algorithm.kl_coef is {run.recipe.algorithm.kl_coef:g}: "
        f"begin a run with a KL, or with --monitor_kl, from its weights: jaxrl-llm train CONFIG --from {name}",
    )
    with writable(directory, "RUN"):
        request_reset(directory, with_optimiser)
    if storage.address(directory):
        storage.push(directory)
    also = " and its optimiser" if with_optimiser else ""
    print(f"{name} resets its reference{also} after its current step, or after its next one")
    return 0
