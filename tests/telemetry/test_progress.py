"""Progress on a terminal and in a log file, in real consoles over real pseudo-terminals and pipes."""

import io
import re
import time

import jax.monitoring
import pytest
from rich.console import Console
from terminals import Terminal

from jaxrl_llm.telemetry import Finding
from jaxrl_llm.telemetry.progress import CompileWatch, Progress, Schedule, allowed_silence, model_line
from jaxrl_llm.telemetry.records import log_to_file

RUN = """
import numpy as np
from jaxrl_llm.types import Completion, Group, Problem
from jaxrl_llm.telemetry.progress import Schedule
from jaxrl_llm.telemetry.progress import Progress
with Progress(Schedule(3), 2) as progress:
    progress.status("loading tiny"); import time; time.sleep(0.8)
    progress.begin()
    progress.step({"step": 2, "reward/mean": 0.25})
    progress.show_evaluation(2, {"eval/sums/pass@1": 0.5})
    print("a stray print")
    none = np.zeros(0, np.int32)
    answer = Completion(none, none, "stop", none, none, text="\\x1b[2J[red]eight[/red]\\nor 9")
    problem = Problem("1", ({"role": "user", "content": "what is " * 30 + "3 + 5?"},), "8", "sums")
    progress.show_events(2, {"step": 2}, [Group(problem, none, (answer,), np.ones(1), np.ones(1))])
    progress.status("sampling 10/40 tokens"); time.sleep(0.8)
    progress.note("[bold]saved[/bold]")
    raise SystemExit(3)
"""


def log_file():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_a_log_file_gets_one_line_for_each_step_with_names_and_no_escape_codes():
    console = log_file()
    with Progress(Schedule(2), console=console) as progress:
        for step in (1, 2):
            progress.status("sampling 3/40 tokens")
            progress.step({"step": step, "reward/mean": 0.25, "reward/accuracy": 0.5, "time/step_s": 1.5})
    shown = console.file.getvalue().splitlines()
    assert [line.split("  left")[0] for line in shown] == [
        f"step {step}/2  reward 0.250  accuracy 50.0 %  seconds 1.5" for step in (1, 2)
    ]
    assert shown[1].endswith("left 0.0 s")


def test_evaluations_and_events_are_lines_of_their_own():
    console = log_file()
    with Progress(Schedule(2), console=console) as progress:
        progress.show_evaluation(0, {"eval/sums/pass@1": 0.5, "eval/sums/pass@4": None})
        progress.show_evaluation(1, {})
        progress.show_events(1, {"event/resumed": True, "event/teaches_nothing": "no token is in the loss"})
    assert console.file.getvalue().splitlines() == [
        "evaluation at step 0:  sums  pass@1 0.500  pass@4 -",
        "step 1: resumed",
        "step 1: teaches nothing: no token is in the loss",
    ]


def test_what_is_said_is_logged_with_its_time_and_goes_nowhere_else(tmp_path, caplog):
    with Progress(Schedule(2), console=log_file()) as progress:
        with log_to_file(tmp_path / "log.txt"):
            progress.note("a note")
        progress.note("later")
    assert re.fullmatch(r"[-0-9]+ [:,0-9]+  a note\n", (tmp_path / "log.txt").read_text())
    assert not caplog.records


@pytest.mark.slow
def test_a_log_file_is_not_silent_while_something_goes_on():
    console = log_file()
    with Progress(Schedule(2), console=console) as progress:
        progress.status("loading tiny")
        deadline = time.monotonic() + 20
        while "..." not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert console.file.getvalue().startswith("... loading tiny  ")


def test_the_clock_goes_on_within_a_phase_and_starts_again_with_the_next():
    progress = Progress(Schedule(5), console=log_file())
    progress.status("sampling")
    time.sleep(0.6)
    progress.status("sampling: 2/40 tokens")
    text, elapsed = shown_clock(progress)
    assert text == "step 1/5  sampling: 2/40 tokens" and elapsed >= 0.6
    progress.status("evaluating 1/40")
    text, restarted = shown_clock(progress)
    assert text == "evaluating 1/40" and restarted < elapsed


COMPILE = "/jax/core/compile/backend_compile_duration"


def test_programs_within_a_program_are_compiled_in_its_time():
    with CompileWatch() as compiling:
        jax.monitoring.record_scalar(COMPILE, 0.0, fun_name="jit(update)")
        jax.monitoring.record_scalar(COMPILE, 0.0, fun_name="inner")
        jax.monitoring.record_event_duration_secs(COMPILE, 1e6, fun_name="inner")
        jax.monitoring.record_event_duration_secs(COMPILE, 2.0, fun_name="jit(update)")
        jax.monitoring.record_event_duration_secs(COMPILE, 1e6, fun_name="begun before anybody listened")
        jax.jit(lambda x: x + 17.25)(1.0)
    assert 2.0 < compiling.seconds < 1e6
    row = compiling.take()
    assert row == {"time/programs": 3.0, "time/compile_s": compiling.seconds}
    assert compiling.take() == {"time/programs": 0.0, "time/compile_s": 0.0}


def test_compilation_is_named_while_it_happens_and_no_part_of_the_pace():
    console = log_file()
    with Progress(Schedule(3), console=console) as progress:
        progress.status("updating")
        progress.begin()
        jax.monitoring.record_scalar(COMPILE, 0.0, fun_name="jit(update)")
        deadline = time.monotonic() + 20
        while "compiling" not in progress.describe() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert progress.describe().startswith("step 1/3  compiling the update  0.")
        jax.monitoring.record_event_duration_secs(COMPILE, 1000.0, fun_name="jit(update)")
        assert progress.describe().startswith("step 1/3  updating  ")
        progress.step({"step": 1})
    assert console.file.getvalue() == "step 1/3  left 0.0 s\n"


CACHE_HIT = "/jax/compilation_cache/cache_hits"


def compiles(seconds, from_cache):
    jax.monitoring.record_scalar(COMPILE, 0.0, fun_name="jit(update)")
    if from_cache:
        jax.monitoring.record_event(CACHE_HIT)
    jax.monitoring.record_event_duration_secs(COMPILE, seconds, fun_name="jit(update)")


@pytest.mark.parametrize(
    "before, told",
    [
        ((), True),
        (((0.5, False),), True),
        (((20.0, False),), True),
        (((20.0, False), (2.0, True)), True),
        (((2.0, True), (20.0, False)), True),
        (((2.0, True),), False),
        (((0.5, False), (2.0, True), (0.2, False)), False),
    ],
)
def test_a_longer_first_step_is_announced_unless_the_cache_has_had_everything(tmp_path, before, told):
    console = log_file()
    with log_to_file(tmp_path / "log.txt"), Progress(Schedule(9), 7, console) as progress:
        progress.begin()
        for compiled in before:
            compiles(*compiled)
        said = progress.compiling.slower(7)
    assert said.startswith("step 7 takes longer than those after it: it also compiles") if told else said == ""
    log = (tmp_path / "log.txt").read_text()
    assert ("compiled the update in 20.0 s" in log) == ((20.0, False) in before)
    assert ("read the update from JAX's cache in 2.0 s" in log) == ((2.0, True) in before)


def test_whoever_wants_no_progress_sees_warnings_and_each_but_once(tmp_path):
    console = log_file()
    finding = Finding("stalled", 2, "nothing rises", "It learns nothing.", "easier problems")
    with log_to_file(tmp_path / "log.txt"), Progress(Schedule(9), 2, console, Found([finding]), quiet=True) as progress:
        progress.begin()
        progress.status("sampling")
        progress.note("a note")
        progress.step({"step": 2, "reward/mean": 0.25})
        progress.show_evaluation(2, {"eval/sums/pass@1": 0.5})
        for step in (2, 3):
            progress.show_events(step, {"step": step, "event/resumed": True, "event/reward_failed": "mine: no"})
        progress.note("stopping", warning=True)
    shown = [
        "step 2: reward failed: mine: no",
        "step 2: stalled since step 2: nothing rises",
        "  It learns nothing. Try easier problems",
        "stopping",
    ]
    assert console.file.getvalue().splitlines() == shown
    log = (tmp_path / "log.txt").read_text()
    assert all(line in log for line in (*shown, "a note", "step 2/9  reward 0.250", "step 3: reward failed: mine: no"))


class Found:
    """A watch that finds something once."""

    def __init__(self, findings):
        self._findings = findings

    def new(self, row):
        found, self._findings = self._findings, []
        return found


def shown_clock(progress):
    text, elapsed = progress.describe().rsplit("  ", 1)
    return text, float(elapsed.removesuffix(" s"))


@pytest.mark.parametrize(
    "status, durations, allowed",
    [
        ("updating", (), 5.0),
        ("updating", (1.0,), 5.0),
        ("sampling 1/2", (20.0, 30.0), 60.0),
        ("evaluating", (30.0,), 5.0),
    ],
)
def test_only_what_belongs_to_a_step_may_take_as_long_as_a_step(status, durations, allowed):
    assert allowed_silence(status, durations) == allowed


@pytest.fixture(scope="module")
def terminals():
    """A run on two terminals, by their columns."""
    both = {columns: Terminal(RUN, columns=columns) for columns in (80, 120)}
    assert [terminal.finish() for terminal in both.values()] == [3, 3]
    return both


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_keeps_finished_steps_and_is_left_in_order(terminals, columns):
    screen = terminals[columns].screen
    assert "continuing at step 2 of 3" in screen
    assert "loading tiny  0." in screen and "step 3/3  sampling 10/40 tokens  0." in screen
    assert "evaluation at step 2:  sums  pass@1 0.500" in screen
    assert "[bold]saved[/bold]" in screen and "a stray print" in screen
    assert "     step   reward" in screen
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen)
    assert re.search(r"memory \d+\.\d GiB\r\n", plain)
    assert f"step 2  reward 1.000  …{('what is ' * 30 + '3 + 5?')[-(columns - 23) :].lstrip()}\r\n" in plain
    assert "  [2J[red]eight[/red] or 9\r\n" in plain and "\x1b[2J" not in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_a_run_says_how_large_it_is():
    assert model_line("tiny", 90_600, 90_600, 1, "cpu") == "tiny: 90.6 k parameters, on one device (cpu)"
    large = model_line("large", 8_030_000_000, 41_900_000, 64, "TPU v5p")
    assert large == "large: 8.0 B parameters, an adapter of 41.9 M is trained, on 64 devices (TPU v5p)"
