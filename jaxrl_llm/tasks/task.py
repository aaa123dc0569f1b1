"""A task: where its problems come from, how answers are checked, and what is held out for evaluation."""

import dataclasses
import datetime
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.extract import extract, integer
from jaxrl_llm.tasks.instructed import Instructions
from jaxrl_llm.tasks.instructions import check_instructions
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.tasks.rows import messages_of, prompt_key
from jaxrl_llm.tasks.sources import HubDataset, ReasoningGym, Rows, Table
from jaxrl_llm.types import Problem

TEMPLATES = ("tokenizer", "chatml", "plain")
VERIFIERS = ("match", "integer", "math", "reasoning_gym", "instructions", "none")
UNANSWERED = ("reasoning_gym", "instructions", "none")
"""Verifiers that need no reference answer."""

TABLES = (Table, HubDataset, Rows)
"""Sources whose problems are rows."""
Dated = TypeVar("Dated", bound=Any)
_NAMED = 3  # how many dropped rows a note names


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, and how answers to them are checked.

    Attributes:
      source: of the problems: one of those here, rows in memory (a list of dictionaries, a ``datasets.Dataset``), or a
        frozen dataclass of your own with ``problems()`` and ``label``.
      extractor: how the answer is cut out of a completion: ``last_number``, ``boxed``, ``tag:NAME``,
        ``after:TAG`` or ``whole`` (see ``extract``).
      verifier: how it is compared: ``match`` (text, or equal numbers), ``integer``, ``math`` (equivalent expressions),
        ``reasoning_gym`` (the data set's own scoring), ``instructions`` (the share of the row's instructions that the
        text follows, see ``tasks/instructions.py``), or ``none``: nothing is. The last two need no reference answer.
      keep: ``module:function`` of a Problem; where it returns False the problem is dropped.
      system: the system message, in place of the row's own.
      suffix: text appended to the last user message.
      template: ``tokenizer`` (its own chat template), ``chatml`` (no default system message), ``plain`` (contents
        only) or a Jinja text.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      date: what templates that read the clock see as today, as 2025-07-01; None means the day on which the run began.
    """

    source: ReasoningGym | Table | HubDataset | Instructions | Rows | Any  # Any: flags leave a class of yours as it is
    extractor: str = "last_number"
    verifier: str = "match"
    keep: str | None = None
    system: str | None = None
    suffix: str = ""
    template: str = "tokenizer"
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.source, "problems"):
            object.__setattr__(self, "source", Rows(self.source))

    @property
    def label(self) -> str:
        """Names it in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A task's problems: no prompt twice, and none in both parts.

    Attributes:
      train: in the source's order.
      held_out: in the order of their hashes, so that the first n are a fair sample.
      notes: a line for each reason for which problems were dropped, with counts.
    """

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def verified(self) -> bool:
        """Whether answers are compared with references; else the reward is all that says how good they are."""
        return self.train[0].verifier != "none"


def check(task: Task) -> None:
    """Refuses a task that cannot work, before anything is loaded.

    Raises:
      InputError: unknown extractor, verifier or template, two that do not fit, a holdout outside [0, 1), a bad date, a
        ``keep`` that names no function.
    """
    extract("", task.extractor)
    if task.verifier not in VERIFIERS:
        raise InputError(f"verifier {task.verifier!r} is unknown; choose one of {', '.join(VERIFIERS)}")
    if task.verifier == "reasoning_gym" and isinstance(task.source, TABLES):
        raise InputError(f"verifier 'reasoning_gym' needs a ReasoningGym source; give {task.label} another")
    if task.verifier == "instructions" and task.extractor in ("last_number", "boxed"):
        raise InputError(
            f"verifier 'instructions' looks at a whole text, of which extractor {task.extractor!r} leaves a piece: set "
            "extractor whole, tag:NAME or after:TAG"
        )
    if task.keep is not None:
        resolve(task.keep)
    check_template(task.template)
    check_split(task.holdout, task.date)


def check_template(template: str) -> None:
    """InputError for a template that is neither the name of one nor Jinja."""
    if template not in TEMPLATES and "{" not in template:
        raise InputError(f"template {template!r} is unknown; choose {', '.join(TEMPLATES)} or give a Jinja text")


def check_split(holdout: float, date: str | None) -> None:
    """Refuses what cannot be held out, and a date that is none.

    Raises:
      InputError: a holdout outside [0, 1), or a bad date.
    """
    if not 0 <= holdout < 1:
        raise InputError(f"holdout is {holdout}; it is a share of the prompts, from 0 to below 1")
    try:
        datetime.date.fromisoformat(date or "2025-07-01")
    except ValueError:
        raise InputError(f"date {date!r} is none; write it as 2025-07-01") from None


def dated(task: Dated, day: str) -> Dated:
    """The task, or data of a supervised stage, with what its template is to see as today, unless it says so itself."""
    return task if task.date else dataclasses.replace(task, date=day)


def load(task: Task, answers: bool = True) -> Loaded:
    """Loads, filters, merges duplicates by prompt, then splits by a hash of the prompt: the same on every machine.

    ``answers``: whether reference answers are needed. Where they are not, and no problem has one, nothing is verified.

    Raises:
      InputError: what ``check`` and the source refuse, or no problem is left to train on.
    """
    check(task)
    notes: list[str] = []
    found = _read(task, answers)
    verifier = _verifier(task, found, answers, notes)
    settings = {"task": task.label, "extractor": task.extractor, "verifier": verifier}
    rows = [dataclasses.replace(problem, **settings) for problem in found]
    kept = _savable(_checkable(_filtered(rows, task, notes), verifier, notes), notes)
    train, held_out = _split(_without_duplicates(kept, notes), task.holdout)
    if not train:
        raise InputError(
            f"task {task.label} has no problem left to train on: {len(rows)} from the source, "
            f"{len(held_out)} held out{''.join('; ' + note for note in notes)}; give it more problems"
        )
    return Loaded(train, held_out, tuple(notes))


def _read(task: Task, answers: bool) -> list[Problem]:
    if isinstance(task.source, TABLES):
        return list(task.source.problems(answers and task.verifier not in UNANSWERED))
    return [_checked(problem, f"{task.label}[{index}]") for index, problem in enumerate(task.source.problems())]


def _checked(problem: Any, where: str) -> Problem:
    """What a source yields, which may be somebody's own, with its prompt as messages and its answer as text.

    Raises:
      InputError: it is no problem, or its prompt no text and no chat.
    """
    if not isinstance(problem, Problem):
        raise InputError(f"{where} is a {type(problem).__name__}; a source's problems() yields jaxrl_llm.types.Problem")
    answer = "" if problem.answer is None else str(problem.answer)
    return dataclasses.replace(problem, prompt=messages_of(problem.prompt, where), answer=answer)


def _verifier(task: Task, problems: list[Problem], answers: bool, notes: list[str]) -> str:
    """How the problems are verified: as the task says, or not at all where none has an answer and none is needed.

    Raises:
      InputError: some have an answer and some have none.
    """
    # What reasoning-gym's data sets score may have no answer in words.
    if task.verifier in UNANSWERED or isinstance(task.source, ReasoningGym):
        return task.verifier
    without = [problem for problem in problems if not problem.answer]
    if not without:
        return task.verifier
    if answers or len(without) < len(problems):
        _read(task, True)  # a table knows better what the row lacks, and says so
        raise InputError(
            f"{_place(without[0])} has no answer, as {len(without)} of {len(problems)} problems of "
            f"{task.label}: give all one, or take rewards that need none (no Accuracy) and verifier none"
        )
    notes.append(f"no problem of {task.label} has a reference answer: nothing is verified, only the reward is reported")
    return "none"


def _savable(problems: list[Problem], notes: list[str]) -> list[Problem]:
    """The problems without the fields of their rows that a checkpoint could not hold, such as images."""
    left_out: dict[str, str] = {}
    found = []
    for problem in problems:
        fields = {name: value for name, value in problem.metadata.items() if not _kind_refused(value, name, left_out)}
        found.append(problem if len(fields) == len(problem.metadata) else dataclasses.replace(problem, metadata=fields))
    for name, kind in left_out.items():
        notes.append(f"the field {name} is left out: it holds a value of type {kind}, which cannot be saved")
    return found


def _kind_refused(value: Any, name: str, left_out: dict[str, str]) -> bool:
    """Whether a checkpoint cannot hold a field's value; then the kind of what it holds is noted under its name."""
    try:
        codec.to_json(value)
    except TypeError as error:
        left_out.setdefault(name, str(error))
        return True
    return False


def _place(problem: Problem) -> str:
    return str(problem.metadata.get("row", problem.id))


def _filtered(problems: list[Problem], task: Task, notes: list[str]) -> list[Problem]:
    if task.keep is None:
        return problems
    keep = resolve(task.keep)
    kept = [problem for problem in problems if keep(problem)]
    if len(kept) < len(problems):
        notes.append(f"{len(problems) - len(kept)} of {len(problems)} dropped by {task.keep}")
    return kept


def _checkable(problems: list[Problem], verifier: str, notes: list[str]) -> list[Problem]:
    """The problems whose answers the verifier can read.

    Raises:
      InputError: one has instructions that cannot be checked.
    """
    if verifier == "instructions":
        for problem in problems:
            check_instructions(problem.metadata, _place(problem))
    if verifier != "integer":
        return problems
    dropped = [problem for problem in problems if integer(problem.answer) is None]
    if dropped:
        named = ", ".join(f"{_place(problem)} ({problem.answer[:40]!r})" for problem in dropped[:_NAMED])
        more = ", ..." if len(dropped) > _NAMED else ""
        notes.append(f"{len(dropped)} of {len(problems)} dropped because the answer is no integer: {named}{more}")
    return [problem for problem in problems if integer(problem.answer) is not None]


def _without_duplicates(problems: Iterable[Problem], notes: list[str]) -> dict[str, Problem]:
    """The first problem of each prompt, by the prompt's key, in order."""
    first: dict[str, Problem] = {}
    merged = conflicting = 0
    for problem in problems:
        known = first.setdefault(prompt_key(problem.prompt), problem)
        merged += known is not problem
        conflicting += known.answer != problem.answer
    if merged:
        other = f"; {conflicting} of them had another answer than the one kept" if conflicting else ""
        notes.append(f"{merged} duplicates of a prompt merged, {len(first)} distinct prompts left{other}")
    return first


def _split(problems: dict[str, Problem], holdout: float) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """The problems to train on, in order, and those held out."""
    held_out = {key: problems[key] for key in held_out_keys(problems, holdout)}
    return tuple(problem for key, problem in problems.items() if key not in held_out), tuple(held_out.values())


def held_out_keys(keys: Collection[str], holdout: float) -> list[str]:
    """Which of the distinct prompts, by their keys, are held out: the first in order, one at least where any is."""
    return sorted(keys)[: max(1, round(holdout * len(keys))) if holdout else 0]
