"""A step filled with groups, simulated: order, surplus, interruption, budgets, what is wasted and how busy the slots
are.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
from rollout.simulation import LONGEST, ToyEngine, ToyEngineAhead, ToySource, drawn, long_tailed, places, sampler, steps

from jaxrl_llm import codec
from jaxrl_llm.rollout.collect import collect_groups
from jaxrl_llm.rollout.groups import GROUP_RECORDS, Carryover, RolloutBatch, count_sampled_tokens


def versions(group):
    """The policy versions that sampled its tokens."""
    return {int(v) for c in group.completions for v in c.version}


def saved(left):
    """What a checkpoint holds of what a step leaves."""
    return json.dumps(codec.to_json(left, GROUP_RECORDS))


def learned(found):
    return sum(len(step.groups) for step in found)


def begun(found):
    """Prompts begun, and not among those that are still under way or carried."""
    left = found[-1].carryover
    return left.cursor - len(left.unfinished) - len(left.surplus)


def test_without_the_filter_the_prompts_needed_are_taken_as_they_are():
    found = steps(sampler(3, 8, 0.5, filter_groups=False), 2)
    assert [places(step.groups) for step in found] == [[0, 1, 2], [3, 4, 5]]
    assert found[0].groups == found[0].sampled and (
        found[1].carryover.cursor,
        found[1].carryover.surplus,
        found[1].carryover.unfinished,
    ) == (6, (), ())
    assert found[0].metrics["reward/errors"] >= 1 and "dynamic_sampling/rounds" not in found[0].metrics
    assert found[0].tokens == count_sampled_tokens(found[0].groups) and found[0].metrics["prompts"] == 3


def test_the_filter_keeps_what_can_teach_in_the_order_of_the_prompts():
    made = sampler(6, 16, 0.5)
    found = steps(made, 6)
    for step in found:
        assert len(step.groups) == 6 and all(made.source.informative(n) for n in places(step.groups))
        carried = step.metrics["dynamic_sampling/carried_in"]
        assert places(step.groups)[carried:] == sorted(places(step.groups)[carried:])
        assert places(step.sampled) == sorted(places(step.sampled))
        assert step.metrics["dynamic_sampling/missing"] == 0 == step.metrics["rollout/interrupted"]
        assert step.metrics["dynamic_sampling/finished"] == len(step.sampled)
        assert step.metrics["reward/mean"] == pytest.approx(
            np.mean([g.rewards for g in step.sampled])
        )  # before the filter
        assert step.metrics["completions/repetition_fraction"] == 0
    every = [n for step in found for n in places(step.groups)]
    assert len(set(every)) == len(every)
    seen = [n for step in found for n in places(step.sampled)]
    assert (found[-1].carryover.recent_scored, found[-1].carryover.recent_informative) == (
        len(seen),
        sum(made.source.informative(n) for n in seen),
    )


def test_processes_compare_the_scores_and_tokens_of_all_groups_that_are_learned_from():
    batch = steps(sampler(3, 8), 1)[0]
    wanted = [array for g in batch.groups for array in (g.rewards, *(c.tokens for c in g.completions))]
    found = list(batch.common)
    assert len(found) == 3 * (1 + 4) and all(one is other for one, other in zip(found, wanted, strict=True))


def test_a_step_that_finishes_nothing_measures_nothing_and_leaves_the_engine_empty():
    made = sampler(2, 8, token_budget=1, group=8)
    found = collect_groups(made, None, 0, Carryover())
    assert found.tokens and not found.sampled and found.metrics["rollout/utilisation"] == 1
    unmeasured = ("rollout/useful_fraction", "dynamic_sampling/kept_fraction", "reward/mean", "completions/mean_length")
    assert np.isnan([found.metrics[name] for name in unmeasured]).all()
    assert made.engine.slot_steps == 0, "learning needs the memory of the cache"


def test_a_filter_of_the_reward_keeps_groups_that_nobody_solves():
    made = sampler(6, 16, 0.5, filter_groups="reward")
    unsolved = dataclasses.replace(made, source=dataclasses.replace(made.source, solved=False))
    found, wanted = steps(unsolved, 3), steps(made, 3)
    assert [places(step.groups) for step in found] == [places(step.groups) for step in wanted]
    assert not any(g.accuracy.any() for step in found for g in step.groups) and learned(found) == 18


def test_surplus_comes_first_in_the_next_step_and_is_dropped_after_that():
    made = sampler(2, 64)  # all sixteen groups that slots have room for would be informative; two are begun
    surplus = steps(sampler(8, 64), 1)[0].groups
    first = collect_groups(made, None, 5, Carryover(40, tuple(surplus)))
    assert places(first.groups) == [0, 1] and first.sampled == [] and first.tokens == 0
    assert first.metrics["dynamic_sampling/expired"] == 6 and first.carryover == Carryover(40)
    assert first.metrics["reward/mean"] == 0.75  # of what it learned from, since nothing was finished
    assert math.isnan(first.metrics["rollout/utilisation"]) and math.isnan(
        first.metrics["dynamic_sampling/kept_fraction"]
    )
    assert math.isnan(first.metrics["throughput/sampled_tokens_per_s"])
    assert 0 < first.metrics["rollout/useful_fraction"] < 1
    second = collect_groups(made, None, 5, Carryover(40, tuple(surplus[:1])))
    assert places(second.groups) == [0, 40] and [versions(g) for g in second.groups] == [{0}, {5}]


def test_a_step_that_finds_too_little_learns_from_that():
    made = sampler(4, 16, 0.9, max_rounds=2)
    found = steps(made, 4)
    assert [step.carryover.cursor for step in found] == [8, 16, 24, 32]
    assert [step.metrics["dynamic_sampling/rounds"] for step in found] == [2] * 4
    informative = sum(made.source.informative(n) for n in range(32))
    assert (
        learned(found) == informative and sum(s.metrics["dynamic_sampling/missing"] for s in found) == 16 - informative
    )
    nothing = steps(sampler(4, 16, 1.0, max_rounds=2), 1)[0]
    assert (
        nothing.groups == []
        and nothing.metrics["rollout/useful_fraction"] == 0 == nothing.metrics["dynamic_sampling/kept_fraction"]
    )


def discarding(needed, degenerate, count):
    """Groups learned from and generated by "generate 3x, keep what is needed, discard the rest, again until enough"."""
    source, cursor = ToySource(4, degenerate), 0
    for _ in range(count):
        kept = 0
        while kept < needed:
            kept += sum(source.informative(n) for n in range(cursor, cursor + 3 * needed))
            cursor += 3 * needed
    return count * needed, cursor


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("degenerate", [0.3, 0.5, 0.8])
def test_hardly_a_group_is_generated_in_vain(degenerate, interrupt):
    made, count = sampler(16, 64, degenerate, interrupt=interrupt), 40
    found = steps(made, count)
    useful = learned(found) / begun(found)
    # The bound of what these very prompts allow: luck made the share of informative ones differ from the law's a
    # little.
    share = np.mean([made.source.informative(n) for n in range(found[-1].carryover.cursor)])
    assert learned(found) == 16 * count and share == pytest.approx(1 - degenerate, abs=0.03)
    assert useful >= 0.95 * (1 - degenerate) and useful >= 0.97 * share
    naive, generated = discarding(16, degenerate, count)
    assert naive / generated < 0.8 * useful


def test_every_token_is_accounted_for():
    found = steps(sampler(6, 32, 0.5, interrupt=True, token_budget=40), 12)
    account = lambda step: [g for g in step.sampled if 0 < np.mean(g.accuracy) < 1]
    thrown = sum(count_sampled_tokens(step.sampled) - count_sampled_tokens(account(step)) for step in found)
    left = found[-1].carryover
    open_tokens = sum(len(c.tokens) for u in left.unfinished for c in u.completions if c)
    used = sum(count_sampled_tokens(step.groups) for step in found)
    assert sum(step.metrics["dynamic_sampling/expired"] for step in found) == 0
    assert sum(step.tokens for step in found) == used + thrown + count_sampled_tokens(left.surplus) + open_tokens
    for step in found:
        lost = count_sampled_tokens(step.sampled) - count_sampled_tokens(account(step))
        assert step.metrics["rollout/useful_fraction"] == count_sampled_tokens(step.groups) / (
            count_sampled_tokens(step.groups) + lost
        )


def busy(found):
    """Share of slots that sampled, over all steps."""
    made = [step for step in found if step.tokens]
    return sum(s.tokens for s in made) / sum(s.tokens / s.metrics["rollout/utilisation"] for s in made)


@pytest.mark.slow
def test_slots_stay_busy_on_a_long_tail():
    """Without refill they would be for 30 %; a chunk of 4 steps wastes 5 % at these lengths."""
    assert 0.25 < np.mean([long_tailed(n) for n in range(999)]) / LONGEST < 0.35
    engine = lambda: ToyEngine(32, chunk=4)
    assert busy(steps(sampler(8, 32, 0.5, interrupt=True, engine=engine()), 20)) > 0.9
    assert busy(steps(sampler(16, 32, filter_groups=False, interrupt=True, engine=engine()), 20)) > 0.9
    assert busy(steps(sampler(256, 32, 0.5, engine=engine()), 2)) > 0.9


def test_while_a_step_is_short_no_slot_idles_unless_enough_is_under_way():
    made = sampler(8, 32, 0.6)
    heard, engine = [], made.engine
    step = engine.step
    engine.step = lambda model, version: (
        heard.append(len(engine.waiting) + len(engine.running)),
        step(model, version),
    )[1]
    steps(made, 5)
    assert min(heard) > 0 and np.mean(np.asarray(heard) >= 32) > 0.3


def test_an_interrupted_completion_goes_on_as_if_nobody_had_stopped_it():
    found = steps(sampler(4, 24, 0.3, interrupt=True), 15)
    groups = [g for step in found for g in step.groups]
    assert sum(len(versions(g)) > 1 for g in groups) > 10 and sum(s.metrics["rollout/interrupted"] for s in found) > 10
    assert [s.metrics["rollout/resumed"] for s in found[1:]] == [s.metrics["rollout/interrupted"] for s in found[:-1]]
    left = [c for step in found for u in step.carryover.unfinished for c in u.completions]
    assert None in left and all(len(c.tokens) for c in left if c is not None)
    source = ToySource(4, 0.3)
    for group in groups:
        seeds = source.seeds(int(group.problem.id))
        for seed, c in zip(seeds, group.completions, strict=True):
            assert c.tokens.tolist() == [(seed + 7 * i) % 1000 for i in range(long_tailed(seed))]
            assert (np.diff(c.version) >= 0).all() and len(c.sampler_logp) == len(c.mask) == len(c.tokens)


def test_no_group_waits_for_ever():
    found = steps(sampler(4, 64, 0.5, interrupt=True), 30)
    assert max(version - min(versions(g)) for version, step in enumerate(found) for g in step.groups) <= 6


@pytest.mark.slow
def test_a_group_that_grows_too_old_is_dropped():
    free, bound, strict = (steps(sampler(4, 64, 0.5, interrupt=True, max_age=age), 20) for age in (0, 6, 1))
    assert saved(free[-1].carryover) == saved(bound[-1].carryover)  # none is older
    assert not sum(step.metrics["rollout/expired"] for step in free)
    for version, step in enumerate(strict):
        oldest = lambda group: min(int(v) for c in group.completions if c is not None for v in c.version)
        assert all(u.age == (version + 1 - oldest(u) if u.has_tokens else 0) <= 1 for u in step.carryover.unfinished)
        assert all(version - oldest(g) <= 1 + (g in strict[version - 1].carryover.surplus) for g in step.groups)
    assert sum(step.metrics["rollout/expired"] for step in strict) > 5
    used = [count_sampled_tokens(step.groups) for step in strict]
    thrown = sum(n / step.metrics["rollout/useful_fraction"] - n for n, step in zip(used, strict, strict=True))
    left = strict[-1].carryover
    assert sum(step.tokens for step in strict) == pytest.approx(
        sum(used) + thrown + count_sampled_tokens([*left.surplus, *left.unfinished])
    )


def test_the_longest_completion_is_finished_under_any_age_limit():
    found = steps(sampler(4, 16, 0.3, token_budget=30, max_age=1), 12)
    assert max(len(c.tokens) for step in found for g in step.groups for c in g.completions) == LONGEST
    assert max(u.age for step in found for u in step.carryover.unfinished) <= 5


@pytest.mark.parametrize("interrupt", [False, True])
def test_what_is_under_way_waits_where_surplus_is_enough(interrupt):
    before = steps(sampler(4, 24, 0.3, interrupt=True), 1)[0]
    left = dataclasses.replace(before.carryover, surplus=(*before.carryover.surplus, *before.groups))
    found = collect_groups(sampler(4, 24, 0.3, interrupt=interrupt), None, 1, left)
    assert found.tokens == 0 == found.metrics["rollout/resumed"] and len(found.groups) == 4
    assert any(u.has_tokens for u in left.unfinished) and found.metrics["rollout/interrupted"] > 0
    assert [u.number for u in found.carryover.unfinished] == [u.number for u in left.unfinished]
    count = lambda left: [[len(c.tokens) if c else 0 for c in u.completions] for u in left.unfinished]
    assert count(found.carryover) == count(left)


def test_a_completion_samples_no_more_in_a_step_than_its_budget():
    found = steps(sampler(4, 16, 0.3, token_budget=30), 12)
    assert all(
        [u.number for u in s.carryover.unfinished] == sorted(u.number for u in s.carryover.unfinished) for s in found
    )
    counts = [np.bincount(c.version).max() for step in found for g in step.groups for c in g.completions]
    assert max(counts) == 30
    whole = [c for step in found for g in step.groups for c in g.completions]
    assert max(len(c.tokens) for c in whole) > 90 and {c.finish_reason for c in whole} == {"stop"}
    assert sum(len(step.groups) == 4 for step in found) >= 10 and sum(s.metrics["rollout/resumed"] for s in found) > 5


def test_what_its_budget_cuts_off_goes_on_and_what_the_longest_length_cuts_off_is_whole():
    endless = ToyEngine(16, length=lambda seed: 2 * long_tailed(seed))
    found = steps(sampler(4, 16, 0.3, engine=endless, token_budget=30), 6)
    whole = [c for step in found for g in step.groups for c in g.completions]
    assert {len(c.tokens) for c in whole if c.finish_reason == "length"} == {LONGEST}


def test_where_earlier_tokens_are_not_learned_from_nothing_finished_is_carried():
    found = steps(sampler(4, 32, 0.5, interrupt=True, learn_earlier=False), 12)
    assert not any(step.carryover.surplus for step in found) and any(
        s.metrics["dynamic_sampling/expired"] for s in found
    )
    assert all(version in versions(g) for version, step in enumerate(found) for g in step.groups)


@pytest.mark.parametrize("settings", [{}, {"interrupt": True}, {"interrupt": True, "token_budget": 25}])
def test_a_step_depends_on_the_backlog_alone_and_that_survives_the_checkpoint(settings):
    whole = steps(sampler(5, 32, 0.5, **settings), 8)
    start = max(range(7), key=lambda n: len(whole[n].carryover.surplus) + len(whole[n].carryover.unfinished))
    left = codec.from_json(json.loads(saved(whole[start].carryover)), GROUP_RECORDS)
    assert left.surplus or left.unfinished
    assert [u.age for u in left.unfinished] == [u.age for u in whole[start].carryover.unfinished]
    for version in range(start + 1, 8):
        found = collect_groups(sampler(5, 32, 0.5, **settings), None, version, left)
        left = found.carryover
        assert saved(left) == saved(whole[version].carryover)
        assert places(found.groups) == places(whole[version].groups)
        spared = lambda step: {n: v for n, v in step.metrics.items() if not n.startswith(("time/", "throughput/"))}
        assert spared(found) == spared(whole[version])


IN_ORDER = [{}, {"filter_groups": False}]
"""Where the groups of a step do not depend on what ends first."""
STOPPED = [(ToyEngine, settings) for settings in (*IN_ORDER, {"interrupt": True}, {"token_budget": 25})]


@pytest.mark.slow
@pytest.mark.parametrize("engine, settings", [*STOPPED, *((ToyEngineAhead, settings) for settings in IN_ORDER)])
def test_a_step_that_is_stopped_within_its_sampling_goes_on_as_if_nobody_had_stopped_it(engine, settings):
    """After every chunk of every step, through the file; one step is stopped several times."""
    make = lambda: sampler(5, 24, 0.3, engine=engine(24), **settings)
    whole = steps(make(), 3)
    clock = ("time/", "throughput/", "rollout/utilisation")
    spared = lambda step: {n: v for n, v in step.metrics.items() if not n.startswith(clock)}
    stops, unscored = 0, 0
    for version in range(3):
        left = Carryover() if version == 0 else whole[version - 1].carryover
        while True:
            asked = iter([False, True])
            found = collect_groups(make(), None, version, left, lambda asked=asked: next(asked))
            if isinstance(found, RolloutBatch):
                break
            left = codec.from_json(json.loads(saved(found)), GROUP_RECORDS)
            stops += 1
            unscored += len(left.step_progress["pending"])
        assert saved(found.carryover) == saved(whole[version].carryover)
        assert codec.to_json(found.groups, GROUP_RECORDS) == codec.to_json(whole[version].groups, GROUP_RECORDS)
        assert spared(found) == spared(whole[version])
    assert stops > 6 and (unscored > 6 or settings.get("filter_groups", True))


def test_a_step_that_is_stopped_in_vain_again_and_again_moves_on():
    """What is being sampled begins anew twice, so that the run is the same; then its tokens are kept."""
    left, kept = Carryover(), []
    for _ in range(5):
        made, asked = sampler(2, 8, filter_groups=False, engine=ToyEngine(8, length=lambda seed: LONGEST)), iter([0, 1])
        stopped = collect_groups(made, None, 0, left, lambda asked=asked: next(asked))
        left = codec.from_json(json.loads(saved(stopped)), GROUP_RECORDS)
        kept.append(left.step_progress["tokens"])
    assert kept[:2] == [0, 0] and 0 < kept[2] < kept[3] < kept[4]


def test_the_toys_lengths_are_not_all_alike():
    assert len({drawn(n, 1, 100) for n in range(50)}) > 30


@dataclasses.dataclass(frozen=True)
class Learning(ToySource):
    """Prompts whose order is a function of what came back: it remembers what it asked and what was scored."""

    def new_group(self, number, memory):
        group, _ = super().new_group(number, memory)
        return group, memory | {"asked": memory.get("asked", 0) + 1}

    def learns(self, memory):
        return True

    def observe(self, memory, groups):
        return memory | {"scored": [*memory.get("scored", []), *(int(group.problem.id) for group in groups)]}


def test_a_stream_of_prompts_remembers_what_came_back():
    made = dataclasses.replace(sampler(4, 16, 0.5), source=Learning(4, 0.5))
    found = steps(made, 3)
    memory = found[-1].carryover.stream_memory
    assert memory["asked"] == found[-1].carryover.cursor
    assert sorted(memory["scored"]) == sorted(int(g.problem.id) for step in found for g in step.sampled)
    left = codec.from_json(json.loads(saved(found[0].carryover)), GROUP_RECORDS)
    again = collect_groups(made, None, 1, left)
    assert again.carryover.stream_memory == found[1].carryover.stream_memory, "what it remembers is saved with the run"
