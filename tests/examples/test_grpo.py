"""The loop on one page: a random model learns to write a digit by it, and README shows its middle."""

import inspect
import re
import textwrap
from pathlib import Path

import grpo
import jax

from jaxrl_llm.config import Run, load_config
from jaxrl_llm.rewards import Format


def test_the_loop_on_one_page_trains():
    with jax.numpy_dtype_promotion("standard"):  # as optax needs
        _, before, after = grpo.train("tiny-random", Format(r".*[0-9].*"), learning_rate=1e-2, steps=5)
    assert after >= 0.9 > before + 0.4


def test_readme_shows_a_run(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    _, shown = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my_run.py").write_text(shown)
    run = load_config(str(tmp_path / "my_run.py"))[1]
    assert isinstance(run, Run) and run.evaluation.every and len(shown.splitlines()) <= 20


def test_readme_shows_its_middle():
    lines = inspect.getsource(grpo)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown, _ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(lines.splitlines()) <= 80
    for part in shown.split("\n\n"):
        assert textwrap.indent(part.strip(), "    ") in lines
