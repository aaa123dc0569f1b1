"""Filling a step with groups, and the sampler that makes them from a place in the stream of prompts."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.rollout.collect import Sampler, collect, informative, request_seed
from jaxrl_llm.tasks import Table, Task, load
from jaxrl_llm.types import Group, Problem


def group(number, accuracy, rewards=None):
    problem = Problem(str(number), ({"role": "user", "content": "?"},), "1", "test")
    return Group(
        problem,
        np.array([1]),
        (),
        np.asarray(rewards if rewards is not None else accuracy, float),
        np.asarray(accuracy, float),
    )


class Stream:
    """Prompt n is informative where ``pattern`` (repeated) says so; remembers what was asked of it."""

    def __init__(self, *pattern):
        self.pattern, self.calls = pattern, []

    def __call__(self, cursor, count):
        self.calls.append((cursor, count))
        groups = [
            group(n, [1, 0] if self.pattern[n % len(self.pattern)] else [1, 1]) for n in range(cursor, cursor + count)
        ]
        return groups, {"time/rollout_s": 1.0, "reward/errors": 2}


def ids(groups):
    return [int(g.problem.id) for g in groups]


def test_without_the_filter_one_round_is_taken_as_it_is():
    stream = Stream(False, True)
    found = collect(stream, 3, 8, 10, [], False, 5)
    assert stream.calls == [(10, 3)]
    assert (ids(found.groups), found.fresh, found.carried, found.cursor) == ([10, 11, 12], [True] * 3, [], 13)
    assert found.metrics == {"time/rollout_s": 1.0, "reward/errors": 2, "prompts": 13.0}


def test_the_filter_samples_on_until_the_step_is_full_and_carries_the_rest():
    stream = Stream(False, True)
    found = collect(stream, 3, 4, 0, [], True, 5)
    assert stream.calls == [(0, 4), (4, 4)]
    assert (ids(found.groups), ids(found.carried), found.fresh, found.cursor) == ([1, 3, 5], [7], [True] * 3, 8)
    assert ids(found.sampled) == list(range(8))
    assert found.metrics == {
        "time/rollout_s": 2.0, "reward/errors": 4, "prompts": 8.0, "dynamic_sampling/rounds": 2,
        "dynamic_sampling/kept_fraction": 0.5, "dynamic_sampling/carried_in": 0, "dynamic_sampling/carried_out": 1,
        "dynamic_sampling/expired": 0, "dynamic_sampling/missing": 0,
    }  # fmt: skip


def test_what_the_step_before_left_comes_first_and_is_not_fresh():
    first = collect(Stream(True), 3, 4, 0, [], True, 5)
    second = collect(Stream(True), 3, 4, first.cursor, first.carried, True, 5)
    assert (ids(second.groups), second.fresh) == ([3, 4, 5], [False, True, True])
    assert second.metrics["dynamic_sampling/carried_in"] == 1


def test_nothing_older_than_one_step_is_learned_from():
    carried = [group(n, [1, 0]) for n in range(5)]
    found = collect(Stream(True), 3, 4, 20, carried, True, 5)
    assert (ids(found.groups), found.fresh, found.carried, found.cursor) == ([0, 1, 2], [False] * 3, [], 20)
    assert found.metrics["dynamic_sampling/expired"] == 2 and found.metrics["dynamic_sampling/rounds"] == 0
    assert found.sampled == []


def test_the_budget_runs_out():
    stream = Stream(False, False, False, True)
    found = collect(stream, 3, 4, 0, [], True, 2)
    assert len(stream.calls) == 2 and ids(found.groups) == [3, 7]
    assert found.metrics["dynamic_sampling/missing"] == 1
    empty = collect(Stream(False), 3, 4, 0, [], True, 2)
    assert empty.groups == [] and empty.cursor == 8 and empty.metrics["dynamic_sampling/missing"] == 3


def test_a_round_is_as_large_as_what_is_missing():
    stream = Stream(True)
    collect(stream, 6, 2, 0, [], True, 5)
    assert stream.calls == [(0, 6)]


def test_the_filter_looks_at_accuracy_and_not_at_the_reward():
    assert not informative(group(0, [1, 1], rewards=[1.0, 0.4]))
    assert informative(group(0, [1, 0], rewards=[0.5, 0.5]))
    assert not informative(group(0, [0.5, 0.0], rewards=[0.5, 0.0]))
    assert informative(group(0, [0, 0, 0, 1.5]))


def test_request_seeds_are_unique_within_a_run_and_between_runs():
    numbers = [0, 1, 2, (1 << 39), (1 << 39) + 1, (1 << 40) - 1]
    seeds = {request_seed(run, n) for run in (0, 1, 2, (1 << 24) - 1) for n in numbers}
    assert len(seeds) == 4 * len(numbers) and all(0 <= seed < 1 << 64 for seed in seeds)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "letters.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {c}", "answer": c}) + "\n" for c in "abcdefgh"))
    task = Task(Table(str(path)), extractor="whole", template="chatml")
    model, tokenizer = load_pretrained("tiny-random")
    engine = Engine(model, slots=4, max_length=64, chunk=4)
    with Scorer((Accuracy(),), 1) as scorer:
        rules, quiet = Sampling(max_new_tokens=5), lambda text: None
        yield model, Sampler(engine, tokenizer, task, load(task).train, scorer, rules, 3, 7, (), status=quiet, note=quiet)


def test_groups_depend_on_their_place_in_the_stream_only(sampler):
    model, sample = sampler
    together, _ = sample(model, 2, 5, 4)
    apart = [g for cursor in (5, 7) for g in sample(model, 2, cursor, 2)[0]]
    assert [g.problem.id for g in together] == [g.problem.id for g in apart]
    for a, b in zip(together, apart, strict=True):
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.tokens.tobytes() == y.tokens.tobytes() and x.sampler_logp.tobytes() == y.sampler_logp.tobytes()
            assert x.text == y.text and x.version.tolist() == [2] * len(x.tokens)


def test_groups_hold_their_prompts_completions_and_scores(sampler):
    model, sample = sampler
    groups, numbers = sample(model, 0, 0, 4)
    assert len(groups) == 4 and {len(g.completions) for g in groups} == {3}
    for g in groups:
        assert g.rewards.shape == g.accuracy.shape == g.parts["accuracy"].shape == (3,)
        assert len({c.tokens.tobytes() for c in g.completions}) == 3
        assert g.problem.prompt[-1]["content"] in bytes(g.prompt[g.prompt < 256].astype(np.uint8)).decode()
    assert numbers["time/rollout_s"] > 0 and numbers["reward/errors"] == 0


def test_rewards_are_shaped_in_order_with_the_updates_and_the_budget_at_hand(sampler):
    model, sample = sampler
    seen = []

    def note(name):
        def shape(group, updates, budget):
            seen.append((name, updates, budget))
            return dataclasses.replace(group, rewards=group.rewards * 2 + (name == "second"))

        return shape

    shaped, _ = dataclasses.replace(sample, shaping=(note("first"), note("second")))(model, 7, 0, 1)
    plain, _ = sample(model, 7, 0, 1)
    assert seen == [("first", 7, 5), ("second", 7, 5)]
    np.testing.assert_array_equal(shaped[0].rewards, plain[0].rewards * 4 + 1)
