"""Packing of samples into rows."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import POLICY, READ_BY_THE_HEAD, Counts, Layout, Packed, Sample
from jaxrl_llm.models.decoder import TokenRows
from jaxrl_llm.types import Prompt

Piece = list[int]
"""The samples (by index) that follow one prompt in one row."""
NARROW = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
"""Device dtypes for wide host dtypes: the device holds 32 bits at most."""


def pack(samples: Sequence[Sample], layout: Layout, objectives: Sequence[str] = POLICY) -> Packed:
    """Pack samples into microbatches; samples of one prompt share it within a row.

    Args:
      samples: at least one.
      layout: shapes.
      objectives: names of those that will read them.

    Raises:
      InputError: a prompt with its completion is longer than a row, or samples that belong together fill more than a
        microbatch.
    """
    batches = _batches(samples, layout)
    empty = _blank(samples, batches, layout, objectives)
    for number, batch in enumerate(batches):
        _write(jax.tree.map(lambda x, n=number: x[n], empty), batch, samples, layout)
    counts = {}
    for name in objectives:
        tokens = [sample.arrays.get(name, sample.mask).sum() for sample in samples if _counts(name, sample)]
        counts[name] = Counts(np.float32(sum(tokens)), np.float32(sum(count > 0 for count in tokens)))
    return empty._replace(microbatches=np.int32(len(batches)), counts=counts)


def packed_shapes(samples: Sequence[Sample], layout: Layout, objectives: Sequence[str] = POLICY) -> tuple[Packed, int]:
    """Return the shapes of ``pack``'s result for these samples, and the number of non-empty microbatches."""
    batches = _batches(samples, layout)
    total = jax.ShapeDtypeStruct((), np.float32)
    blank = jax.eval_shape(lambda: _blank(samples, batches, layout, objectives))
    counts = {name: Counts(total, total) for name in objectives}
    return blank._replace(microbatches=jax.ShapeDtypeStruct((), np.int32), counts=counts), len(batches)


def _counts(objective: str, sample: Sample) -> bool:
    return sample.counted_by is None or objective in sample.counted_by


def _blank(
    samples: Sequence[Sample], batches: list[list[list[Piece]]], layout: Layout, objectives: Sequence[str]
) -> Packed:
    """Return microbatches of only padding, with room for these samples."""
    part = layout.rows // layout.parts
    # Powers of two.
    width = 1 << (max(sum(len(piece) for row in batch for piece in row) for batch in batches) - 1).bit_length()
    count = 1 << (len(batches) - 1).bit_length()
    predictions = max(
        sum(len(samples[n].tokens) for row in batch[i : i + part] for piece in row for n in piece)
        for batch in batches
        for i in range(0, len(batch), part)
    )
    quarter = -(-part * layout.row_tokens // 4)
    predictions = -(-predictions // quarter) * quarter
    R, S, T = layout.rows, layout.row_tokens, layout.completion_tokens

    def zeros(shape: tuple[int, ...], dtype: Any = np.int32) -> np.ndarray:
        return np.zeros((count, *shape), dtype)

    def named(arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {name: zeros((*shape, *x.shape[1:]), NARROW.get(x.dtype, x.dtype)) for name, x in arrays.items()}

    by_column = {name: x for sample in samples for name, x in sample.prompt_arrays.items()}
    per_token = {name: x for sample in samples for name, x in sample.arrays.items() if name not in by_column}
    by_prediction = {name: x for name, x in per_token.items() if name in READ_BY_THE_HEAD}
    by_token = {name: x for name, x in per_token.items() if name not in READ_BY_THE_HEAD}
    by_sequence = {name: zeros((width,), np.float32) for name in {name for s in samples for name in s.scalars}}
    if any(sample.together is not None for sample in samples):
        by_sequence["together"] = zeros((width,)) + np.arange(width, dtype=np.int32)
    predicted = (layout.parts, predictions)
    return Packed(
        rows=TokenRows(zeros((R, S)), zeros((R, S)), zeros((R, S)), zeros((R, S))),
        source=zeros(predicted),
        target=zeros(predicted),
        scatter=zeros(predicted) + width * T,
        mask=zeros((width, T), bool),
        counted={name: zeros((width,), bool) for name in objectives},
        by_sequence=by_sequence,
        by_token=named(by_token, (width, T)),
        by_prediction=named(by_prediction, predicted),
        by_column=named(by_column, (R, S)),
        microbatches=None,
        counts=None,
    )


def rows_of(samples: Sequence[Sample], layout: Layout) -> list[tuple[int, int]]:
    """Return the place of each sample in ``pack``'s result: its microbatch, and its row of [B, T] there."""
    found: dict[int, tuple[int, int]] = {}
    for microbatch, rows in enumerate(_batches(samples, layout)):
        order = [index for row in rows for piece in row for index in piece]
        found |= {index: (microbatch, place) for place, index in enumerate(order)}
    return [found[index] for index in range(len(samples))]


def rows_together(samples: Sequence[Sample], layout: Layout) -> int:
    """Return the number of rows that samples which are compared fill, beginning in a row of their own."""
    alone = [dataclasses.replace(sample, together=None) for sample in samples]
    return sum(map(len, _batches(alone, layout)))


class _Filling:
    """The rows of a batch, filled one after the other, each a list of pieces."""

    def __init__(self, samples: Sequence[Sample], layout: Layout):
        self.rows: list[list[Piece]] = []
        self._samples = samples
        self._layout = layout
        self._left = 0

    def add(self, members: Sequence[int]) -> None:
        """Add samples of one prompt; those that do not fit continue in the next row, after a copy of the prompt.

        Padding would cost as much as the copied tokens.
        """
        room = self._layout.row_tokens
        prompt = len(self._samples[members[0]].prompt)
        piece: Piece = []
        for index in members:
            length = len(self._samples[index].tokens)
            if prompt + length > room:
                raise InputError(
                    f"a prompt of {prompt} and a completion of {length} tokens exceed learner.compute.row_tokens {room}"
                )
            if length + (0 if piece else prompt) > self._left:
                self.rows.append([])
                self._left = room
                piece = []
            if not piece:
                self.rows[-1].append(piece)
                self._left -= prompt
            piece.append(index)
            self._left -= length

    def add_together(self, groups: Sequence[Sequence[int]]) -> None:
        """Add samples of one or several prompts to one microbatch: to this one, or else to the next."""
        rows = self._layout.rows
        full = self.rows[:-1]
        last = [list(piece) for row in self.rows[-1:] for piece in row]
        for here in (True, False):
            if not here:
                self.rows = [*full, last] if last else full
                self.rows += [[] for _ in range(-len(self.rows) % rows)]
                self._left = 0
            begun = len(self.rows)
            for members in groups:
                self.add(members)
            stands = begun > 0 and any(groups[0][0] in piece for piece in self.rows[begun - 1])
            if (begun - stands) // rows == (len(self.rows) - 1) // rows:
                return
        raise InputError(
            f"{sum(map(len, groups))} completions that are compared with each other fill more than one microbatch: "
            f"raise learner.compute.microbatch_rows (now {rows})"
        )


def _batches(samples: Sequence[Sample], layout: Layout) -> list[list[list[Piece]]]:
    """Return the rows of each microbatch; samples that belong together, or share a prompt, are placed at one time."""
    prompts = [Prompt(sample.prompt, sample.prompt_arrays).key for sample in samples]
    units: list[Hashable] = [
        ("prompt", prompt) if sample.together is None else ("together", sample.together)
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    filling = _Filling(samples, layout)
    for unit in _by_key(range(len(samples)), units):
        own = [prompts[index] for index in unit]
        groups = _by_key(unit, own) if layout.share_prompts else [[index] for index in unit]
        if samples[unit[0]].together is None:
            for members in groups:
                filling.add(members)
        else:
            filling.add_together(groups)
    rows = filling.rows
    return [rows[i : i + layout.rows] for i in range(0, len(rows), layout.rows)]


def _by_key(indices: Iterable[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices in lists of equal keys, in the order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in zip(indices, keys, strict=True):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _write(out: Packed, batch: list[list[Piece]], samples: Sequence[Sample], layout: Layout) -> None:
    """Fill the arrays of one microbatch in place."""
    part = layout.rows // layout.parts
    first: dict[Hashable, int] = {}
    sequence = 0
    used = 0
    for r, row in enumerate(batch):
        column = 0
        if r % part == 0:
            used = 0
        for group, members in enumerate(row, start=1):
            prompt = samples[members[0]].prompt
            _place_tokens(out.rows, r, column, prompt, 0, group, 0)
            for name, values in samples[members[0]].prompt_arrays.items():
                out.by_column[name][r, column : column + len(prompt)] = values
            last = column + len(prompt) - 1
            column += len(prompt)
            for branch, index in enumerate(members, start=1):
                sample = samples[index]
                size = len(sample.tokens)
                predictions = r // part, slice(used, used + size)
                _place_tokens(out.rows, r, column, sample.tokens, len(prompt), group, branch)
                sources = np.concatenate([[last], np.arange(column, column + size - 1)])
                out.source[predictions] = r % part * layout.row_tokens + sources
                out.target[predictions] = sample.tokens
                out.scatter[predictions] = sequence * layout.completion_tokens + np.arange(size)
                out.mask[sequence, :size] = sample.mask
                for name, counted in out.counted.items():
                    counted[sequence] = _counts(name, sample)
                for name, number in sample.scalars.items():
                    out.by_sequence[name][sequence] = number
                for name, values in sample.arrays.items():
                    if name in out.by_prediction:
                        out.by_prediction[name][predictions] = values
                    elif name in out.by_column:
                        out.by_column[name][r, column : column + size] = values
                    else:
                        out.by_token[name][sequence, :size] = values
                if sample.together is not None:
                    out.by_sequence["together"][sequence] = first.setdefault(sample.together, sequence)
                column += size
                used += size
                sequence += 1


def _place_tokens(
    rows: TokenRows, row: int, column: int, tokens: np.ndarray, position: int, group: int, branch: int
) -> None:
    at = (row, slice(column, column + len(tokens)))
    rows.tokens[at] = tokens
    rows.positions[at] = position + np.arange(len(tokens))
    rows.group[at] = group
    rows.branch[at] = branch
