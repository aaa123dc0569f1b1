"""What both dialects do to the fields of an algorithm."""

import dataclasses
from typing import Any

from jaxrl_llm.algorithms.advantages import KLInReward
from jaxrl_llm.algorithms.loss import Algorithm
from jaxrl_llm.algorithms.surrogates import SAPO, MiniRL, PPOClip
from jaxrl_llm.cli.dialects.given import Given
from jaxrl_llm.cli.dialects.spellings import SPELLINGS

Fields = dict[str, Any]

CLIPPED = (PPOClip, MiniRL)
"""Surrogates with bounds ``low`` and ``high``, distances from 1."""


def fields_of(algorithm: Algorithm) -> Fields:
    """Its fields by name, the estimator without the KL that is put around it."""
    fields = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    if isinstance(algorithm.advantage, KLInReward):
        fields["advantage"] = algorithm.advantage.estimator
    return fields


def kind(value: Any) -> str:
    """The name of a piece's class."""
    return type(value).__name__


def kept(surrogate: Any, wanted: type) -> Any:
    """The surrogate where it is of the wanted kind, else one with that kind's defaults."""
    return surrogate if isinstance(surrogate, wanted) else wanted()


def with_bounds(surrogate: Any, given: Given, names: tuple[str, ...], low: float | None, high: float | None) -> Fields:
    """A clipped surrogate with another ``low`` and ``high``; None keeps. ``names``: the spellings that say so."""
    name = given.first(*names)
    if name is None:
        return {}
    if not isinstance(surrogate, CLIPPED):
        given.refuse(name, f"{kind(surrogate)} has no clip range: leave it out")
    bounds = {"low": low, "high": high}
    return {"surrogate": dataclasses.replace(surrogate, **{k: v for k, v in bounds.items() if v is not None})}


def with_temperatures(surrogate: Any, given: Given, positive: str, negative: str) -> Fields:
    """SAPO with other temperatures, by the names of two spellings."""
    name = given.first(positive, negative)
    if name is None:
        return {}
    if not isinstance(surrogate, SAPO):
        given.refuse(name, f"only SAPO has temperatures, and the loss is {kind(surrogate)}")
    return {
        "surrogate": SAPO(given.number(positive, surrogate.tau_pos), given.number(negative, surrogate.tau_neg)),
    }


def check_range(
    before: Algorithm, fields: Fields, given: Given, level: str, bounds: tuple[str, str], said: bool
) -> None:
    """Refuse a clip range that was made for ratios of another level: a sequence's is some 500 times narrower.

    Raises:
      InputError: the spelling ``level`` changed the ratio's level, the loss is clipped, and its range is not ``said``
        by the spellings ``bounds``.
    """
    now = fields["ratio"].level
    was = before.ratio.level
    if level in given and now != was and isinstance(fields["surrogate"], CLIPPED) and not said:
        usual = ("3e-4", "4e-4") if now == "sequence" else ("0.2", "0.2")
        remedy = " ".join(SPELLINGS[name].typed(value) for name, value in zip(bounds, usual, strict=True))
        given.refuse(level, f"a clip range for ratios by {was} does not fit ratios by {now}: add one, such as {remedy}")
