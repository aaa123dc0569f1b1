"""The stream of problems is a pure function: each epoch a permutation, no two epochs or seeds alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Shuffled, problem_index
from jaxrl_llm.tasks.stream import permutation

seeds, epochs, sizes = st.integers(0, 2**64), st.integers(0, 10**9), st.integers(1, 200)


def epoch_of(seed, epoch, size):
    return [problem_index(seed, epoch * size + position, size) for position in range(size)]


@given(seeds, epochs, sizes)
def test_each_epoch_is_a_permutation(seed, epoch, size):
    assert sorted(epoch_of(seed, epoch, size)) == list(range(size))


@given(seeds, epochs)
def test_epochs_and_seeds_differ(seed, epoch):
    # 50! orders: two equal ones mean that the seed or the epoch is not read
    orders = [epoch_of(seed, epoch, 50), epoch_of(seed, epoch + 1, 50), epoch_of(seed + 1, epoch, 50)]
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


@given(seeds, st.integers(0, 10**12), sizes, st.integers(0, 10**6))
def test_it_depends_on_nothing_that_was_asked_before(seed, cursor, size, other):
    before = problem_index(seed, cursor, size)
    problem_index(seed, other, size)
    assert problem_index(seed, cursor, size) == before


def test_every_first_problem_is_about_equally_likely():
    counts = [0] * 10
    for seed in range(2000):
        counts[problem_index(seed, 0, 10)] += 1
    assert all(140 < count < 260 for count in counts)  # mean 200, standard deviation 13


def test_the_order_is_the_same_on_every_machine():
    assert epoch_of(7, 3, 12) == [11, 2, 10, 4, 7, 3, 5, 1, 8, 9, 0, 6]


@pytest.mark.parametrize("arguments", [(0, 0, 0), (-1, 0, 5), (0, -1, 5)])
def test_impossible_positions_are_refused(arguments):
    named = "no problem at seed {}, cursor {}, size {}; size starts at 1".format(*arguments)
    with pytest.raises(InputError, match=named):
        problem_index(*arguments)


def test_an_order_is_made_once_for_each_epoch_of_a_stream_however_many_streams_there_are():
    streams = [Shuffled(range(5), seed) for seed in range(40)]
    before = permutation.cache_info().misses
    asked = [[stream.next(number, {})[0] for stream in streams] for number in range(10)]
    assert permutation.cache_info().misses == before + 2 * len(streams)
    assert asked == [[problem_index(seed, number, 5) for seed in range(40)] for number in range(10)]
