"""Several tasks as one stream: exact shares, and each task's own order whatever stands beside it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.tasks import Shuffled, of_tasks
from jaxrl_llm.tasks.stream import Interleaved, due_task, places_in, resume_memory
from jaxrl_llm.types import Group, Problem

weights = st.lists(st.one_of(st.integers(1, 20), st.floats(0.01, 50.0)), min_size=2, max_size=9)


def problems(task, count):
    return [Problem(str(number), ({"role": "user", "content": "?"},), "1", task) for number in range(count)]


@given(weights)
def test_no_count_is_ever_a_whole_prompt_away_from_its_share(given_weights):
    named = {str(number): weight for number, weight in enumerate(given_weights)}
    shares = np.array(list(named.values())) / sum(named.values())
    asked = dict.fromkeys(named, 0)
    for number in range(1, 200):
        asked[due_task(asked, named)] += 1
        # Tijdeman's bound: 1 - 1 / (2 k - 2)
        away = np.abs(np.array(list(asked.values())) - shares * number)
        assert away.max() <= 1 - 1 / (2 * len(named) - 2) + 1e-6


def test_equal_weights_take_turns_and_a_task_with_twice_the_weight_has_two():
    asked = {"a": 0, "b": 0}
    order = ""
    for _ in range(6):
        label = due_task(asked, {"a": 2.0, "b": 1.0})
        asked[label] += 1
        order += label
    assert sorted(order[:3]) == sorted(order[3:]) == ["a", "a", "b"]


class Counting:
    """A stream that remembers how many groups it was told of."""

    def __init__(self, problems):
        self.problems = problems

    def next(self, number, memory):
        return self.problems[number % len(self.problems)], memory

    def observe(self, memory, groups):
        return {"told": memory.get("told", 0) + len(groups)}

    def metrics(self, before, after):
        return {"new": after.get("told", 0) - before.get("told", 0)}


def asked_of(stream, count, memory=None):
    found = []
    memory = memory or {}
    for number in range(count):
        problem, memory = stream.next(number, memory)
        found.append((problem.task, problem.id))
    return found, memory


def test_a_task_is_asked_in_its_own_order_whatever_stands_beside_it():
    alone, _ = asked_of(Shuffled(problems("a", 7), 3), 20)
    for other in (1.0, 5.0):
        streams = [("a", 1.0, Shuffled(problems("a", 7), 3)), ("b", other, Shuffled(problems("b", 4), 3))]
        mixed, _ = asked_of(of_tasks(streams), 150)
        own = [pair for pair in mixed if pair[0] == "a"]
        assert own[:20] == alone[: len(own[:20])] and len(own) >= 20


def test_what_it_remembers_goes_on_from_a_file():
    streams = {name: Shuffled(problems(name, 5), 1) for name in "abc"}
    mixed = Interleaved(streams, {"a": 1.0, "b": 2.5, "c": 0.5})
    whole, last = asked_of(mixed, 60)
    first, memory = asked_of(mixed, 23)
    memory = json.loads(json.dumps(memory))
    rest = []
    for number in range(23, 60):
        problem, memory = mixed.next(number, memory)
        rest.append((problem.task, problem.id))
    assert first + rest == whole and memory == last


def test_shares_count_from_where_others_began_and_streams_go_on():
    streams = {name: Shuffled(problems(name, 50), 1) for name in "ab"}
    first, memory = asked_of(Interleaved(streams, {"a": 1.0, "b": 1.0}), 20)
    later = Interleaved(streams, {"a": 3.0, "b": 1.0})
    places = places_in(memory, ["a", "b"], 20)
    rest, _ = asked_of(later, 40, resume_memory(places, ["a", "b"], 20))
    assert [sum(task == "a" for task, _ in rest[:count]) for count in (4, 8, 40)] == [3, 6, 30]
    assert len(set(first + rest)) == 60, "no problem comes twice before all of its task have come"
    alone, _ = asked_of(later, 4, resume_memory({"b": places["b"]}, ["a", "b"], 20))
    assert next(pair for pair in alone if pair[0] == "a") == first[[pair[0] for pair in first].index("a")]


def group_of(task):
    return Group(problems(task, 1)[0], np.zeros(1), (), np.zeros(0), np.zeros(0))


def test_a_stream_is_told_of_its_own_groups_alone_and_measures_them():
    mixed = Interleaved({name: Counting(problems(name, 2)) for name in "abc"}, dict.fromkeys("abc", 1.0))
    _, first = asked_of(mixed, 6)
    before = json.dumps(first)
    second = mixed.observe(first, [group_of("a"), group_of("b"), group_of("b")])
    third = mixed.observe(second, [group_of("b")])
    assert json.dumps(first) == before, "what was handed in has changed"
    assert third["streams"] == {"a": {"told": 1}, "b": {"told": 3}, "c": {}}
    assert third["asked"] == {"a": 2, "b": 2, "c": 2}
    assert mixed.metrics(second, third) == {"task/a/new": 0, "task/b/new": 1, "task/c/new": 0}


def test_a_single_task_stays_as_it_is():
    stream = Shuffled(problems("a", 3), 0)
    assert of_tasks([("a", 0.3, stream)]) is stream


@pytest.mark.parametrize("number", [2, 3])
def test_labels_decide_nothing_but_ties(number):
    names = [chr(ord("a") + at) for at in range(number)]
    first = {name: 1.0 for name in names}
    asked = dict.fromkeys(names, 0)
    order = []
    for _ in range(2 * number):
        label = due_task(asked, first)
        asked[label] += 1
        order.append(label)
    assert order == names * 2
