"""The memory of one device as a picture: what of it is used for what, in both halves of a step."""

from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError

GIB = 2.0**30
COLOURS = {
    "weights": "#4269d0", "optimiser": "#6c8ae0", "reference": "#97bbf5", "critic": "#a463f2",
    "critic_optimiser": "#c9a3f7", "judges": "#ff8ab7", "batch": "#9c6b4e", "sampled": "#3ca951", "cache": "#efb118",
    "temporary": "#ff725c",
}  # fmt: skip
"""By kind of memory."""


def draw(plans: list[dict[str, Any]], path: Path) -> None:
    """Two bars for each plan (as ``report.to_json`` gives it): while it samples, where it does, and while it learns.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 0.9 + 0.95 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    halves = [[half for half in ("sampling", "learning") if p["memory"][half]] for p in plans]
    most = max(
        max(p["memory"]["available"], *(p["memory"][half]["total"] for half in shown))
        for p, shown in zip(plans, halves, strict=True)
    )
    labels = []
    for number, one in enumerate(plans):
        for offset, half in enumerate(halves[number]):
            y = 2.4 * number + offset
            labels.append((y, f"{_short(one['model'])} on {one['machine']}, {half}" if not offset else half))
            _bar(axes, y, one["memory"][half])
            available = one["memory"]["available"] / GIB
            axes.plot([available, available], [y - 0.5, y + 0.5], color="black", linewidth=1.5)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, most / GIB * 1.05)
    axes.set_xlabel("GiB of one device (black line: what there is)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    shown = [label for label in LABELS.values() if label in handles]
    figure.legend(
        [handles[label] for label in shown], shown, loc="outside upper center", ncols=4, fontsize=8, frameon=False
    )
    figure.savefig(path)


def _bar(axes: Any, y: float, memory: dict[str, float]) -> None:
    left = 0.0
    for kind, colour in COLOURS.items():
        if value := memory.get(kind, 0.0) / GIB:  # plans that were kept earlier know fewer kinds
            axes.barh(y, value, left=left, height=0.85, color=colour, label=LABELS[kind])
            left += value


LABELS = {
    "weights": "weights", "optimiser": "optimiser", "reference": "reference", "critic": "critic",
    "critic_optimiser": "optimiser of the critic", "judges": "reward models", "batch": "batch",
    "sampled": "weights to sample from", "cache": "key/value cache", "temporary": "activations, temporaries",
}  # fmt: skip
"""Names in the legend."""


def _short(model: str) -> str:
    return model.rsplit("/", 1)[-1]
