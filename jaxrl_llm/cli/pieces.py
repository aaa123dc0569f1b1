"""Pieces on the command line, by the names of their classes: ``--recipe.algorithm.kl K3``, ``--rules.until None``."""

import argparse
import copy
import dataclasses
import operator
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.algorithms.advantages import Estimator, KLInReward
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus, UnbiasedK3
from jaxrl_llm.algorithms.loss import OPTIONAL
from jaxrl_llm.algorithms.ratios import (
    MaskedIS,
    OffPolicySequenceMask,
    Sequence,
    SequenceMask,
    SequenceToken,
    Token,
    TruncatedIS,
)
from jaxrl_llm.algorithms.reduce import Reducer
from jaxrl_llm.algorithms.surrogates import Surrogate, TopEntropy
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.recipes import Controller
from jaxrl_llm.rules.settings import Until
from jaxrl_llm.system.setting import has_default

ALGORITHM, CONTROLLER, UNTIL = "recipe.algorithm", "recipe.controller", "rules.until"


def choices() -> dict[str, dict[str, Any]]:
    """Return the classes that each piece may have, by the dotted name of the piece and by the names of the classes;
    with those of the configuration's own file."""
    pieces: dict[str, tuple[type, ...]] = {
        "advantage": _below(Estimator),
        "ratio": (Token, Sequence, SequenceToken),
        "surrogate": _below(Surrogate),
        "reduce": _below(Reducer),
        "kl": (K1, K2, K3, K3Plus, UnbiasedK3),
        "correction": (TruncatedIS, MaskedIS, SequenceMask),
        "sequence_filter": (OffPolicySequenceMask,),
        "token_filter": (TopEntropy,),
    }
    found = {f"{ALGORITHM}.{name}": kinds for name, kinds in pieces.items()}
    found[CONTROLLER] = typing.get_args(Controller)
    named: dict[str, dict[str, Any]] = {name: {k.__name__: k for k in kinds} for name, kinds in found.items()}
    for name in (CONTROLLER, *(f"{ALGORITHM}.{name}" for name in OPTIONAL)):
        named[name]["None"] = None
    return named


def set_by_class() -> dict[str, dict[str, Any]]:
    """Return the classes of all settings that are given by the name of their class: pieces, and the run's end."""
    return choices() | {UNTIL: {"None": None} | {kind.__name__: kind for kind in typing.get_args(Until)}}


def _below(base: type) -> tuple[type, ...]:
    """Return the pieces that are made from an interface, by name."""
    kinds = {kind for one in base.__subclasses__() for kind in (one, *_below(one))}
    pieces = (kind for kind in kinds if dataclasses.is_dataclass(kind) and kind is not KLInReward)
    return tuple(sorted(pieces, key=lambda kind: kind.__name__))


def with_pieces(run: Any, given: Mapping[str, str]) -> Any:
    """Return the run with a piece of each of these classes, by the dotted names of the pieces.

    A new piece has the defaults of its class; one of the same class stays as it is. Whether the pieces fit together is
    left to be checked with the values of the other flags.

    Raises:
      InputError: there is no such class, or it has no defaults.
    """
    algorithm = copy.copy(run.recipe.algorithm)
    if isinstance(algorithm.advantage, KLInReward):  # wrapped anew when the algorithm is made
        object.__setattr__(algorithm, "advantage", algorithm.advantage.estimator)
    controller, rules = run.recipe.controller, run.rules
    known = set_by_class()
    for name, word in given.items():
        kind = _named(name, word, known[name])
        if name == CONTROLLER:
            controller = _made(name, kind, controller)
        elif name == UNTIL:
            rules = dataclasses.replace(rules, until=_made(name, kind, rules.until))
        else:
            field = name.removeprefix(f"{ALGORITHM}.")
            object.__setattr__(algorithm, field, _made(name, kind, getattr(algorithm, field)))
    recipe = dataclasses.replace(run.recipe, algorithm=algorithm, controller=controller)
    return dataclasses.replace(run, recipe=recipe, rules=rules)


def _named(name: str, word: str, kinds: Mapping[str, Any]) -> Any:
    """Return the class of this name; capitals, ``_`` and ``-`` do not count."""
    plain = word.replace("_", "").replace("-", "").lower()
    for known, kind in kinds.items():
        if known.lower() == plain:
            return kind
    raise InputError(f"--{name}: expected one of {', '.join(kinds)}, got {word!r}")


def _made(name: str, kind: Any, before: Any) -> Any:
    """Return a piece of a class with its defaults, or the one before if it has this class."""
    if kind is None or type(before) is kind:
        return None if kind is None else before
    lacking = [field.name for field in dataclasses.fields(kind) if not has_default(field)]
    require(not lacking, f"--{name} {kind.__name__} has no default {', '.join(lacking)}: set it in the configuration")
    return kind()


def flags(run: Any) -> dict[str, argparse.Action]:
    """Return the flags that name a class, for help, by their names."""
    table = argparse.ArgumentParser(add_help=False)
    found = {}
    for name, kinds in set_by_class().items():
        part = operator.attrgetter(name)(run)
        now = "None" if part is None else type(part).__name__
        told = f"by the name of its class, whose fields are flags in turn (default: {now})"
        found[name] = table.add_argument(f"--{name}", metavar="{" + ",".join(kinds) + "}", help=told)
    return found
