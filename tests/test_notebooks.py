"""The notebooks run, and what they show on the web is what their source makes."""

import os
import runpy
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOOL = runpy.run_path(str(ROOT / "tools" / "run_notebooks.py"))


@pytest.fixture(autouse=True, scope="module")
def kernels_compile_sooner():
    """What a notebook shows depends on no compiler's choice; its runs share small programs, too."""
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    before = os.environ[name]
    os.environ.update({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", name: "0.02"})
    yield
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    os.environ[name] = before


def shown(notebook):
    """Of each code cell: its number, and what kinds of output it has, texts in full."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds = [
                (output.output_type, output.get("text"), sorted(output.get("data", ()))) for output in cell.outputs
            ]
            yield cell.execution_count, kinds


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_stores_what_its_source_shows(path):
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    again = "run tools/run_notebooks.py"
    assert stored.metadata.get("fingerprint") == TOOL["fingerprint"](stored), f"outputs of another source: {again}"
    fresh = TOOL["executed"](stored)
    assert list(shown(stored)) == list(shown(fresh)), again
    assert any("image/png" in kinds for _, outputs in shown(fresh) for *_, kinds in outputs), "no pictures"
    assert stored.metadata == fresh.metadata, f"{again}: the metadata holds more than it leaves there"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small(path):
    assert path.stat().st_size < 600_000
