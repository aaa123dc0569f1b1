"""What one phase of reinforcement learning leaves to the next."""

import operator

from jaxrl_llm import config as configs
from jaxrl_llm.config import Run
from jaxrl_llm.rollout.replay import Store, no_longer_than
from jaxrl_llm.tasks.interleaved import STREAMS, going_on
from jaxrl_llm.tasks.stream import Memory


def same_groups(one: Run, other: Run) -> bool:
    """Whether both sample and score groups in the same way."""
    parts = ("task", "rollout", "scoring", "learner.keep_sampling_mask", "recipe.filter_groups", "recipe.shaping")
    return all(operator.attrgetter(part)(one) == operator.attrgetter(part)(other) for part in parts)


def same_rewards(one: Run, other: Run) -> bool:
    """Whether both score all completions in the same way, the punishment of long ones included."""
    return one.scoring == other.scoring and configs.rewards(one) == configs.rewards(other)


def shared_tasks(one: Run, other: Run) -> list[str]:
    """The labels of the tasks that both have, alike in all: problems, prompts, and how answers are judged."""
    before = configs.tasks_in(one.task)
    return [task.label for task in configs.tasks_in(other.task) if task in before]


def successes_left(store: Store, one: Run, other: Run) -> Store:
    """Stored successes that are right in the next phase, too, and fit into its limits."""
    masks = one.learner.keep_sampling_mask == other.learner.keep_sampling_mask
    if not masks or not same_rewards(one, other):
        return {}
    limits = configs.limits_of(configs.parts_of_task(other.task), other.rollout.max_new_tokens)
    return no_longer_than(store, {label: limits[label] for label in shared_tasks(one, other)})


def stream_left(memory: Memory, one: Run, other: Run) -> Memory:
    """What the stream of prompts remembers of the tasks that the next phase has, too."""
    if one.task == other.task:
        return memory
    mixtures = STREAMS in memory and len(configs.tasks_in(other.task)) > 1  # a single task is numbered by the run
    return going_on(memory, shared_tasks(one, other)) if mixtures else {}
