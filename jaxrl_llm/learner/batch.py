"""The learner's data: samples, and the packed rows of fixed shape made of them.

A row holds the prompts and completions of one or more groups. A prompt occurs once in a row; each completion after it
attends to the prompt and to itself, so a group of G costs one prompt, not G. Log-probabilities are gathered back to
[B, T], one row per completion, before the loss reads them.

Further data of a sample are named, and the name alone decides where they go (see ``Packed``).
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.decoder import TokenRows

READ_BY_THE_HEAD = ("kept", "teacher_ids", "teacher_logp")
"""Names of per-token arrays that the last layer, not the loss, reads at the token's prediction."""
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
      arrays: [t, ...] each, one entry for each token, by name. One with the name of an objective, bool[t], is the mask
        of that objective.
      prompt_arrays: [p, ...] each, one entry for each token of the prompt, by name; a name in both is one array over
        all that the model reads.
      place: of the completion in its batch: its group's index, and its own in the group; None if it was not sampled.
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
        before = objectives if self.counted_by is None else self.counted_by
        return dataclasses.replace(self, counted_by=tuple(name for name in before if name in objectives))

    def with_arrays(self, **arrays: np.ndarray) -> "Sample":
        """Add arrays [t, ...], which take the places of numbers of the same names."""
        scalars = {name: x for name, x in self.scalars.items() if name not in arrays}
        return dataclasses.replace(self, scalars=scalars, arrays=self.arrays | arrays)


class Counts(NamedTuple):
    """The counts of one objective in an optimiser step, over all its microbatches.

    Attributes:
      tokens: float32[], valid tokens.
      sequences: float32[], completions with a valid token.
    """

    tokens: Any
    sequences: Any


class Predictions(NamedTuple):
    """The positions of a microbatch's rows that predict completion tokens; see ``Packed`` for the letters.

    Attributes:
      source: int32[M, P, N], flat index (row * S + column) in its part of the position that predicts each completion
        token.
      target: int32[M, P, N], the token predicted.
      scatter: int32[M, P, N], index of its log-probability in the flat [B * T]; B * T for padding, which is dropped.
    """

    source: Any
    target: Any
    scatter: Any


class Packed(NamedTuple):
    """One optimiser step's data as M microbatches of R rows of S tokens, B completions of T tokens.

    Rows form P parts, which a mesh divides, of N predictions each: a part's predictions are of its own rows.

    Attributes:
      rows: [M, R, S] each.
      predictions: [M, P, N] each.
      mask: bool[M, B, T].
      counted: bool[M, B] by objective: the completions that it counts.
      by_sequence: [M, B] each: ``Sample.scalars``; and ``together``, int32, equal for completions that a loss compares.
      by_token: [M, B, T, ...] each: ``Sample.arrays``, and arrays computed before the first update.
      by_prediction: [M, P, N, ...] each, aligned with ``predictions``: the names in ``READ_BY_THE_HEAD``.
      by_column: [M, R, S, ...] each, aligned with ``rows``: the names that prompts have too.
      microbatches: int32[], the non-empty ones; the rest is padding. None for a single microbatch, without the axis M.
      counts: of the step, by objective; None likewise.
      teachers: by name, models that are run with each microbatch (``learner.teaching``); None without any.
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
    """Shapes of a microbatch.

    Attributes:
      rows: R.
      row_tokens: S, at least the longest prompt with its completion.
      completion_tokens: T, the longest completion.
      parts: P, into which a mesh divides the rows; divides R.
      share_prompts: whether completions of one prompt share it within a row; else each has its own copy.
    """

    rows: int
    row_tokens: int
    completion_tokens: int
    parts: int = 1
    share_prompts: bool = True
