"""What one phase of reinforcement learning leaves to the next."""

import dataclasses
import operator

from jaxrl_llm import config as configs
from jaxrl_llm.config import Run
from jaxrl_llm.rollout.replay import Store, no_longer_than
from jaxrl_llm.tasks import EasyToHard, Task
from jaxrl_llm.tasks.interleaved import going_on, places_in
from jaxrl_llm.tasks.scheduled import NONE, PLACES
from jaxrl_llm.tasks.stream import Memory

ROWS = ("source", "keep", "holdout")
"""Settings of a task that decide which rows it asks."""


def same_groups(one: Run, other: Run) -> bool:
    """Whether both sample and score groups in the same way."""
    parts = ("task", "rollout", "scoring", "learner.keep_sampling_mask", "recipe.filter_groups", "recipe.shaping")
    return all(operator.attrgetter(part)(one) == operator.attrgetter(part)(other) for part in parts)


def same_rewards(one: Run, other: Run) -> bool:
    """Whether both score all completions in the same way, the punishment of long ones included."""
    return one.scoring == other.scoring and configs.rewards(one) == configs.rewards(other)


def same_task(one: Task, other: Task) -> bool:
    """Whether two tasks differ in nothing but their names: problems, prompts, and how answers are judged."""
    return dataclasses.replace(one, name=other.name) == other


def same_problems(one: Task, other: Task) -> bool:
    """Whether two tasks ask the same rows, in whatever words, and however answers are judged."""
    return all(operator.attrgetter(part)(one) == operator.attrgetter(part)(other) for part in ROWS)


def going_together(one: Run, other: Run) -> list[tuple[Task, Task]]:
    """Each task of ``other`` that goes on with one of ``one``, behind that: both ask the same rows, alone or in a
    mixture, under whatever names; of several the most alike ones."""
    before, after = configs.tasks_in(one.task), configs.tasks_in(other.task)
    found = []
    for alike in (operator.eq, same_task, same_problems):
        for task in list(after):
            fitting = [old for old in before if alike(old, task)]
            if fitting:
                old = min(fitting, key=lambda old, task=task: old.label != task.label)
                found.append((old, task))
                before.remove(old)
                after.remove(task)
    return found


def successes_left(store: Store, one: Run, other: Run) -> Store:
    """Stored successes that are right in the next phase, too, and fit into its limits."""
    masks = one.learner.keep_sampling_mask == other.learner.keep_sampling_mask
    if not masks or not same_rewards(one, other):
        return {}
    limits = configs.limits_of(configs.parts_of_task(other.task), other.rollout.max_new_tokens)
    names = {old.label: new.label for old, new in going_together(one, other) if same_task(old, new)}
    return no_longer_than(store, {old: limits[new] for old, new in names.items()}, names)


def stream_left(memory: Memory, prompts: int, one: Run, other: Run) -> Memory:
    """What the stream of prompts remembers of the tasks that the next phase has, too, alone or in a mixture.

    A task goes on from its place where it asks the same rows, with what its curriculum has counted where answers are
    judged as before. Where ``easy_to_hard`` is another one it begins with its easiest problems.

    ``prompts``: of the run so far.
    """
    anew = _easy_to_hard(one) != _easy_to_hard(other)
    if one.task == other.task and not anew:
        return memory
    before, after = ([task.label for task in configs.tasks_in(run.task)] for run in (one, other))
    places = places_in(memory, before, prompts)
    left = {}
    for old, new in going_together(one, other):
        count, own = places[old.label]
        own = own if same_task(old, new) else {name: own[name] for name in PLACES if name in own}
        left[new.label] = count, own | {"since": NONE} if anew and own else own
    return going_on(left, after, prompts)


def _easy_to_hard(run: Run) -> EasyToHard | None:
    curriculum = run.rollout.collect.curriculum
    return None if curriculum is None else curriculum.easy_to_hard
