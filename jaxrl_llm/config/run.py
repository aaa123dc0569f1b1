"""What decides a run: frozen dataclasses of at most twelve fields."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.config.mixture import Mixture, Part, parts_of_task
from jaxrl_llm.learner.settings import RL_RATE, Learner, at_usual_rate
from jaxrl_llm.moved import taking_old_names
from jaxrl_llm.recipes import DAPO, Recipe
from jaxrl_llm.rewards.bounds import Constraint, Gate, base_of
from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rewards.shaping import Accuracy, Reward
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.rules.settings import Rules
from jaxrl_llm.sharding.mesh import MeshShape
from jaxrl_llm.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When and how the policy is tested.

    Attributes:
      every: steps between evaluations; 0 for the start and the end only.
      samples: k, completions of each problem.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      limit: problems at most; 0 for all.
      task: None for the part of the training task, or of each of them, that is held out.
      judge: a reward, or a function, whose scores say which of two answers is better: each evaluation tells how often
        today's answers beat those that the first policy gave to the same problems. None for no such contest.
    """

    every: int = 0
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    limit: int = 0
    task: Task | Mixture | None = None
    judge: Reward | None = None

    def __post_init__(self) -> None:
        if self.judge is not None:
            object.__setattr__(self, "judge", as_reward(self.judge))


@dataclasses.dataclass(frozen=True)
class Output:
    """What a run leaves behind.

    Attributes:
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep: checkpoints that stay.
      samples: groups of each step whose completions are written to samples.jsonl; in turn, so that all tasks of a
        mixture are seen.
      ratios: write how much likelier the step has made each of their tokens, and which of them clipping would cut then;
        it takes one more forward pass of those.
      monitor_kl: where the recipe has no KL, keep the policy that the run begins with and measure each step how far the
        policy is from it (``kl``); takes its memory and two forward passes, and what is learned stays the same bit for
        bit.
      tensorboard: write curves for TensorBoard.
      wandb: project on Weights & Biases, for metrics and some completions of each evaluation; None for none.
      run_dir: where it all lies; None for runs/NAME below the current folder. ``--run_dir`` is short for it.
    """

    checkpoint_every: int = 50
    keep: int = 2
    samples: int = 1
    ratios: bool = False
    monitor_kl: bool = False
    tensorboard: bool = True
    wandb: str | None = None
    run_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How completions are scored.

    Attributes:
      rewards: named parts, or functions of your own (``jaxrl_llm.rewards.forms`` says which); the reward is their
        weighted sum, without those that value steps (``StepFunction``).
      workers: processes for rewards that may hang or crash.
      timeout_s: seconds after which one completion's score is given up and its worker killed.
      on_error: what such a completion, or one whose reward raises, scores.
      constraints: limits on the means of costs, each with a multiplier that a rule moves.
      gate: what a completion must pass to be reinforced; None for nothing.
      refusals: tells which completions refuse to answer, to be measured: ``Refusals()`` by patterns, or any reward or
        function, where it is at least 0.5 (``Threshold(reward, at)`` for another bound). None for no such measure.
    """

    rewards: tuple[Reward, ...] = (Accuracy(),)
    workers: int = 2
    timeout_s: float = 5.0
    on_error: float = 0.0
    constraints: tuple[Constraint, ...] = ()
    gate: Gate | None = None
    refusals: Reward | None = None

    def __post_init__(self) -> None:
        rewards = self.rewards if isinstance(self.rewards, (tuple, list)) else (self.rewards,)
        object.__setattr__(self, "rewards", tuple(as_reward(reward) for reward in rewards))
        given = self.constraints if isinstance(self.constraints, (tuple, list)) else (self.constraints,)
        object.__setattr__(self, "constraints", tuple(given))
        if self.refusals is not None:
            object.__setattr__(self, "refusals", as_reward(self.refusals))


MOVED = {"run_dir": "run_dir"}
"""Fields of configurations that are ``output``'s now."""


@taking_old_names("output", Output, MOVED)
@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides a run.

    Attributes:
      model: a Hugging Face directory, a .gguf file, a built-in name or a hub id.
      task: prompts with checkable answers; a ``Mixture`` of several tasks.
      scoring: rewards.
      recipe: the method.
      rollout: how groups are sampled.
      learner: how they are learned from.
      mesh: how devices are arranged.
      evaluation: when and how the policy is tested.
      output: checkpoints and logs.
      steps: how many; each samples one batch of groups and learns from it.
      seed: decides every random number of the run.
      rules: what else decides between steps: phases, guards.
    """

    model: str
    task: Task | Mixture
    scoring: Scoring = Scoring()
    recipe: Recipe = DAPO
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    mesh: MeshShape = MeshShape()
    evaluation: Evaluation = Evaluation()
    output: Output = Output()
    steps: int = 100
    seed: int = 0
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        object.__setattr__(self, "learner", at_usual_rate(self.learner, RL_RATE))

    @property
    def run_dir(self) -> str | None:
        """That of ``output``."""
        return self.output.run_dir


class Configuration(Protocol):
    """What every kind of run says; ``Run`` is the one of reinforcement learning.

    The attributes are those of ``Run``.
    """

    model: str
    learner: Learner
    mesh: MeshShape
    evaluation: Evaluation
    output: Output
    steps: int
    seed: int

    @property
    def run_dir(self) -> str | None:
        """Where it lies."""
        ...


@functools.singledispatch
def resolved(run: Any) -> Any:
    """The run with what it leaves to others filled in."""
    return run


@resolved.register
def _(run: Run) -> Run:
    """Filled in are the recipe's temperature, the budget as Dr. GRPO's constant, a
    correction for tokens that an older policy sampled where sampling runs ahead, the size of the overlong punishment,
    and the reward as what a filter of groups reads where accuracy is no part of that of each task: groups that could
    all teach would be thrown away."""
    rollout = run.rollout
    recipe = run.recipe
    algorithm = run.recipe.algorithm
    reads = run.recipe.filter_groups
    if reads == "accuracy" and not all(has_accuracy(rewards_of(run, part)) for part in parts_of_task(run.task)):
        reads = "reward"
    if rollout.temperature is None:
        rollout = dataclasses.replace(rollout, temperature=run.recipe.temperature)
    if algorithm.reduce == ConstantLength(None):
        algorithm = dataclasses.replace(algorithm, reduce=ConstantLength(rollout.max_new_tokens))
    if rollout.collect.staleness and not (algorithm.corrects_sampler or algorithm.ratio.anchor == "sampler"):
        algorithm = dataclasses.replace(algorithm, correction=TruncatedIS())
    weight = overlong_weight(run) or recipe.overlong_weight
    recipe = dataclasses.replace(recipe, algorithm=algorithm, filter_groups=reads, overlong_weight=weight)
    return dataclasses.replace(run, rollout=rollout, recipe=recipe)


def keeps_reference(run: Run) -> bool:
    """Whether the policy is kept as it was, since the recipe has a KL to it, or since one is watched."""
    return run.recipe.algorithm.needs_reference or run.output.monitor_kl


def rewards_of(run: Run, part: Part) -> tuple[Reward, ...]:
    """The rewards of a task's completions."""
    return run.scoring.rewards if part.rewards is None else part.rewards


def given_rewards(run: Run) -> list[Reward]:
    """The rewards of all tasks; those that several have count once."""
    found: list[Reward] = []
    for part in parts_of_task(run.task):
        known = list(found)
        for reward in rewards_of(run, part):
            if reward in known:
                known.remove(reward)
            else:
                found.append(reward)
    return found


def has_accuracy(rewards: Sequence[Reward]) -> bool:
    """Whether what the verifier says is among them."""
    return any(isinstance(base_of(reward), Accuracy) for reward in rewards)


def overlong_weight(run: Run) -> float:
    """What the recipe's punishment of long completions takes away at the end of the budget; 0 where it takes nothing.

    Unless the recipe says it, half of what lies between a right answer and a wrong one: in DAPO (arXiv 2503.14476) 1 of
    the 2 between +1 and -1. Without an ``Accuracy`` nothing says how far that is. Of a mixture's tasks with rewards of
    their own it is what ``scoring.rewards`` make it.
    """
    recipe = run.recipe
    if not recipe.overlong_share:
        return 0.0
    if recipe.overlong_weight is not None:
        return recipe.overlong_weight
    return max(0.0, sum(reward.weight for reward in run.scoring.rewards if isinstance(reward, Accuracy)) / 2)
