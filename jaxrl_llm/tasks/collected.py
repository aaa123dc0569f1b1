"""Data of the model's own: what it answers to a task's problems, once the answers are verified."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Collected:
    """Answers that the run's model gives, sampled before its first step and kept in the run's directory.

    As ``Texts`` they are right answers (rejection sampling), as ``Pairs`` a right one and a wrong one of each problem,
    as ``Steps`` answers whose steps are labelled with the share of continuations that come to the right result.

    Attributes:
      task: the problems, and how answers are verified; those that it holds out are not asked. Its template, system
        message and suffix are those of the data.
      samples: K answers to each problem.
      temperature: of the sampling, above 0.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      limit: problems that are asked at most; 0 for all.
      keep: of a problem's right answers the ``first``, the ``shortest``, or ``all`` that differ. Of pairs ``first`` is
        one of each problem, ``shortest`` one whose answers are next to each other in length, ``all`` as many as there
        are right and wrong answers to put together.
      continuations: k, sampled from the end of each step, where steps are labelled.
    """

    task: Task
    samples: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    limit: int = 0
    keep: Literal["first", "shortest", "all"] = "first"
    continuations: int = 8

    @property
    def label(self) -> str:
        """Names the data where it has no name of its own."""
        return self.task.label

    def read(self) -> Iterator[tuple[str, Any]]:
        """It has no rows before a model has answered.

        Raises:
          InputError: always.
        """
        raise InputError(f"the answers to {self.label} are collected by a run: train one, or use jaxrl-llm collect")
