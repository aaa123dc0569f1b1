"""Whether the problems of a run are still those that it began with, and what has changed."""

import hashlib
import json
from collections.abc import Iterable, Sequence

from jaxrl_llm import codec
from jaxrl_llm.types import Problem

Fingerprint = dict[str, int | str]
"""How many problems there are; their prompts and all that they hold, whatever their order; and all of it in order."""


def fingerprint(problems: Sequence[Problem]) -> Fingerprint:
    """The same wherever the table of these problems lies; small JSON, made to be saved with a run."""
    whole = [_digest([_content(problem)]) for problem in problems]
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


def _content(problem: Problem) -> str:
    """All that a prompt is made of and that verifiers and rewards may read; not where the row lies."""
    metadata = {name: value for name, value in problem.metadata.items() if name != "row"}
    return json.dumps([problem.id, list(problem.prompt), problem.answer, codec.to_json(metadata)], sort_keys=True)


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]
