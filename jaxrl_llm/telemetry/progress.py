"""Progress of a run on stderr: a live table on a terminal, plain lines in a log file."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxrl_llm.diagnosis import FindingTracker
from jaxrl_llm.system.text import count, seconds
from jaxrl_llm.telemetry.report import step_events
from jaxrl_llm.telemetry.screens import Panel, Screen, evaluation_line, memory_now, plain_row
from jaxrl_llm.types import Group

STEP, EVALUATION, SAVE = "step", "evaluation", "save"
PHASES = "/jax/core/compile/"
"""Prefix of JAX's events of tracing, lowering and compiling; each is reported at its begin and at its end."""
PROGRAMS = {
    "run_chunk": "sampling",
    "empty_slots": "sampling",
    "fill_slots": "sampling",
    "extend_prompts": "the reading of prompts",
    "update": "the update",
    "score": "log-probabilities",
    "<lambda>": "a program",
}
"""Display names of the large programs by their functions' names; others are shown by function name."""

COMPILE = "backend_compile"
DONE = {"jaxpr_trace": "traced", "jaxpr_to_mlir_module": "lowered", COMPILE: "compiled"}
MIN_REPORTED_S = 0.3


log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps at which a run evaluates, saves and ends, regardless of interruptions; rollbacks use only their
    checkpoints, and no other is kept for long. ``steps``: number of the last one. ``evaluate_every``, ``save_every``:
    steps between two; 0 evaluates after the last one only. ``moved``: the steps so far after which the run went back or
    into another phase, which are saved too; added to.
    """

    steps: int
    evaluate_every: int = 0
    save_every: int = 0
    moved: set[int] = dataclasses.field(default_factory=set)

    def evaluates(self, step: int) -> bool:
        """Whether the policy is evaluated after ``step``; the last step always is."""
        return step == self.steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)

    def saves(self, step: int) -> bool:
        """Whether ``step`` has a checkpoint; the last one always has."""
        regular = self.save_every > 0 and step > 0 and step % self.save_every == 0
        return step == self.steps or step in self.moved or regular

    def ahead(self, step: int) -> dict[str, int]:
        """Return the remaining amount of each kind after the update of ``step``, including its evaluation and save."""
        every = {EVALUATION: self.evaluate_every, SAVE: self.save_every}
        return {
            STEP: self.steps - step,
            **{kind: self.steps // n - (step - 1) // n + (self.steps % n > 0) if n else 1 for kind, n in every.items()},
        }


def time_left(durations: Mapping[str, Sequence[float]], ahead: Mapping[str, int]) -> float | None:
    """Return the seconds for the work ``ahead`` at the mean of each kind's ``durations``, 0 for a kind without; None
    before the first step. A first time takes longer (files, workers), so it is left out as soon as there is another.
    """
    if not durations.get(STEP):
        return None
    total = 0.0
    for kind, times in ahead.items():
        done = durations.get(kind, ())
        usual = done[1:] or done
        total += times * sum(usual) / len(usual) if usual else 0.0
    return total


class Pace:
    """The latest durations of each kind of work, in seconds, without compilations, of which ``compiled`` returns the
    seconds so far.
    """

    def __init__(self, compiled: Callable[[], float]):
        self.durations: dict[str, tuple[float, ...]] = {}
        self._compiled = compiled
        self.begin()

    def begin(self) -> None:
        """Start the clock of the next work: the time before it does not count."""
        self._begin = time.monotonic()
        self._before = self._compiled()

    def took(self, kind: str) -> None:
        """Record the time since the last call, or since ``begin``, as a duration of this kind of work."""
        elapsed = max(time.monotonic() - self._begin - (self._compiled() - self._before), 0.0)
        self.durations[kind] = (*self.durations.get(kind, ()), elapsed)[-20:]
        self.begin()


class CompileWatch:
    """Owner of listeners to JAX's compilations; a context manager. ``seconds``: of all finished ones of its own thread,
    cached programs included; ``read``: programs from the cache; ``compiled``: those that could have been in it but
    were not.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.read = 0
        self.compiled = 0
        self._reading: set[int] = set()  # threads, within a program that the cache has
        self._lock = threading.Lock()
        self._own = threading.get_ident()
        self._since = [0, 0.0]  # programs and seconds of all threads, since ``take``
        self._open: dict[int, list[tuple[str, float]]] = {}  # by thread: what is traced may trace other programs

    def __enter__(self) -> "CompileWatch":
        import jax.monitoring

        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_listener(self._happens)
        jax.monitoring.register_event_duration_secs_listener(self._ends)
        return self

    def __exit__(self, *exception: object) -> None:
        import jax.monitoring

        jax.monitoring.unregister_scalar_listener(self._begins)
        jax.monitoring.unregister_event_listener(self._happens)
        jax.monitoring.unregister_event_duration_listener(self._ends)

    def take(self) -> dict[str, float]:
        """Return the programs that were made or read since the last call, and the seconds of that, as metrics."""
        with self._lock:
            (programs, spent), self._since = self._since, [0, 0.0]
        return {"time/programs": float(programs), "time/compile_s": spent}

    def slower(self, step: int) -> str:
        """Return a note that this first step takes longer; empty if all large programs came from the cache."""
        if self.read > 0 and self.compiled == 0:
            return ""
        note = "takes longer than those after it: it also compiles its programs, unless JAX's cache has them"
        return f"step {step} {note}"

    def now(self) -> tuple[str, float] | None:
        """Return the program being compiled and its seconds so far; None if nothing is, or only briefly."""
        with self._lock:
            outermost = [programs[0] for programs in self._open.values() if programs]
        for name, since in outermost:
            if time.monotonic() - since >= MIN_REPORTED_S:
                return name, time.monotonic() - since
        return None

    def _begins(self, event: str, value: float, **about: Any) -> None:
        if event.startswith(PHASES) and "fun_name" in about:
            # JAX says ``jit(update)`` and ``update``: both are the update.
            function = about["fun_name"].removeprefix("jit(").removesuffix(")")
            name = PROGRAMS.get(function, function.strip("_"))
            with self._lock:
                self._open.setdefault(threading.get_ident(), []).append((name, time.monotonic()))

    def _happens(self, event: str, **about: Any) -> None:
        # A program was read from JAX's cache; this event comes within that program's compilation.
        if event == "/jax/compilation_cache/cache_hits":
            with self._lock:
                self._reading.add(threading.get_ident())

    def _ends(self, event: str, duration_secs: float, **about: Any) -> None:
        with self._lock:
            programs = self._open.get(threading.get_ident())
            if not programs or not event.startswith(PHASES) or "fun_name" not in about:
                return
            name, _ = programs.pop()
            what = event.removeprefix(PHASES).removesuffix("_duration")
            read = what == COMPILE and threading.get_ident() in self._reading
            if what == COMPILE:
                self._reading.discard(threading.get_ident())
                self.read += read
                self._since[0] += 1
                self.compiled += not read and duration_secs >= 1.0  # the least that JAX keeps in its cache
            if programs:
                return
            self.seconds += duration_secs * (threading.get_ident() == self._own)
            self._since[1] += duration_secs
        if duration_secs >= MIN_REPORTED_S:
            done = f"read {name} from JAX's cache" if read else f"{DONE.get(what, what)} {name}"
            log.info("%s in %.1f s", done, duration_secs)


WITHIN_A_STEP = ("sampling", "scoring", "updating")
"""First words of statuses within a step."""


def allowed_silence(status: str, durations: Sequence[float]) -> float:
    """Return the seconds of silence allowed under ``status`` after steps of ``durations`` seconds. Within a step it is
    twice an ordinary step, so that a log file holds one line for each, but 5 s at least.
    """
    return max(5.0, 2 * max(durations, default=0.0) if _phase(status) in WITHIN_A_STEP else 0.0)


def _phase(status: str) -> str:
    return status.split(" ", 1)[0].rstrip(":")


class Progress:
    """Shows a run's progress; a context manager, so that the terminal is restored in any case. ``first_step``: that
    this process runs: 1 for a new run, s + 1 after resuming at s. ``console``: where to print; stderr if None.
    ``tracker``: looks for findings; None for none. ``quiet``: show warnings alone. ``pace``: durations of each kind of
    work; the loop adds those of checkpoints. ``at``: the current step.
    """

    def __init__(
        self,
        schedule: Schedule,
        first_step: int = 1,
        console: Console | None = None,
        tracker: FindingTracker | None = None,
        quiet: bool = False,
    ):
        console = console or Console(stderr=True, highlight=False)
        self._schedule = schedule
        self.tracker = tracker
        self._block = contextlib.ExitStack()
        self.compiling = CompileWatch()
        self.at = first_step
        self.pace = Pace(lambda: self.compiling.seconds)
        self._status = "starting"
        self._since = time.monotonic()
        self._panel = Panel()
        self._warned: set[str] = set()
        allowed = lambda: allowed_silence(self._status, self.pace.durations.get(STEP, ()))  # noqa: E731
        self._screen = Screen(console, self.describe, allowed, self._panel, quiet)

    def __enter__(self) -> "Progress":
        self._block.enter_context(self.compiling)
        self._block.enter_context(self._screen)
        if self.at > 1:
            self.note(f"continuing at step {self.at} of {self._schedule.steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()

    def begin(self) -> None:
        """Start the clock once everything is loaded: time now counts for evaluations and steps, and memory is shown."""
        self.pace.begin()
        self._panel.memory = memory_now

    def status(self, text: str) -> None:
        """Set the current status, such as ``sampling 120/400 tokens``; another first word starts its clock again."""
        if _phase(text) != _phase(self._status):
            self._since = time.monotonic()
        self._status = text

    def describe(self) -> str:
        """Return one line: the current step, the activity and its duration."""
        where = f"step {self.at}/{self._schedule.steps}  " if _phase(self._status) in WITHIN_A_STEP else ""
        if (compiling := self.compiling.now()) is not None:
            name, since = compiling
            return f"{where}compiling {name}  {seconds(since)}"
        return f"{where}{self._status}  {seconds(time.monotonic() - self._since)}"

    def step(self, metrics: dict[str, Any]) -> None:
        """Print a line for the step ``metrics["step"]`` after its update; its evaluation is still to come."""
        self.pace.took(STEP)
        step = int(metrics["step"])
        seconds_left = time_left(self.pace.durations, self._schedule.ahead(step))
        fields = f"{step}/{self._schedule.steps}", seconds(seconds_left or 0.0), metrics
        self._panel.show_step(metrics)
        self._screen.row(*fields)
        log.info("%s", plain_row(*fields))
        self.at = step + 1
        self.status("writing down")

    def show_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """Print a line with the metrics of the evaluation after ``step``."""
        self.pace.took(EVALUATION)
        self._panel.show_evaluation(metrics)
        if text := evaluation_line(metrics):
            self.note(f"evaluation at step {step}:  {text}")

    def show_events(self, step: int, metrics: dict[str, Any], groups: Sequence[Group] = ()) -> None:
        """Print a line for each event in the step's complete row, as a warning when one with a reason first happens,
        and for each new finding. ``groups``: data of the step; a terminal shows one of its completions now and then.
        """
        for name, reason in step_events(metrics):
            warning = bool(reason) and name not in self._warned
            self.note(f"step {step}: {f'{name}: {reason}' if reason else name}", warning)
            self._warned.add(name)
        for finding in self.tracker.new(metrics) if self.tracker else ():
            text = f"{finding.kind.replace('_', ' ')} since step {finding.step}: {finding.what}"
            self._panel.finding = text
            self.note(f"step {step}: {text}", warning=True)
            self.note(f"  {finding.why} Try {finding.remedy}", warning=True)
        self._panel.show_example(step, groups)

    def note(self, text: str, warning: bool = False) -> None:
        """Print a line of text; a ``warning`` is shown even without progress."""
        self._screen.line(text, warning=warning)
        log.info("%s", text)


def model_line(model: str, parameters: int, trained: int, devices: int, device: str) -> str:
    """Return the line about the model and the machine: ``trained`` parameters of an adapter, ``devices`` of a kind."""
    adapter = "" if trained == parameters else f", an adapter of {count(trained)} is trained"
    on = "one device" if devices == 1 else f"{devices} devices"
    return f"{model}: {count(parameters)} parameters{adapter}, on {on} ({device})"
