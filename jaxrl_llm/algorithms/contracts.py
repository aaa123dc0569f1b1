"""Checks of array arguments: a wrong rank, shape or dtype raises an error that names the argument.

chex compares ranks and shapes, of traced arrays too; ``chex.disable_asserts()`` disables that.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ranked(rank: int, **arrays: Any) -> None:
    """Refuse None and any array without exactly ``rank`` axes.

    Raises:
      ValueError: names the array.
    """
    import chex  # here, like its use below: what only reads settings needs none of it

    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{name} must be given")
        _holds(chex.assert_rank, x, rank, f"{name} must have {rank} axes, got shape {np.shape(x)}")


def listed(**arrays: Any) -> None:
    """Refuse an array that is neither a scalar nor [B].

    Raises:
      ValueError: names the array.
    """
    for name, x in arrays.items():
        if np.ndim(x) > 1:
            raise ValueError(f"{name} must be [B], got shape {np.shape(x)}")


def shaped(shape: tuple[int, ...], **arrays: Any) -> None:
    """Refuse an array of another shape; None is skipped.

    Raises:
      ValueError: names the array.
    """
    import chex

    for name, x in arrays.items():
        if x is not None:
            _holds(chex.assert_shape, x, shape, f"{name} must have shape {shape}, got {np.shape(x)}")


def _holds(assertion: Callable[..., None], x: Any, wanted: Any, otherwise: str) -> None:
    """Run a chex assertion on one array, with an error that names it: chex would call it "input 0"."""
    try:
        assertion([x if hasattr(x, "shape") else np.asarray(x)], wanted)
    except AssertionError:
        raise ValueError(otherwise) from None


def array(x: Any, name: str) -> jax.Array:
    """Return ``x`` as an array.

    Raises:
      ValueError: ``x`` is None or cannot be converted; the message contains ``name``.
    """
    if x is None:
        raise ValueError(f"{name} must be given")
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise ValueError(f"{name} must be an array of numbers, got {type(x).__name__}") from error


def floating(x: Any, name: str) -> jax.Array:
    """Return ``x`` as an array of floats.

    Raises:
      ValueError: it has another dtype; the message contains ``name``.
    """
    x = array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    return x


def numeric(x: Any, name: str) -> jax.Array:
    """Return ``x`` as an array of floats; integers and bools become float32.

    Raises:
      ValueError: it has another dtype; the message contains ``name``.
    """
    x = array(x, name)
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
        return x.astype(jnp.float32)
    return floating(x, name)


def integers(x: Any, name: str) -> jax.Array:
    """Return ``x`` as an array of integers.

    Raises:
      ValueError: it has another dtype; the message contains ``name``.
    """
    x = array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {x.dtype}")
    return x


def flags(x: Any, shape: tuple[int, ...], name: str) -> jax.Array:
    """Return ``x`` as bool of this shape, True where it is not 0: a mask, or the ends of steps.

    Raises:
      ValueError: wrong shape or not numeric; the message contains ``name``.
    """
    numeric(x, name)
    shaped(shape, **{name: x})
    return jnp.asarray(x).astype(bool)


def count(given: Any, counted: jax.Array, name: str, dtype: Any) -> jax.Array:
    """Return the divisor of a loss, at least 1: the given count, or the sum of ``counted``.

    Raises:
      ValueError: the given count is not a scalar; the message contains ``name``.
    """
    ranked(0, **{name: 0 if given is None else given})
    return jnp.maximum(jnp.sum(counted) if given is None else given, 1).astype(dtype)


def positive(owner: Any, *names: str) -> None:
    """Refuse a value unless the named fields are above 0.

    Raises:
      ValueError: names class, field and value.
    """
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{type(owner).__name__}.{name} must be above 0, got {getattr(owner, name)}")


def nonnegative(owner: Any, *names: str) -> None:
    """Refuse a value unless the named fields are at least 0.

    Raises:
      ValueError: names class, field and value.
    """
    for name in names:
        if not getattr(owner, name) >= 0:
            raise ValueError(f"{type(owner).__name__}.{name} must be at least 0, got {getattr(owner, name)}")


def finite(owner: Any, *names: str) -> None:
    """Refuse a value if one of the named fields is infinite.

    Raises:
      ValueError: names class, field and value.
    """
    for name in names:
        if math.isinf(getattr(owner, name)):
            raise ValueError(f"{type(owner).__name__}.{name} must be finite, got {getattr(owner, name)}")


def ordered(owner: Any, low: str, high: str) -> None:
    """Refuse a value unless ``0 <= low < high`` holds for the fields of these names.

    Raises:
      ValueError: names class, fields and values.
    """
    least = getattr(owner, low)
    most = getattr(owner, high)
    if not 0 <= least < most:
        raise ValueError(f"{type(owner).__name__} needs 0 <= {low} < {high}, got {low}={least} and {high}={most}")


def one_of(owner: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value unless the named field has one of the allowed values.

    Raises:
      ValueError: names class, field and value.
    """
    if getattr(owner, name) not in allowed:
        raise ValueError(f"{type(owner).__name__}.{name} must be {' or '.join(allowed)}, got {getattr(owner, name)!r}")
