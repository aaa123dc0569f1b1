"""The one driver of a backend: what comes back when, aborts while it runs, and episodes of several turns."""

import dataclasses

import numpy as np
import pytest
from rollout.simulation import LONGEST, ToyEngine
from tiny import tiny

from jaxrl_llm.rollout import Engine, Sampling, with_tokens
from jaxrl_llm.rollout.generation import OpenRequest, OpenRequests, SeedSpace, generate_stream, request_seed
from jaxrl_llm.types import Completion, Episode, Turn


def asked(count, slots=2, longest=LONGEST, responder=None):
    """Requests for so many completions of the toy, by their numbers."""
    requests = OpenRequests(ToyEngine(slots), Sampling(max_new_tokens=longest), responder)
    requests.submit(range(count), [(1,)] * count, range(count))
    return requests


def test_all_that_is_asked_comes_back_once_by_its_key():
    requests = asked(5)
    rounds = list(generate_stream(requests, None, 3))
    assert rounds[0] == {} and not requests
    found = {key: completion for over in rounds for key, completion in over.items()}
    assert sorted(found) == list(range(5)) and sum(map(len, rounds)) == 5
    assert requests.tokens == sum(len(completion.tokens) for completion in found.values())
    assert {int(version) for completion in found.values() for version in completion.version} == {3}


def test_what_is_aborted_comes_back_before_the_next_chunk():
    requests = asked(4)
    steps, rounds = [], []
    step = requests.backend.step
    requests.backend.step = lambda *given: (steps.append(len(rounds)), step(*given))[1]
    for over in generate_stream(requests, None):
        rounds.append(over)
        if len(rounds) == 2:
            waiting = [key for key in requests.keys if key not in requests.running]
            requests.abort(waiting)
            assert len(waiting) == 4 - len(requests.running) - sum(map(len, rounds))
    assert {completion.finish_reason for completion in rounds[2].values()} == {"aborted"}
    assert 2 not in steps, "no chunk is sampled for it"


def test_the_caller_may_ask_for_more_whenever_it_is_handed_something():
    requests = asked(1)
    seen = []
    for over in generate_stream(requests, None):
        seen += over
        if len(seen) < 4 and not requests:
            requests.submit([10 + len(seen)], [(1,)], [len(seen)])
    assert seen == [0, 11, 12, 13]


@dataclasses.dataclass
class Tool:
    """Answers every first turn with two tokens, and ends the episode at its second.

    ``slow``: only when waited for; ``never``: not at all.
    """

    slow: bool = False
    never: bool = False
    asked: dict = dataclasses.field(default_factory=dict)
    max_turn_tokens: int = 0
    heard: list = dataclasses.field(default_factory=list)
    preparing: tuple = ()

    def has(self, key):
        return True

    def submit_turn(self, key, turn, limit):
        self.heard.append((key, turn.finish_reason))
        self.asked[key] = turn, limit

    def abort(self, keys):
        for key in keys:
            self.asked.pop(key, None)
        return {}

    def pop_answers(self, wait_s):
        if self.never or (self.slow and not wait_s):
            return {}
        found = {}
        for key, (turn, limit) in self.asked.items():
            over = turn.episode is not None or turn.finish_reason != "stop" or len(turn.tokens) + 2 >= limit
            episode = Episode(end="completed" if over else "")
            found[key] = dataclasses.replace(turn if over else with_tokens(turn, [7, 8]), episode=episode)
        self.asked = {}
        return found


RULES = Sampling(max_new_tokens=24, stop_ids=(2, 3, 5, 7, 9, 11, 12, 13))


@pytest.mark.parametrize("slow", [False, True])
def test_a_environments_answers_a_turn_until_the_episode_is_over(slow):
    model, prompts, seeds = tiny("windows"), ([3, 1, 4], [1, 5], [9]), (3, 4, 5)
    engine = Engine(model, slots=2, max_length=32, chunk=4)
    turns = engine.generate(model, prompts, seeds, RULES)
    assert all(turn.finish_reason == "stop" and len(turn.tokens) < 20 for turn in turns)
    tool = Tool(slow)
    requests = OpenRequests(engine, RULES, tool)
    requests.submit("abc", prompts, seeds)
    found = {key: episode for over in generate_stream(requests, model) for key, episode in over.items()}
    assert sorted(tool.heard) == sorted((key, "stop") for key in "abc" * 2) and set(found) == set("abc")
    engine.start(RULES)
    begun = [with_tokens(turn, [7, 8]) for turn in turns]
    handles = engine.submit(prompts, seeds, partials=begun, keep_prompt=True)
    while engine.busy:
        engine.step(model)
    for (_, wanted), key in zip(sorted(engine.collect()), "abc", strict=True):
        np.testing.assert_array_equal(found[key].tokens, wanted.tokens)
        np.testing.assert_array_equal(found[key].mask, wanted.mask)
        np.testing.assert_array_equal(found[key].sampler_logp, wanted.sampler_logp)
        assert (~found[key].mask).sum() == 2
    assert len(handles) == 3


def test_an_interrupted_episode_resumes_with_its_answer():
    model, engine = tiny("windows"), Engine(tiny("windows"), slots=2, max_length=32, chunk=4)
    whole = OpenRequests(engine, RULES, Tool())
    whole.submit("ab", ([3, 1, 4], [1, 5]), (3, 4))
    wanted = {key: one for over in generate_stream(whole, model) for key, one in over.items()}
    requests = OpenRequests(engine, RULES, Tool(never=True))
    requests.submit("ab", ([3, 1, 4], [1, 5]), (3, 4))
    for _ in generate_stream(requests, model):
        waiting = [
            key for key, turn in requests.running.items() if len(turn.tokens) and turn.tokens[-1] in RULES.stop_ids
        ]
        if len(waiting) == 2:
            break
    assert len(requests) == 2, "both wait for the tool"
    requests.abort(requests.keys)
    assert not requests._environments.asked, "nobody is there for its answers"
    left = requests.pop_finished()
    assert {one.finish_reason for one in left.values()} == {"aborted"} and not requests
    again = OpenRequests(engine, RULES, Tool())
    again.submit("ab", ([3, 1, 4], [1, 5]), (3, 4), partials=[left["a"], left["b"]])
    found = {key: one for over in generate_stream(again, model) for key, one in over.items()}
    assert [key for key, _ in again._environments.heard][:2] == ["a", "b"], "nothing is sampled before the tool answers"
    for key, one in wanted.items():
        np.testing.assert_array_equal(found[key].tokens, one.tokens)
        np.testing.assert_array_equal(found[key].sampler_logp, one.sampler_logp)


def test_a_turn_that_a_loop_has_ended_is_answered_after_an_interruption_too():
    """Its tokens do not tell that it has ended."""
    model, engine = tiny("windows"), Engine(tiny("windows"), slots=2, max_length=32, chunk=4)
    turn = dataclasses.replace(engine.generate(model, [[3, 1, 4]], [3], RULES)[0], finish_reason="repetition")
    first = OpenRequests(engine, RULES, Tool(never=True))
    first._submit_turn(OpenRequest("a", [3, 1, 4], 3, 24, None), turn)
    first.abort("a")
    [left] = first.pop_finished().values()
    again = OpenRequests(engine, RULES, Tool())
    again.submit("a", [[3, 1, 4]], [3], partials=[left])
    [found] = [one for over in generate_stream(again, model) for one in over.values()]
    assert left.finish_reason == "aborted" and again._environments.heard == [("a", "repetition")]
    assert found.tokens.tolist() == turn.tokens.tolist() and found.episode.end


@dataclasses.dataclass
class Some(Tool):
    """Plays with one of them alone."""

    def has(self, key):
        return key == "a"


def test_beside_episodes_others_are_one_turn_without_the_limits_of_one():
    model, prompts, seeds = tiny("windows"), ([3, 1, 4], [1, 5]), (3, 4)
    engine = Engine(model, slots=2, max_length=32, chunk=4)
    alone = engine.generate(model, prompts, seeds, RULES)
    requests = OpenRequests(engine, RULES, tool := Some(max_turn_tokens=2))
    requests.submit("ab", prompts, seeds)
    found = {key: one for over in generate_stream(requests, model) for key, one in over.items()}
    assert {key for key, _ in tool.heard} == {"a"} and found["a"].episode.end
    assert found["b"].tokens.tolist() == alone[1].tokens.tolist() and found["b"].episode is None


def test_a_turn_that_is_aborted_is_not_answered():
    tool = Tool()
    requests = asked(4, responder=tool)
    for over in generate_stream(requests, None):
        requests.abort(requests.keys)
        assert {completion.finish_reason for completion in over.values()} <= {"aborted"}
    assert not tool.heard and not requests


@pytest.mark.parametrize("given", [2, 4, 9, 12])
def test_a_row_that_begins_anew_has_the_room_of_a_row_and_random_numbers_of_its_own(given):
    """However long what the model reads there is beside the prompt of 4 tokens; 20 tokens at most."""
    context = tuple(range(50, 50 + given))
    episode = Episode((Turn(3, {}), Turn(6, {}, fork=context)))
    tokens, mask = np.arange(8, dtype=np.int32), np.array([1, 1, 1, 0, 0, 1, 1, 1], bool)
    begun = Completion(tokens, np.float32(tokens), "aborted", mask, np.full(8, 3), episode=episode)
    asked = OpenRequest(0, np.arange(90, 94), 7, 20, begun)
    prompt, seed, limit, row = asked.to_row(0)
    assert [*prompt, *row.tokens] == [*context, 6, 7] and row.mask.sum() == 2
    assert seed != 7 and limit == min(20, 20 - 6 + max(given - 4, 0))
    assert asked.to_row(5)[2] == len(row.tokens) - 2 + 5, "5 tokens of a turn"
    more = dataclasses.replace(with_tokens(row, [30, 31]), finish_reason="stop")
    whole = asked.from_row(more)
    assert whole.tokens.tolist() == [*range(8), 30, 31] and whole.sampler_logp.tolist() == [*range(8), 0, 0]
    assert whole.episode == episode and whole.finish_reason == "stop" and whole.mask[:8].tolist() == mask.tolist()
    first = asked._replace(partial=dataclasses.replace(begun, episode=Episode()))
    assert first.to_row(0) == (first.prompt, 7, 20, first.partial) and first.from_row(more) is more


def test_no_two_kinds_of_asking_share_a_random_number():
    spaces = sorted(SeedSpace)
    assert [int(space) for space in spaces] == [0, 1 << 39, 3 << 38, 7 << 37]
    seeds = {request_seed(3, space + n) for space in spaces for n in (0, 1, (1 << 37) - 1)}
    assert len(seeds) == 12 and max(seeds) < request_seed(4, 0)
