"""Fingerprints of weights: a few bytes for each, which other weights would not have."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def fingerprint(model: Any) -> Any:
    """Return a 64-bit checksum, uint32[2], of every weight; the sharding of the weights does not change it.

    Each element's bits are mixed with its place and added up modulo 2 ** 32, which no order of summation changes.
    """
    return jax.tree.map(_checksum, model)


def weights_digest(model: Any) -> str:
    """Return 16 hexadecimal digits that identify the weights; results computed from a model are stored under them."""
    return digest(jax.tree.leaves(jax.device_get(fingerprint(model))))


def digest(arrays: Sequence[np.ndarray]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the contents of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.asarray(array).tobytes() + b"\n")
    return found.hexdigest()[:16]


def _checksum(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    sums = [jnp.sum(_mix(_mix(place + jnp.uint32(seed)) ^ bits), dtype=jnp.uint32) for seed in (1, 0x9E3779B9)]
    return jnp.stack(sums)


def _mix(x: jax.Array) -> jax.Array:
    """Apply a bijection of uint32 in which every input bit moves half of the output bits (MurmurHash3's finaliser)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
