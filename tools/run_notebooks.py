"""Run the notebooks and store what they show, with a fingerprint of the source that made it.

    pip install -e '.[notebooks]'
    python tools/run_notebooks.py                 # all of notebooks/
    python tools/run_notebooks.py PATH [PATH ...]

What is kept of the metadata says nothing of the machine.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Of all code cells."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as a fresh kernel leaves it; raises at the first cell that fails."""
    fresh = nbformat.from_dict(notebook)
    for cell in fresh.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    with tempfile.TemporaryDirectory() as scratch:
        # A cell's prints are one text: into how many parts they come is a matter of time.
        client = nbclient.NotebookClient(
            fresh,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": scratch}},
        )
        # What a notebook says must not depend on devices, or on whether the kernel has widgets for progress bars.
        quiet = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
        client.execute(env=os.environ | {"IPYTHONDIR": scratch} | quiet)
    fresh.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "fingerprint": fingerprint(fresh),
        }
    )
    return fresh


def main(paths: list[Path]) -> None:
    """Run them in place."""
    for path in paths:
        nbformat.write(executed(nbformat.read(path, as_version=4)), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")))
