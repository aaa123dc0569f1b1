"""The carryover from one phase of reinforcement learning to the next: prompts, and stored successes.

``rollout.replay`` stores and replays the latter.
"""

import dataclasses
import operator

from jaxrl_llm import config as configs
from jaxrl_llm.rollout.replay import Store, no_longer_than, of_another_policy
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.curriculum import PLACES
from jaxrl_llm.tasks.stream import NONE, Memory, going_on, places_in

ROWS = ("source", "keep", "holdout")
"""Settings of a task that decide which rows it asks."""


def same_groups(one: configs.Run, other: configs.Run) -> bool:
    """Whether both runs sample and score groups in the same way."""
    parts = operator.attrgetter(
        "task", "rollout", "scoring", "learner.keep_sampling_mask", "recipe.filter_groups", "recipe.shaping"
    )
    return parts(one) == parts(other)


def same_task(one: Task, other: Task) -> bool:
    """Whether two tasks differ only in name: problems, prompts and the judging of answers are equal."""
    return dataclasses.replace(one, name=other.name) == other


def going_together(one: configs.Run, other: configs.Run) -> list[tuple[Task, Task]]:
    """Pair each task of ``other`` with the task of ``one`` that it continues, old one first.

    Both ask the same rows, alone or in a mixture, under any name; of several candidates the most similar one is taken.
    """
    before, after = configs.tasks_in(one.task), configs.tasks_in(other.task)
    found = []
    rows = operator.attrgetter(*ROWS)
    for alike in (operator.eq, same_task, lambda old, task: rows(old) == rows(task)):
        for task in list(after):
            fitting = [old for old in before if alike(old, task)]
            if fitting:
                old = min(fitting, key=lambda old, task=task: old.label != task.label)
                found.append((old, task))
                before.remove(old)
                after.remove(task)
    return found


def stream_left(memory: Memory, prompts: int, one: configs.Run, other: configs.Run) -> Memory:
    """Return the prompt stream's memory of the tasks that the next phase keeps, alone or in a mixture.

    A task resumes at its place if it asks the same rows, and keeps the counts of its curriculum if answers are judged
    as before. If ``easy_to_hard`` changes, it begins with its easiest problems.

    ``prompts``: asked in the run so far.
    """
    curricula = [run.rollout.collect.curriculum for run in (one, other)]
    before, after = (None if curriculum is None else curriculum.easy_to_hard for curriculum in curricula)
    anew = before != after
    if one.task == other.task and not anew:
        return memory
    labels, new_labels = ([task.label for task in configs.tasks_in(run.task)] for run in (one, other))
    places = places_in(memory, labels, prompts)
    left = {}
    for old, new in going_together(one, other):
        count, own = places[old.label]
        own = own if same_task(old, new) else {name: own[name] for name in PLACES if name in own}
        left[new.label] = count, own | {"since": NONE} if anew and own else own
    return going_on(left, new_labels, prompts)


def successes_left(known: Store, one: configs.Run, other: configs.Run, anew: bool = False) -> Store:
    """Return the stored successes that are also right in the next phase, and fit into its limits.

    A run without replay keeps those of an earlier phase for a later one. ``anew``: they are those of another run's
    policy.
    """
    if one.learner.keep_sampling_mask != other.learner.keep_sampling_mask or not same_rewards(one, other):
        return {}
    limits = configs.limits_of(configs.parts_of_task(other.task), other.rollout.max_new_tokens)
    names = {old.label: new.label for old, new in going_together(one, other) if same_task(old, new)}
    known = of_another_policy(known) if anew else known
    return no_longer_than(known, {old: limits[new] for old, new in names.items()}, names)


def same_rewards(one: configs.Run, other: configs.Run) -> bool:
    """Whether both runs score all completions in the same way, including the penalty of long ones."""
    return one.scoring == other.scoring and configs.rewards(one) == configs.rewards(other)
