"""Groups as checkpoints held them before values were saved as records of ``codec``: those are read still."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.rollout.groups import Carryover, PartialGroup, RolloutBatch
from jaxrl_llm.types import Completion, Group, Problem


def read(data: Mapping[str, Any]) -> tuple[Carryover, RolloutBatch | None]:
    """What a step had left to the next one, and what was sampled ahead for it."""
    left = _carryover(data["backlog"])
    return left, None if data["ready"] is None else _batch(data["ready"], left)


def _carryover(data: dict[str, Any]) -> Carryover:
    unfinished = tuple(_unfinished(group) for group in data["unfinished"])
    return Carryover(**data | {"carried": tuple(_group(group) for group in data["carried"]), "unfinished": unfinished})


def _batch(data: dict[str, Any], left: Carryover) -> RolloutBatch:
    return RolloutBatch(**data | {"groups": [_group(group) for group in data["groups"]], "sampled": [], "left": left})


def _unfinished(data: dict[str, Any]) -> PartialGroup:
    completions = tuple(None if c is None else _completion(c) for c in data["completions"])
    group = PartialGroup(data["place"], completions, age=data.get("age", 0))  # the oldest hold neither age
    if data.get("prompt") is None:  # nor what was asked, which is found by the number
        return group
    return dataclasses.replace(group, problem=_problem(data["problem"]), prompt=np.asarray(data["prompt"], np.int32))


def _group(data: dict[str, Any]) -> Group:
    parts = {name: np.asarray(part) for name, part in data["parts"].items()}
    completions = tuple(_completion(c) for c in data["completions"])
    return Group(
        _problem(data["problem"]),
        np.asarray(data["prompt"], np.int32),
        completions,
        np.asarray(data["rewards"], float),
        np.asarray(data["accuracy"], float),
        parts,
    )


def _problem(data: dict[str, Any]) -> Problem:
    return Problem(**data | {"prompt": tuple(data["prompt"]), "metadata": codec.from_json(data["metadata"])})


def _completion(data: dict[str, Any]) -> Completion:
    kinds = {"tokens": np.int32, "sampler_logp": np.float32, "mask": bool, "version": np.int32}
    arrays = {name: np.asarray(data[name], kind) for name, kind in kinds.items()}
    extras = {name: codec.unpack(extra) for name, extra in data["extras"].items()}
    return Completion(**arrays, finish_reason=data["finish_reason"], extras=extras, text=data["text"])
