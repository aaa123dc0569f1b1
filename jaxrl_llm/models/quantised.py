"""Quantised matrices of a frozen model. Each product widens its own layer's matrix, in the forward and the backward
pass: the wide form of a whole stack never exists.

- int8: a scale for each output channel.
- NF4, as in QLoRA (arXiv 2305.14314): blocks of 64 numbers along the inputs share a scale, and each number is one of
  16, the quantiles of a normal distribution. The scales are 8-bit numbers themselves, in blocks of 256 after their mean
  is subtracted. Numbers, scales and the order of blocks are those of bitsandbytes.
- MXFP4 (OCP Microscaling 1.0): blocks of 32 numbers along the inputs share a power of two, and each number is one of
  16, a sign, two bits of exponent and one of mantissa.
- FP8: numbers of type float8_e4m3fn, with a scale for each 128 inputs of 128 outputs, as in DeepSeek-V3 (arXiv
  2412.19437).

A byte has the codes of inputs i and i + 32 of each 64: neighbours would be an axis of two when they are parted, which
TPUs widen to 128.
"""

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxrl_llm.errors import require
from jaxrl_llm.models.packed_files import BLOCK_SIZES, MXFP4, NF4, PAIRED, SCALE_BLOCK, dynamic_map, pair_codes

LARGEST_FP8 = 448.0


class QuantisedMatrix(nnx.Module):
    """A frozen matrix [in.., out..] in fewer bits, or a stack of them; the arrays are as ``quantise`` makes them.

    Attributes:
      kind: "int8", "nf4", "mxfp4" or "fp8".
      inputs: sizes of the summed axes.
      outer: number of axes before them that are not of the stack: 1 for experts, else 0.
      arrays: ``codes`` [outer.., in.., out..] of int8, and ``scales`` [outer.., out..]; ``codes`` of FP8, and
        ``scales`` [outer.., in / 128, out / 128] of its two axes; ``nibbles`` [outer.., in / 2, out..] and ``scales``
        [outer.., out.., in / 64 or 32] of NF4 and MXFP4, and NF4's ``scale_scales`` and ``offset``.
    """

    def __init__(self, kind: str, inputs: tuple[int, ...], arrays: dict[str, jax.Array], outer: int = 0):
        self.kind, self.inputs, self.outer = kind, inputs, outer
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    def arrays(self) -> dict[str, jax.Array]:
        """Return the arrays by name."""
        return {name: x.get_value() for name, x in vars(self).items() if isinstance(x, nnx.Param)}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def quantise(kind: str, stack: jax.Array, inputs: int, outer: int = 0) -> QuantisedMatrix:
    """Quantise a stack of matrices [L, outer.., in.., out..] with these numbers of summed axes, and of axes before
    them. InputError: 64 does not divide the inputs for NF4 or MXFP4.
    """
    sizes = stack.shape[1 + outer : 1 + outer + inputs]
    width = math.prod(sizes)
    require(
        width % PAIRED == 0 or kind in ("int8", "fp8"),
        f"learner.lora.base {kind} packs {PAIRED} inputs of a matrix together, and this model has one of {width}: "
        "set it to int8, fp8 or bf16",
    )
    each: Any = functools.partial(_QUANTISE[kind], inputs)
    for _ in range(1 + outer):
        each = functools.partial(jax.lax.map, each)
    return QuantisedMatrix(kind, sizes, each(stack), outer)


def _quantise_int8(inputs: int, matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [in.., out..]."""
    axes = tuple(range(inputs))
    wide = matrix.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axes, keepdims=True) / 127, jnp.finfo(jnp.float32).tiny)
    return {"codes": jnp.round(wide / scales).astype(jnp.int8), "scales": jnp.squeeze(scales, axes)}


def _quantise_fp8(inputs: int, matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [in.., out..]."""
    wide = matrix.astype(jnp.float32).reshape(math.prod(matrix.shape[:inputs]), -1)
    size = BLOCK_SIZES["fp8"]
    blocks = jnp.pad(wide, [(0, -n % size) for n in wide.shape])
    blocks = blocks.reshape(-(-wide.shape[0] // size), size, -1, size)
    scales = jnp.maximum(jnp.max(jnp.abs(blocks), (1, 3)) / LARGEST_FP8, jnp.finfo(jnp.float32).tiny)
    codes = jnp.clip(wide / _spread_scales(scales, wide.shape), -LARGEST_FP8, LARGEST_FP8)
    return {"codes": codes.astype(jnp.float8_e4m3fn).reshape(matrix.shape), "scales": scales}


def _spread_scales(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return each number's scale of FP8 [in, out]."""
    for axis, size in enumerate(shape):
        scales = jax.lax.slice_in_dim(jnp.repeat(scales, BLOCK_SIZES["fp8"], axis), 0, size, axis=axis)
    return scales


def _part_codes(nibbles: jax.Array) -> jax.Array:
    """Return the codes [in, out..] of ``pair_codes``."""
    pairs = nibbles.reshape(-1, 1, PAIRED // 2, *nibbles.shape[1:])
    shape = (len(pairs), 2, *pairs.shape[2:])
    shifts = 4 - 4 * jax.lax.broadcasted_iota(jnp.uint8, shape, 1)
    return (jnp.broadcast_to(pairs, shape) >> shifts & 15).reshape(-1, *nibbles.shape[1:])


def _blocks_of(kind: str, inputs: int, matrix: jax.Array) -> jax.Array:
    """Return one matrix [in.., out..] in float32, as blocks [in / size, size, out..]."""
    return matrix.astype(jnp.float32).reshape(-1, BLOCK_SIZES[kind], *matrix.shape[inputs:])


def _quantise_nf4(inputs: int, matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [in.., out..]."""
    blocks = _blocks_of("nf4", inputs, matrix)
    largest = jnp.max(jnp.abs(blocks), axis=1)
    middles = jnp.asarray([(a + b) / 2 for a, b in itertools.pairwise(NF4)], jnp.float32)
    scaled = blocks / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)[:, None]
    nearest = jnp.searchsorted(middles, scaled, side="left", method="compare_all").astype(jnp.uint8)
    largest = jnp.moveaxis(largest, 0, -1)
    offset = jnp.mean(largest)
    flat = (largest - offset).reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    scale_scales = jnp.max(jnp.abs(flat), axis=-1)
    table = jnp.asarray(dynamic_map())
    relative = flat / jnp.maximum(scale_scales, jnp.finfo(jnp.float32).tiny)[:, None]
    scales = jnp.searchsorted((table[:-1] + table[1:]) / 2, relative).astype(jnp.uint8)
    return {
        "nibbles": pair_codes(nearest.reshape(-1, *matrix.shape[inputs:])),
        "scales": scales.reshape(-1)[: largest.size].reshape(largest.shape),
        "scale_scales": scale_scales,
        "offset": offset,
    }


def _quantise_mxfp4(inputs: int, matrix: jax.Array) -> dict[str, jax.Array]:
    """Quantise one matrix [in.., out..]: a block's power of two is that of its largest number over 4."""
    blocks = _blocks_of("mxfp4", inputs, matrix)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=1), jnp.uint32)
    scales = jnp.maximum((bits >> 23).astype(jnp.int32) - 2, 1).astype(jnp.uint8)
    scaled = blocks / _power_of_two(scales)[:, None]
    size = jnp.abs(scaled)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(MXFP4[:8])]
    # A number in the middle goes to the even one of two codes.
    above = [size >= middle if index % 2 else size > middle for index, middle in enumerate(middles)]
    codes = functools.reduce(jnp.add, (x.astype(jnp.uint8) for x in above)) + 8 * (scaled < 0).astype(jnp.uint8)
    return {
        "nibbles": pair_codes(codes.reshape(-1, *matrix.shape[inputs:])), "scales": jnp.moveaxis(scales, 0, -1),
    }  # fmt: skip


def _power_of_two(code: jax.Array) -> jax.Array:
    """Return 2 ** (code - 127), float32, exactly; 0 in place of 2 ** -127 for code 0."""
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint32) << 23, jnp.float32)


def widen(matrix: jax.Array | QuantisedMatrix, dtype: Any) -> jax.Array:
    """Return one matrix [in.., out..] in a floating dtype; experts' [E, in.., out..]."""
    if not isinstance(matrix, QuantisedMatrix):
        return matrix.astype(dtype)
    each: Any = functools.partial(_WIDEN[matrix.kind], matrix.inputs, dtype)
    arrays = matrix.arrays()
    for _ in range(matrix.outer):
        each = jax.vmap(each)
        # Otherwise a GPU's compiler may transpose a whole stack of packed experts before a loop over layers. On a mesh
        # the constraint would gather them.
        if jax.sharding.get_abstract_mesh().size <= 1:
            arrays = {name: with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for name, x in arrays.items()}
    return each(arrays)


def widen_codes(matrix: jax.Array | QuantisedMatrix, dtype: Any) -> tuple[jax.Array, jax.Array | float]:
    """Return a matrix [in.., out..], and the scales [1, 1, out..] of its products: int8's in bfloat16, else 1. GPUs
    convert int8 as they multiply; what is scaled before is rounded once more, and written and read in its wide form.
    """
    if isinstance(matrix, QuantisedMatrix) and matrix.kind == "int8" and dtype == jnp.bfloat16:
        return matrix.codes[...].astype(dtype), matrix.scales[...][None, None]
    return widen(matrix, dtype), 1.0


def _widen_int8(inputs: tuple[int, ...], dtype: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    return (arrays["codes"].astype(jnp.float32) * arrays["scales"][(None,) * len(inputs)]).astype(dtype)


def _widen_fp8(inputs: tuple[int, ...], dtype: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    codes = arrays["codes"]
    wide = codes.astype(jnp.float32).reshape(math.prod(inputs), -1)
    return (wide * _spread_scales(arrays["scales"], wide.shape)).astype(dtype).reshape(codes.shape)


def _widen_nf4(inputs: tuple[int, ...], dtype: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    scales = arrays["scales"]
    flat = jnp.asarray(dynamic_map())[scales.reshape(-1)]
    padded = jnp.pad(flat, (0, -flat.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK)
    largest = (padded * arrays["scale_scales"][:, None]).reshape(-1)[: flat.size] + arrays["offset"]
    return _widen_blocks(NF4, arrays["nibbles"], largest.reshape(scales.shape), inputs, dtype)


def _widen_mxfp4(inputs: tuple[int, ...], dtype: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    return _widen_blocks(MXFP4, arrays["nibbles"], _power_of_two(arrays["scales"]), inputs, dtype)


def _widen_blocks(
    table: tuple[float, ...], nibbles: jax.Array, scales: jax.Array, inputs: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return a matrix [in.., out..] of nibbles [in / 2, out..], and the scales [out.., blocks] of its blocks."""
    outputs = scales.shape[:-1]
    blocks = _number_of(table, _part_codes(nibbles)).reshape(scales.shape[-1], -1, *outputs)
    return (blocks * jnp.moveaxis(scales, -1, 0)[:, None]).astype(dtype).reshape(*inputs, *outputs)


def _number_of(table: tuple[float, ...], codes: jax.Array) -> jax.Array:
    """Return the numbers of codes 0 to 15, float32, exactly: by each bit one of two. A table would be read one by one,
    and choices among constants would be hoisted out of a scan, as sixteen arrays of a matrix's size.
    """
    numbers: list[Any] = list(table)
    for bit in range(4):
        is_set = ((codes >> bit) & 1).astype(jnp.float32)
        numbers = [high * is_set + low * (1 - is_set) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


_QUANTISE = {"int8": _quantise_int8, "nf4": _quantise_nf4, "mxfp4": _quantise_mxfp4, "fp8": _quantise_fp8}
_WIDEN = {"int8": _widen_int8, "nf4": _widen_nf4, "mxfp4": _widen_mxfp4, "fp8": _widen_fp8}
