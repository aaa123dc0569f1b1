"""The one driver of a backend: what comes back when, aborts while it runs, and episodes of several turns."""

import numpy as np
from rollout.simulation import LONGEST, ToyEngine
from tiny import tiny

from jaxrl_llm.rollout import Engine, Sampling, with_tokens
from jaxrl_llm.rollout.respond import Requests, SeedSpace, request_seed, respond


def asked(count, slots=2, longest=LONGEST):
    """Requests for so many completions of the toy, by their numbers."""
    requests = Requests(ToyEngine(slots), Sampling(max_new_tokens=longest))
    requests.submit(range(count), [(1,)] * count, range(count))
    return requests


def test_all_that_is_asked_comes_back_once_by_its_key():
    requests = asked(5)
    rounds = list(respond(requests, None, 3))
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
    for over in respond(requests, None):
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
    for over in respond(requests, None):
        seen += over
        if len(seen) < 4 and not requests:
            requests.submit([10 + len(seen)], [(1,)], [len(seen)])
    assert seen == [0, 11, 12, 13]


def test_a_responder_answers_a_turn_until_the_episode_is_over():
    model, prompts, seeds = tiny("windows"), ([3, 1, 4], [1, 5], [9]), (3, 4, 5)
    rules = Sampling(max_new_tokens=24, stop_ids=(2, 3, 5, 7, 9, 11, 12, 13))
    engine = Engine(model, slots=2, max_length=32, chunk=4)
    turns = engine.generate(model, prompts, seeds, rules)
    assert all(turn.finish_reason == "stop" and len(turn.tokens) < 20 for turn in turns)
    heard = []

    def tool(key, turn):
        heard.append(key)
        return [7, 8] if turn.mask.all() else None

    requests = Requests(engine, rules)
    requests.submit("abc", prompts, seeds)
    found = {key: episode for over in respond(requests, model, 0, tool) for key, episode in over.items()}
    assert sorted(heard) == sorted("abc" * 2) and set(found) == set("abc")
    engine.start(rules)
    begun = [with_tokens(turn, [7, 8]) for turn in turns]
    handles = engine.submit(prompts, seeds, begun=begun)
    while engine.busy:
        engine.step(model)
    for (_, wanted), key in zip(sorted(engine.collect()), "abc", strict=True):
        np.testing.assert_array_equal(found[key].tokens, wanted.tokens)
        np.testing.assert_array_equal(found[key].mask, wanted.mask)
        np.testing.assert_allclose(found[key].sampler_logp, wanted.sampler_logp, atol=1e-5)
        assert (~found[key].mask).sum() == 2
    assert len(handles) == 3


def test_an_answer_that_leaves_no_room_ends_the_episode():
    requests = asked(1, longest=6)
    requests.backend.length = lambda seed: 4
    rounds = list(respond(requests, None, responder=lambda key, turn: [7, 8]))
    assert rounds[-1][0].tokens.shape == (4,)


def test_a_turn_that_is_aborted_is_not_answered():
    requests = asked(4)
    heard = []
    for over in respond(requests, None, responder=lambda key, turn: heard.append(turn.finish_reason)):
        requests.abort(requests.keys)
        assert {completion.finish_reason for completion in over.values()} <= {"aborted"}
    assert not heard and not requests


def test_no_two_kinds_of_asking_share_a_random_number():
    spaces = sorted(SeedSpace)
    assert [int(space) for space in spaces] == [0, 1 << 39, 3 << 38, 7 << 37]
    seeds = {request_seed(3, space + n) for space in spaces for n in (0, 1, (1 << 37) - 1)}
    assert len(seeds) == 12 and max(seeds) < request_seed(4, 0)
