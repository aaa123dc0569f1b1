"""The live lines of a terminal below the table of steps: curves, split of time, memory, an example and a finding."""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from jaxrl_llm.system.json_lines import number
from jaxrl_llm.system.text import ELLIPSIS, abridge, harmless, head, short, tail
from jaxrl_llm.types import Group

EVERY_S = 10.0
"""Least seconds that an example is shown, so that it can be read; slower steps each have their own."""
KEPT = 2000
"""Characters kept of either end of a text: no terminal shows more in a line."""
GIB = 2**30
STATM = Path("/proc/self/statm")
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
"""Levels of a curve from the lowest to the highest; ``PLAIN`` is for terminals without block characters."""
CURVES = (
    ("reward", "reward/mean"),
    ("pairs", "pairs/accuracy"),
    ("entropy", "entropy"),
    ("length", "completions/mean_length"),
    ("kl", "kl"),
    ("critic", "critic/explained_variance_pooled"),
    ("loss", "loss"),
)
"""Short names and metrics, the most informative first."""
NARROWEST = 20
"""Least columns of a curve."""
LEAST_WIDTH = 60
"""Least columns of a terminal with a panel."""
SPLIT = (("sample", "time/rollout_s"), ("score", "time/reward_s"), ("update", "time/update_s"))


class Example(NamedTuple):
    """A completion to display.

    Attributes:
      step: the step that learned from it.
      which: ``best``, ``lowest``, or empty where all completions of the step have the same reward.
      reward: its reward.
      prompt: the end of the prompt, on one line.
      completion: on one line; of an episode all turns, each after its role.
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


def chosen(step: int, groups: Sequence[Group], turn: int) -> Example | None:
    """Choose one of the best completions, or of the worst in odd turns; None if no completion has a reward."""
    scored = [
        (float(reward), group, i) for group in groups for i, reward in enumerate(group.rewards) if math.isfinite(reward)
    ]
    if not scored:
        return None
    best = max(reward for reward, _, _ in scored)
    worst = min(reward for reward, _, _ in scored)
    wanted = worst if turn % 2 else best
    alike = [one for one in scored if one[0] == wanted]
    reward, group, i = alike[turn // 2 % len(alike)]
    which = "" if best == worst else ("lowest" if turn % 2 else "best")
    prompt = harmless(group.problem.prompt[-1]["content"][-KEPT:])
    text = group.completions[i].transcript
    text = text if len(text) <= 2 * KEPT else f"{text[:KEPT]} {text[-KEPT:]}"
    return Example(step, which, reward, prompt, harmless(text))


class Panel:
    """The state of the live lines; unknown quantities have no line.

    Args:
      clock: returns seconds.

    Attributes:
      memory: returns the memory in use as text; empty until it matters.
      finding: the newest finding; empty before the first.
      example: the completion that is shown; None before the first.
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

    def step(self, row: Mapping[str, Any]) -> None:
        """Take a finished step's metrics."""
        self._row = row
        for metric, values in self._curves.items():
            if (measured := number(row.get(metric))) is not None:
                values.append(measured)

    def tested(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of an evaluation; the first one is drawn."""
        for name, value in row.items():
            if name.startswith("eval/") and not name.endswith(("/problems", "/mean_length")):
                values = self._tests.setdefault(name, [])
                if (measured := number(value)) is not None:
                    values.append(measured)

    def learned(self, step: int, groups: Sequence[Group]) -> None:
        """Take the groups of a finished step: now and then one of the best completions is shown, or of the worst."""
        if self._clock() - self._since < EVERY_S or (example := chosen(step, groups, self._turn)) is None:
            return
        self.example = example
        self._turn += 1
        self._since = self._clock()

    def lines(self, width: int, encoding: str = "utf-8") -> list[Text]:
        """Return at most six lines of ``width`` columns, in characters of the terminal's ``encoding``."""
        if width < LEAST_WIDTH:
            return []
        wide = encoding.lower().startswith("utf")
        mark = ELLIPSIS if wide else "..."
        lines = [(line, "") for line in self._drawn(width, BLOCKS if wide else PLAIN)]
        split = f"time  {told}" if (told := time_split(self._row)) else ""
        usage = [part for part in (split, self.memory()) if part]
        one = "    ".join(usage)
        lines += [(line, "dim") for line in (usage if len(one) > width else [one] * bool(usage))]
        if self.example:
            where, what = self.example.lines(width, mark)
            lines += [(where, "dim"), (what, "")]
        if self.finding:
            lines.append((self.finding, "yellow"))
        # A question mark stands for each letter that the encoding does not have.
        known = [(head(line, width, mark).encode(encoding, "replace").decode(encoding), style) for line, style in lines]
        return [Text(line, style=style, no_wrap=True) for line, style in known]

    def _drawn(self, width: int, blocks: str) -> list[str]:
        """Draw the curves side by side on one line, if there are any: ``reward ▁▃▆█ 0.93``."""
        curves = [(name.rpartition("/")[2], values) for name, values in self._tests.items() if len(values) > 1][:1]
        curves += [(name, self._curves[metric]) for name, metric in CURVES if len(set(self._curves[metric])) > 1]
        count = min(4, width // NARROWEST)
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
    whole = row.get("time/step_s")
    if not whole:
        return ""
    parts = [(name, row[metric]) for name, metric in SPLIT if row.get(metric)]
    return "  ".join([*(f"{name} {100 * part / whole:.0f} %" for name, part in parts), f"of {short(whole)} s"])


def memory_now() -> str:
    """Return ``memory 1.4 GiB  device 12.3 of 79.6 GiB, 61.0 at most``; unknown parts are left out."""
    import jax

    return memory_in_words(resident(), [device.memory_stats() or {} for device in jax.local_devices()])


def resident() -> int | None:
    """Return the resident bytes of this process, which on a CPU include its arrays; None where there is no /proc."""
    try:
        pages = STATM.read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_in_words(process: int | None, devices: Sequence[Mapping[str, int]]) -> str:
    """Describe the memory of the process and of the fullest device.

    Args:
      process: bytes; None if unknown.
      devices: JAX's memory statistics of each, in bytes: ``bytes_in_use``, ``bytes_limit`` and ``peak_bytes_in_use``;
        empty for a device without statistics, such as a CPU.
    """
    parts = [] if process is None else [f"memory {process / GIB:.1f} GiB"]
    if measured := [stats for stats in devices if "bytes_in_use" in stats]:
        fullest = max(measured, key=lambda stats: stats["bytes_in_use"] / stats.get("bytes_limit", GIB))
        name = "device" if len(measured) == 1 else "fullest device"
        limit = f" of {fullest['bytes_limit'] / GIB:.1f}" if fullest.get("bytes_limit") else ""
        peak = f", {fullest['peak_bytes_in_use'] / GIB:.1f} at most" if "peak_bytes_in_use" in fullest else ""
        parts.append(f"{name} {fullest['bytes_in_use'] / GIB:.1f}{limit} GiB{peak}")
    return "  ".join(parts)
