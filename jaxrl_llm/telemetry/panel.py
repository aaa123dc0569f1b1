"""What a terminal shows of a run below its finished steps: curves of one line, where time and memory go, an example,
what is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from jaxrl_llm.telemetry.columns import short
from jaxrl_llm.telemetry.examples import Examples
from jaxrl_llm.telemetry.lines import ELLIPSIS, head
from jaxrl_llm.telemetry.rows import number
from jaxrl_llm.types import Group

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"
"""Levels of a curve from the lowest to the highest; where a terminal has no blocks, the other ones."""
CURVES = (
    ("reward", "reward/mean"),
    ("pairs", "pairs/accuracy"),
    ("entropy", "entropy"),
    ("length", "completions/mean_length"),
    ("kl", "kl"),
    ("critic", "critic/explained_variance_pooled"),
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
    """Keeps what is drawn of each row; what is not known yet has no line.

    Attributes:
      memory: says how much is in use, from when on that is of interest.
    """

    def __init__(self) -> None:
        self.memory: Callable[[], str] = str
        self._curves = {metric: Curve(name, []) for name, metric in CURVES}
        self._tests: dict[str, list[float]] = {}
        self._row: Mapping[str, Any] = {}
        self._examples = Examples()
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

    def learned(self, step: int, groups: Sequence[Group]) -> None:
        """Take what a step has learned from; now and then one of its completions is shown."""
        self._examples.see(step, groups)

    def found(self, text: str) -> None:
        """Take the newest finding."""
        self._finding = text

    def lines(self, width: int, encoding: str = "utf-8") -> list[Text]:
        """At most six lines of ``width`` columns, in letters that the terminal's ``encoding`` has."""
        if width < LEAST_WIDTH:
            return []
        wide = encoding.lower().startswith("utf")
        mark = ELLIPSIS if wide else "..."
        lines = [(line, "") for line in self._drawn(width, BLOCKS if wide else PLAIN)]
        split = f"time  {told}" if (told := time_split(self._row)) else ""
        lines += [(line, "dim") for line in _joined([split, self.memory()], width)]
        if self._examples.shown:
            where, what = self._examples.shown.lines(width, mark)
            lines += [(where, "dim"), (what, "")]
        if self._finding:
            lines.append((self._finding, "yellow"))
        return [Text(_known(head(line, width, mark), encoding), style=style, no_wrap=True) for line, style in lines]

    def _drawn(self, width: int, blocks: str) -> list[str]:
        """The curves, side by side on one line, where there are any."""
        curves = [Curve(name.rpartition("/")[2], values) for name, values in self._tests.items() if len(values) > 1][:1]
        curves += [curve for curve in self._curves.values() if len(set(curve.values)) > 1]
        count = min(MOST_CURVES, width // NARROWEST)
        room = width // count - 2
        drawn = [_drawn(curve, room, blocks) for curve in curves[:count]]
        return ["  ".join(f"{text:<{room}}" for text in drawn).rstrip()] if drawn else []


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


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """Those that are not empty: on one line where they fit, each on its own elsewhere."""
    parts = [part for part in parts if part]
    whole = "    ".join(parts)
    return parts if len(whole) > width else [whole] * bool(parts)


def _known(text: str, encoding: str) -> str:
    """The text with a mark of question for each letter that the encoding has not."""
    return text.encode(encoding, "replace").decode(encoding)


def _keep(values: list[float], value: Any) -> None:
    if (measured := number(value)) is not None:
        values.append(measured)


def _drawn(curve: Curve, width: int, blocks: str) -> str:
    """``reward ▁▃▆█ 0.93`` in ``width`` characters."""
    last = short(curve.values[-1])
    return f"{curve.name} {sparkline(curve.values, width - len(curve.name) - len(last) - 2, blocks)} {last}"
