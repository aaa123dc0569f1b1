"""The problems of a run: those of its tasks, in the order in which they are asked, and those that it is tested on."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.config import Run
from jaxrl_llm.stages.stage import Fingerprints
from jaxrl_llm.stages.streams import stream_of
from jaxrl_llm.telemetry.header import steps_line
from jaxrl_llm.types import Problem

_OPENS_A_THOUGHT = re.compile(r"<(\w*(?:think|thought|reason)\w*)>\s*$", re.IGNORECASE)
"""How a prompt ends with which a model begins to think."""


@dataclasses.dataclass(frozen=True)
class Problems:
    """What a run asks.

    Attributes:
      train: the problems of each task, in the order of the mixture's parts; a single task is one.
      held_out: all that could be tested on, of the tasks of ``tested`` in turn.
      asked: those of them that are: the first ones of each task.
      tested: the task or mixture that is tested on.
      notes: lines that say what was dropped.
    """

    train: tuple[tuple[Problem, ...], ...]
    held_out: tuple[Problem, ...]
    asked: tuple[Problem, ...]
    tested: tasks.Task | configs.Mixture
    notes: tuple[str, ...]

    @property
    def all_train(self) -> list[Problem]:
        """The problems of all tasks."""
        return [problem for one in self.train for problem in one]


def read_problems(run: Run, status: Callable[[str], None]) -> Problems:
    """The problems of the run's tasks, and those that it is tested on.

    Raises:
      InputError: there is no answer where something of the run reads which answers are right.
    """

    def read(parts: Sequence[configs.Part]) -> list[tasks.Loaded]:
        found = read_parts(parts, functools.partial(configs.verifies, run), status)
        for part, one in zip(parts, found, strict=True):
            if not one.verified:
                configs.refuse_readers(run, part, f"task {one.train[0].task} without reference answers")
        return found

    loaded = read(configs.parts_of_task(run.task))
    tested = [one.held_out for one in loaded]
    others: list[tasks.Loaded] = []
    if run.evaluation.task:
        others = read(configs.parts_of_task(run.evaluation.task))
        tested = [one.train for one in others]
    most = run.evaluation.limit or None
    return Problems(
        train=tuple(one.train for one in loaded),
        held_out=tuple(problem for one in tested for problem in one),
        asked=tuple(problem for one in tested for problem in one[:most]),
        tested=run.evaluation.task or run.task,
        notes=tuple(dict.fromkeys(line for one in (*loaded, *others) for line in one.notes)),
    )


def problems_of(run: Run, read: Problems) -> Fingerprints:
    """What the run trains and tests on; the latter by its settings, since a run may be continued with another test."""
    name = "held-out"
    if run.evaluation.task:
        settings = json.dumps(configs.to_json(run.evaluation.task))
        name = f"evaluation {hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    return {"training": tasks.fingerprint(read.all_train), name: tasks.fingerprint(read.held_out)}


def check_prompts(run: Run, prompts: tasks.Prompts, problems: Sequence[Problem]) -> None:
    """Refuse a task whose longest prompt does not fit."""
    longest = prompts.longest(problems)
    limit = run.rollout.max_prompt_tokens
    remedy = f"set --rollout.max_prompt_tokens {longest} (now {limit})"
    label = " and ".join(task.label for task in prompts.tasks)
    configs.require(longest <= limit, f"the longest prompt of {label} has {longest} tokens: {remedy}")


def thoughts_judged(prompts: tasks.Prompts, read: Problems) -> list[str]:
    """A line for each task of which completions begin within a thought, and are judged with it."""
    lines = []
    for task, problems in zip(prompts.tasks, read.train, strict=True):
        opened = _OPENS_A_THOUGHT.search(prompts.end_of(problems[0]))
        if opened and task.extractor == "whole" and problems[0].verifier != "none":
            lines.append(
                f"the chat template opens a thought, {opened[0].strip()}, and extractor whole judges {task.label} by "
                f"what is thought too: extractor after:{opened[1]} (--task.extractor) reads what follows "
                f"</{opened[1]}>, and without one there is no answer"
            )
    return lines


def sizes_of(run: Run, read: Problems) -> list[str]:
    """How much the run learns from, for people; of a mixture each task's share too."""
    rollout = run.rollout
    count = sum(len(problems) for problems in read.train)
    whole = steps_line(run.task.label, count, len(read.asked), rollout.prompts, rollout.group, run.learner.updates)
    if not isinstance(run.task, configs.Mixture):
        return [whole]
    parts = run.task.parts
    total = sum(part.weight for part in parts)
    shares = [
        f"{part.task.label} {100 * part.weight / total:.0f} % ({len(problems)} problems)"
        for part, problems in zip(parts, read.train, strict=True)
    ]
    return [whole, f"prompts of each task: {', '.join(shares)}"]


def streams_of(run: Run, train: Sequence[Sequence[Problem]]) -> tasks.PromptStream:
    """The order in which the problems of each task are asked."""
    parts = configs.parts_of_task(run.task)
    seed = configs.shared_by_phases(run.seed)
    return tasks.of_tasks(
        [
            (part.task.label, part.weight, stream_of(run.rollout.collect.curriculum, problems, seed))
            for part, problems in zip(parts, train, strict=True)
        ]
    )


def read_parts(
    parts: Sequence[configs.Part], verifies: Callable[[configs.Part], bool], status: Callable[[str], None]
) -> list[tasks.Loaded]:
    """The problems of each part; ``verifies``: whether something reads which answers to it are right."""
    found = []
    for part in parts:
        status(f"reading task {part.task.label}")
        found.append(tasks.load(part.task, verifies(part)))
    return found
