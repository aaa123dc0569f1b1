"""What a terminal shows of a run below its finished steps: curves of one line, where the time goes, what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from jaxrl_llm.telemetry.columns import short
from jaxrl_llm.telemetry.rows import number

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
"""Levels of a curve from the lowest to the highest; where a terminal has no blocks, the other ones."""
CURVES = (
    ("reward", "reward/mean"),
    ("pairs", "pairs/accuracy"),
    ("entropy", "entropy"),
    ("length", "completions/mean_length"),
    ("kl", "kl"),
    ("critic", "critic/explained_variance"),
    ("loss", "loss"),
)
"""Short names and metrics, the most telling first."""
MOST_CURVES = 4
NARROWEST = 20
"""Columns that one of them takes at least."""
LEAST_WIDTH = 60
"""Columns of a terminal below which no panel is shown."""
SPLIT = (("sample", "time/rollout_s"), ("score", "time/reward_s"), ("update", "time/update_s"))


class Curve(NamedTuple):
    """A metric as it went.

    Attributes:
      name: short.
      values: of the steps that measured it.
    """

    name: str
    values: list[float]


class Panel:
    """Keeps what is drawn of each row; a run without two steps shows nothing."""

    def __init__(self) -> None:
        self._curves = {metric: Curve(name, []) for name, metric in CURVES}
        self._tests: dict[str, list[float]] = {}
        self._row: Mapping[str, Any] = {}
        self._finding = ""

    def step(self, row: Mapping[str, Any]) -> None:
        """Take a finished step's metrics."""
        self._row = row
        for metric, curve in self._curves.items():
            _keep(curve.values, row.get(metric))

    def tested(self, row: Mapping[str, Any]) -> None:
        """Take what an evaluation found; its first number is drawn."""
        for name in evaluation_names(row):
            _keep(self._tests.setdefault(name, []), row[name])

    def found(self, text: str) -> None:
        """Take the newest finding."""
        self._finding = text

    def lines(self, width: int, blocks: str = BLOCKS) -> list[Text]:
        """At most three lines of ``width`` characters."""
        curves = [Curve(name.rpartition("/")[2], values) for name, values in self._tests.items() if len(values) > 1][:1]
        curves += [curve for curve in self._curves.values() if len(set(curve.values)) > 1]
        if width < LEAST_WIDTH or not curves:
            return []
        count = min(MOST_CURVES, width // NARROWEST)
        room = width // count
        drawn = [_drawn(curve, room - 2, blocks) for curve in curves[:count]]
        lines = [Text("  ".join(f"{text:<{room - 2}}" for text in drawn).rstrip(), no_wrap=True)]
        if split := time_split(self._row):
            lines.append(Text(f"time  {split}", style="dim", no_wrap=True, overflow="ellipsis"))
        if self._finding:
            lines.append(Text(self._finding, style="yellow", no_wrap=True, overflow="ellipsis"))
        return lines


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """At most ``width`` characters: the means of equally many neighbours, from the lowest level to the highest.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low = min(means)
    spread = max(means) - low
    top = len(blocks) - 1
    return "".join(blocks[round((mean - low) / spread * top) if spread else 0] for mean in means)


def time_split(row: Mapping[str, Any]) -> str:
    """Where a step's seconds went: ``sample 27 %  score 1 %  update 71 %  of 12.3 s``; empty where none is known."""
    whole = row.get("time/step_s")
    if not whole:
        return ""
    parts = [(name, row[metric]) for name, metric in SPLIT if row.get(metric)]
    return "  ".join([*(f"{name} {100 * part / whole:.0f} %" for name, part in parts), f"of {short(whole)} s"])


def evaluation_names(row: Mapping[str, Any]) -> list[str]:
    """The metrics of evaluations, without how many problems there were."""
    return [name for name in row if name.startswith("eval/") and not name.endswith(("/problems", "/mean_length"))]


def _keep(values: list[float], value: Any) -> None:
    if (measured := number(value)) is not None:
        values.append(measured)


def _drawn(curve: Curve, width: int, blocks: str) -> str:
    """``reward ▁▃▆█ 0.93`` in ``width`` characters."""
    last = short(curve.values[-1])
    return f"{curve.name} {sparkline(curve.values, width - len(curve.name) - len(last) - 2, blocks)} {last}"
