"""Quantised matrices of a frozen model: int8 by output channel, and NF4 as in QLoRA (arXiv 2305.14314). Each product
widens its own layer's matrix, in the forward and the backward pass: the wide form of a whole stack never exists.

NF4: blocks of 64 numbers along the inputs share a scale, and each number is one of 16, the quantiles of a normal
distribution. The scales are 8-bit numbers themselves, in blocks of 256 after their mean is subtracted. The order of
blocks, nibbles and codes is that of bitsandbytes.
"""

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.errors import require

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers of NF4 (QLoRA, appendix E)."""
BLOCK_SIZE, SCALE_BLOCK = 64, 256
"""Numbers with a common scale, and scales with a common scale of their own."""


def dynamic_map() -> np.ndarray:
    """Return the 256 numbers of bitsandbytes' dynamic 8-bit type in rising order, float32: between 0 and 1 each decade
    has twice as many as the one below (arXiv 2110.02861).
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        means = 10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2
        numbers += [*means.tolist(), *(-means).tolist()]
    return np.sort(np.array(numbers + [0.0] * (256 - len(numbers)), np.float32))


class QuantisedMatrix(nnx.Module):
    """A frozen matrix [in.., out..] in fewer bits, or a stack of them; the arrays are as ``quantise`` makes them.

    Attributes:
      kind: "int8" or "nf4".
      inputs: sizes of the summed axes.
      arrays: int8's ``codes`` and ``scales`` [out..]; NF4's ``nibbles`` [out.., in / 2], ``scales`` [out.., in / 64],
        ``scale_scales`` and ``offset``.
    """

    def __init__(self, kind: str, inputs: tuple[int, ...], arrays: dict[str, jax.Array]):
        self.kind, self.inputs = kind, inputs
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@functools.partial(jax.jit, static_argnums=(0, 2))
def quantise(kind: str, stack: jax.Array, inputs: int) -> QuantisedMatrix:
    """Quantise a stack of matrices [L, in.., out..] with this number of summed axes. InputError: NF4's blocks do not
    divide the inputs.
    """
    sizes = stack.shape[1 : 1 + inputs]
    if kind == "int8":
        return QuantisedMatrix(kind, sizes, jax.lax.map(functools.partial(_quantise_int8, inputs), stack))
    outputs, width = stack.shape[1 + inputs :], math.prod(sizes)
    require(
        width % BLOCK_SIZE == 0,
        f"learner.lora.base nf4 packs {BLOCK_SIZE} inputs of a matrix together, and this model has one of {width}: "
        "set it to int8 or bf16",
    )
    inputs_last = jnp.moveaxis(stack, tuple(range(1, 1 + inputs)), tuple(range(-inputs, 0)))
    return QuantisedMatrix(kind, sizes, jax.lax.map(_quantise_nf4, inputs_last.reshape(len(stack), *outputs, width)))


def _quantise_int8(inputs: int, matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [in.., out..]."""
    axes = tuple(range(inputs))
    wide = matrix.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axes, keepdims=True) / 127, jnp.finfo(jnp.float32).tiny)
    return {"codes": jnp.round(wide / scales).astype(jnp.int8), "scales": jnp.squeeze(scales, axes)}


def _quantise_nf4(matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [out.., in]."""
    blocks = matrix.astype(jnp.float32).reshape(*matrix.shape[:-1], -1, BLOCK_SIZE)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    middles = jnp.asarray([(a + b) / 2 for a, b in itertools.pairwise(NF4)], jnp.float32)
    scaled = (blocks / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)[..., None]).reshape(matrix.shape)
    nearest = jnp.searchsorted(middles, scaled, side="left", method="compare_all").astype(jnp.uint8)
    offset = jnp.mean(largest)
    flat = (largest - offset).reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    scale_scales = jnp.max(jnp.abs(flat), axis=-1)
    table = jnp.asarray(dynamic_map())
    relative = flat / jnp.maximum(scale_scales, jnp.finfo(jnp.float32).tiny)[:, None]
    scales = jnp.searchsorted((table[:-1] + table[1:]) / 2, relative).astype(jnp.uint8)
    return {
        "nibbles": nearest[..., ::2] << 4 | nearest[..., 1::2],
        "scales": scales.reshape(-1)[: largest.size].reshape(largest.shape),
        "scale_scales": scale_scales,
        "offset": offset,
    }


def widen(matrix: jax.Array | QuantisedMatrix, dtype: Any) -> jax.Array:
    """Return one matrix [in.., out..] in a floating dtype."""
    if not isinstance(matrix, QuantisedMatrix):
        return matrix.astype(dtype)
    scales = matrix.scales[...]
    if matrix.kind == "int8":
        return (matrix.codes[...].astype(jnp.float32) * scales[(None,) * len(matrix.inputs)]).astype(dtype)
    nibbles = matrix.nibbles[...]
    flat = jnp.asarray(dynamic_map())[scales.reshape(-1)]
    padded = jnp.pad(flat, (0, -flat.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    largest = (padded * matrix.scale_scales[...][:, None]).reshape(-1)[: flat.size] + matrix.offset[...]
    pairs = jnp.stack([nibbles >> 4, nibbles & 15], axis=-1)
    blocks = _nf4_number(pairs).reshape(*scales.shape, BLOCK_SIZE) * largest.reshape(scales.shape)[..., None]
    rows = blocks.reshape(*nibbles.shape[:-1], *matrix.inputs).astype(dtype)
    outputs = nibbles.ndim - 1
    return jnp.moveaxis(rows, tuple(range(outputs)), tuple(range(-outputs, 0)))


def _nf4_number(codes: jax.Array) -> jax.Array:
    """Return the numbers of codes 0 to 15, float32, exactly: by each bit one of two. A table would be read one by one,
    and choices among constants would be hoisted out of a scan, as sixteen arrays of a matrix's size.
    """
    numbers: list[Any] = list(NF4)
    for bit in range(4):
        is_set = ((codes >> bit) & 1).astype(jnp.float32)
        numbers = [high * is_set + low * (1 - is_set) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]
