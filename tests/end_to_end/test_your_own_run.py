"""docs/your_own_run.md, done as it says: its files and commands, in an empty folder."""

import json
import re
from pathlib import Path

import pytest
from commands import commands

from jaxrl_llm.config import Run, validate
from jaxrl_llm.config.origin import execute
from jaxrl_llm.environments.calls import ParsedReply
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.tasks import load
from jaxrl_llm.tasks.messages import tool_call

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parents[2] / "docs" / "your_own_run.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SMALLER = "--model tiny-random --steps {} --task.template plain"
"""What the test says beside the page: a model that needs no download."""


def files():
    """The page's files by name."""
    python = {re.match(r"# (\w+\.py)\n", text) for kind, text in BLOCKS if kind == "python"}
    found = {name[1]: name.string for name in python if name}
    shell = next(text for kind, text in BLOCKS if kind == "bash" and text.startswith("cat > "))
    name, content = re.fullmatch(r"cat > (\S+) <<'END'\n(.*)END\n", shell, re.DOTALL).groups()
    return found | {name: content}


def lines():
    """The page's commands."""
    return [
        line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.startswith("jaxrl-llm ")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name, content in files().items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    train, again, *others = [line.removeprefix("jaxrl-llm ") for line in lines()]
    train = f"{train} {SMALLER.format(2)}"
    again = f"{again.partition(' --steps')[0]} {SMALLER.format(3)}"
    # Compiled as on the machine of somebody who reads the page: with optimisations, and what is fused by way of MLIR.
    return commands([train, again, *others], folder, JAX_DISABLE_MOST_OPTIMIZATIONS="false", XLA_FLAGS="")


def test_the_page_has_its_files_and_commands():
    assert files().keys() == {"my_rewards.py", "my_run.py", "my_mixture.py", "my_shop.py", "sums.jsonl"}
    assert [line.split()[1] for line in lines()] == ["train", "train", "eval", "export"]


def test_its_commands_work_in_an_empty_folder(folder, answers):
    assert [answer.code for answer in answers] == [0] * 4, answers
    rows = [json.loads(line) for line in (folder / "runs/my_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[3]["event/resumed"]
    for part in ("accuracy", "short", "right_about", "judged"):
        assert all(f"reward/{part}" in row for row in rows[1:]), part
    assert not any(row["reward/errors"] or row["reward/timeouts"] for row in rows[1:])
    assert rows[1]["reward/short"] < 0 and (folder / "my_model" / "model.safetensors").exists()


def test_its_mixture_is_a_task(folder):
    mixture = execute(folder / "my_mixture.py").task
    validate(Run("tiny-random", mixture, rollout=Rollout(temperature=1.0)))
    assert [part.task.label for part in mixture.parts] == ["sums", "chain_sum", "letter_counting"]


def test_its_shop_tells_prices(folder):
    config = execute(folder / "my_shop.py").config
    validate(config)
    problem = load(config.task).train[0]
    factory = Factory(config.task.environment)
    world = factory.world({**problem.metadata, "prompt": list(problem.prompt)}, 0, config.rollout.episode)
    world.reset(problem.prompt)
    asked = [tool_call(0, "price", {"item": "pear"}), tool_call(1, "price", {"item": "plum"})]
    told = world.reply(ParsedReply({"role": "assistant", "content": "", "tool_calls": asked}))
    assert told.messages[0]["content"] == str(problem.metadata["prices"]["pear"])
    assert "plum" in told.messages[1]["content"] and told.tool_errors == 1 and not told.end
    world.close()
