"""Pieces on the command line, by the names of their classes: ``--recipe.algorithm.kl K3``, ``--rules.until None``."""

import argparse
import copy
import dataclasses
import operator
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.advantages import Estimator, KLInReward
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus, UnbiasedK3
from jaxrl_llm.algorithms.loss import OPTIONAL
from jaxrl_llm.algorithms.reduce import Reducer
from jaxrl_llm.algorithms.surrogates import Surrogate, TopEntropy
from jaxrl_llm.errors import require
from jaxrl_llm.recipes import Controller
from jaxrl_llm.rules.settings import Until
from jaxrl_llm.system.setting import has_default

ALGORITHM, CONTROLLER, UNTIL = "recipe.algorithm", "recipe.controller", "rules.until"


def piece_classes() -> dict[str, dict[str, Any]]:
    """Return the classes that each piece may have, by its dotted name and theirs; its file's too."""
    pieces: dict[str, tuple[type, ...]] = {
        "advantage": _subclasses(Estimator),
        "ratio": (ratios.Token, ratios.Sequence, ratios.SequenceToken),
        "surrogate": _subclasses(Surrogate),
        "reduce": _subclasses(Reducer),
        "kl": (K1, K2, K3, K3Plus, UnbiasedK3),
        "correction": (ratios.TruncatedIS, ratios.MaskedIS, ratios.SequenceMask),
        "sequence_filter": (ratios.OffPolicySequenceMask,),
        "token_filter": (TopEntropy,),
    }
    kinds_of = {f"{ALGORITHM}.{name}": kinds for name, kinds in pieces.items()}
    kinds_of[CONTROLLER] = typing.get_args(Controller)
    by_class: dict[str, dict[str, Any]] = {name: {k.__name__: k for k in kinds} for name, kinds in kinds_of.items()}
    for name in (CONTROLLER, *(f"{ALGORITHM}.{name}" for name in OPTIONAL)):
        by_class[name]["None"] = None
    return by_class


def set_by_class() -> dict[str, dict[str, Any]]:
    """Return the classes of all settings that are given by the name of their class: pieces, and the run's end."""
    return piece_classes() | {UNTIL: {"None": None} | {kind.__name__: kind for kind in typing.get_args(Until)}}


def _subclasses(base: type) -> tuple[type, ...]:
    """Return the pieces that are made from an interface, by name."""
    kinds = {kind for subclass in base.__subclasses__() for kind in (subclass, *_subclasses(subclass))}
    pieces = (kind for kind in kinds if dataclasses.is_dataclass(kind) and kind is not KLInReward)
    return tuple(sorted(pieces, key=lambda kind: kind.__name__))


def with_pieces(run: Any, words: Mapping[str, str]) -> Any:
    """Return the run with a piece of each of these classes, by the dotted names of the pieces; in the names of classes
    capitals, ``_`` and ``-`` do not count. A new piece has the defaults of its class; one of the same class stays as it
    is. Whether the pieces fit together is left to be checked with the values of the other flags.
    """
    algorithm = copy.copy(run.recipe.algorithm)
    if isinstance(algorithm.advantage, KLInReward):  # wrapped anew when the algorithm is made
        object.__setattr__(algorithm, "advantage", algorithm.advantage.estimator)
    controller, rules = run.recipe.controller, run.rules
    classes = set_by_class()
    for name, word in words.items():
        kinds = {class_name.lower(): kind for class_name, kind in classes[name].items()}
        plain = word.replace("_", "").replace("-", "").lower()
        require(plain in kinds, f"--{name}: expected one of {', '.join(classes[name])}, got {word!r}")
        kind = kinds[plain]
        if name == CONTROLLER:
            controller = _default_piece(name, kind, controller)
        elif name == UNTIL:
            rules = dataclasses.replace(rules, until=_default_piece(name, kind, rules.until))
        else:
            field = name.removeprefix(f"{ALGORITHM}.")
            object.__setattr__(algorithm, field, _default_piece(name, kind, getattr(algorithm, field)))
    recipe = dataclasses.replace(run.recipe, algorithm=algorithm, controller=controller)
    return dataclasses.replace(run, recipe=recipe, rules=rules)


def _default_piece(name: str, kind: Any, before: Any) -> Any:
    """Return a piece of a class with its defaults, or the one before if it has this class."""
    if kind is None or type(before) is kind:
        return None if kind is None else before
    missing = [field.name for field in dataclasses.fields(kind) if not has_default(field)]
    require(not missing, f"--{name} {kind.__name__} has no default {', '.join(missing)}: set it in the configuration")
    return kind()


def class_flags(run: Any) -> dict[str, argparse.Action]:
    """Return the flags that name a class, for help, by their names."""
    table = argparse.ArgumentParser(add_help=False)
    by_flag = {}
    for name, kinds in set_by_class().items():
        part = operator.attrgetter(name)(run)
        now = "None" if part is None else type(part).__name__
        help_text = f"by the name of its class, whose fields are flags in turn (default: {now})"
        by_flag[name] = table.add_argument(f"--{name}", metavar="{" + ",".join(kinds) + "}", help=help_text)
    return by_flag
