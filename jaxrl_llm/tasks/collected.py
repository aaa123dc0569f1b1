"""Data of the model's own: what it answers to a task's problems, once the answers are verified."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.task import Task, check
from jaxrl_llm.tasks.texts import Pairs, Steps, Texts

Kind = Literal["texts", "pairs", "steps"]
"""What is made of the answers: rows of ``Texts``, ``Pairs`` or ``Steps``."""
KINDS: dict[type, Kind] = {Texts: "texts", Pairs: "pairs", Steps: "steps"}


@dataclasses.dataclass(frozen=True)
class Collected:
    """Answers that the run's model gives, sampled before its first step and kept in the run's directory.

    As ``Texts`` they are right answers (rejection sampling), as ``Pairs`` a right one and a wrong one of one problem,
    as ``Steps`` answers whose steps are labelled with the share of continuations that come to the right result. Answers
    that did not come to their end are never among the right ones: they would teach not to stop.

    Attributes:
      task: the problems, and how answers are verified; those that it holds out are not asked. Its template, system
        message and suffix are those of the data.
      samples: K answers to each problem.
      temperature: of the sampling, above 0.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      limit: problems that are asked at most; 0 for all.
      keep: of each problem's right answers the ``first``, the ``shortest``, or ``all`` that differ; of pairs, one with
        that answer, or as many as can be made without using an answer twice.
      match_length: of pairs: put answers together that are as near in length as can be, so that length is nothing to
        prefer; if not, right and wrong ones in the order in which they were sampled.
      cut_off: of pairs: whether right answers are also preferred to ones that were cut off. The rows of these say so
        (``rejected_cut_off``), and no end of them is learned.
      continuations: of steps: k, sampled from the end of each step but the last.
    """

    task: Task
    samples: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    limit: int = 0
    keep: Literal["first", "shortest", "all"] = "first"
    match_length: bool = False
    cut_off: bool = False
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


def check_collected(source: Collected, kind: Kind, before: str) -> None:
    """Refuses what cannot be collected, before anything is loaded.

    ``before``: stands before the names of the fields, such as ``--``.

    Raises:
      InputError: the field, its value and the remedy.
    """
    check(source.task)
    for name, least in {"samples": 2 if kind == "pairs" else 1, "continuations": 1, "limit": 0}.items():
        value = getattr(source, name)
        if value < least:
            raise InputError(f"{before}{name} must be at least {least} to collect {kind}, got {value}")
    if source.temperature <= 0:
        raise InputError(
            f"{before}temperature must be above 0, got {source.temperature}: without it all answers to a problem are "
            "the same"
        )
    if not 0 < source.top_p <= 1:
        raise InputError(f"{before}top_p must be above 0 and at most 1, got {source.top_p}")
    if source.task.verifier == "none":
        raise InputError(
            f"{before}task.verifier none leaves nothing to collect by: give the task its answers and a verifier"
        )
