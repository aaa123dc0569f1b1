"""What a slow judge costs a step: 64 completions in groups of 8, each judged for a while, beside the sampler.

    python tools/bench_scoring.py [--judge_s 1] [--slots 8] [--tokens 256] [--steps 3] [--model tiny-random]

Two runs of the trainer with the same model, prompts and seeds: ``instant``, a judge that answers at once, and ``slow``,
one that takes ``judge_s`` for an answer; all its calls of a group wait at one time. Prints one JSON line: of the
fastest step after the first its seconds, those of sampling and those that sampling waited for scores; and what scoring
one group after the other would add.
"""

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import tyro

from jaxrl_llm import Run, Task, train
from jaxrl_llm.config import Output, Scoring
from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout

GROUP = 8


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      judge_s: seconds that the slow judge takes for an answer.
      slots: completions sampled at one time.
      tokens: of the longest completion.
      prompts: of a step, each with a group of 8.
      steps: of each run; the first is not timed.
      model: any that jaxrl-llm loads.
    """

    judge_s: float = 1.0
    slots: int = 8
    tokens: int = 256
    prompts: int = 8
    steps: int = 3
    model: str = "tiny-random"


def timed(options: Options, folder: Path, judge_s: float) -> dict[str, float]:
    """The seconds of the fastest step, of its sampling, and of its waits for scores."""

    async def judge(problem: Any, completion: Any) -> float:
        await asyncio.sleep(judge_s)
        return float(len(completion.tokens) % 2)

    rows = [{"prompt": str(n), "answer": "1"} for n in range(options.prompts * options.steps)]
    run = Run(
        model=options.model,
        task=Task(rows, template="chatml", verifier="none", name="judged"),
        scoring=Scoring(rewards=(judge,), timeout_s=60.0 + judge_s),
        recipe=GRPO,
        rollout=Rollout(
            prompts=options.prompts,
            group=GROUP,
            max_prompt_tokens=64,
            max_new_tokens=options.tokens,
            engine=EngineOptions(slots=options.slots),
        ),
        learner=Learner(compute=Compute(row_tokens=512)),
        output=Output(run_dir=str(folder), trackers=()),
        steps=options.steps,
    )
    fastest = min((row for row in train(run).history if row["step"] > 1), key=lambda row: row["time/step_s"])
    return {name: round(fastest[f"time/{name}"], 2) for name in ("step_s", "rollout_s", "reward_s")}


def run(options: Options) -> dict[str, Any]:
    """Both runs, and what slowness costs."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: timed(options, Path(folder) / name, judge_s)
            for name, judge_s in (("instant", 0.0), ("slow", options.judge_s))
        }
    longer = round(found["slow"]["step_s"] - found["instant"]["step_s"], 2)
    return dataclasses.asdict(options) | found | {"longer_s": longer, "in_turn_s": options.prompts * options.judge_s}


if __name__ == "__main__":
    print(json.dumps(run(tyro.cli(Options, description=__doc__))))
