"""The settings of a run: frozen dataclasses of at most twelve fields."""

import dataclasses
import math
from typing import Annotated, Any

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.advantages import GAE, ProcessSupervised
from jaxrl_llm.config import mixture
from jaxrl_llm.config.distillation import Distillation
from jaxrl_llm.config.mixture import Mixture, bases, of_steps, tasks_in
from jaxrl_llm.diagnosis.detectors import WORDS
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.learner.settings import RL_RATE, Learner, with_usual_rate
from jaxrl_llm.recipes import DAPO, Recipe
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.functions import OF_STEPS, ON_DEVICE, StepReward, as_reward
from jaxrl_llm.rewards.shaping import Accuracy, Constraint, Gate, RepetitionPenalty, Reward, inner_reward
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.rules import ALL
from jaxrl_llm.rules.settings import Rules
from jaxrl_llm.sharding.mesh import MeshShape
from jaxrl_llm.system import storage
from jaxrl_llm.system.setting import FIXED, FREE, MODEL, RECORDED, Count, Range, Setting
from jaxrl_llm.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Scoring(Setting):
    """Settings of the scoring of completions.

    Attributes:
      rewards: named parts, or your own functions (see ``jaxrl_llm.rewards.functions``); the reward is their weighted
        sum, without those of steps (``StepFunction``). Environments of episodes add their own; then it may be empty.
      workers: processes for rewards that may hang or crash; None for as many as this machine has cores, up to 32.
      timeout_s: seconds after which one completion's score is given up and its worker killed.
      on_error: the score of such a completion, and of one for which a reward raises an error.
      constraints: limits on the means of costs, each with a multiplier that a rule moves.
      gate: a condition for a completion to be reinforced; None for none.
      refusals: measures completions that refuse to answer: ``Refusals()`` by patterns, or any reward or function, where
        it is at least 0.5 (``Threshold(reward, at)`` for another bound). None for no such measure.
      distillation: a teacher that values each token, with rewards or without any. None for none.
    """

    rewards: tuple[Reward, ...] = (Accuracy(),)
    workers: Annotated[int | None, Count(1), FREE] = None
    timeout_s: Annotated[float, Range("(0, inf)", words="above 0 seconds"), RECORDED] = 5.0
    on_error: float = 0.0
    constraints: tuple[Constraint, ...] = ()
    gate: Gate | None = None
    refusals: Reward | None = None
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        rewards = self.rewards if isinstance(self.rewards, (tuple, list)) else (self.rewards,)
        object.__setattr__(self, "rewards", tuple(as_reward(reward) for reward in rewards))
        constraints = self.constraints if isinstance(self.constraints, (tuple, list)) else (self.constraints,)
        object.__setattr__(self, "constraints", tuple(constraints))
        if self.refusals is not None:
            object.__setattr__(self, "refusals", as_reward(self.refusals))

    def check(self, run: Any, where: str) -> None:
        """Refuse rewards and bounds that cannot work, and estimators that would not read them."""
        gates = () if self.gate is None else (self.gate,)
        for field, values, wanted in (("constraints", self.constraints, Constraint), ("gate", gates, Gate)):
            for value in values:
                require(isinstance(value, wanted), f"scoring.{field} holds {value!r:.80}: give {wanted.__name__}(...)")
                shaping.check_reward(value)
        for value in mixture.refusals(run).values():
            shaping.check_reward(value)
        labels = [constraint.label for constraint in self.constraints]
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise InputError(f"scoring.constraints has two of the name {min(twice)!r}: give one of them another name")
        estimator = run.recipe.algorithm.advantage
        seen = "each reward alone" if estimator.several else "the rewards of steps alone"
        require(
            not self.constraints or not (estimator.several or isinstance(estimator, ProcessSupervised)),
            f"scoring.constraints changes the sum of the rewards, and {type(estimator).__name__} looks at {seen}: set "
            "scoring.constraints (), or take another estimator",
        )
        kind = type(estimator).__name__
        rewards = mixture.given_rewards(run)
        steps = of_steps(rewards)
        require(
            "step_rewards" not in estimator.needs or bool(steps),
            f"recipe.algorithm.advantage {kind} needs step_rewards, and no reward values steps: add "
            "StepFunction('module:function') to scoring.rewards, or take an estimator of outcome rewards, such as "
            "GroupZScore",
        )
        rising = [one for one in steps if isinstance(one, StepReward) and one.differences]
        if rising and not isinstance(getattr(estimator, "estimator", estimator), GAE):
            raise InputError(
                f"reward {rising[0].name} gives differences between steps, and {kind} is not GAE: centred, they would "
                "leave a sum that depends on how many steps there are; take GAE (--recipe ppo), or differences False"
            )
        if estimator.several and len(steps) >= len(rewards):
            raise InputError(f"{kind} looks at rewards of whole completions, and scoring.rewards has none: add one")
        require(not math.isinf(self.on_error), f"{where}on_error must be a finite number or nan, got {self.on_error}")
        plays = all(task.plays for task in tasks_in(run.task))
        require(
            bool(self.rewards) or plays or self.distillation is not None,
            f"{where}rewards is empty: give at least one, such as Accuracy(), or a teacher in {where}distillation",
        )
        for reward in mixture.rewards(run):
            shaping.check_reward(reward)
        require(
            run.rollout.repetition.on or not any(isinstance(base, RepetitionPenalty) for base in bases(run)),
            f"{where}rewards has RepetitionPenalty, and nothing ends completions that repeat themselves: set "
            "rollout.repetition.longest_period and times, or leave it out",
        )


MAX_SEED = 1 << 24
"""The exclusive upper bound of seeds; larger ones would repeat the random numbers of smaller ones."""
SEED = Range(f"[0, {MAX_SEED - 1}]")


@dataclasses.dataclass(frozen=True)
class Evaluation(Setting):
    """Settings of evaluations: when and how the policy is tested.

    Attributes:
      every: steps between evaluations; 0 for the start and the end only.
      samples: k, completions of each problem.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
      limit: problems at most; 0 for all.
      task: None for the part of the training task, or of each of them, that is held out.
      judge: a reward or a function: each evaluation reports how often it scores today's answers higher than the first
        policy's to the same problems. None for no judge.
    """

    every: Annotated[int, Count(0), RECORDED, FIXED] = 0
    samples: Annotated[int, Count(1), RECORDED] = 1
    temperature: Annotated[float, Range("[0, inf)", "0 is greedy"), RECORDED] = 0.0
    top_p: Annotated[float, Range("(0, 1]"), RECORDED] = 1.0
    limit: Annotated[int, Count(0), RECORDED] = 0
    task: Annotated[Task | Mixture | None, RECORDED] = None
    judge: Annotated[Reward | None, FIXED] = None

    def __post_init__(self) -> None:
        if self.judge is not None:
            object.__setattr__(self, "judge", as_reward(self.judge))

    def check(self, run: Any, where: str) -> None:
        """Refuse samples that would all be equal, and a judge that does not give one number per answer."""
        require(
            self.samples == 1 or self.temperature > 0,
            f"{where}samples {self.samples} at temperature 0 would all be the same: set {where}temperature above 0",
        )
        judge = self.judge
        if judge is not None and not isinstance(run, Run):
            raise InputError(f"{where}judge compares the answers of a policy in reinforcement learning: leave it out")
        held_out, field = run.holds_out
        if self.every and self.task is None and not held_out:
            raise InputError(f"{where}every {self.every} has nothing to test on: set {field} above 0, or {where}task")
        if judge is None:
            return
        shaping.check_reward(judge)
        if isinstance(inner_reward(judge), OF_STEPS):
            raise InputError(f"{where}judge is the step reward {judge.name}: give a reward with one value a completion")
        require(judge.weight == 1, f"{where}judge has the weight {judge.weight:g}, which nothing reads: leave it out")
        require(
            self.task is not None or held_out,
            f"{where}judge {judge.name} has no answers to compare: set {field} above 0, or {where}task",
        )


@dataclasses.dataclass(frozen=True)
class Output(Setting):
    """Settings of a run's output: checkpoints, samples and logs.

    Attributes:
      checkpoint_every: steps between checkpoints; the last step always has one.
      checkpoint_minutes: minutes after which a step is saved in any case; 0 saves by steps only.
      grace_s: seconds from a signal to stop (SIGTERM, Ctrl-C) until the run may be killed. A step that would not end in
        half of them is stopped within its sampling, and resumes there.
      keep: checkpoints that stay.
      keep_best: keep the model of the best evaluation too, in RUN/best, as RUN@best; where there are evaluations.
      samples: groups of each step that samples.jsonl shows with their completions, in turn for all tasks.
      ratios: write how much likelier the step made each of their tokens, and which clipping would cut (a forward pass).
      monitor_kl: where the recipe has no KL, keep the initial policy and measure each step how far the policy is from
        it (``kl``); takes its memory and two forward passes, and does not change a bit of what is learned.
      profile: the step that JAX's profiler traces into RUN/profile, better not the first, which compiles; 0 for none.
      trackers: what else shows the metrics, ``NAME`` or ``NAME:PROJECT`` each: tensorboard (curves in RUN/tensorboard),
        wandb and trackio (some completions of each evaluation too), or one of another package.
      run_dir: the run's directory or address (gs://, s3://); None for runs/NAME in this folder. Also ``--run_dir``.
    """

    checkpoint_every: Annotated[int, Count(1), FREE] = 50
    checkpoint_minutes: Annotated[float, Range("[0, inf)", "0 saves by steps only"), FREE] = 30.0
    grace_s: Annotated[float, Range("(0, inf]"), FREE] = 25.0
    keep: Annotated[int, Count(1), FREE] = 2
    keep_best: Annotated[bool, FREE] = True
    samples: Annotated[int, Count(0), FREE] = 1
    ratios: Annotated[bool, FREE] = False
    monitor_kl: bool = False
    profile: Annotated[int, Count(0), FREE] = 0
    trackers: Annotated[tuple[str, ...], FREE] = ("tensorboard",)
    run_dir: Annotated[str | None, FREE] = None

    def check(self, run: Any, where: str) -> None:
        """Refuse a ``run_dir`` without folder or name, a ``profile`` of no step, and unnamed or repeated trackers."""
        storage.split(self.run_dir or "", "run_dir")
        require(self.run_dir != "", "run_dir is empty: give a folder, or leave it out for runs/NAME")
        beyond = f"{where}profile {self.profile} is after the last step, {run.steps}: name a step of the run"
        require(self.profile <= run.steps, beyond)
        names = [tracker.partition(":")[0] for tracker in self.trackers]
        for tracker, name in zip(self.trackers, names, strict=True):
            is_name = "" not in tracker.split(":", 1) and "," not in name
            require(is_name, f"{where}trackers has {tracker!r}: write NAME or NAME:PROJECT for each, apart by spaces")
            require(names.count(name) == 1, f"{where}trackers has {name} twice: name it once")


def check_model(model: str) -> None:
    """Refuse an empty name of a model (InputError)."""
    require(
        bool(model), "model is empty: give a Hugging Face directory, a .gguf file, a built-in name, a hub id or RUN"
    )


@dataclasses.dataclass(frozen=True)
class Run(Setting):
    """All settings of a reinforcement learning run.

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
      rules: decisions between steps: phases, guards.
    """

    model: Annotated[str, MODEL, FIXED]
    task: Task | Mixture
    scoring: Scoring = Scoring()
    recipe: Recipe = DAPO
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    mesh: Annotated[MeshShape, FREE, FIXED] = MeshShape()
    evaluation: Evaluation = Evaluation()
    output: Annotated[Output, FIXED] = Output()
    steps: Annotated[int, Count(1), FREE, FIXED] = 100
    seed: Annotated[int, SEED, FIXED] = 0
    rules: Annotated[Rules, FIXED] = Rules()
    first = ("rollout", "learner", "recipe", "evaluation", "scoring", "rules")
    group_field, answer_field = "rollout.prompts", "rollout.max_new_tokens"
    """The fields with the number of groups per step, and with the most tokens of a completion."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "learner", with_usual_rate(self.learner, RL_RATE))

    @property
    def longest_row(self) -> int:
        """The least tokens of a packed row: a prompt, its completion, and one if the state after it has a value."""
        return self.rollout.max_length + int("bootstrap" in self.recipe.algorithm.advantage.needs)

    @property
    def holds_out(self) -> tuple[bool, str]:
        """Whether problems are held out for evaluation, and the field that sets how many."""
        return any(task.holdout for task in tasks_in(self.task)), "task.holdout"

    @property
    def outcomes(self) -> int:
        """The number of rewards that score whole completions."""
        rewards = mixture.rewards(self)
        return len(rewards) - len(of_steps(rewards))

    @property
    def has_accuracy(self) -> bool:
        """Whether ``Accuracy``, the verifier's score, is among the rewards."""
        return mixture.has_accuracy(mixture.given_rewards(self))

    def check(self, run: Any, where: str) -> None:
        """Refuse settings that read missing answers, unknown guards, and tasks that cannot work."""
        check_model(self.model)
        by_name = any(isinstance(base, ON_DEVICE) for base in bases(self))  # a reward model tells tasks apart so
        for tested in tasks_in(self.evaluation.task) if by_name else ():
            for trained in tasks_in(self.task):
                wording = ("template", "system", "suffix", "date") if tested.label == trained.label else ()
                for name in wording:
                    require(
                        getattr(trained, name) == getattr(tested, name),
                        f"task and evaluation.task are both called {trained.label} and differ in {name}: give "
                        "evaluation.task another name, by which reward models tell them apart",
                    )
        mixture.check_answers(self)
        mixture.check_episodes(self)
        for kind in self.rules.guards:
            if kind != ALL and kind not in WORDS:
                meant = did_you_mean(kind, WORDS, f"there are {', '.join(WORDS)}, or all", near=0.5)
                raise InputError(f"rules.guards has {kind!r}, which is not a kind of finding: {meant}")
        for task in tasks_in(self.task, self.evaluation.task):
            tasks.check(task)


def keeps_reference(run: Run) -> bool:
    """Whether the policy is kept as it was: for the recipe's KL, for a teacher's scaled reward, or to watch a KL."""
    distillation = run.scoring.distillation
    scaled = distillation is not None and distillation.needs_reference
    return run.recipe.algorithm.needs_reference or scaled or run.output.monitor_kl
