"""Branches of episodes: where they begin, whatever is slow, interrupted or stopped, and in which environment."""

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import json
import math
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from rollout.test_episodes import FORKS, STOPS, Counting, completions, loaded, stopped
from rollout.test_episodes import sampler as plain

from jaxrl_llm.environments import Limits
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout import Branching, Collect, Engine
from jaxrl_llm.rollout.collect import collect_groups
from jaxrl_llm.rollout.episodes import Episodes, branch_points, common_lengths, entropy_rise
from jaxrl_llm.rollout.groups import Carryover

RULE = Branching(tokens=4)
GROUP = 6


class Copied(Counting):
    """Notes which began, which are copies, and which were closed."""

    began: ClassVar[list] = []
    copied: ClassVar[list] = []
    closed: ClassVar[list] = []

    def reset(self, row, seed):
        self.began.append(self)
        return super().reset(row, seed)

    def copy(self):
        self.copied.append(copy.copy(self))
        return self.copied[-1]

    def close(self):
        self.closed.append(self)


class Slow(Copied):
    slow = 0.05


class Forgetful(Copied):
    """Answers with a number that no other answer has."""

    numbers = itertools.count()

    def step(self, reply):
        step = super().step(reply)
        return dataclasses.replace(step, messages=[{"role": "user", "content": str(next(self.numbers))}])


class Uncopied(Copied):
    def copy(self):
        raise OSError("one world is enough")


def sampler(environment=Copied, rule=RULE, slots=6, peers=None, engine=None, settings=Collect(), limits=Limits()):
    made = plain(environment, slots=slots, settings=settings, limits=limits)
    episodes = Episodes(made.source.prompts, limits, 120, STOPS, peers, rule)
    source = dataclasses.replace(made.source, group=GROUP, episodes=episodes)
    return dataclasses.replace(made, source=source, engine=engine or made.engine)


@functools.cache
def played(environment=Copied, rule=RULE, slots=6, limits=Limits()):
    return collect_groups(sampler(environment, rule, slots, limits=limits), loaded()[0], 4, Carryover())


def same(some, others):
    for one, other in zip(completions(some), completions(others), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.episode == other.episode
        np.testing.assert_allclose(one.sampler_logp, other.sampler_logp, atol=1e-5)


def test_a_branch_has_its_parents_turns_and_goes_on_by_itself():
    began = len(Copied.began)
    made = sampler()

    def told():
        """Each episode knows its own chat, and no other's."""
        episodes = made.source.episodes
        for key, live in episodes._local._live.items():
            if key not in episodes._local._answers:
                said = [message for turn in live.turns for message in (turn.reply, *turn.messages)]
                assert live.messages[1:] == said

    found = collect_groups(made, loaded()[0], 4, Carryover(), told)
    branches = 0
    for group in found.groups:
        assert len(group.completions) == GROUP
        rises = [[turn.entropy_rise for turn in one.episode.turns] for one in group.completions]
        wanted = branch_points([one.episode for one in group.completions], RULE)
        for member, (one, start) in enumerate(zip(group.completions, wanted, strict=True)):
            assert one.episode.parent == (start and start[0]) and one.episode.end == "completed"
            assert len(one.episode.turns) == 3 and one.episode.metrics == {"asked": 3.0}
            size = len(loaded()[1])
            for turn, rise in zip(one.episode.turns, rises[member], strict=True):
                first = {name: x[: turn.end] for name, x in (("tokens", one.tokens), ("mask", one.mask))}
                cut = dataclasses.replace(one, **first, extras={"entropy": one.extras["entropy"][: turn.end]})
                assert entropy_rise(cut, RULE.tokens, size) == pytest.approx(rise)
            if start is None:
                assert one.episode.shared == 0
                continue
            branches += 1
            parent, shared = group.completions[start[0]], one.episode.shared
            np.testing.assert_array_equal(one.tokens[:shared], parent.tokens[:shared])
            np.testing.assert_array_equal(one.sampler_logp[:shared], parent.sampler_logp[:shared])
            assert one.mask[shared] and not one.mask[shared - 1], "it begins after an answer"
            assert one.episode.turns[: start[1]] == parent.episode.turns[: start[1]]
            assert one.tokens[shared:].tolist() != parent.tokens[shared:].tolist(), "another seed"
        assert group.rewards.tolist() == [6.0] * GROUP
    assert branches >= 3
    assert len(Copied.began) - began == 2 * GROUP - branches, "a branch goes on in a copy"
    assert found.metrics["episode/branches"] == branches / 2
    shared = sum(int(one.mask[: one.episode.shared].sum()) for one in completions(found.groups))
    assert found.tokens == sum(one.length for one in completions(found.groups)) - shared, (
        "shared tokens are sampled once"
    )
    assert 0 < found.metrics["episode/shared_fraction"] < 1 and math.isfinite(found.metrics["episode/entropy_rise"])


def test_a_branch_does_not_wait_for_the_end_of_its_parent():
    made = sampler(rule=Branching(whole=1, threshold=0.0))
    seen = set()

    def told():
        live = made.source.episodes._local._live
        seen.update(len(live[key].turns) for key in live if key[1] == 0 and (key[0], 1) in live)

    collect_groups(made, loaded()[0], 4, Carryover(), told)
    assert 2 in seen, "the first branch begins while its parent, of three turns, is in the last one"


@pytest.mark.slow
@pytest.mark.parametrize("slots", [6, 2])
def test_branches_are_the_same_in_a_slow_world_and_in_few_slots(slots):
    same(played(Slow, slots=slots).groups, played().groups)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "wanted"), [
    (Branching(whole=2, threshold=0.0), [None, None, (0, 1), (1, 1), (0, 2), (1, 2)]),
    (Branching(whole=1, threshold=0.0), [None, (0, 1), (0, 2), (1, 2), None, None]),
    (Branching(whole=5, threshold=0.0), [None, None, None, None, None, (0, 1)]),
    (Branching(whole=2, weight=0.0), [None] * 6),
])  # fmt: skip
def test_a_group_has_all_its_members_however_many_branch(rule, wanted):
    for group in played(rule=rule).groups:
        assert branch_points([one.episode for one in group.completions], rule) == wanted
        assert [one.episode.parent for one in group.completions] == [point and point[0] for point in wanted]
        texts = {one.tokens.tobytes() for one in group.completions}
        assert len(texts) == GROUP, "no two members are equal"


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 8, 14, 20])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_is_stopped_goes_on_to_the_same_branches(chunks, again):
    made = sampler()
    left = stopped(made, chunks)
    found = collect_groups(made if again else sampler(), loaded()[0], 4, left)
    same(found.groups, played().groups)
    assert found.tokens == played().tokens


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [8, 14, 20])
def test_a_group_in_which_an_episode_begins_anew_is_whole_all_the_same(chunks):
    left = stopped(sampler(Forgetful), chunks)
    found = collect_groups(sampler(Forgetful), loaded()[0], 4, left)
    assert found.metrics["episode/restarts"] > 0
    for group in found.groups:
        assert [one.episode.end for one in group.completions] == ["completed"] * GROUP
        common = common_lengths(group.completions)
        for one, other in itertools.product(range(GROUP), repeat=2):
            shared = common[one, other]
            first, second = (group.completions[i].tokens[:shared].tolist() for i in (one, other))
            assert first == second, "what an episode that began anew no longer has is not shared"


class Side:
    """One of two processes, which are threads here."""

    def __init__(self, index, board):
        self.index, self.count, self._board = index, 2, board

    def gather(self, value):
        said, barrier = self._board
        said[self.index] = json.dumps(value)
        barrier.wait(timeout=60)
        found = [json.loads(said[index]) for index in range(self.count)]
        barrier.wait(timeout=60)
        return found


@pytest.mark.slow
def test_of_two_processes_the_one_that_has_a_parents_environment_has_its_branches_too():
    """Where the template rewrites history, and branches begin in several rows, too."""
    alone = played(limits=FORKS).groups
    assert any(one.forks and one.episode.parent is not None for one in completions(alone))
    board = {}, threading.Barrier(2)
    began = len(Copied.began)

    def play(index):
        own = Engine(loaded()[0], slots=6, max_length=380, chunk=4, group=3)
        made = sampler(peers=Side(index, board), engine=own, limits=FORKS)
        try:
            return collect_groups(made, loaded()[0], 4, Carryover()).groups
        except threading.BrokenBarrierError:
            return None  # the other one says why
        except Exception:
            board[1].abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for groups in threads.map(play, range(2)):
            same(groups, alone)
    branches = sum(one.episode.parent is not None for one in completions(alone))
    assert len(Copied.began) - began == 2 * GROUP - branches, "each environment is on one process"


@pytest.mark.slow
def test_groups_that_are_interrupted_have_the_same_branches():
    made = sampler(settings=Collect(interrupt=True))
    made = dataclasses.replace(made, admission=dataclasses.replace(made.admission, needed=1))
    left, found, interrupted = Carryover(), {}, 0
    for version in range(4):
        batch = collect_groups(made, loaded()[0], 4 + version, left)
        found |= {one.problem.id: one for one in batch.sampled}
        left, interrupted = batch.carryover, interrupted + batch.metrics["rollout/interrupted"]
    assert interrupted
    for group in played().groups:
        same([found[group.problem.id]], [group])


@pytest.mark.slow
def test_copies_are_closed_and_an_environment_that_fails_to_copy_itself_is_refused():
    made = sampler()
    before = [len(Copied.began), len(Copied.copied), len(Copied.closed)]
    collect_groups(made, loaded()[0], 4, Carryover())
    counts = lambda: [len(all) - n for all, n in zip((Copied.began, Copied.copied, Copied.closed), before, strict=True)]
    end = time.monotonic() + 20
    while counts()[2] < sum(counts()[:2]) and time.monotonic() < end:
        time.sleep(0.01)
    began, copied, closed = counts()
    assert closed == began + copied > 2 * GROUP and not made.source.episodes._local._live
    source = sampler(Uncopied).source
    with pytest.raises(InputError, match="Uncopied: copy: OSError: one world is enough"):
        source.episodes.rehearse([source.stream.next(0, {})[0]])


@pytest.mark.slow
def test_without_copies_a_branch_gets_a_new_environment_that_is_given_the_same_replies():
    same(played(Uncopied).groups, played().groups)
