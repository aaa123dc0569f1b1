"""A task: where its problems come from, how answers are checked, and what is held out for evaluation."""

import dataclasses
from collections.abc import Iterable

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.extract import extract, integer
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.tasks.sources import HubDataset, ReasoningGym, Table, prompt_key
from jaxrl_llm.types import Problem

VERIFIERS = ("match", "integer", "math", "reasoning_gym")

_NAMED = 3  # how many dropped rows a note names


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts with checkable answers.

    Attributes:
      source: of the problems.
      extractor: how the answer is cut out of a completion: ``last_number``, ``boxed``, ``tag:NAME`` or ``whole``.
      verifier: how it is compared: ``match`` (text, or equal numbers), ``integer``, ``math`` (equivalent expressions)
        or ``reasoning_gym`` (the data set's own scoring).
      keep: ``module:function`` of a Problem; where it returns False the problem is dropped.
      system: the system message, in place of the row's own.
      suffix: text appended to the last user message.
      template: ``tokenizer`` (its own chat template), ``chatml`` (no default system message), ``plain`` (contents
        only) or a Jinja text.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
    """

    source: ReasoningGym | Table | HubDataset
    extractor: str = "last_number"
    verifier: str = "match"
    keep: str | None = None
    system: str | None = None
    suffix: str = ""
    template: str = "tokenizer"
    holdout: float = 0.0
    name: str | None = None

    @property
    def label(self) -> str:
        """Names it in metrics."""
        return self.name or self.source.label


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


def check(task: Task) -> None:
    """Refuses a task that cannot work, before anything is loaded.

    Raises:
      InputError: unknown extractor or verifier, a holdout outside [0, 1), or a ``keep`` that names no function.
    """
    extract("", task.extractor)
    if task.verifier not in VERIFIERS:
        raise InputError(f"verifier {task.verifier!r} is unknown; choose one of {', '.join(VERIFIERS)}")
    if task.verifier == "reasoning_gym" and not isinstance(task.source, ReasoningGym):
        raise InputError(f"verifier 'reasoning_gym' needs a ReasoningGym source; give {task.label} another")
    if not 0 <= task.holdout < 1:
        raise InputError(f"holdout is {task.holdout}; it is a share of the prompts, from 0 to below 1")
    if task.keep is not None:
        resolve(task.keep)


def load(task: Task) -> Loaded:
    """Loads, filters, merges duplicates by prompt, then splits by a hash of the prompt: the same on every machine.

    Raises:
      InputError: what ``check`` and the source refuse, or no problem is left to train on.
    """
    check(task)
    notes: list[str] = []
    rows = [dataclasses.replace(problem, task=task.label, extractor=task.extractor, verifier=task.verifier)
            for problem in task.source.problems()]
    kept = _without_duplicates(_checkable(_filtered(rows, task, notes), task, notes), notes)
    train, held_out = _split(kept, task.holdout)
    if not train:
        raise InputError(f"task {task.label} has no problem left to train on: {len(rows)} from the source, "
                         f"{len(held_out)} held out{''.join('; ' + note for note in notes)}; give it more problems")
    return Loaded(train, held_out, tuple(notes))


def _filtered(problems: list[Problem], task: Task, notes: list[str]) -> list[Problem]:
    if task.keep is None:
        return problems
    keep = resolve(task.keep)
    kept = [problem for problem in problems if keep(problem)]
    if len(kept) < len(problems):
        notes.append(f"{len(problems) - len(kept)} of {len(problems)} dropped by {task.keep}")
    return kept


def _checkable(problems: list[Problem], task: Task, notes: list[str]) -> list[Problem]:
    if task.verifier != "integer":
        return problems
    dropped = [problem for problem in problems if integer(problem.answer) is None]
    if dropped:
        named = ", ".join(f"{problem.metadata.get('row', problem.id)} ({problem.answer[:40]!r})"
                          for problem in dropped[:_NAMED])
        more = ", ..." if len(dropped) > _NAMED else ""
        notes.append(f"{len(dropped)} of {len(problems)} dropped because the answer is no integer: {named}{more}")
    return [problem for problem in problems if integer(problem.answer) is not None]


def _without_duplicates(problems: Iterable[Problem], notes: list[str]) -> list[Problem]:
    first: dict[str, Problem] = {}
    merged = conflicting = 0
    for problem in problems:
        known = first.setdefault(prompt_key(problem.prompt), problem)
        merged += known is not problem
        conflicting += known.answer != problem.answer
    if merged:
        other = f"; {conflicting} of them had another answer than the one kept" if conflicting else ""
        notes.append(f"{merged} duplicates of a prompt merged, {len(first)} distinct prompts left{other}")
    return list(first.values())


def _split(problems: list[Problem], holdout: float) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    count = max(1, round(holdout * len(problems))) if holdout else 0
    held_out = sorted(problems, key=lambda problem: prompt_key(problem.prompt))[:count]
    keys = {problem.id for problem in held_out}
    return tuple(problem for problem in problems if problem.id not in keys), tuple(held_out)
