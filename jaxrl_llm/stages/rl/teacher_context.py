"""What a teacher is told of a completion that the policy was not: its prompt, by the template of ``Context``."""

import dataclasses
import string

import numpy as np

from jaxrl_llm.tasks import Prompts, encode
from jaxrl_llm.types import Group

RIGHT = 1.0
"""The least accuracy of a completion that counts as right."""


def told_prompt(template: str, group: Group, member: int, prompts: Prompts) -> np.ndarray | None:
    """Return the teacher's prompt of a completion, int32[T]; None if it lacks one of the facts.

    Args:
      template: of ``Context``.
      group: of the completion.
      member: its place there.
      prompts: of the policy: the task's chat template writes the teacher's too.
    """
    problem = group.problem
    before, last = problem.prompt[:-1], problem.prompt[-1]
    known = facts(group, member) | {"prompt": last["content"]}
    wanted = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    if not all(known.get(name) for name in wanted):
        return None
    content = template.format(**{name: known[name] for name in wanted})
    told = dataclasses.replace(problem, prompt=(*before, {**last, "content": content}))
    return encode(told, prompts.task(problem.task), prompts.tokenizer)


def facts(group: Group, member: int) -> dict[str, str]:
    """Return the facts about a completion by name; what is unknown is missing."""
    row = {name: str(value) for name, value in group.problem.metadata.items() if value is not None}
    found = row | {"answer": group.problem.answer, "attempt": group.completions[member].text}
    if not np.isnan(group.accuracy[member]):
        found["verdict"] = "right" if group.accuracy[member] >= RIGHT else "wrong"
    others = [place for place in np.flatnonzero(group.accuracy >= RIGHT) if place != member]
    if others:
        found["success"] = group.completions[others[0]].text
    return found
