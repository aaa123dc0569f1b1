"""Settings of the scoring of completions: rewards, bounds, teachers."""

import dataclasses
import math
from typing import Annotated, Any

from jaxrl_llm.algorithms.advantages import GAE, ProcessSupervised
from jaxrl_llm.config import mixture
from jaxrl_llm.config.distillation import Distillation
from jaxrl_llm.config.mixture import bases, of_steps, tasks_in
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.functions import StepReward, as_reward
from jaxrl_llm.rewards.shaping import Accuracy, Constraint, Gate, RepetitionPenalty, Reward
from jaxrl_llm.system.setting import FREE, RECORDED, Count, Range, Setting


@dataclasses.dataclass(frozen=True)
class Scoring(Setting):
    """Settings of the scoring of completions.

    Attributes:
      rewards: named parts, or functions of your own (``jaxrl_llm.rewards.functions`` says which); the reward is their
        weighted sum, without those that value steps (``StepFunction``). Environments of episodes add their own rewards
        to it, and then it may be empty.
      workers: processes for rewards that may hang or crash; None for as many as this machine has cores, up to 32.
      timeout_s: seconds after which one completion's score is given up and its worker killed.
      on_error: the score of such a completion, and of one for which a reward raises an error.
      constraints: limits on the means of costs, each with a multiplier that a rule moves.
      gate: a condition for a completion to be reinforced; None for none.
      refusals: detects completions that refuse to answer, to be measured: ``Refusals()`` by patterns, or any reward or
        function, where it is at least 0.5 (``Threshold(reward, at)`` for another bound). None for no such measure.
      distillation: a teacher that values each token, in addition to the rewards, or in their place if they are empty.
        None for none.
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
        given = self.constraints if isinstance(self.constraints, (tuple, list)) else (self.constraints,)
        object.__setattr__(self, "constraints", tuple(given))
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
        given = mixture.given_rewards(run)
        steps = of_steps(given)
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
        if estimator.several and len(steps) >= len(given):
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
