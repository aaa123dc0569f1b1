"""Several tasks in one run, each with its share of the prompts, its rewards and its token limit."""

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rewards.shaping import Reward
from jaxrl_llm.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a mixture.

    Attributes:
      task: its source, template, extractor and verifier are its own.
      weight: its share of the prompts, among the weights of all parts.
      rewards: of its completions; None for ``scoring.rewards``.
      max_new_tokens: longest completion, the stop token included; None for ``rollout.max_new_tokens``, which is the
        most that a part may have.
    """

    task: Task
    weight: float = 1.0
    rewards: tuple[Reward, ...] | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.rewards is not None:
            given = self.rewards if isinstance(self.rewards, (tuple, list)) else (self.rewards,)
            object.__setattr__(self, "rewards", tuple(as_reward(reward) for reward in given))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Tasks that are trained on together.

    After each prompt every part has had its share of all prompts asked so far, to less than one prompt; which of a
    part's problems is asked is up to that part alone, whatever the others are.

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

    @property
    def label(self) -> str:
        """Names it for people; metrics name its tasks."""
        return self.name


def parts_of_task(task: Task | Mixture | None) -> tuple[Part, ...]:
    """What a task is made of: itself alone, or the parts of a mixture; nothing of none."""
    if task is None:
        return ()
    return task.parts if isinstance(task, Mixture) else (Part(task),)


def tasks_in(*given: Task | Mixture | None) -> list[Task]:
    """All single tasks of these."""
    return [part.task for task in given for part in parts_of_task(task)]


def limits_of(parts: Sequence[Part], most: int) -> dict[str, int]:
    """The longest completion of each task in tokens, by its label; ``most`` where a part does not say it."""
    return {part.task.label: most if part.max_new_tokens is None else part.max_new_tokens for part in parts}


def holds_out(task: Task | Mixture) -> bool:
    """Whether any problem is held out."""
    return any(one.holdout for one in tasks_in(task))
