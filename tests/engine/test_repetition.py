"""Repetition stops: what the compiled state says of each prefix is what looking at the whole prefix says."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.engine.sampling import Tail, empty_tail, extend_tail, tail_after, to_traced
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.errors import InputError

ROWS, LENGTH, PERIOD = 3, 16, 4


def repeats(tokens, repetition):
    """Whether some block of tokens stands ``times`` times at the end of the list."""
    n_times = [(n, n * repetition.times) for n in range(1, repetition.longest_period + 1)]
    return repetition.times > 0 and any(
        len(tokens) >= size and list(tokens[-size:]) == list(tokens[-n:]) * repetition.times for n, size in n_times
    )


def is_sure(logps, repetition):
    """Whether the last ``tail`` tokens all had a probability above ``probability``."""
    last = np.exp(np.float64(logps[len(logps) - repetition.tail :]))
    return 0 < repetition.tail <= len(logps) and all(last > repetition.probability)


@functools.partial(jax.jit, static_argnums=3)
def fed(tokens, logps, rule, period):
    """States and stops after each token of [B, T], leading axis T."""

    def one(tail, inputs):
        tail, stop = extend_tail(tail, *inputs, rule)
        return tail, (tail, stop)

    return jax.lax.scan(one, empty_tail(ROWS, Repetition(period, 2 if period else 0)), (tokens.T, logps.T))[1]


rules = st.builds(
    Repetition, st.just(PERIOD), st.integers(2, 4), st.sampled_from([0.0, 0.5, 0.9]), st.integers(1, 6)
) | st.builds(Repetition, st.just(PERIOD), st.integers(2, 6))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5), rules)
def test_a_stop_is_what_the_whole_prefix_says(seed, words, period, repetition):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, words, (ROWS, LENGTH)).astype(np.int32)
    start = random.integers(0, LENGTH)
    for row in tokens:  # from there on one block again and again
        row[start:] = np.resize(row[start : start + period], LENGTH - start)
    logps = np.log(random.choice([0.3, 0.45, 0.7, 0.95], (ROWS, LENGTH), p=[0.1, 0.1, 0.3, 0.5])).astype(np.float32)
    tails, stops = jax.device_get(fed(tokens, logps, to_traced(Sampling(repetition=repetition)), PERIOD))
    for row in range(ROWS):
        for t in range(LENGTH):
            seen, sure = tokens[row, : t + 1], logps[row, : t + 1]
            assert stops[t, row] == (repeats(seen, repetition) or is_sure(sure, repetition)), (row, t)
            for found, wanted in zip(tail_after(seen, sure, repetition), tails, strict=True):
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted[t, row])


@pytest.mark.parametrize(("tokens", "times", "at"), [
    ([5, 5, 5, 5], 3, 2), ([1, 2, 1, 2, 1, 2], 2, 3), ([1, 2, 1, 2, 1, 2], 3, 5),
    ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 2, None),
    ([9, 1, 2, 3, 1, 2, 3], 2, 6),
])  # fmt: skip
def test_the_first_stop_of_a_few_lists(tokens, times, at):
    """A period of 5 is longer than what is looked for."""
    values = np.tile(np.array(tokens, np.int32), (ROWS, 1))
    rules = to_traced(Sampling(repetition=Repetition(PERIOD, times)))
    stops = np.asarray(fed(values, np.zeros(values.shape, np.float32), rules, PERIOD)[1])[:, 0]
    assert (np.argmax(stops) if stops.any() else None) == at


def test_a_probability_of_exactly_the_bound_is_not_above_it():
    rule = Repetition(probability=0.5, tail=2)
    logps = np.log(np.array([0.6, 0.5, 0.6, 0.6], np.float32))
    stops = fed(
        np.tile(np.arange(4, dtype=np.int32), (ROWS, 1)),
        np.tile(logps, (ROWS, 1)),
        to_traced(Sampling(repetition=rule)),
        0,
    )[1]
    np.testing.assert_array_equal(stops[:, 0], [False, False, False, True])


def test_off_costs_nothing_and_ends_nothing():
    tail = empty_tail(ROWS, None)
    assert tail.recent.size == tail.runs.size == 0
    zeros = np.zeros((ROWS, LENGTH), np.int32)
    assert not np.any(fed(zeros, np.zeros((ROWS, LENGTH), np.float32), to_traced(Sampling()), 0)[1])
    assert not np.any(fed(zeros, np.zeros((ROWS, LENGTH), np.float32), to_traced(Sampling()), PERIOD)[1])
    alone = tail_after(np.zeros(0, np.int32), np.zeros(0, np.float32), Repetition(PERIOD, 2))
    np.testing.assert_array_equal(alone.recent, [-1] * PERIOD)
    assert isinstance(alone, Tail) and alone.confident == 0


@pytest.mark.parametrize(("fields", "words"), [
    ({"longest_period": -1}, "longest_period must be at least 0"), ({"longest_period": 3}, "times must be at least 2"),
    ({"longest_period": 3, "times": 1}, "times must be at least 2"), ({"times": 3}, "and 0 where it is not, got 3"),
    ({"tail": -1, "probability": 0.5}, "tail must be at least 0"),
    ({"tail": 3}, "probability must be from 0 to below 1"),
    ({"probability": 0.5}, "and 1 where it is not, got 0.5"),
    ({"learn": False}, "learn must be True where no repetition"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(fields, words):
    with pytest.raises(InputError, match=words):
        Repetition(**fields)
