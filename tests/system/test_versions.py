"""Both ends of the bounds in pyproject.toml: the lowest releases of all dependencies together, and the newest."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # downloads too

SFT = """
from jaxrl_llm.config import Supervised
from jaxrl_llm.data import Texts
from jaxrl_llm.tasks import Table
config = Supervised("tiny-random", Texts(Table("rows.parquet"), template="chatml", holdout=0.25), steps=1)
"""
ROWS = """
import datasets
chats = [[{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": str(n + 1)}] for n in range(16)]
datasets.Dataset.from_dict({"messages": chats}).to_parquet("rows.parquet")
"""
COMMANDS = (
    "train smoke --steps 1 --run_dir rl --evaluation.limit 4",
    "train sft.py --run_dir sft --batch.rows 4 --output.trackers tensorboard",
    "train rl --steps 2",
    "export rl --out rl_model",
    "export sft --out sft.gguf",
    "eval rl_model --config smoke --limit 2 --max_new_tokens 4",
    "generate sft.gguf --prompt 1 --max_new_tokens 2",
    "report rl sft --out report.html",
)


def bounds():
    """Each dependency with its lowest release; jaxlib's is JAX's own."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        asked = tomllib.load(file)["project"]["dependencies"]
    lowest = dict(re.match(r"([\w.-]+)>=([\w.]+)", one).groups() for one in asked)
    return asked, lowest | {"jaxlib": lowest["jax"]}


@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_a_run_works_at_both_ends_of_the_bounds(tmp_path, end):
    asked, lowest = bounds()
    pins = [f"{name}=={version}" for name, version in lowest.items()] if end == "lowest" else asked
    (tmp_path / "requirements.txt").write_text("\n".join(pins))
    (tmp_path / "sft.py").write_text(SFT)
    early = ("PYTHON", "JAX_COMPILATION", "JAX_NUM_CPU")  # what this process's own environment needs
    kept = {name: value for name, value in os.environ.items() if not name.startswith(early)}
    own = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "XLA_FLAGS": ""}
    own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=kept | own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    run(python, "-m", "pip", "install", "-q", "--prefer-binary", "-r", "requirements.txt")
    run(python, "-c", ROWS)
    for line in COMMANDS:
        run(python, "-m", "jaxrl_llm", *line.split())
