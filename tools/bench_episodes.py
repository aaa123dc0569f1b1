"""What slow worlds cost a step: 64 episodes whose environment answers after two seconds, and one that never answers.

    python tools/bench_episodes.py [--episodes 64] [--wait_s 2] [--timeout_s 6] [--steps 4] [--model tiny-random]

Three runs of the trainer with the same model, rows and seeds, one after another: ``instant``, an environment that
answers at once; ``slow``, one that takes ``wait_s`` for the one answer that an episode asks for; ``hanging``, as slow,
and one episode of each step hangs until its time limit ends it. Prints one JSON line: the seconds of the fastest step
after the first, what the two others take longer, and how many episodes the time limit ended. One after another the
waits of a step would take ``episodes * wait_s``.
"""

import dataclasses
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from jaxrl_llm import Environment, Run, Step, Task, train
from jaxrl_llm.config import Output, Scoring
from jaxrl_llm.environments import Limits
from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout

GROUP = 8
HANGS_S = 20.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      episodes: of a step, in groups of 8.
      wait_s: seconds that the slow environment takes for its answer.
      timeout_s: time limit of one answer.
      steps: of each run; the first is not timed.
      model: any that jaxrl-llm loads.
    """

    episodes: int = 64
    wait_s: float = 2.0
    timeout_s: float = 6.0
    steps: int = 4
    model: str = "tiny-random"


HEARD = itertools.count()
"""Of the replies that a world had to wait for."""


class World(Environment):
    """Says once that it has heard, and ends after the second reply; the row tells how long it takes."""

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Begin."""
        self.row = row
        self.turns = 0
        return [{"role": "user", "content": "Speak."}]

    def step(self, reply: dict[str, Any]) -> Step:
        """Answer after a while; of as many episodes as the row says, one is never answered."""
        self.turns += 1
        if self.turns == 2:
            return Step(reward=float(len(reply["content"]) % 2), done=True)
        lost = self.row["one_hangs_of"] and next(HEARD) % self.row["one_hangs_of"] == 0
        time.sleep(HANGS_S if lost else self.row["wait_s"])
        return Step([{"role": "user", "content": "Go on."}])


def settings(options: Options, wait_s: float, hanging: bool) -> Run:
    """A run whose environment takes ``wait_s`` for an answer; ``hanging``: one episode of each step hangs."""
    prompts = options.episodes // GROUP
    row = {"wait_s": wait_s, "one_hangs_of": options.episodes if hanging else 0}
    rows = [row | {"prompt": str(n)} for n in range(prompts * options.steps)]
    return Run(
        model=options.model,
        task=Task(rows, environment=World, template="chatml", verifier="none", name="waiting"),
        scoring=Scoring(rewards=()),
        recipe=GRPO,
        rollout=Rollout(
            prompts=prompts,
            group=GROUP,
            max_prompt_tokens=64,
            max_new_tokens=96,
            engine=EngineOptions(slots=options.episodes),
            episode=Limits(max_turns=2, max_turn_tokens=16, tool_timeout_s=options.timeout_s),
        ),
        learner=Learner(compute=Compute(row_tokens=256)),
        steps=options.steps,
    )


def timed(options: Options, folder: Path, wait_s: float, hanging: bool) -> dict[str, float]:
    """The seconds of the fastest step, and the episodes that the environment's time limit ended."""
    run = settings(options, wait_s, hanging)
    result = train(dataclasses.replace(run, output=Output(run_dir=str(folder))))
    rows = [row for row in result.history if row["step"] > 1]
    shares = [row.get("episode/ends/timeout", 0.0) for row in result.history if row["step"]]
    lost = round(sum(shares) * options.episodes)
    return {"step_s": round(min(row["time/step_s"] for row in rows), 2), "timeouts": lost}


def run(options: Options) -> dict[str, Any]:
    """The three runs, and what slowness costs."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: timed(options, Path(folder) / name, wait_s, hanging)
            for name, wait_s, hanging in (
                ("instant", 0.0, False),
                ("slow", options.wait_s, False),
                ("hanging", options.wait_s, True),
            )
        }
    longer = {name: round(found[name]["step_s"] - found["instant"]["step_s"], 2) for name in ("slow", "hanging")}
    return dataclasses.asdict(options) | found | {"longer_s": longer, "in_turn_s": options.episodes * options.wait_s}


if __name__ == "__main__":
    print(json.dumps(run(tyro.cli(Options, description=__doc__))))
