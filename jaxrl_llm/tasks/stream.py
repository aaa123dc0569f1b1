"""An endless shuffled stream of problems as a pure function of its position."""

import functools

import numpy as np

from jaxrl_llm.errors import InputError


def problem_index(seed: int, cursor: int, size: int) -> int:
    """The index, in ``[0, size)``, of the problem at position ``cursor`` of the stream.

    Positions ``e * size`` to ``(e + 1) * size - 1`` are epoch ``e``: a permutation of all problems, fresh for each
    (seed, epoch). A checkpoint needs one integer, the number of prompts consumed.

    Raises:
      InputError: size is 0, or seed or cursor is negative.
    """
    if size < 1 or seed < 0 or cursor < 0:
        raise InputError(f"no problem at seed {seed}, cursor {cursor}, size {size}; size starts at 1, the others at 0")
    epoch, position = divmod(cursor, size)
    return int(_permutation(seed, epoch, size)[position])


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    # Raw bits and a stable sort: NumPy promises their values across versions, and not those of its own shuffle.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")
