"""Checks of arguments: a wrong rank, shape, dtype or number raises an error that names the argument."""

import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.setting import Range, annotations, check_fields

ABOVE_0 = Range("(0, inf]")
AT_LEAST_0 = Range("[0, inf]")
FINITE = Range("[-inf, inf)", words="finite")
KINDS = {"floating point": jnp.floating, "integers": jnp.integer}


def ranked(rank: int, **arrays: Any) -> None:
    """Refuse None and any array without exactly ``rank`` axes.

    Raises:
      ValueError: names the array.
    """
    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{name} must be given")
        if np.ndim(x) != rank:
            raise ValueError(f"{name} must have {rank} axes, got shape {np.shape(x)}")


def shaped(shape: tuple[int, ...], **arrays: Any) -> None:
    """Refuse an array of another shape; None is skipped.

    Raises:
      ValueError: names the array.
    """
    for name, x in arrays.items():
        if x is not None and np.shape(x) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(x)}")


def array(x: Any, name: str, kind: str = "floating point") -> jax.Array:
    """Return ``x`` as an array of this kind: a key of ``KINDS``, or "any": integers and bools become float32.

    Raises:
      ValueError: it is None, no array, or of another dtype; the message contains ``name``.
    """
    if x is None:
        raise ValueError(f"{name} must be given")
    try:
        x = jnp.asarray(x)
    except TypeError as error:
        raise ValueError(f"{name} must be an array of numbers, got {type(x).__name__}") from error
    if kind == "any" and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)):
        return x.astype(jnp.float32)
    wanted = "floating point" if kind == "any" else kind
    if not jnp.issubdtype(x.dtype, KINDS[wanted]):
        raise ValueError(f"{name} must be {wanted}, got {x.dtype}")
    return x


def flags(x: Any, shape: tuple[int, ...], name: str) -> jax.Array:
    """Return ``x`` as bool of this shape, True where it is not 0: a mask, or the ends of steps.

    Raises:
      ValueError: wrong shape or not numeric; the message contains ``name``.
    """
    array(x, name, "any")
    shaped(shape, **{name: x})
    return jnp.asarray(x).astype(bool)


def count(given: Any, counted: jax.Array, name: str, dtype: Any) -> jax.Array:
    """Return the divisor of a loss, at least 1: the given count, or the sum of ``counted``.

    Raises:
      ValueError: the given count is not a scalar; the message contains ``name``.
    """
    ranked(0, **{name: 0 if given is None else given})
    return jnp.maximum(jnp.sum(counted) if given is None else given, 1).astype(dtype)


def within_bounds(piece: Any) -> None:
    """Refuse a value unless its fields lie in the ranges, and among the literals, of their annotations.

    A class of values takes it as its ``__post_init__``.

    Raises:
      ValueError: names class, field and value.
    """
    owner = type(piece).__name__
    try:
        check_fields(piece, f"{owner}.")
    except InputError as error:
        raise ValueError(*error.args) from None
    for name, (hint, _) in annotations(type(piece)).items():
        if typing.get_origin(hint) is typing.Literal and getattr(piece, name) not in typing.get_args(hint):
            allowed = " or ".join(typing.get_args(hint))
            raise ValueError(f"{owner}.{name} must be {allowed}, got {getattr(piece, name)!r}")


def ordered(owner: Any, low: str, high: str) -> None:
    """Refuse a value unless ``0 <= low < high`` holds for the fields of these names.

    Raises:
      ValueError: names class, fields and values.
    """
    least = getattr(owner, low)
    most = getattr(owner, high)
    if not 0 <= least < most:
        raise ValueError(f"{type(owner).__name__} needs 0 <= {low} < {high}, got {low}={least} and {high}={most}")
