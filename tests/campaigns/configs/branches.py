"""Branches of episodes, under a loss that draws tokens and reads what the sampler said of them; tools take a while."""

import dataclasses
import time
import zlib

from jaxrl_llm import Environment, Step
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.algorithms.surrogates import ClipCov
from jaxrl_llm.config import Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import ARPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.rollout.settings import Limits
from jaxrl_llm.tasks import Rows, Task


class Echo(Environment):
    """Answers with a number made of all replies so far, after a while that depends on it; rewards odd ones."""

    def reset(self, row, seed):
        self.turn, self.known = 0, seed
        return [{"role": "user", "content": f"begin at {row['answer']}"}]

    def step(self, reply):
        self.turn += 1
        self.known = zlib.crc32(reply["content"].encode(), self.known)
        time.sleep(0.04 + self.known % 5 * 0.04)
        said = [{"role": "user", "content": f"{self.known % 1000}"}]
        return Step(said, float(self.known % 2), self.turn == 3, state=str(self.known % 4))

    def copy(self):
        other = Echo()
        vars(other).update(vars(self))
        return other


ROWS = Rows([{"prompt": f"Say {digit}", "answer": str(digit)} for digit in range(10)])
PLAYED = Task(ROWS, environment=Echo, template="chatml", verifier="none", name="echo")
config = Run(
    model="tiny-random",
    task=PLAYED,
    scoring=Scoring(rewards=(), timeout_s=60.0),
    recipe=dataclasses.replace(
        ARPO,
        name="arpo_clip_cov",
        algorithm=dataclasses.replace(PRESETS["clip_cov"], surrogate=ClipCov(0.25, 0.0), correction=TruncatedIS(2.0)),
    ),
    rollout=Rollout(
        prompts=2,
        group=6,
        max_prompt_tokens=64,
        max_new_tokens=160,
        engine=EngineOptions(slots=8, chunk=4),
        episode=Limits(max_turn_tokens=14),
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), compute=Compute(row_tokens=256), minibatches=2),
    output=Output(checkpoint_every=2, trackers=()),
    steps=6,
)
