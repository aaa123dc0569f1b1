"""The tasks of a run: one, or several with their shares of the prompts, rewards and token limits."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards.functions import OF_STEPS, as_reward
from jaxrl_llm.rewards.shaping import (
    REFUSED,
    REFUSES_FROM,
    REJECTED,
    Accuracy,
    RelativeLength,
    Reward,
    SoftOverlong,
    TaskReward,
    Threshold,
    inner_reward,
)
from jaxrl_llm.system.setting import Setting
from jaxrl_llm.tasks.task import UNANSWERED, Task
from jaxrl_llm.types import MEAN_OF_TASKS

JUDGED = "judged"
"""The name of the scores that the judge of evaluations gives to answers."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a mixture.

    Attributes:
      task: with its own source, template, extractor and verifier.
      weight: its share of the prompts, among the weights of all parts.
      rewards: of its completions; None for ``scoring.rewards``.
      max_new_tokens: longest completion, the stop token included, at most and by default ``rollout.max_new_tokens``.
    """

    task: Task
    weight: float = 1.0
    rewards: tuple[Reward, ...] | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.rewards is not None:
            rewards = self.rewards if isinstance(self.rewards, (tuple, list)) else (self.rewards,)
            object.__setattr__(self, "rewards", tuple(as_reward(reward) for reward in rewards))


@dataclasses.dataclass(frozen=True)
class Mixture(Setting):
    """Several tasks that a run trains on together. After each prompt every part has had its share of all prompts so
    far, to less than one prompt; which of its problems is asked is up to that part alone.

    Attributes:
      parts: at least one; their tasks have names of their own.
      name: for people.
    """

    parts: tuple[Part, ...]
    name: str = "mixture"

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, (tuple, list)) else (self.parts,)
        parts = tuple(part if isinstance(part, Part) else Part(part) for part in given)
        object.__setattr__(self, "parts", parts)

    def check(self, run: Any, where: str) -> None:
        """Refuse tasks with equal names, and parts that cannot work."""
        field = where.removesuffix(".")
        require(bool(self.parts), f"{field}.parts is empty: give at least one Part(Task(...))")
        names = [part.task.label for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{field} has two tasks called {twice[0]!r}: give one of them another name (Task.name)")
        require(
            len(names) == 1 or MEAN_OF_TASKS not in names,
            f"{field} has a task called {MEAN_OF_TASKS!r}, as the means over tasks are "
            f"(eval/{MEAN_OF_TASKS}/...): give it another name (Task.name)",
        )
        for number, part in enumerate(self.parts):
            if not (isinstance(part.weight, (int, float)) and 0 < part.weight < math.inf):
                raise InputError(f"{field}.parts[{number}].weight must be above 0, got {part.weight!r}: leave it out")
            if part.rewards == ():
                raise InputError(f"{field}.parts[{number}].rewards is empty: give at least one, or None for scoring's")
        most = operator.attrgetter(run.answer_field)(run)
        for name, longest in limits_of(self.parts, most).items():
            require(
                1 <= longest <= most,
                f"{field}: max_new_tokens of {name} is {longest}: it must be from 1 to {run.answer_field} {most}",
            )
        if where != "task." or all(rewards_of(run, part) == rewards_of(run, self.parts[0]) for part in self.parts):
            return
        # The estimator, or a reward of steps, may need the same rewards for all.
        estimator = run.recipe.algorithm.advantage
        require(
            not estimator.several,
            f"{type(estimator).__name__} weighs each reward, and the tasks have different ones: give all parts the "
            "same rewards, or take another estimator",
        )
        for reward in of_steps(given_rewards(run)):
            raise InputError(
                f"reward {reward.name} values steps, and the tasks have different rewards: give all parts the same ones"
            )

    @property
    def label(self) -> str:
        """The mixture's name for people; metrics name its tasks."""
        return self.name


def parts_of_task(task: Task | Mixture | None) -> tuple[Part, ...]:
    """Return the parts of a task: itself alone, the parts of a mixture, or () for None."""
    if task is None:
        return ()
    return task.parts if isinstance(task, Mixture) else (Part(task),)


def tasks_in(*tasks_or_mixtures: Task | Mixture | None) -> list[Task]:
    """Return all single tasks of the given tasks and mixtures."""
    return [part.task for task in tasks_or_mixtures for part in parts_of_task(task)]


def limits_of(parts: Sequence[Part], most: int) -> dict[str, int]:
    """Return the longest completion of each task in tokens, by its label; ``most`` where a part sets no limit."""
    return {part.task.label: most if part.max_new_tokens is None else part.max_new_tokens for part in parts}


def rewards_of(run: Any, part: Part) -> tuple[Reward, ...]:
    """Return the rewards of a task's completions."""
    return run.scoring.rewards if part.rewards is None else part.rewards


def given_rewards(run: Any) -> list[Reward]:
    """Return the rewards of all tasks; one that several tasks share counts once."""
    collected: list[Reward] = []
    for part in parts_of_task(run.task):
        remaining = list(collected)
        for reward in rewards_of(run, part):
            if reward in remaining:
                remaining.remove(reward)
            else:
                collected.append(reward)
    return collected


def has_accuracy(rewards: Sequence[Reward]) -> bool:
    """Whether the verifier's ``Accuracy`` is among the rewards."""
    return any(isinstance(inner_reward(reward), Accuracy) for reward in rewards)


def overlong_weight(run: Any) -> float:
    """Return the recipe's punishment of a completion that reaches the end of the token budget; 0 for none. By default
    it is half the distance between a right and a wrong answer: in DAPO (arXiv 2503.14476) 1 of the 2 between +1 and -1;
    0 without an ``Accuracy``. In a mixture ``scoring.rewards`` decides it.
    """
    overlong = run.recipe.overlong
    if not overlong.share:
        return 0.0
    if overlong.weight is not None:
        return overlong.weight
    return max(0.0, sum(reward.weight for reward in run.scoring.rewards if isinstance(reward, Accuracy)) / 2)


def rewards(run: Any) -> tuple[Reward, ...]:
    """Return the configured rewards, in ``TaskReward`` if of some tasks only, and the recipe's punishment of
    completions near their task's length limit.
    """
    parts = parts_of_task(run.task)
    limits = limits_of(parts, run.rollout.max_new_tokens)
    weight = overlong_weight(run)
    labelled: list[tuple[Reward, list[str]]] = []
    for part in parts:
        label = part.task.label
        longest = limits[label]
        cache = round(run.recipe.overlong.share * longest)
        punished = (SoftOverlong(longest, cache, weight),) if cache and weight else ()
        for reward in rewards_of(run, part) + punished:
            same = [having for other, having in labelled if other == reward and label not in having]
            if same:
                same[0].append(label)
            else:
                labelled.append((reward, [label]))
    every = len(parts)
    return tuple(reward if len(having) == every else TaskReward(reward, tuple(having)) for reward, having in labelled)


def watched(run: Any) -> dict[str, Any]:
    """Return the measures scored in addition to the rewards, by part name: costs of constraints, the gate, refusals."""
    scoring = run.scoring
    costs = {constraint.part: constraint.cost for constraint in scoring.constraints}
    gate = {} if scoring.gate is None else {REJECTED: scoring.gate}
    return costs | gate | refusals(run)


def refusals(run: Any) -> dict[str, Any]:
    """Return the detector of refusals by its part name; {} if the run does not measure refusals."""
    judge = run.scoring.refusals
    return {} if judge is None else {REFUSED: Threshold(judge, REFUSES_FROM)}


def asked(run: Any) -> dict[str, Any]:
    """Return the measures scored in evaluations only, by part name: the judge's score of each answer."""
    return {} if run.evaluation.judge is None else {JUDGED: run.evaluation.judge}


def bases(run: Any) -> list[Any]:
    """Return everything that the run scores, with bounds removed."""
    return [inner_reward(reward) for reward in (*given_rewards(run), *watched(run).values(), *asked(run).values())]


def of_steps(rewards: Sequence[Reward]) -> list[Any]:
    """Return the rewards that score steps."""
    return [reward for reward in rewards if isinstance(reward, OF_STEPS)]


def verifies(run: Any, part: Part | None = None) -> bool:
    """Whether a score of the run, or of one task (``part``), compares answers with references."""
    part_rewards = given_rewards(run) if part is None or part.rewards is None else part.rewards
    return has_accuracy((*part_rewards, *watched(run).values(), *asked(run).values()))


def check_answers(run: Any) -> None:
    """Refuse, before it is loaded, a task without reference answers while a reward or shaping reads correctness.
    InputError names the task's field, what reads the answers, and the remedy.
    """
    for name, task in (("task", run.task), ("evaluation.task", run.evaluation.task)):
        for number, part in enumerate(parts_of_task(task)):
            field = f"{name}.parts[{number}].task" if isinstance(task, Mixture) else name
            if part.task.verifier == "none":
                refuse_readers(run, part, f"{field}.verifier none")
            elif part.task.verifier not in UNANSWERED and getattr(part.task.source, "answer_field", "") is None:
                refuse_readers(run, part, f"{field}.source.answer_field None")


def check_environments(tasks: Sequence[Task]) -> list[Factory]:
    """Refuse environments and tools that cannot work, before anything is loaded; return the factories of the tasks that
    have some. InputError names the field and the remedy.
    """
    return [Factory(task.environment, task.tools) for task in tasks if task.plays]


def check_episodes(run: Any) -> None:
    """Refuse (InputError) environments and tools that cannot work, and settings that a run's episodes cannot have."""
    check_environments(tasks_in(run.evaluation.task))
    trained = [task for task in tasks_in(run.task) if task.plays]
    factories = check_environments(trained)
    require(
        run.recipe.branch is None or bool(trained),
        f"recipe.branch has nothing to branch: no task of {run.task.label} has episodes; give it tools or an "
        "environment, or set recipe.branch None",
    )
    for task, factory in zip(trained, factories, strict=True):
        require(
            run.recipe.branch is None or factory.copyable,
            f"recipe.branch continues episodes from copies of their environment, and that of task {task.label} has no "
            "copy(): give it one, or set recipe.branch None",
        )
    budget = run.rollout.collect.token_budget
    require(
        not (trained and budget),
        f"rollout.collect.token_budget {budget} cuts answers in the middle of a turn, and task {run.task.label} has "
        "episodes: set it to 0, and rollout.max_new_tokens to the longest episode",
    )
    coef = run.recipe.observation_coef
    require(
        bool(trained) or not coef,
        f"recipe.observation_coef {coef} has nothing to learn from, since task {run.task.label} has no environment or "
        "tools: set it to 0, or give the task an environment",
    )
    estimator = run.recipe.algorithm.advantage
    for task in tasks_in(run.task):
        require(
            task.plays or "turn_rewards" not in estimator.needs,
            f"recipe.algorithm.advantage {type(estimator).__name__} compares turns of episodes, and task {task.label} "
            "has no environment or tools: take another recipe, such as grpo, or give the task an environment",
        )
    for reward in of_steps(given_rewards(run)) if trained else ():
        raise InputError(
            f"reward {reward.name} values steps of one text, and task {run.task.label} has episodes: let its "
            "environment reward each turn (Step.reward), or leave the reward out"
        )


def refuse_readers(run: Any, part: Part, cause: str) -> None:
    """Refuse a run that reads correctness although no answer can be checked, for this ``cause``."""
    if verifies(run, part):
        raise InputError(
            f"{cause} leaves the reward Accuracy nothing to compare: give the task its answers and a verifier, or take "
            "Accuracy() out of scoring.rewards"
        )
    if any(isinstance(shape, RelativeLength) for shape in run.recipe.shaping):
        raise InputError(
            f"{cause}, but recipe.shaping RelativeLength rewards short answers that are right: give the task its "
            "answers and a verifier, or take it out"
        )
