"""Simulate a run's sampling on a machine that you do not have: its slots, its queue and its long tail.

    python tools/simulate_tail.py dapo_qwen2_5_32b --topology v5p:8x8x4 [--median 0.25] [--sigma 0.9] [--common 0.5]
        [--dull 0.3] [--judge_s 3] [--judges 64] [--steps 4] [--json FILE] [--field value ...]

No model runs and nothing is compiled. The trainer's own rules decide which groups begin, where their requests are
seated, what is interrupted and what is carried over. The tokens of a completion follow from its seed: log-normal with
``sigma``, their median a share of the longest, cut there. A decode step takes the time to read the weights and the
columns that the engine would read, at the peak of the machine's memory, in the fullest part of the mesh; a score
takes ``judge_s`` of one of ``judges``. Prompts, learning and everything else take no time.

Prints a row for the run as it is configured, and one for each change alone: decoding that reads every slot to the
longest one's length; scores that sampling waits for; ``--rollout.collect.interrupt``. The numbers are means over the
steps after the first:

    seconds    of sampling
    waiting    of these, for scores
    empty      decode steps with no request in the queue, of all
    in use     slots that sample, of all
    read/live  columns read over live ones
    blocks     stored prompts over distinct ones
    learned    tokens that the step learns from, over those that it samples
    earlier    of these, tokens that an earlier step's policy sampled
    length     mean tokens of a completion learned from, over the mean of the distribution
    first      the same of the first step
"""

import collections
import dataclasses
import functools
import heapq
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import tyro
from simulated_slots import Clock, Costs, Slots

from jaxrl_llm import config as configs
from jaxrl_llm.cli.plan import plan_settings
from jaxrl_llm.engine.scheduler import EngineSpec
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.plan.machines import parse_topology
from jaxrl_llm.plan.planning import choose_slots
from jaxrl_llm.plan.programs import find_model_config, planned_run
from jaxrl_llm.rewards import Failures, Scores
from jaxrl_llm.rollout.collect import collect_groups
from jaxrl_llm.rollout.generation import SeedSpace
from jaxrl_llm.rollout.groups import Carryover, GroupSource
from jaxrl_llm.sharding import bytes_per_device
from jaxrl_llm.stages.programs import build_sampler
from jaxrl_llm.tasks import Shuffled
from jaxrl_llm.types import Completion, Problem, Prompt

PROBLEMS = 1 << 16
LIMITS = (("median", 0.0, 1.0), ("sigma", 0.0, 5.0), ("common", 0.0, 1.0), ("dull", 0.0, 0.99), ("judge_s", 0.0, 1e6))
"""Least and largest values of the options."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Assumptions.

    Attributes:
      config: a configuration; fields of it may follow, as ``jaxrl-llm train`` takes them.
      topology: the machine, as ``jaxrl-llm plan`` takes it.
      median: of a completion's tokens, as a share of ``rollout.max_new_tokens``.
      sigma: standard deviation of the logarithm of a completion's tokens.
      common: share of that variance that the completions of a prompt have in common.
      dull: share of the groups whose members are all right or all wrong.
      judge_s: seconds of the score of one completion.
      judges: scores at one time.
      steps: of each row; the first is not counted.
      json: file for the rows.
    """

    config: tyro.conf.Positional[str]
    topology: str
    median: float = 0.25
    sigma: float = 0.9
    common: float = 0.0
    dull: float = 0.0
    judge_s: float = 0.0
    judges: int = 64
    steps: int = 4
    json: Path | None = None

    def lengths(self, normal: Any, longest: int) -> Any:
        """Return the tokens of completions from standard normal numbers."""
        return np.clip(np.floor(self.median * longest * np.exp(self.sigma * normal)), 1, longest)

    def check(self) -> None:
        """Refuse what cannot be simulated."""
        for name, low, high in LIMITS:
            value = getattr(self, name)
            require(low <= value <= high, f"--{name} must be from {low:g} to {high:g}, got {value:g}")
        require(self.median > 0, "--median must be above 0")
        require(self.judges >= 1, f"--judges must be at least 1, got {self.judges}")
        require(self.steps >= 2, f"--steps must be at least 2, since the first is not counted; got {self.steps}")


class Judges:
    """Scores that take a while, ``judges`` at one time; ``waits``: sampling waits for each one that begins."""

    def __init__(self, options: Options, clock: Clock, waits: bool):
        self.options, self.clock, self.waits = options, clock, waits
        self.free = [0.0] * options.judges
        self.waited = 0.0

    def begin(self, items: Sequence[tuple[Problem, Completion]]) -> Callable[[], Scores]:
        """Begin to score; the function returned waits."""
        ends = self.clock.now
        for _ in items:
            end = max(heapq.heappop(self.free), self.clock.now) + self.options.judge_s
            heapq.heappush(self.free, end)
            ends = max(ends, end)

        def finish() -> Scores:
            self.waited += max(ends - self.clock.now, 0.0)
            self.clock.now = max(self.clock.now, ends)
            right = np.array([self.right(problem, place) for place, (problem, _) in enumerate(items)])
            return Scores(right, right, {"accuracy": right}, Failures(), right < 0)

        if self.waits:
            scores = finish()
            return lambda: scores
        return finish

    def right(self, problem: Problem, place: int) -> float:
        """Return 1 for right answers: every other one of a problem, or all of a dull one."""
        dull = np.random.default_rng(int(problem.id)).random() < self.options.dull
        return float(dull or place % 2)


class Prompts:
    """Of every problem one that is as long as prompts may be, and says which it is."""

    tasks = ()

    def __init__(self, length: int):
        self.length = length

    def __getitem__(self, problem: Problem) -> Prompt:
        return Prompt(np.full(self.length, int(problem.id), np.int32))


class Silent:
    """A tokenizer of no words."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **options: bool) -> str:
        """Return no text."""
        return ""


def planned(run: configs.Run, topology: str) -> tuple[EngineSpec, Costs]:
    """Return the engine's settings on a machine, and what reading costs a device there."""
    require(isinstance(run, configs.Run), f"a {type(run).__name__} samples nothing: give a configuration with rollouts")
    machine = parse_topology(topology, run.mesh.slices)
    config = find_model_config(run.model)[0]
    held = planned_run(choose_slots(run, config, machine=machine)[0], config, None, machine=machine).arrays
    shape, bandwidth = held.slot_shape, machine.chip.bandwidth
    columns = shape.rows // shape.parts * shape.columns
    return held.build, Costs(
        bytes_per_device(held.sampled) / bandwidth, bytes_per_device(held.slots.cache) / columns / bandwidth
    )


def simulate(
    run: configs.Run, options: Options, build: EngineSpec, costs: Costs, waits: bool = False
) -> dict[str, float]:
    """Return the means of a run's steps after the first, by the names of ``HEADS``."""
    rollout, clock = run.rollout, Clock()

    @functools.cache
    def tokens(seed: int) -> int:
        number = (seed - SeedSpace.TRAINING) % (1 << 39) // rollout.group
        own, shared = (np.random.default_rng(given).standard_normal() for given in (seed, [number, run.seed]))
        normal = np.sqrt(1 - options.common) * own + np.sqrt(options.common) * shared
        return int(options.lengths(normal, rollout.max_new_tokens))

    engine, judges = Slots(build, costs, tokens, clock), Judges(options, clock, waits)
    problems = [Problem(str(n), (), "", "simulated", verifier="none") for n in range(PROBLEMS)]
    prompts = Prompts(rollout.max_prompt_tokens)
    source = GroupSource(Silent(), prompts, Shuffled(problems, run.seed), judges, rollout.group, run.seed, ())
    sampler = build_sampler(run, engine, source, (), lambda text: None)
    left, learned = Carryover(), []
    for step in range(options.steps):
        if step == 1:
            engine.tally, judges.waited, began = collections.Counter(), 0.0, clock.now
        batch = collect_groups(sampler, None, step, left)
        left = batch.carryover
        completions = [c for group in batch.groups for c in group.completions]
        learned.append(np.array([(c.length, np.sum(c.version < step)) for c in completions]))
    counted, found = options.steps - 1, engine.tally
    lengths, earlier = np.concatenate(learned[1:]).T
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / PROBLEMS) for i in range(PROBLEMS)])
    mean = options.lengths(normal, rollout.max_new_tokens).mean()
    return {
        "seconds": (clock.now - began) / counted,
        "waiting": judges.waited / counted,
        "empty": found["empty"] / found["steps"],
        "in use": found["tokens"] / found["slots"],
        "read/live": found["read"] / found["live"],
        "blocks": found["blocks"] / found["prompts"],
        "learned": lengths.sum() / found["tokens"],
        "earlier": earlier.sum() / lengths.sum(),
        "length": lengths.mean() / mean,
        "first": learned[0][:, 0].mean() / mean,
    }


HEADS = ("seconds", "waiting", "empty", "in use", "read/live", "blocks", "learned", "earlier", "length", "first")


def rows(run: configs.Run, options: Options) -> dict[str, dict[str, float]]:
    """Return the numbers of the run as it is, and with one change each."""
    build, costs = planned(run, options.topology)
    collecting = dataclasses.replace(run.rollout.collect, interrupt=not run.rollout.collect.interrupt)
    other = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, collect=collecting))
    given = options, build, costs
    found = {"as configured": simulate(run, *given)}
    if build.form is not None:
        found["every slot to the longest"] = simulate(run, options, dataclasses.replace(build, form=None), costs)
    if options.judge_s:
        found["scores waited for"] = simulate(run, *given, waits=True)
    switch = "interrupt" if collecting.interrupt else "no_interrupt"
    return found | {f"--rollout.collect.{switch}": simulate(other, *given)}


def main(arguments: list[str]) -> None:
    """Print the table."""
    options, fields = tyro.cli(Options, description=__doc__, args=arguments, return_unknown_args=True)
    options.check()
    run = plan_settings(options.config, fields, 1)
    configs.validate(run)
    found = rows(configs.in_phase(run, 0), options)
    print(f"{'':32s}" + "".join(f"{name:>10s}" for name in HEADS))
    for name, values in found.items():
        print(f"{name:32s}" + "".join(f"{values[head]:10.3g}" for head in HEADS))
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(options) | {"rows": found}, default=str) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"simulate_tail: {error}")
