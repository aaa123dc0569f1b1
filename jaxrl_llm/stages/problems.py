"""The problems of a run, for training in the order of asking, and for evaluation; what a phase leaves to the next."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm import codec, tasks
from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rollout.groups import SuccessStore, drop_long_successes, mark_off_policy
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.runs import find_start, host_state
from jaxrl_llm.stages.stage import Fingerprints, read_parts
from jaxrl_llm.stages.taught import format_notes
from jaxrl_llm.tasks.chats import OPENS_A_THOUGHT, ChatEncoder
from jaxrl_llm.tasks.stream import (
    BY_SUCCESS,
    NONE,
    PLACES,
    Curriculum,
    Memory,
    PromptStream,
    difficulties,
    places_in,
    resume_memory,
)
from jaxrl_llm.types import Problem

ROWS = ("source", "keep", "holdout", "overlong")
"""Settings of a task that decide which rows it asks."""
FIELD = "rollout.collect.curriculum"
"""The setting that holds the curriculum, for messages."""


@dataclasses.dataclass(frozen=True)
class Problems:
    """The problems of a run.

    Attributes:
      train: the problems of each task, in the order of the mixture's parts; a single task is one.
      held_out: all problems available for evaluation, of the tasks of ``tested`` in turn.
      asked: those that evaluations ask: the first ones of each task.
      tested: the task or mixture of evaluations.
      notes: lines that report dropped problems.
    """

    train: tuple[tuple[Problem, ...], ...]
    held_out: tuple[Problem, ...]
    asked: tuple[Problem, ...]
    tested: tasks.Task | configs.Mixture
    notes: tuple[str, ...]

    @property
    def all_train(self) -> list[Problem]:
        """Return the training problems of all tasks."""
        return [problem for task_problems in self.train for problem in task_problems]


def load_problems(run: configs.Run, tokenizer: Any, status: Callable[[str], None]) -> Problems:
    """Read the training problems of the run's tasks, and its evaluation problems, without too long prompts where the
    task drops them. InputError: reference answers that the run needs are missing, or no problem is left.
    """

    def read(parts: Sequence[configs.Part]) -> list[tasks.Loaded]:
        loaded = read_parts(parts, functools.partial(configs.verifies, run), status)
        for part, task in zip(parts, loaded, strict=True):
            if task.train[0].verifier == "none":
                configs.refuse_readers(run, part, f"task {task.train[0].task} without reference answers")
        pairs = zip(parts, loaded, strict=True)
        return [drop_long_prompts(part.task, task, tokenizer, run.rollout) for part, task in pairs]

    loaded = read(configs.parts_of_task(run.task))
    evaluation_tasks = read(configs.parts_of_task(run.evaluation.task))
    tested = [task.train for task in evaluation_tasks] if evaluation_tasks else [task.held_out for task in loaded]
    limit = run.evaluation.limit or None
    return Problems(
        train=tuple(task.train for task in loaded),
        held_out=tuple(problem for task in tested for problem in task),
        asked=tuple(problem for task in tested for problem in task[:limit]),
        tested=run.evaluation.task or run.task,
        notes=tuple(dict.fromkeys(line for task in (*loaded, *evaluation_tasks) for line in task.notes)),
    )


def drop_long_prompts(task: tasks.Task, loaded: tasks.Loaded, tokenizer: Any, rollout: Rollout) -> tasks.Loaded:
    """Return a task's problems, without too long prompts if the task drops them. InputError: none is left."""
    if task.overlong == "refuse":
        return loaded
    prompts, limit = tasks.Prompts(task, tokenizer), rollout.max_prompt_tokens
    before = loaded.train, loaded.held_out
    train, held_out = (tuple(p for p in problems if len(prompts[p]) <= limit) for problems in before)
    count = sum(map(len, before))
    dropped = count - len(train) - len(held_out)
    note = f"{dropped} of {count} problems of {task.label} dropped: their prompts have over {limit} tokens"
    require(bool(train), f"{note}; raise --rollout.max_prompt_tokens")
    return dataclasses.replace(loaded, train=train, held_out=held_out, notes=(*loaded.notes, *[note] * (dropped > 0)))


def problem_fingerprints(run: configs.Run, problems: Problems) -> Fingerprints:
    """Return fingerprints of the problems; the evaluation's key depends on its settings, which may change on resume."""
    name = "held-out"
    if run.evaluation.task:
        name = f"evaluation {codec.digest(configs.to_json(run.evaluation.task))}"
    return {"training": tasks.fingerprint(problems.all_train), name: tasks.fingerprint(problems.held_out)}


def encode_prompts(
    run: configs.Run, task: tasks.Task | configs.Mixture, problems: Sequence[Problem], tokenizer: Any
) -> tasks.Prompts:
    """Return the prompts of these problems of a task or mixture. InputError: a prompt is too long."""
    prompts = tasks.Prompts(configs.tasks_in(task), tokenizer)
    longest = prompts.longest(problems)
    limit = run.rollout.max_prompt_tokens
    remedy = f"set --rollout.max_prompt_tokens {longest} (now {limit}), or drop such prompts with --task.overlong drop"
    label = " and ".join(task.label for task in prompts.tasks)
    require(longest <= limit, f"the longest prompt of {label} has {longest} tokens: {remedy}")
    return prompts


def unstopped_notes(task: tasks.Task, tokenizer: Any, stops: Sequence[int]) -> list[str]:
    """Return a line for people if the chat template ends the assistant's turn with a text that stops no completion."""
    closing: Sequence[int] = ()
    if task.template != "plain" and not task.plays:  # an episode says it by itself
        with contextlib.suppress(InputError):  # a template that writes no answers
            closing = ChatEncoder(task, tokenizer, stops, {}).closing or ()
    end = text_of(tokenizer, closing).strip()
    if not end or {*closing} & {*stops}:
        return []
    ends = " or ".join(text_of(tokenizer, [stop]) for stop in stops) or "none"
    return [
        f"the chat template of {task.label} ends a turn with {end}, which stops no completion (stop tokens: {ends}): "
        "name its id as eos_token_id in the model's generation_config.json, if the model writes it"
    ]


def data_notes(run: configs.Run, problems: Problems, prompts: tasks.Prompts, stops: Sequence[int]) -> list[str]:
    """Return lines for people on thoughts that are judged, ends of turns that none of ``stops`` is, the amount of data
    with each task's share in a mixture, models without a recorded training format, and settings.
    """
    lines = []
    for task, of_task in zip(prompts.tasks, problems.train, strict=True):
        lines += unstopped_notes(task, prompts.tokenizer, stops)
        opened = OPENS_A_THOUGHT.search(text_of(prompts.tokenizer, prompts[of_task[0]][-16:]))
        if opened and task.extractor == "whole" and of_task[0].verifier != "none":
            lines.append(
                f"the chat template opens a thought, {opened[0].strip()}, and extractor whole judges the "
                f"thoughts of {task.label} too: extractor after:{opened[1]} (--task.extractor) reads the text after "
                f"</{opened[1]}>; a completion without it has no answer"
            )
    updates = "one update" if run.learner.updates == 1 else f"{run.learner.updates} updates"
    lines.append(
        f"{run.task.label}: {len(problems.all_train):,} problems, {len(problems.asked):,} to test on; each step "
        f"{run.rollout.prompts} x {run.rollout.group} completions, {updates}"
    )
    if isinstance(run.task, configs.Mixture):
        parts = run.task.parts
        total = sum(part.weight for part in parts)
        shares = [
            f"{part.task.label} {100 * part.weight / total:.0f} % ({len(of_task)} problems)"
            for part, of_task in zip(parts, problems.train, strict=True)
        ]
        lines.append(f"prompts of each task: {', '.join(shares)}")
    return [*lines, *format_notes(run), *configs.notes(run)]


def prompt_stream(run: configs.Run, train: Sequence[Sequence[Problem]]) -> tasks.PromptStream:
    """Return the stream of prompts, which gives the order of each task's problems."""
    parts = configs.parts_of_task(run.task)
    seed = run.seed % configs.SHIFT  # so that no phase restarts the order
    return tasks.of_tasks(
        [
            (part.task.label, part.weight, task_stream(run.rollout.collect.curriculum, problems, seed))
            for part, problems in zip(parts, train, strict=True)
        ]
    )


def task_stream(curriculum: Curriculum | None, problems: Sequence[Problem], seed: int) -> PromptStream:
    """Return the stream of these problems; without a curriculum each epoch is a fresh permutation. InputError: the
    curriculum needs missing data: right answers, a column, another run's statistics.
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
    counts = {} if curriculum.statistics is None else load_statistics(curriculum.statistics, problems)
    return tasks.Scheduled(curriculum, problems, seed, counts)


def load_statistics(name: str, problems: Sequence[Problem]) -> Memory:
    """Return the counts of these problems in the newest checkpoint of RUN, or that of RUN@STEP; no weights are read.

    In a mixture the task of the same name is preferred: tasks may ask the same problems and judge them differently.

    Raises:
      InputError: the run is missing, had no curriculum or other problems, or has them in several tasks of other names.
    """
    memories = find_memories(host_state(find_start(name)))
    if not memories:
        raise InputError(
            f"{FIELD}.statistics {name} has none: that run had no {FIELD}, or this is a snapshot; give another, or "
            "leave it out"
        )
    problems_digest, task = codec.digest("\n".join(problem.id for problem in problems)), problems[0].task
    same = {label: memory for label, memory in reversed(memories) if memory["problems"] == problems_digest}
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


def find_memories(saved: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return every stream's memory in a checkpoint's host values, as written, with its key (a task's name)."""
    if isinstance(saved, dict):
        if {"problems", "tries", "solved", "streak"} <= saved.keys():
            return [(name, saved)]
        return [memory for inner, item in saved.items() for memory in find_memories(item, inner)]
    return [memory for item in saved for memory in find_memories(item, name)] if isinstance(saved, list) else []


def same_groups(before: configs.Run, after: configs.Run) -> bool:
    """Whether both runs sample and score groups in the same way."""
    parts = operator.attrgetter(
        "task",
        "rollout",
        "scoring",
        "learner.keep_sampling_mask",
        "recipe.filter_groups",
        "recipe.shaping",
        "recipe.branch",
    )
    return parts(before) == parts(after)


def same_task(before: tasks.Task, after: tasks.Task) -> bool:
    """Whether two tasks differ only in name: problems, prompts and the judging of answers are equal."""
    return dataclasses.replace(before, name=after.name) == after


def continued_tasks(before: configs.Run, after: configs.Run) -> list[tuple[tasks.Task, tasks.Task]]:
    """Pair each task of ``after`` with the most similar one of ``before`` that asks the same rows, old one first;
    either may be alone or in a mixture, under any name.
    """
    old_tasks, new_tasks = configs.tasks_in(before.task), configs.tasks_in(after.task)
    pairs = []
    rows = operator.attrgetter(*ROWS)
    for alike in (operator.eq, same_task, lambda old, task: rows(old) == rows(task)):
        for task in list(new_tasks):
            fitting = [old for old in old_tasks if alike(old, task)]
            if fitting:
                old = min(fitting, key=lambda old, task=task: old.label != task.label)
                pairs.append((old, task))
                old_tasks.remove(old)
                new_tasks.remove(task)
    return pairs


def carry_stream(memory: Memory, prompts: int, before: configs.Run, after: configs.Run) -> Memory:
    """Return the prompt stream's memory of the tasks that the next phase keeps, alone or in a mixture; ``prompts``:
    asked so far. A task resumes at its place if it asks the same rows, and keeps its curriculum's counts if answers are
    judged as before. If ``easy_to_hard`` changes, it begins with its easiest problems.
    """
    curricula = [run.rollout.collect.curriculum for run in (before, after)]
    old_order, new_order = (None if curriculum is None else curriculum.easy_to_hard for curriculum in curricula)
    restart = old_order != new_order
    if before.task == after.task and not restart:
        return memory
    labels, new_labels = ([task.label for task in configs.tasks_in(run.task)] for run in (before, after))
    places = places_in(memory, labels, prompts)
    continued = {}
    for old, new in continued_tasks(before, after):
        count, counts = places[old.label]
        counts = counts if same_task(old, new) else {name: counts[name] for name in PLACES if name in counts}
        continued[new.label] = count, counts | {"since": NONE} if restart and counts else counts
    return resume_memory(continued, new_labels, prompts)


def carry_successes(
    store: SuccessStore, before: configs.Run, after: configs.Run, new_run: bool = False
) -> SuccessStore:
    """Return the stored successes that are also right in the next phase, and fit into its limits; those of another
    policy if ``new_run``. A run without replay keeps those of an earlier phase for a later one.
    """
    if before.learner.keep_sampling_mask != after.learner.keep_sampling_mask or not same_rewards(before, after):
        return {}
    limits = configs.limits_of(configs.parts_of_task(after.task), after.rollout.max_new_tokens)
    names = {old.label: new.label for old, new in continued_tasks(before, after) if same_task(old, new)}
    store = mark_off_policy(store) if new_run else store
    return drop_long_successes(store, {old: limits[new] for old, new in names.items()}, names)


def same_rewards(before: configs.Run, after: configs.Run) -> bool:
    """Whether both runs score all completions in the same way, including the penalty of long ones."""
    return before.scoring == after.scoring and configs.rewards(before) == configs.rewards(after)
