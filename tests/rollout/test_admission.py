"""When another group is begun: a pure function of counts."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.simulation import ToySource, drawn

from jaxrl_llm.engine.requests import EMPTY
from jaxrl_llm.rollout import Collect
from jaxrl_llm.rollout.collect import SHARE_WINDOW, PendingScores, fade_counts, informative_share
from jaxrl_llm.rollout.groups import AdmissionPolicy, Carryover

LONGEST = 100


def admission(needed=8, slots=32, filter_groups=True, **settings):
    return AdmissionPolicy(needed, slots, LONGEST, filter_groups, Collect(**settings))


def begun(wanting, share, now=(0, 0, 0, 0, 0), group=4):
    """Groups begun at once, with these numbers of groups kept, running and held, completions waiting, prompts begun."""
    kept, running, held, waiting, started = now
    count = 0
    while wanting.should_start(kept, running + count, held, waiting + count * group, started + count, share):
        count += 1
    return count


def test_without_the_filter_what_is_needed_is_begun_at_once():
    assert begun(admission(filter_groups=False, slots=2), 1.0) == 8
    assert begun(admission(filter_groups=False, slots=2), 1.0, (3, 1, 0, 4, 0)) == 4
    assert begun(admission(filter_groups=False, slots=64, interrupt=True), 1.0) == 16


@pytest.mark.parametrize(("share", "count", "interrupted"), [(1.0, 8, 16), (0.5, 16, 32), (0.4, 20, 40), (0.1, 80, 80)])
def test_with_it_so_many_as_are_expected_to_do(share, count, interrupted):
    """Twice as many where the last ones are interrupted, but never more than ten rounds."""
    assert begun(admission(slots=1000), share) == count
    assert begun(admission(slots=1000, interrupt=True), share) == interrupted
    assert begun(admission(slots=1000), share, (8, 0, 0, 0, 8)) == 0


def test_no_more_than_slots_and_as_many_again_wait():
    assert begun(admission(slots=16), 0.1) == 8
    assert begun(admission(slots=16), 0.1, (0, 8, 0, 25, 8)) == 2
    assert begun(admission(slots=2), 1.0) == 1


def test_rounds_bound_the_prompts_of_a_step():
    assert begun(admission(slots=1000, max_rounds=3), 0.01) == 24
    assert begun(admission(slots=1000, max_rounds=3, filter_groups=False), 1.0, (0, 0, 20, 0, 20)) == 0


def test_what_is_held_counts_for_the_steps_that_it_takes():
    halves = admission(slots=1000, token_budget=50)
    assert halves.max_steps == 2
    assert [halves.limit(length, "sums") for length in (0, 50, 70)] == [50, 100, 100]
    assert begun(halves, 0.5) == 16 == begun(halves, 0.5, (0, 0, 16, 0, 16))
    assert begun(halves, 0.5, (0, 0, 31, 0, 31)) == 1
    assert begun(halves, 0.5, (0, 0, 32, 0, 32)) == 0
    assert (admission().max_steps, admission().limit(0, "sums")) == (1, LONGEST)
    assert admission(token_budget=30).max_steps == 4


def test_a_token_budget_adds_its_own_steps_to_the_oldest_that_is_gone_on_with():
    ages = [admission(max_age=3), admission(max_age=3, token_budget=30), admission(max_age=0)]
    assert [rules.max_age for rules in ages] == [3, 6, math.inf]


@given(st.integers(0, 7), st.floats(0.01, 1.0), st.integers(1, 64))
def test_a_short_step_with_nothing_under_way_always_begins_something(kept, share, slots):
    assert begun(admission(slots=slots), share, (kept, 0, 0, 0, 0)) > 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_the_share_is_a_chance_and_old_groups_fade(batches):
    good = seen = 0.0
    for right, wrong in batches:
        good, seen = fade_counts(good, seen, right, right + wrong)
        assert 0 < informative_share(good, seen) < 1 and 0 <= good <= seen <= SHARE_WINDOW
    for _ in range(40):
        good, seen = fade_counts(good, seen, 16, 32)
    assert informative_share(good, seen) == pytest.approx(0.5, abs=0.02)


def test_where_nothing_was_seen_four_of_five_are_informative():
    assert (
        informative_share(*fade_counts(0.0, 0.0, 0, 0)) == 0.8
        and informative_share(2.0, 2.0) == 0.9
        and informative_share(0.0, 2.0) == 0.4
    )


@pytest.mark.parametrize("reads", ["accuracy", False])
def test_a_decision_waits_only_for_scores_that_it_depends_on_and_is_that_of_all_scores(reads):
    """Over many states: groups that ended in batches, some of them scored, and a bound on those kept."""
    source = ToySource(2, 0.5)
    policy = AdmissionPolicy(8, 16, 8, reads, Collect())
    waited = 0
    for state in range(300):
        sizes = [1 + drawn(state, place, 4) for place in range(5)]
        numbers = iter(range(10 * state, 10 * state + 50))
        batches = [[source.new_group(next(numbers), {})[0] for _ in range(size)] for size in sizes]
        batches = [[dataclasses.replace(one, completions=(EMPTY,) * 2) for one in batch] for batch in batches]
        lazy, eager = (PendingScores(source, policy, 0, Carryover()) for _ in range(2))
        running, bound = drawn(state, 8, 8), drawn(state, 9, 20)
        decisions = (lambda kept, share: kept + share * running < bound, lambda kept, share: kept >= bound)  # noqa: B023
        for batch in batches:
            for judging in (lazy, eager):
                judging.start(batch)
            eager.wait(9)
            for decision in decisions:
                before = len(lazy.pending)
                ends = {decision(*lazy.bound(many)) for many in (False, True)}
                assert lazy.decide(decision) == decision(*eager.bound(True))
                waited += before - len(lazy.pending)
                assert (before == len(lazy.pending)) == (len(ends) == 1)
        lazy.wait(9)
        assert (lazy.recent_informative, lazy.recent_scored, [*lazy.kept], [*lazy.sampled]) == (
            eager.recent_informative, eager.recent_scored, [*eager.kept], [*eager.sampled],
        )  # fmt: skip
        assert lazy.failures == eager.failures
    assert waited == 0 if reads is False else 100 < waited < 1500
