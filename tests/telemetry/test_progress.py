"""Progress on a terminal and in a log file, in real consoles over real pseudo-terminals and pipes."""

import io
import os
import pty
import subprocess
import sys
import time

import pytest
from rich.console import Console

from jaxrl_llm.telemetry.progress import Progress, patience

RUN = """
from jaxrl_llm.telemetry.progress import Progress
with Progress(3, 2) as progress:
    progress.status("loading tiny"); import time; time.sleep(0.8)
    progress.step({"step": 2, "reward/mean": 0.25, "eval/sums/pass@1": 0.5})
    print("a stray print")
    progress.status("sampling 10/40 tokens"); time.sleep(0.8)
    progress.note("[bold]saved[/bold]")
    raise SystemExit(3)
"""


def log_file():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_a_log_file_gets_one_line_for_each_step_with_names_and_no_escape_codes():
    console = log_file()
    with Progress(2, console=console) as progress:
        for step in (1, 2):
            progress.status("sampling 3/40 tokens")
            progress.step({"step": step, "reward/mean": 0.25, "reward/accuracy": 0.5, "time/step_s": 1.5})
    shown = console.file.getvalue().splitlines()
    assert [line.split("  left")[0] for line in shown] == [
        f"step {step}/2  reward 0.250  accuracy 50.0 %  seconds 1.5" for step in (1, 2)]
    assert shown[1].endswith("left 0.0 s")


def test_an_evaluation_alone_is_a_line_of_its_own():
    console = log_file()
    with Progress(2, console=console) as progress:
        progress.step({"step": 0, "eval/sums/pass@1": 0.5, "eval/sums/pass@4": None})
    assert console.file.getvalue() == "evaluation at step 0:  sums/pass@1 0.500\n"


def test_a_log_file_is_not_silent_while_something_goes_on():
    console = log_file()
    with Progress(2, console=console) as progress:
        progress.status("loading tiny")
        deadline = time.monotonic() + 20
        while "..." not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert console.file.getvalue().startswith("... loading tiny  ")


def test_the_clock_goes_on_within_a_phase_and_starts_again_with_the_next():
    progress = Progress(5, console=log_file())
    progress.status("sampling 1/40 tokens")
    time.sleep(0.6)
    progress.status("sampling 2/40 tokens")
    text, elapsed = shown_clock(progress)
    assert text == "step 1/5  sampling 2/40 tokens" and elapsed >= 0.6
    progress.status("evaluating 1/40")
    text, restarted = shown_clock(progress)
    assert text == "evaluating 1/40" and restarted < elapsed


def shown_clock(progress):
    text, elapsed = progress.describe().rsplit("  ", 1)
    return text, float(elapsed.removesuffix(" s"))


@pytest.mark.parametrize("status, durations, allowed", [
    ("updating", (), 5.0), ("updating", (1.0,), 5.0), ("sampling 1/2", (20.0, 30.0), 60.0), ("evaluating", (30.0,), 5.0),
])
def test_only_what_belongs_to_a_step_may_take_as_long_as_a_step(status, durations, allowed):
    assert patience(status, durations) == allowed


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_keeps_finished_steps_and_is_left_in_order(columns):
    code, screen = on_a_terminal(RUN, columns)
    assert code == 3
    assert "continuing at step 2 of 3" in screen
    assert "loading tiny  0." in screen and "step 3/3  sampling 10/40 tokens  0." in screen
    assert "evaluation at step 2:  sums/pass@1 0.500" in screen
    assert "[bold]saved[/bold]" in screen and "a stray print" in screen
    assert ("     step  reward" in screen) == (columns == 80)
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def on_a_terminal(program, columns):
    """The exit code of a Python program on a pseudo-terminal, and all that it wrote there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while chunk := _read(ours):
        written += chunk
    os.close(ours)
    return process.wait(), written.decode()


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the other end's closing as an error.
        return b""
