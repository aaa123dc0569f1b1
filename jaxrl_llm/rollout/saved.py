"""Groups as JSON values, exact: what a checkpoint keeps of rollouts. Those of earlier versions are read too."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.rollout.groups import Carryover, PartialGroup, RolloutBatch
from jaxrl_llm.types import Completion, Group, Problem


def carryover_to_json(left: Carryover) -> dict[str, Any]:
    """What one step leaves to the next, as JSON values; exact."""
    unfinished = [_unfinished_to_json(group) for group in left.unfinished]
    return {**vars(left), "carried": [group_to_json(g) for g in left.carried], "unfinished": unfinished}


def carryover_from_json(data: dict[str, Any]) -> Carryover:
    """The inverse of ``carryover_to_json``."""
    unfinished = tuple(_unfinished_from_json(group) for group in data["unfinished"])
    return Carryover(**data | {"carried": tuple(map(group_from_json, data["carried"])), "unfinished": unfinished})


def batch_to_json(batch: RolloutBatch | None) -> dict[str, Any] | None:
    """Groups that wait to be learned from, as JSON values; exact. What they left to the next step is saved apart."""
    if batch is None:
        return None
    groups = [group_to_json(g) for g in batch.groups]
    return {"groups": groups, "tokens": batch.tokens, "version": batch.version, "metrics": batch.metrics}


def batch_from_json(data: dict[str, Any] | None, left: Carryover) -> RolloutBatch | None:
    """The inverse of ``batch_to_json``, but for the groups sampled, which were looked at already."""
    if data is None:
        return None
    return RolloutBatch(**data | {"groups": [group_from_json(g) for g in data["groups"]], "sampled": [], "left": left})


def _unfinished_to_json(group: PartialGroup) -> dict[str, Any]:
    return {
        "place": group.number,
        "age": group.age,
        "completions": [None if c is None else _completion_to_json(c) for c in group.completions],
        "problem": None if group.problem is None else _problem_to_json(group.problem),
        "prompt": None if group.prompt is None else group.prompt.tolist(),
    }


def _unfinished_from_json(data: dict[str, Any]) -> PartialGroup:
    completions = tuple(None if c is None else _completion_from_json(c) for c in data["completions"])
    group = PartialGroup(data["place"], completions, age=data.get("age", 0))  # checkpoints of old hold neither age
    if data.get("prompt") is None:  # nor what was asked, which is found by the number
        return group
    prompt = np.asarray(data["prompt"], np.int32)
    return dataclasses.replace(group, problem=_problem_from_json(data["problem"]), prompt=prompt)


def group_to_json(group: Group) -> dict[str, Any]:
    """A group as JSON values; float32 and float64 survive exactly, and so does what a problem's row held."""
    return {
        "problem": _problem_to_json(group.problem),
        "prompt": group.prompt.tolist(),
        "completions": [_completion_to_json(c) for c in group.completions],
        "rewards": group.rewards.tolist(),
        "accuracy": group.accuracy.tolist(),
        "parts": {name: part.tolist() for name, part in group.parts.items()},
    }


def group_from_json(data: dict[str, Any]) -> Group:
    """The inverse of ``group_to_json``."""
    parts = {name: np.asarray(part) for name, part in data["parts"].items()}
    completions = tuple(_completion_from_json(c) for c in data["completions"])
    return Group(
        _problem_from_json(data["problem"]),
        np.asarray(data["prompt"], np.int32),
        completions,
        np.asarray(data["rewards"], float),
        np.asarray(data["accuracy"], float),
        parts,
    )


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    return {**vars(problem), "prompt": list(problem.prompt), "metadata": codec.to_json(problem.metadata)}


def _problem_from_json(data: dict[str, Any]) -> Problem:
    return Problem(**data | {"prompt": tuple(data["prompt"]), "metadata": codec.from_json(data["metadata"])})


def _completion_to_json(completion: Completion) -> dict[str, Any]:
    arrays = {name: getattr(completion, name).tolist() for name in ("tokens", "sampler_logp", "mask", "version")}
    extras = {name: codec.pack(extra) for name, extra in completion.extras.items()}
    return arrays | {"finish_reason": completion.finish_reason, "text": completion.text, "extras": extras}


def _completion_from_json(data: dict[str, Any]) -> Completion:
    kinds = {"tokens": np.int32, "sampler_logp": np.float32, "mask": bool, "version": np.int32}
    arrays = {name: np.asarray(data[name], kind) for name, kind in kinds.items()}
    extras = {name: codec.unpack(extra) for name, extra in data["extras"].items()}
    return Completion(**arrays, finish_reason=data["finish_reason"], extras=extras, text=data["text"])
