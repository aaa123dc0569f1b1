"""Occupancy of an engine's slots over a step: how many chunks sampling takes, and how much of the cache they read."""

import dataclasses
import functools
from statistics import NormalDist

import numpy as np

from jaxrl_llm.engine.scheduler import columns_for, rows_for
from jaxrl_llm.models.decode_kernels import ByLength, columns_read

SIGMA = 0.9
"""Standard deviation of the logarithm of a completion's length, as reasoning models have it early in a run."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """A step's decoding.

    Attributes:
      chunks: calls of the decode program.
      read: share of the whole cache, slots by columns, that a call reads on average.
      live: share of the whole cache that holds keys and values of running completions, on average.
    """

    chunks: int
    read: float
    live: float


def lengths(count: int, mean: float, longest: int) -> np.ndarray:
    """Return the tokens of ``count`` completions, int[count]: log-normal, cut at ``longest``, of this mean, shuffled.

    A mean of ``longest`` gives that length to all.
    """
    if mean >= longest:
        return np.full(count, longest)
    spread = np.exp(SIGMA * np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]))
    low, high = 0.0, float(longest) / spread[0]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * spread, longest).mean() < mean else (low, middle)
    return np.random.default_rng(0).permutation(np.maximum(np.rint(np.minimum(high * spread, longest)), 1).astype(int))


@functools.lru_cache
def occupancy(
    completions: int,
    mean: int,
    longest: int,
    slots: int,
    chunk: int,
    room: int,
    parts: int = 1,
    form: ByLength | None = None,
) -> Occupancy:
    """Run a step's completions through the slots by the engine's rules for the rows and columns of a chunk.

    A slot whose completion ends takes the next one of the queue at the next chunk.

    Args:
      completions: B.
      mean: tokens of a completion on average, as ``lengths`` spreads them.
      longest: tokens of the longest.
      slots: of the engine.
      chunk: decode steps of a call.
      room: columns of the whole cache.
      parts: of the mesh's rows.
      form: kernels that read each row by its length; None for the plain form, which reads all to the longest one's.
    """
    queue = lengths(completions, mean, longest)
    running = queue[:slots]
    done = np.zeros(len(running), int)
    waits = len(running)
    chunks, read, live = 0, 0.0, 0.0
    while len(running):
        chunks += 1
        if form is None:
            # The chunk before has not been read when the next one is sent.
            columns = columns_for(int(done.max()) + 2 * chunk, slots, room)
            read += rows_for(len(running), slots, parts) * columns
        else:
            read += sum(columns_read(form, int(live), room) for live in done)
        live += float(done.sum())
        done = done + chunk
        ended = done >= running
        new = queue[waits : waits + int(ended.sum())]
        waits += len(new)
        running = np.concatenate([running[~ended], new])
        done = np.concatenate([done[~ended], np.zeros(len(new), int)])
    whole = slots * room * chunks
    return Occupancy(chunks, read / whole, live / whole)
