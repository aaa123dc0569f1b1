"""The learner's data: samples, and the packed rows of fixed shape made of them.

A row holds the prompts and completions of one or more groups. A prompt occurs once in a row; each completion after it
attends to the prompt and to itself, so a group of G costs one prompt, not G. Log-probabilities are gathered back to [B,
T], one row per completion, before the loss reads them. The name of a sample's further data decides where they go (see
``Packed``).
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import TokenRows
from jaxrl_llm.types import Prompt

HEAD_ARRAYS = ("kept", "teacher_ids", "teacher_logp")
"""Names of per-token arrays that the last layer, not the loss, reads at the token's prediction."""
ROOM = 2**25
"""Bytes up to which an array of a step is padded to hold all its completions in any microbatch."""
POLICY = ("policy",)
"""The objective of a run that trains only a policy."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion as the learner reads it. All samples of a run carry the same names.

    Attributes:
      prompt: int32 token ids; samples with equal prompts, ``prompt_arrays`` included, share it (``types.Prompt``).
      tokens: int32[t].
      mask: bool[t], tokens that the loss counts.
      scalars: numbers of the whole completion, by name.
      arrays: [t, ...] each, by name, one entry for each token; one named as an objective, bool[t], is that one's mask.
      prompt_arrays: [p, ...] each, likewise for the prompt; a name in both is one array over all that the model reads.
      place: its group's index in the batch, and its own in the group; None if it was not sampled.
      forks: where a new row begins, as of ``Completion.forks``; the loss reads one row all the same.
      together: a key shared by samples that a loss compares; they are never split over microbatches.
      counted_by: names of the objectives that count it; None for all. ``counting`` narrows it.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    prompt_arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    place: tuple[int, int] | None = None
    forks: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    together: Hashable = None
    counted_by: tuple[str, ...] | None = None

    def counting(self, objectives: Collection[str]) -> "Sample":
        """Restrict the sample to these objectives; objectives that were excluded before stay excluded."""
        counted_by = objectives if self.counted_by is None else self.counted_by
        return dataclasses.replace(self, counted_by=tuple(name for name in counted_by if name in objectives))

    def with_arrays(self, **arrays: np.ndarray) -> "Sample":
        """Add arrays [t, ...], which take the places of numbers of the same names."""
        scalars = {name: number for name, number in self.scalars.items() if name not in arrays}
        return dataclasses.replace(self, scalars=scalars, arrays=self.arrays | arrays)


class Counts(NamedTuple):
    """What one objective counts in an optimiser step, over all its microbatches: valid ``tokens``, float32[], and
    ``sequences``, float32[], the completions with a valid token.
    """

    tokens: Any
    sequences: Any


class Predictions(NamedTuple):
    """The positions of a microbatch's rows that predict completion tokens, int32[M, P, N] each (letters: see
    ``Packed``).

    Attributes:
      source: flat index (row * S + column) in its part of the position that predicts each completion token.
      target: the token predicted.
      scatter: index of its log-probability in the flat [B * T]; B * T for padding, which is dropped.
    """

    source: Any
    target: Any
    scatter: Any


class Packed(NamedTuple):
    """One optimiser step's data as M microbatches of R rows of S tokens, B completions of T tokens. Rows form P parts,
    which a mesh divides, of N predictions each: a part's predictions are of its own rows.

    Attributes:
      rows: [M, R, S] each.
      predictions: [M, P, N] each.
      mask: bool[M, B, T].
      counted: bool[M, B] by objective: the completions that it counts.
      by_sequence: [M, B] each: ``Sample.scalars``; and ``together``, int32, equal for completions that a loss compares.
      by_token: [M, B, T, ...] each: ``Sample.arrays``, and arrays computed before the first update.
      by_prediction: [M, P, N, ...] each, aligned with ``predictions``: the names in ``HEAD_ARRAYS``.
      by_column: [M, R, S, ...] each, aligned with ``rows``: the names that prompts have too.
      microbatches: int32[], the non-empty ones; the rest is padding. None for a single microbatch, without the axis M.
      counts: of the step, by objective; None likewise.
      teachers: by name, models that are run with each microbatch (``learner.objectives``); None without any.
    """

    rows: TokenRows
    predictions: Predictions
    mask: Any
    counted: dict[str, Any]
    by_sequence: dict[str, Any]
    by_token: dict[str, Any]
    by_prediction: dict[str, Any]
    by_column: dict[str, Any]
    microbatches: Any
    counts: dict[str, Counts] | None
    teachers: dict[str, Any] | None = None

    def with_tokens(self, **arrays: Any) -> "Packed":
        """Add arrays [M, B, T] to ``by_token``."""
        return self._replace(by_token=self.by_token | arrays)

    def counting(self, objective: str) -> "Packed":
        """Return a batch [B, T], without the microbatch axis, with the mask of the tokens that an objective counts."""
        mask = self.by_token.get(objective, self.mask)
        return self._replace(mask=mask & self.counted[objective][:, None])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes of a microbatch: R ``rows`` of ``row_tokens`` S (at least the longest prompt with its completion),
    completions of up to ``completion_tokens`` T, and ``parts`` P, into which a mesh divides the rows; P divides R.
    ``share_prompts``: whether completions of one prompt share it within a row; else each has its own copy.
    ``microbatches`` M, ``sequences`` B and ``predictions`` N: the least of a step's arrays, which double where its data
    need more; padding costs memory alone, and every step that fits is one compiled program. 0: half of a part's tokens.
    """

    rows: int
    row_tokens: int
    completion_tokens: int
    parts: int = 1
    share_prompts: bool = True
    microbatches: int = 1
    sequences: int = 1
    predictions: int = 0

    def with_room(self, samples: Sequence["Sample"], room: int = ROOM) -> "Layout":
        """Return the layout with room for an update of as many samples as these, which are at their longest. Shorter
        ones fill fewer microbatches, of more completions each: B is all of them while an array of float32[M, B, T]
        takes no more than ``room`` bytes, and those that share a prompt fill the row behind it.
        """
        batches = assign_rows(samples, self)
        least = max(len(row_order(batch)) for batch in batches)
        most = room // (4 * len(batches) * self.completion_tokens)
        sequences = max(least, min(len(samples), most))
        prompts = {Prompt(sample.prompt, sample.prompt_arrays).key: len(sample.prompt) for sample in samples}
        predictions = padded_predictions(batches, self)
        if len(prompts) < len(samples) and 2 * max(prompts.values()) < self.row_tokens:
            predictions = self.rows // self.parts * self.row_tokens
        return dataclasses.replace(self, microbatches=len(batches), sequences=sequences, predictions=predictions)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive ``tokens`` of a ``sample`` (its index), all of them unless it forks, and what the model reads before
    them: ``prompt`` int32[p], and ``prompt_arrays`` [p, ...] each, 0 for what a fork reads. Segments of equal ``unit``
    are placed at one time, in one microbatch if ``together``.
    """

    sample: int
    tokens: slice
    prompt: np.ndarray
    prompt_arrays: Mapping[str, np.ndarray]
    unit: Hashable
    together: bool

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return self.tokens.stop - self.tokens.start


Piece = list[Segment]
"""The segments that follow one prompt in one row."""
DEVICE_DTYPES = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
"""Device dtypes for wide host dtypes: the device holds 32 bits at most."""


def pack(samples: Sequence[Sample], layout: Layout, objectives: Sequence[str] = POLICY) -> Packed:
    """Pack samples, at least one, into microbatches; samples of one prompt share it within a row. ``objectives``: names
    of those that will read them. InputError: a prompt with its completion is longer than a row, or samples that belong
    together fill more than a microbatch.
    """
    batches = assign_rows(samples, layout)
    empty = empty_batch(samples, batches, layout, objectives)
    for number, batch in enumerate(batches):
        write_microbatch(jax.tree.map(lambda x, n=number: x[n], empty), batch, samples, layout)
    counts = {}
    for name in objectives:
        tokens = [sample.arrays.get(name, sample.mask).sum() for sample in samples if is_counted(name, sample)]
        counts[name] = Counts(np.float32(sum(tokens)), np.float32(sum(count > 0 for count in tokens)))
    return empty._replace(microbatches=np.int32(len(batches)), counts=counts)


def packed_shapes(samples: Sequence[Sample], layout: Layout, objectives: Sequence[str] = POLICY) -> tuple[Packed, int]:
    """Return the shapes of ``pack``'s result for these samples, and the number of non-empty microbatches."""
    batches = assign_rows(samples, layout)
    total = jax.ShapeDtypeStruct((), np.float32)
    blank = jax.eval_shape(lambda: empty_batch(samples, batches, layout, objectives))
    counts = {name: Counts(total, total) for name in objectives}
    return blank._replace(microbatches=jax.ShapeDtypeStruct((), np.int32), counts=counts), len(batches)


def is_counted(objective: str, sample: Sample) -> bool:
    """Whether the objective counts the sample."""
    return sample.counted_by is None or objective in sample.counted_by


def empty_batch(
    samples: Sequence[Sample], batches: list[list[list[Piece]]], layout: Layout, objectives: Sequence[str]
) -> Packed:
    """Return microbatches of only padding, with room for these samples."""
    width = doubled(layout.sequences, max(len(row_order(batch)) for batch in batches))
    count = doubled(layout.microbatches, len(batches))
    predictions = padded_predictions(batches, layout)
    R, S, T = layout.rows, layout.row_tokens, layout.completion_tokens

    def zeros(shape: tuple[int, ...], dtype: Any = np.int32) -> np.ndarray:
        return np.zeros((count, *shape), dtype)

    def zeros_like(arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {name: zeros((*shape, *x.shape[1:]), DEVICE_DTYPES.get(x.dtype, x.dtype)) for name, x in arrays.items()}

    by_column = {name: x for sample in samples for name, x in sample.prompt_arrays.items()}
    per_token = {name: x for sample in samples for name, x in sample.arrays.items() if name not in by_column}
    by_prediction = {name: x for name, x in per_token.items() if name in HEAD_ARRAYS}
    by_token = {name: x for name, x in per_token.items() if name not in HEAD_ARRAYS}
    by_sequence = {name: zeros((width,), np.float32) for name in {name for s in samples for name in s.scalars}}
    if any(sample.together is not None for sample in samples):
        by_sequence["together"] = zeros((width,)) + np.arange(width, dtype=np.int32)
    predicted = (layout.parts, predictions)
    return Packed(
        rows=TokenRows(zeros((R, S)), zeros((R, S)), zeros((R, S)), zeros((R, S))),
        predictions=Predictions(zeros(predicted), zeros(predicted), zeros(predicted) + width * T),
        mask=zeros((width, T), bool),
        counted={name: zeros((width,), bool) for name in objectives},
        by_sequence=by_sequence,
        by_token=zeros_like(by_token, (width, T)),
        by_prediction=zeros_like(by_prediction, predicted),
        by_column=zeros_like(by_column, (R, S)),
        microbatches=None,
        counts=None,
    )


def padded_predictions(batches: list[list[list[Piece]]], layout: Layout) -> int:
    """Return N, so that a part of each microbatch has room for its predictions: half of its tokens, or all."""
    part = layout.rows // layout.parts
    most = max(
        sum(len(segment) for row in batch[i : i + part] for piece in row for segment in piece)
        for batch in batches
        for i in range(0, len(batch), part)
    )
    half = -(-part * layout.row_tokens // 2)
    return max(layout.predictions, half if most <= half else part * layout.row_tokens)


def doubled(size: int, needed: int) -> int:
    """Return the size, doubled until it holds what is needed."""
    while size < needed:
        size *= 2
    return size


def sample_rows(samples: Sequence[Sample], layout: Layout) -> list[tuple[int, int]]:
    """Return the place of each sample in ``pack``'s result: its microbatch, and its row of [B, T] there."""
    rows: dict[int, tuple[int, int]] = {}
    for microbatch, batch in enumerate(assign_rows(samples, layout)):
        rows |= {index: (microbatch, place) for index, place in row_order(batch).items()}
    return [rows[index] for index in range(len(samples))]


def row_order(batch: list[list[Piece]]) -> dict[int, int]:
    """Return the row of [B, T] of each sample of a microbatch."""
    samples = dict.fromkeys(segment.sample for row in batch for piece in row for segment in piece)
    return {sample: place for place, sample in enumerate(samples)}


def count_compared_rows(samples: Sequence[Sample], layout: Layout) -> int:
    """Return the number of rows that samples which are compared fill, beginning in a row of their own."""
    alone = [dataclasses.replace(sample, together=None) for sample in samples]
    return sum(map(len, assign_rows(alone, layout)))


class RowPacker:
    """The rows of a batch, filled one after the other, each a list of pieces."""

    def __init__(self, layout: Layout):
        self.rows: list[list[Piece]] = []
        self._layout = layout
        self._left = 0

    def add(self, members: Sequence[Segment]) -> None:
        """Add segments of one prompt; those that do not fit continue in the next row, after a copy of the prompt.
        Padding would cost as much as the copied tokens.
        """
        row_tokens = self._layout.row_tokens
        prompt = len(members[0].prompt)
        piece: Piece = []
        for segment in members:
            length = len(segment)
            if prompt + length > row_tokens:
                raise InputError(
                    f"a prompt of {prompt} and a completion of {length} tokens exceed learner.compute.row_tokens "
                    f"{row_tokens}"
                )
            if length + (0 if piece else prompt) > self._left:
                self.rows.append([])
                self._left = row_tokens
                piece = []
            if not piece:
                self.rows[-1].append(piece)
                self._left -= prompt
            piece.append(segment)
            self._left -= length

    def add_together(self, groups: Sequence[Sequence[Segment]]) -> None:
        """Add segments of one or several prompts to one microbatch: to this one, or else to the next."""
        rows = self._layout.rows
        full = self.rows[:-1]
        last = [list(piece) for row in self.rows[-1:] for piece in row]
        for in_place in (True, False):
            if not in_place:
                self.rows = [*full, last] if last else full
                self.rows += [[] for _ in range(-len(self.rows) % rows)]
                self._left = 0
            first_row = len(self.rows)
            for members in groups:
                self.add(members)
            before = [segment for piece in self.rows[first_row - 1] for segment in piece] if first_row else []
            continues = any(groups[0][0] is segment for segment in before)
            if (first_row - continues) // rows == (len(self.rows) - 1) // rows:
                return
        raise InputError(
            f"{sum(map(len, groups))} completions that are compared with each other, or rows of one episode, fill more "
            "than one microbatch: "
            f"raise learner.compute.microbatch_rows (now {rows})"
        )


def split_forks(index: int, sample: Sample) -> list[Segment]:
    """Return the segments of a sample."""
    prefixes = {0: (sample.prompt, sample.prompt_arrays)}
    for start, prefix in sample.forks.items():
        blank = {name: np.zeros((len(prefix), *x.shape[1:]), x.dtype) for name, x in sample.prompt_arrays.items()}
        prefixes[start] = (prefix, blank)
    together = sample.together is not None or bool(sample.forks)
    unit: Hashable = ("prompt", Prompt(sample.prompt, sample.prompt_arrays).key)
    if together:
        unit = ("together", sample.together) if sample.together is not None else ("forked", index)
    stops = [*sample.forks, len(sample.tokens)]
    parts = zip(prefixes.items(), stops, strict=True)
    segments = [Segment(index, slice(start, stop), *prefix, unit, together) for (start, prefix), stop in parts]
    return [segment for segment in segments if len(segment)] or segments[:1]


def assign_rows(samples: Sequence[Sample], layout: Layout) -> list[list[list[Piece]]]:
    """Return the rows of each microbatch; samples that belong together, or share a prompt, are placed at one time."""
    segments = [segment for index, sample in enumerate(samples) for segment in split_forks(index, sample)]
    filling = RowPacker(layout)
    for unit in group_by_key(segments, [segment.unit for segment in segments]):
        prompts = [Prompt(segment.prompt, segment.prompt_arrays).key for segment in unit]
        groups = group_by_key(unit, prompts) if layout.share_prompts else [[segment] for segment in unit]
        if unit[0].together:
            filling.add_together(groups)
        else:
            for members in groups:
                filling.add(members)
    rows = filling.rows
    return [rows[i : i + layout.rows] for i in range(0, len(rows), layout.rows)]


def group_by_key(segments: Iterable[Segment], keys: Sequence[Hashable]) -> list[list[Segment]]:
    """Return the segments in lists of equal keys, in the order of first appearance."""
    groups: dict[Hashable, list[Segment]] = {}
    for segment, key in zip(segments, keys, strict=True):
        groups.setdefault(key, []).append(segment)
    return list(groups.values())


def write_microbatch(packed: Packed, batch: list[list[Piece]], samples: Sequence[Sample], layout: Layout) -> None:
    """Fill the arrays of one microbatch in place."""
    part = layout.rows // layout.parts
    first: dict[Hashable, int] = {}
    order = row_order(batch)
    used = 0
    for r, row in enumerate(batch):
        column = 0
        if r % part == 0:
            used = 0
        for group, members in enumerate(row, start=1):
            prompt = members[0].prompt
            write_tokens(packed.rows, r, column, prompt, 0, group, 0)
            for name, array in members[0].prompt_arrays.items():
                packed.by_column[name][r, column : column + len(prompt)] = array
            last = column + len(prompt) - 1
            column += len(prompt)
            for branch, segment in enumerate(members, start=1):
                sample, sequence, at = samples[segment.sample], order[segment.sample], segment.tokens
                size, tokens = len(segment), sample.tokens[at]
                predictions = packed.predictions
                at_predictions = r // part, slice(used, used + size)
                write_tokens(packed.rows, r, column, tokens, len(prompt), group, branch)
                sources = np.concatenate([[last], np.arange(column, column + size - 1)])
                predictions.source[at_predictions] = r % part * layout.row_tokens + sources
                predictions.target[at_predictions] = tokens
                predictions.scatter[at_predictions] = sequence * layout.completion_tokens + np.arange(at.start, at.stop)
                packed.mask[sequence, at] = sample.mask[at]
                for name, counted in packed.counted.items():
                    counted[sequence] = is_counted(name, sample)
                for name, number in sample.scalars.items():
                    packed.by_sequence[name][sequence] = number
                for name, array in sample.arrays.items():
                    if name in packed.by_prediction:
                        packed.by_prediction[name][at_predictions] = array[at]
                    elif name in packed.by_column:
                        packed.by_column[name][r, column : column + size] = array[at]
                    else:
                        packed.by_token[name][sequence, at] = array[at]
                if sample.together is not None:
                    packed.by_sequence["together"][sequence] = first.setdefault(sample.together, sequence)
                column += size
                used += size


def write_tokens(
    rows: TokenRows, row: int, column: int, tokens: np.ndarray, position: int, group: int, branch: int
) -> None:
    """Write tokens into a row from a column on, at consecutive positions."""
    at = (row, slice(column, column + len(tokens)))
    rows.tokens[at] = tokens
    rows.positions[at] = position + np.arange(len(tokens))
    rows.group[at] = group
    rows.branch[at] = branch
