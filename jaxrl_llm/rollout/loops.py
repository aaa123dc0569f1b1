"""Which completions repeat themselves to their end, on the host."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.types import Completion

LONGEST_PERIOD = 128
"""The longest run of tokens whose repetition is noticed."""
TIMES = 4
"""How often it stands there, at least."""
FEWEST = 16
"""Tokens that all of them are together, at least: three equal signs or full stops are no loop."""


def written(completion: Completion) -> np.ndarray:
    """A completion's tokens without the one that stopped it."""
    return completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens


def loops(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row of tokens ends in a loop, bool[B].

    The last n tokens, for some n up to ``LONGEST_PERIOD``, stand ``TIMES`` times in a row exactly where each of the
    last (``TIMES`` - 1) n tokens equals the one n before it; a loop of less than ``FEWEST`` tokens must go on so long.
    """
    width = TIMES * LONGEST_PERIOD
    # Where a row has no token, nothing equals anything.
    tails = np.repeat(-1 - np.arange(width)[None], len(rows), axis=0)
    for i, tokens in enumerate(rows):
        last = tokens[-width:]
        if len(last):
            tails[i, -len(last) :] = last
    found = np.zeros(len(rows), bool)
    for period in range(1, LONGEST_PERIOD + 1):
        same = max((TIMES - 1) * period, FEWEST - period)
        found |= (tails[:, -same:] == tails[:, -same - period : -period]).all(axis=1)
    return found
