"""Collected data of a run: answered before its first step, then a table like any other."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jaxrl_llm.collection.collect import collect
from jaxrl_llm.collection.ledger import COLLECTED
from jaxrl_llm.collection.sampling import Answerer, Asked
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.tasks import Pairs, Prompts, Steps, Table, Texts
from jaxrl_llm.tasks.collected import KINDS
from jaxrl_llm.types import Problem

Data = TypeVar("Data", Texts, Pairs, Steps)


def collected(
    data: Data,
    problems: Sequence[Problem],
    answerer: Callable[[], Answerer],
    max_new_tokens: int,
    seed: int,
    directory: Path,
    peers: Peers,
    status: Callable[[str], None],
) -> Data:
    """The data with a table in place of its ``Collected`` source, whose prompts are written as the model read them.

    Args:
      data: to collect; its source is a ``Collected``.
      problems: to ask.
      answerer: makes what answers; not called where an earlier start of the run has collected all.
      max_new_tokens: longest answer, the stop token included.
      seed: decides every random number.
      directory: the run's.
      peers: its processes.
      status: hears what is going on.

    Raises:
      InputError: no answer is good for a row.
    """
    path = directory / COLLECTED
    task = data.source.task
    if not peers.first(path.exists):
        by = answerer()
        separator = data.separator if isinstance(data, Steps) else "\n"
        asked = Asked(
            Prompts(task, by.tokenizer), problems, data.source, KINDS[type(data)], max_new_tokens, seed, separator
        )
        counts = collect(by, asked, path, peers, status)
        if not counts.rows:
            peers.first(path.unlink)  # another attempt may ask otherwise
            raise InputError(
                f"none of {counts.answers} answers to {data.source.label} makes a row ({counts.right} are right, "
                f"{counts.ended} came to their end): ask a better model, for more samples or longer answers"
            )
    return dataclasses.replace(
        data,
        source=Table(str(path)),
        template=task.template,
        system=task.system,
        suffix=task.suffix,
        date=task.date,
        name=data.label,
    )
