"""Output of a run: a terminal or a notebook with live lines below a table of steps, a log file, or warnings only."""

import html
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.console import Group as Lines
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.system.json_lines import number
from jaxrl_llm.system.text import ELLIPSIS, abridge, harmless, head, short, shown, tail
from jaxrl_llm.types import Group

EXAMPLE_S = 10.0
"""Least seconds that an example is shown, so that it can be read; slower steps each have their own."""
MAX_CHARACTERS = 2000
"""Characters kept of either end of a text: no terminal shows more in a line."""
GIB = 2**30
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
"""Levels of a curve from the lowest to the highest; ``PLAIN`` is for terminals without block characters."""
CURVES = (
    ("reward", "reward/mean"), ("pairs", "pairs/accuracy"), ("entropy", "entropy"),
    ("length", "completions/mean_length"), ("kl", "kl"), ("critic", "critic/explained_variance_pooled"),
    ("loss", "loss"),
)  # fmt: skip
"""Short names and metrics, the most informative first."""


class Example(NamedTuple):
    """A completion to display, on one line, and the end of its prompt; of an episode all turns, each after its role.
    ``step``: that learned from it. ``which``: ``best``, ``lowest``, or empty where all of the step have the same
    reward.
    """

    step: int
    which: str
    reward: float
    prompt: str
    completion: str

    def lines(self, width: int, mark: str = ELLIPSIS) -> list[str]:
        """Return a line with origin and prompt, and one with the completion, cut to ``width`` columns by ``mark``."""
        worth = f"step {self.step}  {f'{self.which} reward'.lstrip()} {short(self.reward)}  "
        return [
            worth + tail(self.prompt, width - len(worth), mark),
            f"  {abridge(self.completion, width - 2, mark) or '(nothing)'}",
        ]


def choose_example(step: int, groups: Sequence[Group], turn: int) -> Example | None:
    """Choose one of the best completions, or of the worst in odd turns; None if no completion has a reward."""
    scored = [
        (float(reward), group, i) for group in groups for i, reward in enumerate(group.rewards) if math.isfinite(reward)
    ]
    if not scored:
        return None
    best = max(reward for reward, _, _ in scored)
    worst = min(reward for reward, _, _ in scored)
    target = worst if turn % 2 else best
    candidates = [candidate for candidate in scored if candidate[0] == target]
    reward, group, i = candidates[turn // 2 % len(candidates)]
    which = "" if best == worst else ("lowest" if turn % 2 else "best")
    prompt = harmless(group.problem.prompt[-1]["content"][-MAX_CHARACTERS:])
    text = group.completions[i].transcript
    text = text if len(text) <= 2 * MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} {text[-MAX_CHARACTERS:]}"
    return Example(step, which, reward, prompt, harmless(text))


class Panel:
    """The state of the live lines; unknown quantities have no line. ``memory``: returns the memory in use as text;
    empty until it matters. ``finding``: the newest, or empty. ``example``: the completion that is shown, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory: Callable[[], str] = str
        self.finding = ""
        self.example: Example | None = None
        self._clock = clock
        self._turn = 0
        self._since = -math.inf
        self._curves: dict[str, list[float]] = {metric: [] for _, metric in CURVES}
        self._tests: dict[str, list[float]] = {}
        self._row: Mapping[str, Any] = {}

    def show_step(self, row: Mapping[str, Any]) -> None:
        """Take a finished step's metrics."""
        self._row = row
        for metric, values in self._curves.items():
            if (measured := number(row.get(metric))) is not None:
                values.append(measured)

    def show_evaluation(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of an evaluation; the first one is drawn."""
        for name, value in row.items():
            if name.startswith("eval/") and not name.endswith(("/problems", "/mean_length")):
                values = self._tests.setdefault(name, [])
                if (measured := number(value)) is not None:
                    values.append(measured)

    def show_example(self, step: int, groups: Sequence[Group]) -> None:
        """Take the groups of a finished step: now and then one of the best completions is shown, or of the worst."""
        if self._clock() - self._since < EXAMPLE_S or (example := choose_example(step, groups, self._turn)) is None:
            return
        self.example = example
        self._turn += 1
        self._since = self._clock()

    def lines(self, width: int, encoding: str = "utf-8") -> list[Text]:
        """Return at most six lines of ``width`` columns, in characters of the terminal's ``encoding``."""
        if width < 60:
            return []
        wide = encoding.lower().startswith("utf")
        mark = ELLIPSIS if wide else "..."
        lines = [(line, "") for line in self._drawn(width, BLOCKS if wide else PLAIN)]
        split = f"time  {times}" if (times := time_split(self._row)) else ""
        usage = [part for part in (split, self.memory()) if part]
        usage_line = "    ".join(usage)
        lines += [(line, "dim") for line in (usage if len(usage_line) > width else [usage_line] * bool(usage))]
        if self.example:
            origin, text = self.example.lines(width, mark)
            lines += [(origin, "dim"), (text, "")]
        if self.finding:
            lines.append((self.finding, "yellow"))
        # A question mark stands for each letter that the encoding does not have.
        encodable = [
            (head(line, width, mark).encode(encoding, "replace").decode(encoding), style) for line, style in lines
        ]
        return [Text(line, style=style, no_wrap=True) for line, style in encodable]

    def _drawn(self, width: int, blocks: str) -> list[str]:
        """Draw the curves side by side on one line, if there are any: ``reward ▁▃▆█ 0.93``."""
        curves = [(name.rpartition("/")[2], values) for name, values in self._tests.items() if len(values) > 1][:1]
        curves += [(name, self._curves[metric]) for name, metric in CURVES if len(set(self._curves[metric])) > 1]
        count = min(4, width // 20)  # a curve has 20 columns at least
        room = width // count - 2
        drawn = []
        for name, values in curves[:count]:
            last = short(values[-1])
            line = sparkline(values, room - len(name) - len(last) - 2, blocks)
            drawn.append(f"{f'{name} {line} {last}':<{room}}")
        return ["  ".join(drawn).rstrip()] if drawn else []


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Draw at most ``width`` characters: means of equally many neighbours, scaled from the lowest to the highest level.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means)
    spread = max(means) - low
    top = len(blocks) - 1
    return "".join(blocks[round((mean - low) / spread * top) if spread else 0] for mean in means)


def time_split(row: Mapping[str, Any]) -> str:
    """Return the split of a step's seconds: ``sample 27 %  score 1 %  update 71 %  of 12.3 s``; empty if unknown."""
    step_s = row.get("time/step_s")
    if not step_s:
        return ""
    metrics = (("sample", "time/rollout_s"), ("score", "time/reward_s"), ("update", "time/update_s"))
    parts = [(name, row[metric]) for name, metric in metrics if row.get(metric)]
    return "  ".join([*(f"{name} {100 * part / step_s:.0f} %" for name, part in parts), f"of {short(step_s)} s"])


def memory_now() -> str:
    """Return ``memory 1.4 GiB  device 12.3 of 79.6 GiB, 61.0 at most``; unknown parts are left out."""
    import jax

    return describe_memory(resident_bytes(), [device.memory_stats() or {} for device in jax.local_devices()])


def resident_bytes() -> int | None:
    """Return the resident bytes of this process, which on a CPU include its arrays; None where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def describe_memory(process: int | None, devices: Sequence[Mapping[str, int]]) -> str:
    """Describe the memory of the process and of the fullest device. ``process``: bytes; None if unknown. ``devices``:
    JAX's memory statistics of each, in bytes: ``bytes_in_use``, ``bytes_limit`` and ``peak_bytes_in_use``; empty for a
    device without statistics, such as a CPU.
    """
    parts = [] if process is None else [f"memory {process / GIB:.1f} GiB"]
    if measured := [stats for stats in devices if "bytes_in_use" in stats]:
        fullest = max(measured, key=lambda stats: stats["bytes_in_use"] / stats.get("bytes_limit", GIB))
        name = "device" if len(measured) == 1 else "fullest device"
        limit = f" of {fullest['bytes_limit'] / GIB:.1f}" if fullest.get("bytes_limit") else ""
        peak = f", {fullest['peak_bytes_in_use'] / GIB:.1f} at most" if "peak_bytes_in_use" in fullest else ""
        parts.append(f"{name} {fullest['bytes_in_use'] / GIB:.1f}{limit} GiB{peak}")
    return "  ".join(parts)


class CellOutput:
    """One output of the cell that runs; any thread may update it."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display(self._bundle([], []), raw=True, display_id=True)
        self._lines: list[tuple[str, bool]] = []
        self._lock = threading.Lock()

    def add(self, text: str, strong: bool) -> None:
        """Append a line, which is shown with the next ``show``; a ``strong`` one stands out."""
        with self._lock:
            self._lines = [*self._lines, (text, strong)][-100:]  # all are in the run's log.txt

    def show(self, below: Sequence[str]) -> None:
        """Show the lines and, under them, those of what is going on now."""
        with self._lock:
            self._handle.update(self._bundle(self._lines, below), raw=True)

    @staticmethod
    def _bundle(lines: Sequence[tuple[str, bool]], below: Sequence[str]) -> dict[str, str]:
        marked = [f"<b>{html.escape(text)}</b>" if strong else html.escape(text) for text, strong in lines]
        page = "\n".join([*marked, *map(html.escape, below)])
        plain = "\n".join([*(text for text, _ in lines), *below])
        style = "white-space: pre; overflow-x: auto; line-height: 1.3"
        return {"text/plain": plain, "text/html": f'<pre style="{style}">{page}</pre>'}


class Column(NamedTuple):
    """One column of the table of steps: ``width`` characters, without the gap before it; in a narrow terminal columns
    of a higher ``rank`` are left out first.
    """

    title: str
    metric: str
    width: int
    style: Callable[[float], str]
    rank: int

    def cell(self, metrics: dict[str, Any]) -> str:
        """Return the value as the column shows it: ``-`` for a missing value; infinity is shown."""
        return shown(metrics.get(self.metric), self.style)


COLUMNS = (
    Column("reward", "reward/mean", 7, short, 0),
    Column("accuracy", "reward/accuracy", 8, lambda value: f"{100 * value:.1f} %", 1),
    Column("pairs", "pairs/accuracy", 7, lambda value: f"{100 * value:.1f} %", 1),
    Column("steps right", "steps/accuracy", 11, lambda value: f"{100 * value:.1f} %", 1),
    Column("loss", "loss", 7, short, 8),
    Column("length", "completions/mean_length", 7, lambda value: f"{value:.1f}", 4),
    Column("entropy", "entropy", 7, short, 6),
    Column("grad norm", "grad_norm", 9, short, 7),
    Column("tokens/s", "throughput/sampled_tokens_per_s", 8, lambda value: f"{value:.0f}", 5),
    Column("MFU", "throughput/mfu", 6, lambda value: f"{100 * value:.1f} %", 9),
    Column("gap", "sampler/logp_abs_diff_mean", 8, short, 10),
    Column("seconds", "time/step_s", 7, lambda value: f"{value:.1f}", 3),
)


def fit_columns(width: int, metrics: Collection[str]) -> tuple[tuple[Column, ...], int]:
    """Return the columns of these metrics within ``width`` characters, and the characters between them. Gaps are
    narrowed first, then columns of high rank are left out.
    """
    columns = tuple(column for column in COLUMNS if column.metric in metrics)
    gap = 2
    while len(format_row(columns, gap, "step", "left")) > width and (gap > 1 or columns):
        if gap > 1:
            gap = 1
        else:
            least = max(columns, key=lambda column: column.rank)
            columns = tuple(column for column in columns if column is not least)
    return columns, gap


def format_row(
    columns: Sequence[Column], gap: int, step: str, time_left: str, metrics: dict[str, Any] | None = None
) -> str:
    """Return a step's values in right-aligned columns; without ``metrics`` the titles, each over its column."""
    cells = [column.title if metrics is None else column.cell(metrics) for column in columns]
    widths = (9, *(column.width for column in columns), 7)
    texts = (step, *cells, time_left)
    return (" " * gap).join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def plain_row(step: str, time_left: str, metrics: dict[str, Any]) -> str:
    """Return a step's values with their names, for log files."""
    values = "".join(f"  {column.title} {column.cell(metrics)}" for column in COLUMNS if column.metric in metrics)
    return f"step {step}{values}  left {time_left}"


def evaluation_line(metrics: dict[str, Any]) -> str:
    """Return the metrics of a step's evaluation: ``chain_sum  pass@1 0.987  mean length 8.000``; empty without one."""
    by_task: dict[str, str] = {}
    for name, value in metrics.items():
        _, _, measured = name.partition("eval/")
        task, _, metric = measured.rpartition("/")
        if task and metric != "problems":  # the run printed their number before
            by_task[task] = f"{by_task.get(task, task)}  {metric.replace('_', ' ')} {shown(value)}"
    return "  ".join(by_task.values())


class Screen:
    """Output of a run's lines; a context manager, so that a terminal is restored in any case. On a terminal finished
    steps scroll by as a table above live lines; in a notebook both are one output, updated in place. A log file has one
    line for each step, and when a phase takes long: no bars, no escape codes. ``describe`` returns the activity now,
    ``patience`` the seconds that a file may stay silent now.
    """

    def __init__(
        self, console: Console, describe: Callable[[], str], patience: Callable[[], float], panel: Panel, quiet: bool
    ):
        self._console = console
        self._describe = describe
        self._patience = patience
        self._panel = panel
        self._quiet = quiet
        self._live: Live | None = None
        self._cell: CellOutput | None = None
        if not quiet and console.is_terminal and not console.is_dumb_terminal:
            self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

    def __enter__(self) -> "Screen":
        if self._console.is_jupyter and not self._quiet:
            self._cell = CellOutput()
        if self._live is not None:
            self._live.start()
        elif not self._quiet:
            self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif not self._quiet:
            self._stopped.set()
            self._watch.join()
            if self._cell is not None:
                self._cell.show([])

    def _render(self) -> Lines:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return Lines(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def _break_silence(self) -> None:
        while not self._stopped.wait(0.5):
            if self._cell is not None:
                panel = self._panel.lines(self._console.width)
                self._cell.show([*(line.plain for line in panel), f"... {self._describe()}"])
                continue
            shortest = self._patience()
            # Waits between two lines of one phase double up to a minute.
            if time.monotonic() - self._last >= max(shortest, min(shortest * 2**self._repeats, 60.0)):
                repeats = self._repeats + 1
                self.line(f"... {self._describe()}")
                self._repeats = repeats

    def row(self, step: str, time_left: str, metrics: dict[str, Any]) -> None:
        """Print a finished step: ``3/9``, the time left, and its metrics; except in a file with a heading at times."""
        if self._live is None and self._cell is None:
            self.line(plain_row(step, time_left, metrics))
            return
        layout = fit_columns(self._console.width, metrics)
        if self._rows % 40 == 0:
            self._print(format_row(*layout, "step", "left"), "bold")
        self._rows += 1
        self.line(format_row(*layout, step, time_left, metrics))

    def line(self, text: str, warning: bool = False) -> None:
        """Print a line, which ends a silence; warnings are coloured on a terminal."""
        if self._quiet and not warning:
            return
        self._print(text, "yellow" if warning and (self._live or self._cell) else "")
        self._last = time.monotonic()
        self._repeats = 0

    def _print(self, text: str, style: str) -> None:
        if self._cell is not None:
            self._cell.add(text, bool(style))
        else:
            self._console.print(Text(text, style=style), soft_wrap=self._live is None)
