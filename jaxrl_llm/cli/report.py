"""``jaxrl-llm report``: one page on one or several runs, to be opened in a browser."""

from pathlib import Path

from jaxrl_llm.cli.flags import first, take
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import local, writable

USAGE = """usage: jaxrl-llm report RUN [RUN ...] [--out FILE]

Writes what runs have measured and said as one page: curves, findings, where the time went, completions, settings.
Several runs are drawn over each other. The page needs no network. Without --out it is RUN/report.html; of several
runs it is report.html in this folder. Training writes RUN/report.html by itself, at evaluations and at its end."""


def report(arguments: list[str]) -> int:
    """``report RUN [RUN ...] [--out FILE]``; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    out = take(arguments, "--out", True)
    runs = [first(arguments, USAGE, "report needs a run: jaxrl-llm report runs/quickstart"), *arguments]
    unknown = [argument for argument in arguments if argument.startswith("-")]
    if unknown:
        raise InputError(f"report does not know {unknown[0]}: jaxrl-llm report RUN [RUN ...] [--out FILE]")
    directories = list(dict.fromkeys(Path(local(run)) for run in runs))
    for directory in directories:
        if not directory.is_dir():
            raise InputError(f"{directory} is no run: give the folder that holds its metrics.jsonl")
    path = Path(out or ("report.html" if len(directories) > 1 else directories[0] / "report.html"))
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise InputError(f"{path} {wrong}; give a file in a folder that exists with --out")
    from jaxrl_llm.telemetry.report import write_report

    with writable(path, "--out"):
        write_report(directories, path)
    print(f"{path} is written: open it in a browser")
    return 0
