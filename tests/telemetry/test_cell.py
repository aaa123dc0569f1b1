"""Progress in a notebook, in a real kernel."""

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

RUN = """
import time
from jaxrl_llm.telemetry.progress import Schedule
from jaxrl_llm.telemetry.progress import Progress
with Progress(Schedule(3)) as progress:
    progress.status("sampling 10/40 tokens")
    for step in (1, 2, 3):
        progress.step({"step": step, "reward/mean": 0.25 * step})
    progress.note("<b>kept</b>", warning=True)
    time.sleep(0.7)
"""


def test_a_run_is_one_output_of_its_cell():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RUN)])
    NotebookClient(notebook, timeout=60).execute()
    (output,) = notebook.cells[0].outputs
    lines = output.data["text/plain"].splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["step", "reward"],
        ["1/3", "0.250"],
        ["2/3", "0.500"],
        ["3/3", "0.750"],
    ]
    assert lines[-1] == "<b>kept</b>" and "<b>&lt;b&gt;kept" in output.data["text/html"]
