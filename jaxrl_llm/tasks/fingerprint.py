"""Whether the problems of a run are still those that it began with, and what has changed."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.tasks.learned import Learned
from jaxrl_llm.types import Problem

Fingerprint = dict[str, int | str]
"""How many problems there are; their prompts and all that they hold, whatever their order; and all of it in order."""


def fingerprint(problems: Sequence[Problem | Learned]) -> Fingerprint:
    """The same wherever the table of these problems, or rows, lies; small JSON, made to be saved with a run."""
    whole = [_digest([content(problem)]) for problem in problems]
    return {
        "count": len(problems),
        "prompts": _digest(sorted(problem.id for problem in problems)),
        "contents": _digest(sorted(whole)),
        "order": _digest(whole),
    }


def difference(before: Fingerprint, now: Fingerprint) -> str:
    """What has changed between two fingerprints, in a few words; empty where nothing has."""
    if before["count"] != now["count"]:
        return f"there were {before['count']} and there are {now['count']}"
    if before["prompts"] != now["prompts"]:
        return f"there are {now['count']} as before, but prompts have changed"
    if before["contents"] != now["contents"]:
        return "the prompts are the same, but answers or other fields have changed"
    if before["order"] != now["order"]:
        return "they are the same in another order"
    return ""


def content(problem: Problem | Learned) -> str:
    """All that a prompt is made of and that verifiers and rewards may read, or that is learned; not where the row lies.

    JSON, the same for equal content.
    """
    if not isinstance(problem, Problem):
        fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        return json.dumps(fields | {"where": ""}, sort_keys=True, default=np.ndarray.tolist)
    metadata = {name: value for name, value in problem.metadata.items() if name != "row"}
    return json.dumps([problem.id, list(problem.prompt), problem.answer, codec.to_json(metadata)], sort_keys=True)


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]
