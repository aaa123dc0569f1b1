"""Ctrl-C, SIGTERM and a lost terminal at any moment: one line at once, the terminal in order, nothing left behind."""

import os
import queue
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from commands import MAIN, ROOT, environment
from terminals import CTRL_C, Terminal

from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.system.signals import BETWEEN_STEPS, QUIT, SIGNALS, STOPPING, UNHEARD, Preemption, while_read
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.records import log_to_file
from jaxrl_llm.trainer.state import open_context

PARENT = """
import os, time
from jaxrl_llm.system.signals import child, listen
listen()

def slow():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(0.5)

with child(["sleep", "600"], preexec_fn=slow) as process:
    process.communicate()
"""
QUITTING = """
import os, sys, threading, time
from jaxrl_llm.system.signals import on_exit, quit_now

def begin(output):
    while True:
        with on_exit(lambda *reason: None):
            os.write(output, b"block ")
        time.sleep(0.001)

os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"." * 4096)
except BlockingIOError:  # it is full: the last line waits for its reader
    os.set_blocking(2, True)
threading.Thread(target=begin, args=(int(sys.argv[1]),), daemon=True).start()
threading.Timer(0.05, quit_now, (130, "interrupted")).start()
while True:
    os.write(1, b"more ")
    time.sleep(0.001)
"""
REWARD = """
import os, time
def reward(problem, completion):
    with open("worker.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace("worker.new", "worker")  # it may be killed at any moment
    while os.path.exists("wait"):
        time.sleep(0.01)
    return float(sum(completion.tokens) % 7)
"""
CONFIG = """
import dataclasses
from jaxrl_llm.config import Scoring, load_config
from jaxrl_llm.rewards import Function
scoring = Scoring(rewards=(Function("waits:reward"),), workers=1, timeout_s=600.0)
config = dataclasses.replace(load_config("smoke")[1], scoring=scoring, steps=400)
"""


def gone(process):
    """Whether it has ended; the system may take a moment."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def assert_in_order(terminal):
    """No traceback, and the cursor is shown."""
    assert "Traceback" not in terminal.screen, terminal.screen
    assert terminal.screen.rfind("\x1b[?25h") > terminal.screen.rfind("\x1b[?25l")


@pytest.fixture(scope="module")
def quit_twice(tmp_path_factory):
    """(terminal, worker process) of a run that was asked to stop while a reward did not answer, and then asked
    again.
    """
    folder = tmp_path_factory.mktemp("twice")
    (folder / "waits.py").write_text(REWARD)
    (folder / "waiting.py").write_text(CONFIG)
    terminal = Terminal(MAIN, ["train", "waiting.py"], folder, columns=120, PYTHONPATH=f"{ROOT}:{folder}")
    terminal.wait_for("best reward")
    (folder / "wait").touch()
    terminal.press(CTRL_C)
    terminal.wait_for(STOPPING)
    terminal.press(CTRL_C)
    terminal.finish()
    return terminal, int((folder / "worker").read_text())


@pytest.mark.slow
def test_the_second_ctrl_c_quits_within_the_step(quit_twice):
    terminal, worker = quit_twice
    assert terminal.process.returncode == 130
    assert terminal.lines()[-2:] == [f"jaxrl-llm: {QUIT}", ""]
    assert_in_order(terminal)
    assert gone(worker)


@pytest.mark.slow
def test_a_terminal_shows_a_completion_that_was_learned_from(quit_twice):
    screen = quit_twice[0].screen
    shown = re.search(r"step (\d+)  best reward (\d)\S*  [^\n]*(\d|=|\?)", screen)
    assert shown and int(shown[1]) >= 1 and int(shown[2]) > 3, screen


def test_a_run_says_first_how_large_it_is(quit_twice):
    told = quit_twice[0].screen
    assert "tiny-random: 90.6 k parameters, on one device (cpu)" in told
    assert "chain_sum: 105 problems, 26 to test on; each step 8 x 8 completions, 2 updates" in told


def test_before_the_first_step_a_run_quits_at_once_and_leaves_nothing(tmp_path):
    terminal = Terminal(MAIN, ["train", "smoke"], tmp_path)
    terminal.wait_for("reading task")
    terminal.press(CTRL_C)
    assert terminal.finish() == 75
    assert terminal.lines()[-2:] == [f"jaxrl-llm: {BETWEEN_STEPS}", ""]
    assert_in_order(terminal)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_what_nobody_reads_any_more_is_dropped_and_the_log_says_so(tmp_path, opened):
    reading, writing = opened()
    with open(writing, "w") as file:
        out = while_read(file)
        assert out.isatty() == (opened is os.openpty)
        print("heard", file=out)
        assert os.read(reading, 64).split() == [b"heard"]
        os.close(reading)
        print("before there is a log", file=out)
        with log_to_file(tmp_path / "log.txt"):
            for _ in range(3):
                print("unheard", file=out)
    assert (tmp_path / "log.txt").read_text().endswith(f"  {UNHEARD}\n")
    assert (tmp_path / "log.txt").read_text().count("\n") == 1


def test_other_commands_end_with_one_line(tmp_path):
    terminal = Terminal(MAIN, ["eval", "tiny-random", "--config", "smoke"], tmp_path)
    terminal.wait_for("reading task")
    terminal.press(CTRL_C)
    assert terminal.finish() == 130
    assert terminal.lines()[-2:] == ["jaxrl-llm: interrupted", ""]
    assert_in_order(terminal)


def test_while_a_command_says_its_last_line_no_thread_writes_or_begins_anything():
    reading, writing = os.pipe()
    command = [sys.executable, "-c", QUITTING, str(writing)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writing]
    ) as process:
        os.close(writing)
        for output in (process.stdout.fileno(), reading):
            assert os.read(output, 1)
            limit = time.monotonic() + 20
            while select.select([output], [], [], 0.3)[0] and os.read(output, 65536):
                assert time.monotonic() < limit, "the threads go on"
        said = process.stderr.read()
    os.close(reading)
    assert process.returncode == 130 and said.endswith(b".jaxrl-llm: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_does_not_outlive_a_command_that_quits(number):
    """Not even one that is just being started."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        parent.send_signal(number)
        assert parent.communicate() == ("", "jaxrl-llm: interrupted\n")
    assert parent.returncode == 128 + number and gone(child)


def test_what_was_begun_with_nohup_outlives_its_terminal():
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PARENT}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGHUP)
        parent.send_signal(signal.SIGTERM)
    assert parent.returncode == 128 + signal.SIGTERM and gone(child)


@pytest.fixture
def ordinary_handlers():
    """Those of a program that was started in a terminal; what a shell starts in the background ignores Ctrl-C."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_within_another_program_the_second_signal_is_that_programs(ordinary_handlers):
    said = queue.Queue()
    with pytest.raises(KeyboardInterrupt), Preemption(said.put) as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked and said.get(timeout=20) == STOPPING
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}


def test_a_run_stops_after_its_step_when_its_terminal_is_lost(ordinary_handlers):
    said = queue.Queue()
    with Preemption(said.put) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.asked and said.get(timeout=20) == STOPPING
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption(said.put) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.asked


def test_half_of_the_grace_is_for_saving(ordinary_handlers):
    with Preemption(lambda text: None, grace_s=1000.0) as stop:
        assert not stop.late(2000.0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.late(600.0) and not stop.late(400.0)


def test_a_quiet_run_says_that_it_stops(ordinary_handlers, tmp_path, capsys):
    run = resolved(load_config("smoke")[1])
    with open_context(run, tmp_path, None, False, None, ALONE, Verbosity(quiet=True)) as context, context.stop:
        signal.raise_signal(signal.SIGTERM)
        limit = time.monotonic() + 20
        while STOPPING not in (screen := capsys.readouterr().err) and time.monotonic() < limit:
            time.sleep(0.01)
    assert STOPPING in screen
