"""From groups of completions to packed rows of fixed shape.

A row holds the prompts and completions of one or more groups. A prompt stands once in a row, and the completions that
follow it each see it and themselves, so a group of G costs one prompt, not G. Log-probabilities are gathered back to
[B, T], one row per completion, before the loss sees them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import Rows


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion as the learner sees it.

    Attributes:
      prompt: int32 token ids; samples with equal prompts share it.
      tokens: int32[t].
      mask: bool[t], tokens that the loss counts.
      sampler_logp: float32[t], nats.
      advantage: a number, or float[t], one for each token.
      fresh: bool[t], or one for all: sampled by the policy that this step updates. For other tokens ``sampler_logp`` stands in
        for ``old_logp``.
      kept: uint32[t, ceil(V / 32)], the tokens that the sampler's truncation kept at each position, token v as bit v % 32
        of word v // 32; None where it kept all.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    sampler_logp: np.ndarray
    advantage: float | np.ndarray
    fresh: bool | np.ndarray = True
    kept: np.ndarray | None = None


class Totals(NamedTuple):
    """What an optimiser step holds, over all its microbatches.

    Attributes:
      microbatches: int32[], those that hold anything; the rest is padding.
      tokens: float32[], valid tokens.
      sequences: float32[], completions with a valid token.
    """

    microbatches: Any
    tokens: Any
    sequences: Any


class Packed(NamedTuple):
    """One optimiser step's data as M microbatches of R rows of S tokens, B completions of T tokens.

    Rows lie in P parts, which a mesh divides, of N predictions each: a part's predictions are of its own rows.

    Attributes:
      rows: [M, R, S] each.
      source: int32[M, P, N], flat index (row * S + column) in its part of the position that predicts each completion token.
      target: int32[M, P, N], the token predicted.
      place: int32[M, P, N], where its log-probability goes in the flat [B * T]; B * T for padding, which is dropped.
      mask: bool[M, B, T].
      advantages: float32[M, B], or [M, B, T] where they differ by token.
      sampler_logp: float32[M, B, T].
      fresh: bool[M, B, T].
      totals: of the step; None where the microbatch axis is gone.
      old_logp: float32[M, B, T], or None where one update follows the rollout.
      ref_logp: float32[M, B, T], or None without a KL term.
      kept: uint32[M, P, N, ceil(V / 32)], kept sets of the predictions, or None where no sample has any.
    """

    rows: Rows
    source: Any
    target: Any
    place: Any
    mask: Any
    advantages: Any
    sampler_logp: Any
    fresh: Any
    totals: Totals | None
    old_logp: Any = None
    ref_logp: Any = None
    kept: Any = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes of a microbatch.

    Attributes:
      rows: R.
      row_tokens: S, at least the longest prompt with its completion.
      completion_tokens: T, the longest completion.
      parts: P, into which a mesh divides the rows; divides R.
      share_prompts: completions of one prompt share it where they stand in the same row; else each follows its own copy.
    """

    rows: int
    row_tokens: int
    completion_tokens: int
    parts: int = 1
    share_prompts: bool = True


Piece = list[int]
"""The samples (by index) that follow one prompt in one row."""


def pack(samples: Sequence[Sample], layout: Layout) -> Packed:
    """Pack samples into microbatches; samples with equal prompts share one where they stand in the same row.

    Raises:
      InputError: a prompt with its completion is longer than a row.
    """
    batches = _batches(samples, layout)
    empty = _blank(samples, batches, layout)
    for number, batch in enumerate(batches):
        _write(jax.tree.map(lambda x, n=number: x[n], empty), batch, samples, layout)
    counted = [s.mask.sum() for s in samples]
    totals = Totals(np.int32(len(batches)), np.float32(sum(counted)), np.float32(sum(c > 0 for c in counted)))
    return empty._replace(totals=totals)


def packed_shapes(samples: Sequence[Sample], layout: Layout) -> tuple[Packed, int]:
    """The shapes of what ``pack`` returns for these samples, and how many microbatches hold anything."""
    batches, total = _batches(samples, layout), jax.ShapeDtypeStruct((), np.float32)
    blank = jax.eval_shape(lambda: _blank(samples, batches, layout))
    return blank._replace(totals=Totals(jax.ShapeDtypeStruct((), np.int32), total, total)), len(batches)


def _batches(samples: Sequence[Sample], layout: Layout) -> list[list[list[Piece]]]:
    """The rows of each microbatch."""
    rows = _fill_rows(samples, layout)
    return [rows[i : i + layout.rows] for i in range(0, len(rows), layout.rows)]


def _blank(samples: Sequence[Sample], batches: list[list[list[Piece]]], layout: Layout) -> Packed:
    """Microbatches of nothing but padding, with room for these samples."""
    part = layout.rows // layout.parts
    width = _power_of_two(max(sum(len(piece) for row in batch for piece in row) for batch in batches))
    predictions = max(
        sum(len(samples[n].tokens) for row in batch[i : i + part] for piece in row for n in piece)
        for batch in batches
        for i in range(0, len(batch), part)
    )
    quarter = -(-part * layout.row_tokens // 4)
    predictions = -(-predictions // quarter) * quarter
    empty = _arrays(_power_of_two(len(batches)), layout, width, predictions, by_token=np.ndim(samples[0].advantage) == 1)
    words = {s.kept.shape[1] for s in samples if s.kept is not None}
    return empty._replace(kept=np.zeros((*empty.target.shape, *words), np.uint32)) if words else empty


def places(samples: Sequence[Sample], layout: Layout) -> list[tuple[int, int]]:
    """Where ``pack`` puts each sample: its microbatch, and its row of [B, T] there."""
    rows = _fill_rows(samples, layout)
    found: dict[int, tuple[int, int]] = {}
    for microbatch, start in enumerate(range(0, len(rows), layout.rows)):
        order = [index for row in rows[start : start + layout.rows] for piece in row for index in piece]
        found |= {index: (microbatch, place) for place, index in enumerate(order)}
    return [found[index] for index in range(len(samples))]


def _fill_rows(samples: Sequence[Sample], layout: Layout) -> list[list[Piece]]:
    """Rows filled one after the other, each a list of pieces.

    A group that does not fit what is left of a row goes on in the next one, after its prompt once more: padding would cost
    as much as those tokens do.
    """
    rows: list[list[Piece]] = []
    left, room = 0, layout.row_tokens
    for members in _by_prompt(samples) if layout.share_prompts else [[index] for index in range(len(samples))]:
        prompt, piece = len(samples[members[0]].prompt), []
        for index in members:
            length = len(samples[index].tokens)
            if prompt + length > room:
                raise InputError(f"a prompt of {prompt} and a completion of {length} tokens exceed learner.row_tokens {room}")
            if length + (0 if piece else prompt) > left:
                rows.append([])
                left, piece = room, []
            if not piece:
                rows[-1].append(piece)
                left -= prompt
            piece.append(index)
            left -= length
    return rows


def _by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of samples with equal prompts, in the order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt.tobytes(), []).append(index)
    return list(groups.values())


def _arrays(count: int, layout: Layout, width: int, predictions: int, by_token: bool) -> Packed:
    """Microbatches of nothing but padding."""
    R, S, T = layout.rows, layout.row_tokens, layout.completion_tokens
    ints = lambda *shape: np.zeros((count, *shape), np.int32)
    rows = Rows(ints(R, S), ints(R, S), ints(R, S), ints(R, S))
    predicted = ints(layout.parts, predictions)
    mask, logp = np.zeros((count, width, T), bool), np.zeros((count, width, T), np.float32)
    fresh = np.ones((count, width, T), bool)
    advantages = np.zeros_like(logp if by_token else logp[..., 0])
    return Packed(rows, predicted, predicted.copy(), predicted + width * T, mask, advantages, logp, fresh, None)


def _write(out: Packed, batch: list[list[Piece]], samples: Sequence[Sample], layout: Layout) -> None:
    """Fill the arrays of one microbatch in place."""
    sequence, part = 0, layout.rows // layout.parts
    for r, row in enumerate(batch):
        column, used = 0, used if r % part else 0
        for group, members in enumerate(row, start=1):
            prompt = samples[members[0]].prompt
            _place_tokens(out.rows, r, column, prompt, 0, group, 0)
            last, column = column + len(prompt) - 1, column + len(prompt)
            for branch, index in enumerate(members, start=1):
                sample, size = samples[index], len(samples[index].tokens)
                _place_tokens(out.rows, r, column, sample.tokens, len(prompt), group, branch)
                at = r // part, slice(used, used + size)
                out.source[at] = r % part * layout.row_tokens + np.concatenate([[last], np.arange(column, column + size - 1)])
                out.target[at] = sample.tokens
                if sample.kept is not None:
                    out.kept[at] = sample.kept
                out.place[at] = sequence * layout.completion_tokens + np.arange(size)
                out.mask[sequence, :size], out.sampler_logp[sequence, :size] = sample.mask, sample.sampler_logp
                out.fresh[sequence, :size] = sample.fresh
                out.advantages[(sequence, slice(size)) if np.ndim(sample.advantage) else sequence] = sample.advantage
                column, used, sequence = column + size, used + size, sequence + 1


def _place_tokens(rows: Rows, row: int, column: int, tokens: np.ndarray, position: int, group: int, branch: int) -> None:
    at = (row, slice(column, column + len(tokens)))
    rows.tokens[at], rows.positions[at] = tokens, position + np.arange(len(tokens))
    rows.group[at], rows.branch[at] = group, branch


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
