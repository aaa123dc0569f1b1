"""jaxrl_llm's own run, as ``jaxrl-llm train`` makes it, tested after every step; see ``learning``."""

import dataclasses
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from calculator import Calculator
from learning import OUT, work

from jaxrl_llm import config as configs
from jaxrl_llm.environments import Limits
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO as PAPER
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Task
from jaxrl_llm.trainer.launch import train


def tell(directory: Path, began: float, group: int) -> None:
    """A line for each row that the run writes; its evaluations are not counted."""
    tested = 0.0
    read = 0
    metrics = directory / "metrics.jsonl"
    while True:
        lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
        now = time.time()
        for row in map(json.loads, lines[read:]):
            tested += row.get("time/evaluation_s", 0.0)
            accuracy = next((value for name, value in row.items() if name.endswith("/pass@1")), 0.0)
            line = {"step": row["step"], "seconds": now - began - tested, "accuracy": accuracy}
            line["calls"] = Calculator.made
            print(json.dumps(line | {"completions": int(row.get("prompts", 0)) * group}), file=OUT, flush=True)
        read = len(lines)
        time.sleep(0.02)


def played(asked: dict[str, Any]) -> configs.Run:
    """A run of episodes in the environment, with what everybody was told."""
    recipe = dataclasses.replace(PAPER, algorithm=dataclasses.replace(PAPER.algorithm, kl=None, kl_coef=0.0))
    return configs.Run(
        model=asked["model"],
        task=Task(asked["train"], environment=Calculator, verifier="none", name="products"),
        recipe=recipe,
        scoring=configs.Scoring(rewards=()),
        rollout=Rollout(
            prompts=asked["prompts"], group=asked["group"], max_prompt_tokens=asked["prompt"],
            max_new_tokens=asked["completion"], temperature=asked["temperature"],
            engine=EngineOptions(slots=asked["prompts"] * asked["group"]), episode=Limits(max_turns=asked["turns"]),
        ),
        learner=Learner(optimiser=Optimiser(learning_rate=asked["learning_rate"]), compute=Compute(remat="none")),
    )  # fmt: skip


def main(asked: dict[str, Any]) -> int:
    """The run, in a folder that is nobody's; returns its exit code."""
    run = played(asked) if asked["turns"] else configs.find_config(asked["config"]).run
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(
            run,
            steps=asked["steps"],
            seed=asked["seed"],
            evaluation=dataclasses.replace(run.evaluation, every=int(not asked["turns"])),
            output=dataclasses.replace(run.output, run_dir=folder + "/run", checkpoint_every=asked["steps"]),
        )
        teller = threading.Thread(target=tell, args=(Path(folder) / "run", asked["began"], asked["group"]), daemon=True)
        teller.start()
        return train(run)


if __name__ == "__main__":
    sys.exit(main(work()))
