"""The order of a run's problems: of its curriculum, which may begin with what another run has counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import codec, tasks
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import read_host
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.snapshots import kept
from jaxrl_llm.tasks.curriculum import BY_SUCCESS, Curriculum, difficulties
from jaxrl_llm.tasks.scheduled import digest
from jaxrl_llm.tasks.stream import Memory, PromptStream
from jaxrl_llm.types import Problem

FIELD = "rollout.collect.curriculum"
"""Where a run says it."""


def stream_of(curriculum: Curriculum | None, problems: Sequence[Problem], seed: int) -> PromptStream:
    """The stream of these problems; epochs, each a fresh permutation, where there is no curriculum.

    Raises:
      InputError: the curriculum reads what is not there: right answers, a column, another run's statistics.
    """
    if curriculum is None:
        return tasks.Shuffled(problems, seed, tasks.Scheduled(Curriculum(), problems, seed))
    require(
        not curriculum.reads_success or problems[0].verifier != "none",
        f"{FIELD} counts answers that are right, and task {problems[0].task} has no reference answers: give it answers "
        f"and a verifier, or set {FIELD} None (easy_to_hard by a column needs no answers)",
    )
    easy = curriculum.easy_to_hard
    if easy is not None and easy.by != BY_SUCCESS:
        difficulties(easy, problems)
    known = {} if curriculum.statistics is None else statistics(curriculum.statistics, problems)
    return tasks.Scheduled(curriculum, problems, seed, known)


def statistics(name: str, problems: Sequence[Problem]) -> Memory:
    """What the newest checkpoint of RUN, or that of RUN@STEP, has counted of these problems; no weights are read.

    Of a mixture the counts of the task of the same name come first: tasks may ask the same, and judge it differently.

    Raises:
      InputError: there is no such run, it had no curriculum, or other problems, or these for several other tasks.
    """
    start = configs.find_start(name)
    saved = read_host(kept(Path(start.run))[start.step])
    found = list(_memories(saved))
    if not found:
        raise InputError(
            f"{FIELD}.statistics {name} has none: that run had no {FIELD}, or this is a snapshot; give another, or "
            "leave it out"
        )
    wanted, task = digest(problems), problems[0].task
    same = {label: memory for label, memory in reversed(found) if memory["problems"] == wanted}
    if not same:
        raise InputError(
            f"{FIELD}.statistics {name} is about other problems than the {len(problems)} of {task}: give a run "
            "of the same task, source and holdout, or leave it out"
        )
    require(
        task in same or len(same) == 1,
        f"{FIELD}.statistics {name} has counted these problems for several tasks ({', '.join(sorted(same))}), none of "
        f"them called {task}: give the task the name of one of them (Task.name), or leave it out",
    )
    return codec.from_json(same[task] if task in same else next(iter(same.values())))


def _memories(saved: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every stream's memory among the host values of a checkpoint, as they were written, each with the name that it
    stands under: in a mixture its task's."""
    if isinstance(saved, dict):
        if {"problems", "tries", "solved", "streak"} <= saved.keys():
            return [(name, saved)]
        return [memory for inner, item in saved.items() for memory in _memories(item, inner)]
    return [memory for item in saved for memory in _memories(item, name)] if isinstance(saved, list) else []
