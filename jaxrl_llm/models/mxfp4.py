"""Weights in MXFP4 (OCP Microscaling 1.0): blocks of 32 numbers of 4 bits with a common power of two, two in a byte.

GPT-OSS stores a matrix of an expert by its columns: ``_blocks`` uint8[E, out, in / 32, 16] and ``_scales`` uint8[E,
out, in / 32], where the tensor itself is [E, in, out].
"""

import functools

import numpy as np

from jaxrl_llm.errors import require
from jaxrl_llm.models.tensors import StoredTensor

SUFFIXES = ("_blocks", "_scales")
"""Ends of the names of the two tensors that a packed one consists of."""
BLOCK = 32
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = np.array(_POSITIVE + [-value for value in _POSITIVE], np.float32)
"""What the 16 patterns of bits stand for: a sign, two bits of exponent and one of mantissa."""


def unpacked(blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Return the tensor [E, in, out] of two that are read together, float32; InputError where they do not fit."""
    fits = len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and blocks.shape[:3] == scales.shape
    require(
        fits,
        f"packed weights have blocks {list(blocks.shape)} and scales {list(scales.shape)}: fetch the checkpoint again",
    )
    experts, outputs, count, _ = blocks.shape
    return StoredTensor((experts, count * BLOCK, outputs), functools.partial(_read, blocks, scales))


def _read(blocks: StoredTensor, scales: StoredTensor, place: tuple[slice, ...]) -> np.ndarray:
    experts, inputs, outputs = place
    groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
    packed = blocks.part((experts, outputs, groups, slice(0, BLOCK // 2)))
    # The first of two numbers is in the lower bits; a scale of 127 is 1.
    pairs = VALUES[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:3], BLOCK)
    exponents = scales.part((experts, outputs, groups)).astype(np.int32) - 127
    values = np.ldexp(pairs, exponents[..., None]).reshape(*packed.shape[:2], -1)
    first = inputs.start - groups.start * BLOCK
    return values[:, :, first : first + inputs.stop - inputs.start].swapaxes(1, 2)
