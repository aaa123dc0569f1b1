"""Tasks: the source of the problems, the check of the answers, and the part held out for evaluation."""

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.tasks.extract import EXTRACTORS, extract, integer, matches, written
from jaxrl_llm.tasks.filters import importable, resolve
from jaxrl_llm.tasks.instructions import Instructions, check_instructions
from jaxrl_llm.tasks.messages import TOOLS
from jaxrl_llm.tasks.programs import Programs
from jaxrl_llm.tasks.prompts import content, messages_of, prompt_key
from jaxrl_llm.tasks.sources import HubDataset, ReasoningGym, Rows, RowSource, Table
from jaxrl_llm.tasks.tables import shown
from jaxrl_llm.types import Problem

TEMPLATES = ("tokenizer", "chatml", "plain")
VERIFIERS = ("match", "integer", "math", "reasoning_gym", "instructions", "code", "none")
UNANSWERED = ("reasoning_gym", "instructions", "code", "none")
"""Verifiers that need no reference answer."""

Item = TypeVar("Item", covariant=True)
_NAMED = 3  # how many dropped rows a note names


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts, and the check of answers to them.

    Attributes:
      source: of the problems: one of those here, rows in memory (a list of dictionaries, a ``datasets.Dataset``), or a
        frozen dataclass of your own with ``problems()`` and ``label``.
      extractor: how the answer is cut out of a completion: ``last_number``, ``boxed``, ``tag:NAME``,
        ``after:TAG`` or ``whole`` (see ``extract``).
      verifier: how it is compared: ``match`` (text, or equal numbers), ``integer``, ``math`` (equivalent expressions),
        ``reasoning_gym`` (the data set's own scoring), ``instructions`` (the share of the row's instructions that the
        text follows, see ``tasks/instructions.py``), ``code`` (whether the program passes the tests in the row's column
        ``tests``), or ``none``, no check. The last three need no reference answer.
      keep: ``module:function`` of a Problem; where it returns False the problem is dropped.
      system: the system message, in place of the row's own.
      suffix: text appended to the last user message.
      template: ``tokenizer`` (its own chat template), ``chatml`` (no default system message), ``plain`` (contents
        only) or a Jinja text.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      date: today's date for templates that read the clock, as 2025-07-01; None means the day on which the run began.
      environment: makes the environment of each episode: an ``Environment`` class, a factory, a class of TRL's form, or
        a dictionary of them, chosen by the row's column ``environment``; each as ``module:name`` too. None without one.
      tools: functions with type hints and docstrings that the model may call; in addition to the environment's.
      overlong: handling of a prompt that is too long for the run: ``refuse``, or ``drop`` and count it.
    """

    source: (
        ReasoningGym | Table | HubDataset | Instructions | Programs | Rows | Any
    )  # Any: flags leave a class of yours as it is
    extractor: str = "last_number"
    verifier: str = "match"
    keep: str | None = None
    system: str | None = None
    suffix: str = ""
    template: str = "tokenizer"
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None
    environment: Any = None
    tools: tuple[Any, ...] = ()
    overlong: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        if not hasattr(self.source, "problems"):
            object.__setattr__(self, "source", Rows(self.source))
        given = self.environment
        named = {key: by_name(value) for key, value in given.items()} if isinstance(given, dict) else by_name(given)
        object.__setattr__(self, "environment", named)
        tools = self.tools if isinstance(self.tools, (tuple, list)) else (self.tools,)
        object.__setattr__(self, "tools", tuple(map(by_name, tools)))

    @property
    def plays(self) -> bool:
        """Whether completions are episodes, with an environment or tools."""
        return self.environment is not None or bool(self.tools)

    @property
    def label(self) -> str:
        """Name of the task in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)


def by_name(given: Any) -> Any:
    """Return ``module:name`` for a function or class that other processes can import; other values stay."""
    return (importable(given)[0] or given) if callable(given) else given


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[Item]):
    """A task's problems, or the rows of data: each occurs once, and each prompt in one of the two parts.

    Attributes:
      train: in the source's order.
      held_out: in the order of the hashes of their prompts, so that the first n are a fair sample.
      notes: a line for each reason for which some were dropped or changed, with counts.
      left_out: the note about rows that were dropped or truncated; empty without such rows.
    """

    train: tuple[Item, ...]
    held_out: tuple[Item, ...]
    notes: tuple[str, ...]
    left_out: str = ""


def check(task: Task) -> None:
    """Refuse a task that cannot work, before anything is loaded.

    Raises:
      InputError: unknown extractor, verifier or template, two that do not fit, a holdout outside [0, 1), a bad date, a
        ``keep`` that does not name a function.
    """
    if task.extractor not in EXTRACTORS:
        extract("", task.extractor)
    require(task.verifier in VERIFIERS, f"verifier {task.verifier!r} is unknown; choose one of {', '.join(VERIFIERS)}")
    if task.verifier == "reasoning_gym" and isinstance(task.source, RowSource):
        raise InputError(f"verifier 'reasoning_gym' needs a ReasoningGym source; give {task.label} another")
    if task.verifier in ("instructions", "code") and task.extractor in ("last_number", "boxed"):
        raise InputError(
            f"verifier {task.verifier!r} looks at a whole text, of which extractor {task.extractor!r} leaves a piece: "
            "set extractor whole, tag:NAME or after:TAG"
        )
    if task.keep is not None:
        resolve(task.keep)
    check_template(task.template)
    check_split(task.holdout, task.date)


def check_template(template: str) -> None:
    """Raise InputError for a template that is neither a known name nor Jinja."""
    if template not in TEMPLATES and "{" not in template:
        raise InputError(f"template {template!r} is unknown; choose {', '.join(TEMPLATES)} or give a Jinja text")


def check_split(holdout: float, date: str | None) -> None:
    """Refuse an invalid holdout share or date.

    Raises:
      InputError: a holdout outside [0, 1), or a bad date.
    """
    require(0 <= holdout < 1, f"holdout is {holdout}; it is a share of the prompts, from 0 to below 1")
    try:
        datetime.date.fromisoformat(date or "2025-07-01")
    except ValueError:
        raise InputError(f"date {date!r} is not a date; write it as 2025-07-01") from None


def load(task: Task, answers: bool = True) -> Loaded[Problem]:
    """Load, filter, merge duplicates, then split by a hash of the prompt; equal on every machine.

    ``answers``: whether reference answers are needed. If they are not, and no problem has one, nothing is verified.

    Raises:
      InputError: ``check`` or the source refuses the task, or no problem is left to train on.
    """
    check(task)
    notes: list[str] = []
    found = _read(task, answers)
    verifier = _verifier(task, found, answers, notes)
    settings = {"task": task.label, "extractor": task.extractor, "verifier": verifier}
    rows = [dataclasses.replace(problem, **settings) for problem in found]
    kept = rows
    if task.keep is not None:
        keep = resolve(task.keep)
        kept = [problem for problem in rows if keep(problem)]
        if len(kept) < len(rows):
            notes.append(f"{len(rows) - len(kept)} of {len(rows)} dropped by {task.keep}")
    if task.plays:
        _check_begun(kept)
    checked = _checkable(kept, verifier, notes)
    if verifier in ("match", "integer"):
        lost = [one for one in checked if not _reached(one)]
        notes += unreachable(lost, len(checked), answers)
    problems = _distinct(_savable(checked, notes), not isinstance(task.source, ReasoningGym), notes)
    chosen = {*held_out_keys({key for _, key in problems}, task.holdout)}
    held_out = tuple(one for one, key in sorted(problems, key=lambda pair: pair[1]) if key in chosen)
    train = tuple(one for one, key in problems if key not in chosen)
    notes += nearly_equal(map(_asked, train), map(_asked, held_out))
    if not train:
        raise InputError(
            f"task {task.label} has no problem left to train on: {len(rows)} from the source, "
            f"{len(held_out)} held out{''.join('; ' + note for note in notes)}; give it more problems"
        )
    return Loaded(train, held_out, tuple(notes))


def _read(task: Task, answers: bool) -> list[Problem]:
    """Read the problems of the source, which may be the user's own: prompts as messages, answers as text.

    Raises:
      InputError: it yields something other than a problem, or a prompt that is neither text nor a chat.
    """
    if isinstance(task.source, RowSource):
        return list(task.source.problems(answers and task.verifier not in UNANSWERED))
    found = []
    for index, problem in enumerate(task.source.problems()):
        where = f"{task.label}[{index}]"
        if not isinstance(problem, Problem):
            raise InputError(
                f"{where} is a {type(problem).__name__}; a source's problems() yields jaxrl_llm.types.Problem"
            )
        answer = "" if problem.answer is None else str(problem.answer)
        found.append(dataclasses.replace(problem, prompt=messages_of(problem.prompt, where), answer=answer))
    return found


def _verifier(task: Task, problems: list[Problem], answers: bool, notes: list[str]) -> str:
    """Return the verifier: the task's, or ``none`` if no problem has an answer and none is needed.

    Raises:
      InputError: some problems have an answer and some have none.
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
    """Return the problems without the fields of their rows that a checkpoint could not hold, such as images."""
    left_out: dict[str, str] = {}
    found = []
    for problem in problems:
        fields = {}
        for name, value in problem.metadata.items():
            try:
                codec.to_json(value)
                fields[name] = value
            except TypeError as error:
                left_out.setdefault(name, str(error))
        found.append(problem if len(fields) == len(problem.metadata) else dataclasses.replace(problem, metadata=fields))
    for name, kind in left_out.items():
        notes.append(f"the field {name} is left out: it holds a value of type {kind}, which cannot be saved")
    return found


def _place(problem: Problem) -> str:
    return str(problem.metadata.get("row", problem.id))


def _checkable(problems: list[Problem], verifier: str, notes: list[str]) -> list[Problem]:
    """Return the problems with answers that the verifier can read.

    Raises:
      InputError: a problem has instructions that cannot be checked, or no tests.
    """
    if verifier == "instructions":
        for problem in problems:
            check_instructions(problem.metadata, _place(problem))
    if verifier == "code":
        for problem in problems:
            there = problem.metadata.get("tests") is not None
            require(there, f"{_place(problem)} has no tests, which verifier code runs: give each row the column tests")
    if verifier != "integer":
        return problems
    dropped = [problem for problem in problems if integer(problem.answer) is None]
    if dropped:
        named = ", ".join(f"{_place(problem)} ({problem.answer[:40]!r})" for problem in dropped[:_NAMED])
        more = ", ..." if len(dropped) > _NAMED else ""
        notes.append(f"{len(dropped)} of {len(problems)} dropped because the answer is not an integer: {named}{more}")
    return [problem for problem in problems if integer(problem.answer) is not None]


def _check_begun(problems: Iterable[Problem]) -> None:
    """Refuse rows that begin what an episode cannot go on with.

    Raises:
      InputError: a row has tools of its own, or its prompt ends in a message of the assistant.
    """
    for problem in problems:
        require(
            TOOLS not in problem.options,
            f"{_place(problem)} has tools, and the task's environment and tools are those of its episodes: leave the "
            "column out, or name it in metadata_fields if only they read it",
        )
        require(
            problem.prompt[-1]["role"] != "assistant",
            f"{_place(problem)}: the prompt ends in a message of the assistant, which no episode continues; cut it off",
        )


def _reached(problem: Problem) -> bool:
    answer = extract(written(problem.answer, problem.extractor), problem.extractor)
    return answer is not None and matches(answer, problem.answer, problem.verifier)


def unreachable(lost: Sequence[Problem], count: int, needed: bool) -> list[str]:
    """Return the note about references that no answer reaches: not even the reference itself, in the form in which it
    is extracted.

    Args:
      lost: their problems.
      count: of the problems that were tried.
      needed: whether the run reads which answers are right.

    Raises:
      InputError: it is needed, and no answer is right for most problems.
    """
    if not lost:
        return []
    first = lost[0]
    named = ", ".join(f"{shown(problem.answer)} ({_place(problem)})" for problem in lost[:_NAMED])
    remedy = "correct them, or take another verifier"
    if first.extractor == "last_number":
        remedy = "cut the number out of them (answer_extractor last_number), or take extractor boxed and verifier math"
    told = (
        f"{len(lost)} of {count} references of {first.task} are not reached by any answer, since extractor "
        f"{first.extractor} and verifier {first.verifier} do not take them for themselves: "
        f"{named}{', ...' if len(lost) > _NAMED else ''}; {remedy}"
    )
    require(not needed or 2 * len(lost) <= count, told)
    return [told]


def _distinct(problems: Iterable[Problem], whole: bool, notes: list[str]) -> list[tuple[Problem, str]]:
    """Return the problems in order, each with the key of its prompt; equal ones are merged.

    ``whole``: whether problems differ by all that verifiers, rewards and environments can read; else by the prompt
    alone, as those of a generator do.
    """
    alike: dict[str, dict[str, Problem]] = {}
    found: list[tuple[Problem, str]] = []
    merged = 0
    for problem in problems:
        prompt = prompt_key(problem.prompt)
        others = alike.setdefault(prompt, {})
        key = content(dataclasses.replace(problem, id="")) if whole else ""
        if key in others:
            merged += 1
            continue
        others[key] = dataclasses.replace(problem, id=codec.digest_of_parts([problem.id, key])) if others else problem
        found.append((others[key], prompt))
    if merged:
        what = "row" if whole else "prompt"
        notes.append(f"{merged} duplicates of a {what} merged, {len(found)} distinct {what}s left")
    several = [{one.answer for one in others.values()} for others in alike.values() if len(others) > 1]
    if several:
        differ = sum(len(answers) > 1 for answers in several)
        notes.append(f"{len(several)} prompts belong to several problems each, {differ} of them with different answers")
    return found


def _asked(problem: Problem) -> str:
    return "\n".join(message["content"] for message in problem.prompt)


def nearly_equal(train: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Return a note about held-out prompts that are also training prompts but for white space and case."""
    there = [" ".join(text.split()).casefold() for text in held_out]
    known = {" ".join(text.split()).casefold() for text in train} if there else ()
    count = sum(text in known for text in there)
    told = f"{count} of {len(there)} held-out prompts are training prompts too, but for white space and case"
    return [told] if count else []


def held_out_keys(keys: Collection[str], holdout: float) -> list[str]:
    """Return the keys of the prompts that are held out: the first in order, at least one unless the share is 0."""
    return sorted(keys)[: max(1, round(holdout * len(keys))) if holdout else 0]
