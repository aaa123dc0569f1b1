"""When a completion that only repeats itself is ended: a small state for each row, a pure step for each token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engine.settings import Repetition


class TailRule(NamedTuple):
    """``Repetition`` as arrays, for the compiled loop; ``longest_period`` is the shape of ``Tail``.

    Attributes:
      times: int32[], repetitions that end a completion; 0 never.
      logp: float32[], the log-probability above which a token is confident, nats.
      tail: int32[], confident tokens in a row that end it; 0 never.
    """

    times: Any
    logp: Any
    tail: Any


class Tail(NamedTuple):
    """What is remembered of each row's sampled tokens; N = ``longest_period``.

    Attributes:
      recent: int32[B, N], the last N tokens, the newest first; -1 before the first token.
      runs: int32[B, N], at n - 1: how many of the newest tokens in a row equal the token n before each of them.
      confident: int32[B], how many of the newest tokens in a row had more than the rule's probability.
    """

    recent: jax.Array
    runs: jax.Array
    confident: jax.Array


def tail_rule(repetition: Repetition | None) -> TailRule:
    """The traced form; None never ends anything."""
    repetition = repetition or Repetition()
    with np.errstate(divide="ignore"):
        logp = np.log(np.float32(repetition.probability))
    return TailRule(np.int32(repetition.times), logp, np.int32(repetition.tail))


def fresh_tail(rows: int, repetition: Repetition | None) -> Tail:
    """Nothing sampled yet, in B rows."""
    period = repetition.longest_period if repetition else 0
    return Tail(
        jnp.full((rows, period), -1, jnp.int32), jnp.zeros((rows, period), jnp.int32), jnp.zeros(rows, jnp.int32)
    )


def extend_tail(tail: Tail, tokens: jax.Array, logp: jax.Array, rule: TailRule) -> tuple[Tail, jax.Array]:
    """The state after one more token int32[B] of log-probability float32[B] in each row, and where to stop: bool[B].

    The log-probability is the policy's own: under greedy sampling every token is sampled with certainty.
    The last n tokens stand ``times`` times in a row exactly where each of the last (times - 1) n tokens equals the one
    n before it.
    """
    runs = jnp.where(tail.recent == tokens[:, None], tail.runs + 1, 0)
    recent = jnp.concatenate([tokens[:, None], tail.recent], axis=1)[:, : tail.recent.shape[1]]
    confident = jnp.where(logp > rule.logp, tail.confident + 1, 0)
    periods = jnp.arange(1, runs.shape[1] + 1, dtype=jnp.int32)[None]
    repeats = (rule.times > 0) & jnp.any(runs >= (rule.times - 1) * periods, axis=1)
    return Tail(recent, runs, confident), repeats | ((rule.tail > 0) & (confident >= rule.tail))


def tail_of(tokens: np.ndarray, logps: np.ndarray, repetition: Repetition | None) -> Tail:
    """The state (NumPy, without the axis B) after tokens int[t] of log-probabilities float[t], for a completion to go
    on from.

    Equal to feeding them to ``extend_tail`` one by one.
    """
    period = repetition.longest_period if repetition else 0
    tokens = np.asarray(tokens, np.int32)
    recent = np.full(period, -1, np.int32)
    recent[: len(tokens)] = tokens[::-1][:period]
    same = [tokens[n:] == tokens[: len(tokens) - n] for n in range(1, min(period, len(tokens)) + 1)]
    runs = np.zeros(period, np.int32)
    runs[: len(same)] = [_run(values) for values in same]
    confident = _run(np.asarray(logps, np.float32) > tail_rule(repetition).logp)
    return Tail(recent, runs, np.int32(confident))


def _run(values: np.ndarray) -> int:
    """How many of the last values of bool[n] in a row are true."""
    return len(values) if values.all() else int(np.argmin(values[::-1]))
