"""Checkpoints with matrices in fewer bits, read as floating tensors, or array by array as ``quantised`` keeps them.

- MXFP4, as GPT-OSS stores experts: ``NAME_blocks`` uint8[E, out, in / 32, 16] and ``NAME_scales`` uint8[E, out,
  in / 32], where the tensor itself is [E, in, out].
- bitsandbytes' 4 bits: ``NAME`` uint8[in out / 2, 1], and ``NAME.absmax``, ``NAME.quant_map`` and others beside it.
- FP8 by blocks: ``NAME`` float8_e4m3fn[out, in] and ``NAME_scale_inv`` [out / 128, in / 128].
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.families import StoredTensor

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers of NF4 (QLoRA, appendix E)."""
MXFP4 = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The 16 numbers of MXFP4."""
BLOCK_SIZES = {"nf4": 64, "mxfp4": 32, "fp8": 128}
"""Inputs with a common scale."""
SCALE_BLOCK = 256
"""Scales of NF4 with a common scale of their own."""
PAIRED = 64
"""Inputs of which half share a byte with the other half."""
METHODS = ("mxfp4", "bitsandbytes", "fp8")
"""The ``quant_method`` of a config.json that can be read."""
FLOATS = ("F64", "F32", "F16", "BF16")
STATE = ".quant_state.bitsandbytes__"
"""Between the name of a matrix and its type, in the name of bitsandbytes' description of it."""


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


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A tensor that is stored in fewer bits, of a kind of ``quantised``; "" where that has none. ``arrays`` reads those
    of a ``QuantisedMatrix`` of the stored axes: NF4's [in / 2, out], FP8's [in, out], MXFP4's [E, in / 2, out], of some
    outputs where a slice is given.
    """

    kind: str = ""
    arrays: Callable[..., dict[str, np.ndarray]] = dict


def pair_codes(codes: Any) -> Any:
    """Return bytes [in / 2, out..] of codes [in, out..] from 0 to 15."""
    halves = codes.reshape(-1, 2, PAIRED // 2, *codes.shape[1:])
    return (halves[:, 0] << 4 | halves[:, 1]).reshape(-1, *codes.shape[1:])


def open_packed(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors of a file or a checkpoint, with one ``PackedTensor`` in place of all that it is stored as.
    InputError: they do not fit together, or a tensor has a type that is not read.
    """
    tensors: dict[str, StoredTensor] = {}
    rest = dict(stored)
    parts_of: dict[str, dict[str, StoredTensor]] = collections.defaultdict(dict)
    for name, tensor in stored.items():
        matrix, dot, part = name.partition(".weight.")
        parts_of[f"{matrix}.weight" if dot else ""][part] = tensor
    for name in stored:
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in stored:
            base = name.removesuffix("_blocks")
            tensors[base] = _mxfp4(base, rest.pop(name), rest.pop(f"{base}_scales"))
        elif name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in stored:
            base = name.removesuffix("_scale_inv")
            tensors[base] = _fp8(base, rest.pop(base), rest.pop(name))
        elif STATE in name:
            base, _, kind = name.partition(STATE)
            parts = parts_of[base]
            for part in parts:
                rest.pop(f"{base}.{part}", None)
            require(base in rest, f"the weights hold {name} without {base}; fetch the checkpoint again")
            tensors[base] = _bitsandbytes(base, rest.pop(base), parts, kind)
    for name, tensor in rest.items():
        if tensor.dtype not in FLOATS:
            raise InputError(f"{name} is stored as {tensor.dtype}, which cannot be read alone; read are "
                             f"{', '.join(FLOATS)}, MXFP4, FP8 by blocks and 4 bits of bitsandbytes")  # fmt: skip
    return tensors | rest


def _misfit(name: str, *parts: StoredTensor) -> InputError:
    shapes = " and ".join(str(list(part.shape)) for part in parts)
    return InputError(f"the packed {name} has parts of shapes {shapes}, which do not fit: fetch the checkpoint again, "
                      "or take the model in 16 bits")  # fmt: skip


def _whole_blocks(part: slice, size: int) -> slice:
    return slice(part.start // size, -(-part.stop // size))


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> PackedTensor:
    size = BLOCK_SIZES["mxfp4"]
    fits = len(blocks.shape) == 4 and blocks.shape[3] == size // 2 and blocks.shape[:3] == scales.shape
    if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
        raise _misfit(name, blocks, scales)
    experts, outputs, count, _ = blocks.shape

    def part(place: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = place
        groups = _whole_blocks(inputs, size)
        packed = blocks.part((experts, outputs, groups, slice(0, size // 2)))
        pairs = np.array(MXFP4, np.float32)[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(
            *packed.shape[:3], size
        )
        exponents = scales.part((experts, outputs, groups)).astype(np.int32) - 127
        values = np.ldexp(pairs, exponents[..., None]).reshape(*packed.shape[:2], -1)
        first = inputs.start - groups.start * size
        return values[:, :, first : first + inputs.stop - inputs.start].swapaxes(1, 2)

    def arrays(some: slice = slice(None)) -> dict[str, np.ndarray]:
        packed = blocks.read()[:, some]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
        return {"nibbles": np.stack([pair_codes(one.T) for one in codes]), "scales": scales.read()[:, some]}

    kind = "mxfp4" if count * size % PAIRED == 0 else ""
    return PackedTensor((experts, count * size, outputs), part, kind=kind, arrays=arrays)


def _fp8(name: str, codes: StoredTensor, scales: StoredTensor) -> PackedTensor:
    size = BLOCK_SIZES["fp8"]
    fits = codes.dtype == "F8_E4M3" and scales.shape == tuple(-(-n // size) for n in codes.shape)
    if not fits or scales.dtype not in FLOATS:
        raise _misfit(f"{name} ({codes.dtype}; read is F8_E4M3 with scales of {size} x {size} numbers)", codes, scales)

    def part(place: tuple[slice, ...]) -> np.ndarray:
        blocks = [_whole_blocks(cut, size) for cut in place]
        spread = scales.part(tuple(blocks)).astype(np.float32)
        for axis, (cut, block) in enumerate(zip(place, blocks, strict=True)):
            first = cut.start - block.start * size
            spread = spread.repeat(size, axis).take(range(first, first + cut.stop - cut.start), axis)
        return codes.part(place).astype(np.float32) * spread

    def arrays() -> dict[str, np.ndarray]:
        return {"codes": codes.read().T, "scales": scales.read().astype(np.float32).T}

    return PackedTensor(codes.shape, part, kind="fp8", arrays=arrays)


def _bitsandbytes(name: str, codes: StoredTensor, parts: Mapping[str, StoredTensor], kind: str) -> PackedTensor:
    """Return a matrix of bitsandbytes' "nf4" or "fp4"; its scales may be packed too."""
    if codes.dtype != "U8":
        raise InputError(f"{name} is stored as {codes.dtype} (bnb_4bit_quant_storage), and only uint8 is read: "
                         "save the model with that")  # fmt: skip
    state = _read_state(name, parts[f"quant_state.bitsandbytes__{kind}"])
    shape, size = tuple(state["shape"]), state["blocksize"]
    count = -(-int(np.prod(shape)) // size)
    nested = "nested_absmax" in parts
    needed = {"absmax", "quant_map"} | ({"nested_quant_map"} if nested else set())
    fits = needed <= parts.keys() and parts["absmax"].shape == (count,) and len(shape) == 2
    if not fits or codes.shape != (-(-int(np.prod(shape)) // 2), 1):
        raise _misfit(name, codes, *parts.values())
    table = parts["quant_map"].read().astype(np.float32)
    scale_table = parts["nested_quant_map"].read() if nested else np.zeros(0, np.float32)

    def scales(blocks: slice) -> np.ndarray:
        stored = parts["absmax"].part((blocks,))
        if not nested:
            return stored.astype(np.float32)
        each = parts["nested_absmax"].read()[np.arange(blocks.start, blocks.stop) // state["nested_blocksize"]]
        return scale_table[stored] * each + np.float32(state["nested_offset"])

    def part(place: tuple[slice, ...]) -> np.ndarray:
        rows, columns = place
        flat = slice(rows.start * shape[1], rows.stop * shape[1])
        blocks = _whole_blocks(flat, size)
        cut = slice(blocks.start * size // 2, min(blocks.stop * size // 2, codes.shape[0]))
        packed = codes.part((cut, slice(0, 1))).reshape(-1)
        numbers = table[np.stack([packed >> 4, packed & 15], axis=-1)].reshape(-1)
        values = numbers * scales(blocks).repeat(size)[: len(numbers)]
        first = flat.start - blocks.start * size
        return values[first : first + flat.stop - flat.start].reshape(-1, shape[1])[:, columns]

    def arrays() -> dict[str, np.ndarray]:
        packed = codes.read().reshape(-1)
        split = np.stack([packed >> 4, packed & 15], axis=-1)
        return {
            "nibbles": pair_codes(split.reshape(shape).T), "scales": parts["absmax"].read().reshape(shape[0], -1),
            "scale_scales": parts["nested_absmax"].read(), "offset": np.array(state["nested_offset"], np.float32),
        }  # fmt: skip

    kept = (
        kind == "nf4" and nested and (size, state["nested_blocksize"]) == (BLOCK_SIZES["nf4"], SCALE_BLOCK)
        and shape[1] % size == 0 and np.array_equal(table, np.array(NF4, np.float32))
        and np.allclose(scale_table, dynamic_map(), 1e-6, 0)  # processors round the last bit of some differently
    )  # fmt: skip
    return PackedTensor(shape, part, kind="nf4" if kept else "", arrays=arrays)


def _read_state(name: str, stored: StoredTensor) -> dict[str, Any]:
    """Read bitsandbytes' description of a matrix, JSON in bytes."""
    try:
        state = json.loads(stored.read().tobytes())
        counts = [*state["shape"], state["blocksize"], state.setdefault("nested_blocksize", 1)]
        state.setdefault("nested_offset", 0.0)
        valid = all(isinstance(count, int) and count > 0 for count in counts)
        require(valid and isinstance(state["nested_offset"], float), f"{name} has the sizes {counts}")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"bitsandbytes' description of {name} cannot be read ({error}): fetch it again") from None
    return state
