"""The page: template, style, scripts and data in one file."""

import base64
import datetime
import gzip
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file
from jaxrl_llm.telemetry.report.files import described, read_files, samples_of
from jaxrl_llm.telemetry.rows import jsonable

HERE = Path(__file__).parent
SCRIPTS = ("uplot.js", "values.js", "charts.js", "sections.js", "completions.js", "begin.js")
STYLES = ("uplot.css", "style.css")
QUICK = 4
"""Level of gzip: a tenth larger than the smallest, at a third of the time, since runs wait for it."""
MARK = re.compile(r"\[\[(\w+)\]\]")


def write_report(directories: Sequence[Path], path: Path) -> None:
    """Write the report of one or several runs to ``path``, in one move.

    Raises:
      InputError: one of them is no run, or has files that cannot be read.
    """
    text = page(directories)
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def page(directories: Sequence[Path]) -> str:
    """The report of some runs as HTML; what is not of this package is in it as base64 or escaped."""
    try:
        runs = [read_files(directory) for directory in directories]
        chosen = samples_of(runs)
    except OSError as error:
        named = ", ".join(map(str, directories))
        raise InputError(f"a file of {named} cannot be read: {error}") from error
    data = described(runs, chosen)
    data["written"] = datetime.datetime.now().isoformat(" ", "minutes")
    blobs = [_blob("history", json.dumps(jsonable(data), allow_nan=False).encode())]
    blobs += [_blob(f"samples-{number}", b"\n".join(one.lines)) for number, one in enumerate(chosen)]
    parts = {
        "title": html.escape(", ".join(run["name"] for run in data["runs"])),
        "style": "\n".join((HERE / name).read_text() for name in STYLES),
        "script": "\n".join((HERE / name).read_text() for name in SCRIPTS),
        "licence": (HERE / "uplot.LICENSE").read_text(),
        "data": "\n".join(blobs),
    }
    return MARK.sub(lambda mark: parts[mark[1]], (HERE / "page.html").read_text())


def _blob(name: str, data: bytes) -> str:
    """Data in an element that browsers neither run nor show."""
    packed = base64.b64encode(gzip.compress(data, QUICK, mtime=0)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'
