"""From a recipe and spellings to a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.cli.dialects import trl, verl
from jaxrl_llm.cli.dialects.given import Given
from jaxrl_llm.cli.dialects.spellings import ACTOR, SPELLINGS
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import Recipe

REMEDIES = {
    "TRL": " (SequenceMean is --loss_type grpo)",
    "verl": f" (SequenceMean is {ACTOR}loss_agg_mode=seq-mean-token-mean)",
}


def translate(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """The recipe with what the spellings change; what they do not name stays, whatever the other trainer's default is.

    Args:
      recipe: where to start from.
      settings: values as typed, by names of ``SPELLINGS``; the order says nothing.

    Raises:
      InputError: names of both dialects; a value that does not parse; what this library cannot express exactly, or a
        mix that contradicts itself. The message is one line that names the spelling and the remedy.
    """
    for name in settings:
        if name not in SPELLINGS:
            raise InputError(f"no spelling {name}: docs/dialects.md lists those that are known")
    if len({SPELLINGS[name].dialect for name in settings}) > 1:
        one, other = (next(name for name in settings if SPELLINGS[name].dialect == d) for d in ("TRL", "verl"))
        foreign = _typed({one: settings[one]})
        stranger = _typed({other: settings[other]})
        raise InputError(f"{foreign} is TRL's and {stranger} verl's: use one dialect in a command")
    try:
        return _changed(recipe, settings)
    except InputError:
        raise
    except ValueError as error:
        remedy = REMEDIES[SPELLINGS[next(iter(settings))].dialect] if "SequenceMean" in str(error) else ""
        raise InputError(f"{_typed(_culprits(recipe, settings, str(error)))}: {error}{remedy}") from error


def explain(recipe: Recipe, settings: Mapping[str, str]) -> list[str]:
    """One line for each spelling: what it became in the translated recipe."""

    def said(field: str) -> str:
        return shown(getattr(recipe if hasattr(recipe, field) else recipe.algorithm, field))

    def fields(name: str) -> list[str]:
        return [f for f in SPELLINGS[name].fields if f != "kl_in" or recipe.algorithm.kl is not None]

    return [
        f"{_typed({name: value})}: {', '.join(f'{field} {said(field)}' for field in fields(name))}"
        for name, value in settings.items()
    ]


def shown(value: Any) -> str:
    """A value as one would write it, without the fields that are None."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(f'{name}={shown(x)}' for name, x in fields if x is not None)})"


def _typed(settings: Mapping[str, str]) -> str:
    return " ".join(SPELLINGS[name].typed(value) for name, value in settings.items())


def _changed(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    if not settings:
        return recipe
    dialect = SPELLINGS[next(iter(settings))].dialect
    return (trl if dialect == "TRL" else verl).change(recipe, Given(settings))


def _culprits(recipe: Recipe, settings: Mapping[str, str], message: str) -> Mapping[str, str]:
    """The spellings without which the recipe would not be refused for this reason."""
    for name in settings:
        rest = {other: value for other, value in settings.items() if other != name}
        try:
            _changed(recipe, rest)
        except ValueError as error:
            if str(error) == message:
                return _culprits(recipe, rest, message)
    return settings
