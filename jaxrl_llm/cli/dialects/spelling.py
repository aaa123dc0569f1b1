"""A setting's name in another trainer, the settings of one command, and what names of both dialects do."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl_llm.algorithms.advantages import KLInReward
from jaxrl_llm.algorithms.surrogates import LUSPO, SAPO, MiniRL, PPOClip
from jaxrl_llm.algorithms.whole_step import ClipCov
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.recipes import Recipe

KL = "kl kl_coef kl_in"
CLIPPED = (PPOClip, MiniRL, LUSPO, ClipCov)
"""Surrogates with bounds ``low`` and ``high``, distances from 1."""


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One setting's name in another trainer.

    Attributes:
      name: as that trainer has it, without dashes.
      dialect: the trainer.
      fields: fields of ``Recipe`` or ``Algorithm`` that it may change; empty for a spelling that is always refused.
      values: what it takes; or words with their meanings.
      effect: changes the fields, once for all the names that share it; None sets the one field to the value.
      refused: reasons against other known words; or one against every word.
    """

    name: str
    dialect: Literal["TRL", "verl"]
    fields: tuple[str, ...]
    values: Literal["number", "number or None", "switch"] | Mapping[str, Any]
    effect: Callable[["Given"], None] | None
    refused: Mapping[str, str] | str = dataclasses.field(default_factory=dict)

    def typed(self, value: str) -> str:
        """Return the spelling and value as its trainer has it: ``--beta 0.04``, ``algorithm.adv_estimator=grpo``."""
        return f"--{self.name} {value}" if self.dialect == "TRL" else f"{self.name}={value}"

    def read(self, text: str) -> Any:
        """Return the value that a text means: a finite number, None, True or False, or the meaning of a word.

        Raises:
          InputError: the text has none.
        """
        switch = self.values == "switch"
        words = {"true": True, "false": False} if switch else self.values
        word = text.lower() if switch else text
        if isinstance(words, Mapping):
            expected = "True or False" if switch else ", ".join(words)
            known = self.refused
            reason = known if isinstance(known, str) else known.get(word, f"expected {expected}")
            require(word in words, f"{self.typed(text)}: {reason}")
            return words[word]
        if words == "number or None" and text.lower() in ("none", "null"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        require(math.isfinite(value), f"{self.typed(text)}: expected a number")
        return value


class Given:
    """The settings of one command.

    Attributes:
      texts: how each was typed, by name.
      recipe: before any change.
      fields: of the changed recipe and algorithm, by name, which effects set; the estimator is without a KL wrapper.
    """

    def __init__(self, spellings: Mapping[str, Spelling], texts: Mapping[str, str], recipe: Recipe):
        self.texts = texts
        self.recipe = recipe
        self.fields = vars(recipe) | vars(recipe.algorithm)
        self._spellings = spellings
        if isinstance(recipe.algorithm.advantage, KLInReward):
            self.fields["advantage"] = recipe.algorithm.advantage.estimator

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or the default where it was not given."""
        return self._spellings[name].read(self.texts[name]) if name in self.texts else default

    def first(self, *names: str) -> str | None:
        """Return the first of these names that was given, or None."""
        return next((name for name in names if name in self.texts), None)

    def refuse(self, name: str | None, reason: str, when: bool = True) -> None:
        """Raise an InputError about a setting, unless ``when`` is False or it was not given."""
        if when and name is not None and name in self.texts:
            raise InputError(f"{self._spellings[name].typed(self.texts[name])}: {reason}")


def set_bounds(given: Given, names: tuple[str, str], low: float | None, high: float | None) -> None:
    """Set ``low`` and ``high`` of a clipped surrogate; None keeps the value. ``names``: the spellings of the bounds."""
    surrogate = given.fields["surrogate"]
    unread = f"{type(surrogate).__name__} has no clip range: leave it out"
    given.refuse(given.first(*names), unread, not isinstance(surrogate, CLIPPED))
    low = surrogate.low if low is None else low
    high = surrogate.high if high is None else high
    given.fields["surrogate"] = dataclasses.replace(surrogate, low=low, high=high)


def set_temperatures(given: Given, positive: str, negative: str) -> None:
    """Set the temperatures of SAPO from two spellings."""
    surrogate = given.fields["surrogate"]
    unlike = f"only SAPO has temperatures, and the loss is {type(surrogate).__name__}"
    given.refuse(given.first(positive, negative), unlike, not isinstance(surrogate, SAPO))
    found = SAPO(given.get(positive, surrogate.tau_pos), given.get(negative, surrogate.tau_neg))
    given.fields["surrogate"] = found


def refuse_own_kl(given: Given, name: str | None) -> None:
    """Refuse the spelling of a KL to the reference if the surrogate has its own KL."""
    surrogate = given.fields["surrogate"]
    unread = f"the KL of {type(surrogate).__name__} is not to a reference: leave it out"
    given.refuse(name, unread, surrogate.reads_kl_coef)


def check_range(given: Given, level: str, bounds: str, told: bool) -> None:
    """Refuse a clip range made for ratios of another level: that of a sequence is some 500 times narrower.

    ``bounds``: how a range is typed, with two places to fill.

    Raises:
      InputError: the spelling ``level`` changed the ratio's level, the loss is clipped, and its range is not told.
    """
    now, was = given.fields["ratio"].level, given.recipe.algorithm.ratio.level
    if now != was and isinstance(given.fields["surrogate"], CLIPPED) and not told:
        remedy = bounds.format(*(("3e-4", "4e-4") if now == "sequence" else ("0.2", "0.2")))
        given.refuse(level, f"a clip range for ratios by {was} does not fit ratios by {now}: add one, such as {remedy}")
