"""Prompts of problems as the token ids that the policy continues."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.chats import Writer
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.tasks.template import Wording
from jaxrl_llm.types import Problem


class Prompts:
    """Prompts of problems as token ids, each encoded once.

    Args:
      tasks: set the templates: one task, or several, found by the label of the problem.
      tokenizer: of the model.
    """

    def __init__(self, tasks: Task | Sequence[Task], tokenizer: Any):
        self.tasks = (tasks,) if isinstance(tasks, Task) else tuple(tasks)
        self._by_label = {task.label: task for task in self.tasks}
        self.tokenizer = tokenizer
        self._known: dict[tuple[str, str], np.ndarray] = {}

    def __getitem__(self, problem: Problem) -> np.ndarray:
        """Return the prompt's token ids, int32[T]; see ``encode``. Ids tell the problems of one task apart."""
        key = (problem.task, problem.id)
        if key not in self._known:
            self._known[key] = encode(problem, self.task(problem.task), self.tokenizer)
        return self._known[key]

    def task(self, label: str) -> Task:
        """Return the task of this label; a single task is returned for any label."""
        return self._by_label[label] if len(self.tasks) > 1 else self.tasks[0]

    def longest(self, problems: Iterable[Problem]) -> int:
        """Return the number of tokens of the longest prompt; 0 without problems."""
        return max((len(self[problem]) for problem in problems), default=0)


def encode(problem: Problem, task: Wording, tokenizer: Any) -> np.ndarray:
    """Encode the prompt as token ids, int32[T], up to the start of the answer, or to where a last message of the
    assistant has begun it.

    The template gets ``problem.options``, and asks the date of the task, or the clock if the task has none. It writes
    its own special tokens, so none are added to its text, and control tokens that a user's message spells stay text.
    ``plain`` joins the contents with blank lines, as they are, and begins with the tokenizer's BOS token if that
    tokenizer begins every text with it.

    Raises:
      InputError: no tokenizer or no chat template, an unknown template, one that refuses the messages or does not read
        an option of the row.
    """
    try:
        wording = (task.template, task.system, task.suffix, task.date)
        return _writer(wording, type(task), tokenizer, json.dumps(problem.options)).prompt(problem.prompt)[1]
    except InputError as error:
        row = problem.metadata.get("row")
        raise InputError(f"{row}: {error}" if row else str(error)) from error


@functools.lru_cache(maxsize=64)
def _writer(wording: tuple[Any, ...], kind: type, tokenizer: Any, options: str) -> Writer:
    template, system, suffix, date = wording
    return Writer(
        kind([], template=template, system=system, suffix=suffix, date=date), tokenizer, (), json.loads(options)
    )
