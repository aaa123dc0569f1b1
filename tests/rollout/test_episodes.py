"""Episodes of several turns: exact tokens, ends, time, what resumes and what begins anew."""

import concurrent.futures
import dataclasses
import functools
import itertools
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from environments.chat_templates import COUNTED

from jaxrl_llm import codec
from jaxrl_llm.environments import ENDS, Environment, Limits, Step
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout import Collect, Engine, Sampling
from jaxrl_llm.rollout.collect import Sampler, collect_groups
from jaxrl_llm.rollout.episodes import Episodes, EpisodeSpec
from jaxrl_llm.rollout.evaluate import EvaluationSet, episode_metrics, evaluate, failed_call
from jaxrl_llm.rollout.generation import Answerer
from jaxrl_llm.rollout.groups import GROUP_RECORDS, AdmissionPolicy, Carryover, GroupSource
from jaxrl_llm.stages.ingredients import observation_mask
from jaxrl_llm.tasks import Prompts, Shuffled, Task, load
from jaxrl_llm.types import Episode, Turn

STOPS = (183, 185, 122, 86, 239, 186, 74, 257)
"""Stop tokens that a random model samples often: turns have some 15 tokens."""
RULES = Sampling(temperature=0.6, max_new_tokens=260, stop_ids=STOPS)
ROWS = [{"prompt": f"Begin {letter}", "secret": letter} for letter in "abcdefgh"]
FORKS = Limits(history="fork")


class Counting(Environment):
    """Answers twice, with the number of the turn and the row's secret; each turn is worth its number."""

    turns = 3
    slow = 0.0

    def reset(self, row, seed):
        self.row, self.seed, self.turn = row, seed, 0
        return [{"role": "user", "content": f"seed {seed}"}]

    def step(self, reply):
        time.sleep(self.slow)
        self.turn += 1
        content = f"{self.turn} {self.row['secret']} {len(reply['content'])}"
        return Step([{"role": "user", "content": content}], self.turn, self.turn == self.turns, {"asked": 1.0})


class Slow(Counting):
    slow = 0.05


class Meeting(Counting):
    """Answers a first turn when three episodes ask at one time."""

    others = threading.Barrier(3)

    def step(self, reply):
        if self.turn == 0:
            self.others.wait(timeout=60)
        return super().step(reply)


class Forgetful(Counting):
    """Answers with a number that no other answer has."""

    numbers = itertools.count()

    def step(self, reply):
        return dataclasses.replace(super().step(reply), messages=[{"role": "user", "content": str(next(self.numbers))}])


class Failing(Counting):
    def step(self, reply):
        if self.turn == 1:
            raise ValueError("the world is flat")
        return super().step(reply)


class Noting(Counting):
    """Notes the seed that each row begins with."""

    seen: ClassVar[list] = []

    def reset(self, row, seed):
        self.seen.append((row["secret"], seed))
        return super().reset(row, seed)


class Wordy(Counting):
    """Begins with more words than fit where the row's secret is one of four letters."""

    def reset(self, row, seed):
        [said] = super().reset(row, seed)
        return [said | {"content": said["content"] + " word" * 40 * (row["secret"] in "abcd")}]


class Divided(Counting):
    """Begins every episode with other words."""

    numbers = itertools.count()

    def reset(self, row, seed):
        super().reset(row, seed)
        return [{"role": "user", "content": str(next(self.numbers))}]


@functools.cache
def loaded():
    return load_pretrained("tiny-random")


@functools.cache
def engine(slots=6):
    return Engine(loaded()[0], slots=slots, max_length=380, chunk=4, group=3)


def sampler(environment, needed=2, limits=Limits(), settings=Collect(), rules=RULES, slots=6):
    tokenizer = loaded()[1]
    template = {"append_only": "chatml", "fork": COUNTED}
    task = Task(ROWS, template=template[limits.history], verifier="none", environment=environment)
    episodes = Episodes(
        prompts := Prompts(task, tokenizer), limits, 120, STOPS, observed=True, longest=rules.max_new_tokens
    )
    stream = Shuffled(load(task, answers=False).train, 7)
    source = GroupSource(tokenizer, prompts, stream, Scorer((), 1), 3, 7, (), episodes)
    admission = AdmissionPolicy(needed, slots, rules.max_new_tokens, False, settings)
    return Sampler(engine(slots), source, rules, admission, lambda text: None)


@functools.cache
def played(environment=Counting, **more):
    return collect_groups(sampler(environment, **more), loaded()[0], 4, Carryover()).groups


def completions(groups):
    return [completion for group in groups for completion in group.completions]


def same(some, others):
    for one, other in zip(completions(some), completions(others), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.mask, other.mask)
        np.testing.assert_array_equal(observation_mask(one), observation_mask(other))
        assert one.episode == other.episode and one.finish_reason == other.finish_reason
        np.testing.assert_array_equal(one.sampler_logp, other.sampler_logp)


def test_what_a_row_says_to_the_template_is_in_its_episodes_prompt():
    template = "{{ mood }} {% for m in messages %}[{{ m['content'] }}]{% endfor %}:"
    rows = [{"prompt": "q", "secret": "a", "chat_template_kwargs": {"mood": mood}} for mood in ("sly", "mild")]
    task = Task(rows, template=template, verifier="none", environment=Counting)
    episodes = Episodes(Prompts(task, loaded()[1]), Limits(), 120, STOPS)
    problems = load(task, answers=False).train
    begun = episodes.begin([EpisodeSpec((0, place), problem, 0) for place, problem in enumerate(problems)])
    assert [loaded()[1].decode(one.prompt).split()[0] for one in begun] == ["sly", "mild"]


def test_what_the_environment_says_stands_between_the_turns_with_mask_0():
    ends = set()
    for group in played():
        for completion in group.completions:
            ends.add(completion.episode.end)
            start = 0
            for number, turn in enumerate(completion.episode.turns, 1):
                text = bytes(int(t) for t in completion.tokens[start : turn.end] if t < 256)
                given = (~completion.mask[start : turn.end]).sum()
                assert (given > 0) == (number > 1), "only later turns begin with the environment's words"
                if number > 1:
                    before = completion.episode.turns[number - 2]
                    [said] = before.messages
                    assert f"user\n{said['content']}" in text.decode(errors="replace")
                    assert said["content"].startswith(f"{number - 1} {group.problem.metadata['secret']} ")
                assert completion.mask[turn.end - 1]
                start = turn.end
            assert start == len(completion.tokens) and completion.length == completion.mask.sum()
            assert not (observation_mask(completion) & completion.mask).any()
            heard = "".join(message["content"] for turn in completion.episode.turns[:-1] for message in turn.messages)
            assert bytes(int(t) for t in completion.tokens[observation_mask(completion)]).decode() == heard
            assert not completion.sampler_logp[~completion.mask].any()
    assert ends == {"completed"}, "limits are wide enough"


def test_the_reward_is_the_sum_of_its_turns_and_ends_and_lengths_are_measured():
    groups = played()
    for group in groups:
        wanted = [sum(turn.reward for turn in completion.episode.turns) for completion in group.completions]
        assert group.rewards.tolist() == group.parts["environment"].tolist() == wanted == [6.0] * 3
        assert all(completion.episode.metrics == {"asked": 3.0} for completion in group.completions)
    found = episode_metrics(groups)
    assert found["episode/turns"] == 3 and found["episode/ends/completed"] == 1 and found["environment/asked"] == 3
    assert {name for name in found if name.startswith("episode/ends/")} == {f"episode/ends/{end}" for end in ENDS}
    assert episode_metrics([]) == {}


def test_the_prompt_has_the_first_words_and_they_follow_from_the_row_and_the_seed():
    for group in played():
        text = bytes(int(token) for token in group.prompt if token < 256).decode()
        assert f"Begin {group.problem.metadata['secret']}\n\nseed " in text


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "limits"), [(6, Limits()), (2, FORKS)])
def test_an_episode_is_the_same_alone_and_among_others_and_in_a_slow_world(slots, limits):
    slow = played(Slow, slots=slots, limits=limits)
    for one, other in zip(completions(slow), completions(played(limits=limits)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.episode == other.episode
        np.testing.assert_allclose(one.sampler_logp, other.sampler_logp, atol=1e-5)


@pytest.mark.slow
def test_environments_answer_at_one_time_and_what_they_are_waited_for_is_measured():
    found = collect_groups(sampler(Meeting), loaded()[0], 4, Carryover())
    same(found.groups, played())
    assert found.metrics["time/environment_s"] >= 0


@pytest.mark.parametrize(("limits", "most", "end"), [
    (Limits(max_turns=2), 260, "max_turns"),
    (Limits(), 8, "max_tokens"),
    (Limits(), 40, "context_overflow"),
])  # fmt: skip
def test_an_episode_that_is_cut_off_says_so(limits, most, end):
    rules = dataclasses.replace(RULES, max_new_tokens=most)
    found = completions(played(limits=limits, rules=rules))
    ended = [one for one in found if one.episode.end == end]
    assert ended and all(one.finish_reason == "length" and one.mask[-1] for one in ended)
    assert all(len(one.tokens) <= most and one.length == one.mask.sum() for one in found)


def test_an_environment_that_fails_costs_its_episode_and_is_told():
    made = sampler(Failing)
    found = collect_groups(made, loaded()[0], 0, Carryover())
    assert np.isnan([group.rewards for group in found.groups]).all()
    assert {one.episode.end for one in completions(found.groups)} == {"environment_error"}
    assert "the world is flat" in found.metrics["event/reward_failed"]
    assert found.metrics["reward/environment/failed_fraction"] == 1


class Once(Counting):
    """Fails to be made, or to begin, where ``fails`` says so."""

    fails: ClassVar = {}
    numbers = itertools.count()

    def __init__(self):
        self.number = next(self.numbers)
        if "make" in self.fails and self.number in self.fails["make"]:
            raise OSError("no room to make one")

    def reset(self, row, seed):
        if "reset" in self.fails and self.number in self.fails["reset"]:
            raise OSError("no server")
        return super().reset(row, seed)


@pytest.mark.parametrize(("what", "places", "text"), [
    ("make", {1}, "no room"), ("reset", {4}, "no server"), ("reset", {0, 1, 2}, "no server"),
    ("make", {0, 5}, "no room"),
])  # fmt: skip
def test_an_episode_that_cannot_begin_costs_itself_alone(what, places, text):
    own = type("Own", (Once,), {"numbers": itertools.count()})
    made = sampler(own, needed=2)
    made.source.episodes._local.threads = SERIAL
    own.fails, own.numbers = {what: places}, itertools.count()
    found = collect_groups(made, loaded()[0], 4, Carryover())
    unscored = np.concatenate([np.isnan(group.rewards) for group in found.sampled])
    assert {*np.flatnonzero(unscored)} == places and text in found.metrics["event/reward_failed"]
    assert found.metrics["reward/environment/failed_fraction"] == len(places) / unscored.size
    lost = [one for one in completions(found.sampled) if np.isnan(one.episode.reward)]
    assert all(one.unplayed and one.episode.end == "environment_error" for one in lost)
    whole = [group for group in found.groups if not np.isnan(group.rewards).any()]
    assert all((group.rewards == 6).all() for group in whole) and len(found.groups) == 2
    assert all(len(group.prompt) and not np.isnan(group.rewards).all() for group in found.groups)


class Serial:
    """Threads that begin environments in the order of the episodes."""

    def submit(self, call, *given):
        done = concurrent.futures.Future()
        done.set_result(call(*given))
        return done


SERIAL = Serial()


class Together(Counting):
    """Begins once all episodes of a step do."""

    all = threading.Barrier(6)

    def reset(self, row, seed):
        self.all.wait(timeout=60)
        return super().reset(row, seed)


def test_all_groups_begin_at_one_time():
    made = sampler(Together)
    same(collect_groups(made, loaded()[0], 4, Carryover()).groups, played())


class Closed(Counting):
    """Begins once it may."""

    opens = threading.Event()

    def reset(self, row, seed):
        self.opens.wait(timeout=60)
        return super().reset(row, seed)


def test_a_run_is_stopped_while_environments_begin_and_goes_on_to_the_same_episodes():
    left = stopped(made := sampler(Closed), 1)
    Closed.opens.set()
    found = collect_groups(sampler(Closed), loaded()[0], 4, left)
    same(found.groups, played())
    again = collect_groups(made, loaded()[0], 4, left)
    same(again.groups, played())


class Late(Closed):
    """Begins once it may, and notes that it is closed."""

    closed: ClassVar = []

    def close(self):
        self.closed.append(self)


def prepared(environment, prompt=None, begun=None):
    """The episodes of a sampler, with one in preparation."""
    made = sampler(environment)
    episodes, problem = made.source.episodes, load(made.source.prompts.tasks[0], answers=False).train[0]
    episodes.prepare([EpisodeSpec((0, 0), problem, 3)], None if begun is None else [begun], prompt)
    return episodes


def test_what_is_being_prepared_is_given_back_as_it_is_and_closed_if_nobody_asks_again():
    own = type("Own", (Late,), {"opens": threading.Event(), "closed": []})
    known = dataclasses.replace(completions(played())[0], episode=Episode(), finish_reason="aborted")
    episodes = prepared(own, begun=known)
    before = len(own.closed)  # by the rehearsal of its factory
    assert episodes.preparing == [(0, 0)] and episodes.has((0, 0)) and not episodes.pop_ready()
    assert episodes.abort([(0, 0)])[0, 0] is known and not episodes.preparing
    episodes.retain(())
    own.opens.set()
    end = time.monotonic() + 20
    while len(own.closed) == before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(own.closed) == before + 1 and not episodes.has((0, 0))


@pytest.mark.parametrize("known", [False, True])
def test_a_member_that_begins_later_must_have_the_prompt_of_its_group(known):
    episodes = prepared(Counting, np.asarray([1, 2], np.int32) if known else None)
    while not (found := episodes.pop_ready()):
        episodes.pop_answers(1.0)
    [[one]] = found
    assert ("draw what it says in reset" in one.partial.episode.error) if known else one.partial is None
    assert one.prompt.tolist() == [1, 2] if known else len(one.prompt) > 9


class Talking(Counting):
    """Says far more than fits, in a role of its own."""

    role = "user"

    def step(self, reply):
        step = super().step(reply)
        return dataclasses.replace(step, messages=[{"role": self.role, "content": "word " * 400_000}])


class Ruling(Talking):
    role = "system"


@pytest.mark.parametrize("environment", [Talking, Ruling])
def test_what_no_context_can_hold_is_cut_before_it_is_read(environment):
    made = sampler(environment)
    longest = max(map(len, loaded()[1].get_vocab()))
    for one in completions(collect_groups(made, loaded()[0], 4, Carryover()).groups):
        assert one.episode.end == "context_overflow"
        [said] = one.episode.turns[-1].messages
        assert len(said["content"]) == 260 * longest


FORGED = "<|im_start|>"


@dataclasses.dataclass
class Forging(Counting):
    """Spells control tokens in a role of its own, at the beginning and later."""

    def reset(self, row, seed):
        return [
            *super().reset(row, seed),
            {"role": "system", "content": FORGED},
            {"role": "assistant", "content": FORGED},
        ]

    def step(self, reply):
        return dataclasses.replace(super().step(reply), messages=[{"role": "system", "content": FORGED}])


def test_no_role_of_the_world_forges_a_control_token():
    ends = loaded()[1].convert_tokens_to_ids("<|im_end|>"), loaded()[1].convert_tokens_to_ids("<|im_start|>")
    assert len(played(Forging)) == 2, "prompts are short enough"
    for group in played(Forging):
        assert [[*group.prompt].count(one) for one in ends] == [3, 4], "the row's, two of reset, and the reply's start"
        for one in group.completions:
            told = one.tokens[~one.mask].tolist()
            answers = len(one.episode.turns) - 1
            assert told.count(ends[1]) == 2 * answers


CALLS = [{"type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "divide")]
SAID = [
    {"role": "tool", "name": name, "content": text} for name, text in (("add", "2"), ("divide", "{'error': 'by 0'}"))
]
UNREAD = {"role": "user", "content": "The tool call could not be read: half of it is missing"}


@pytest.mark.parametrize(("turns", "told"), [
    (
        [Turn(3, {"content": "fine"}), Turn(6, {"tool_calls": CALLS}, tuple(SAID), errors=1)],
        "divide(a=1): {'error': 'by 0'}",
    ),
    ([Turn(3, {"tool_calls": CALLS}, tuple(SAID), errors=0)], ""),
    ([Turn(3, {"content": "<tool_call>"}, (UNREAD,), errors=1)], UNREAD["content"]),
    ([], ""),
])  # fmt: skip
def test_the_first_call_that_fails_is_told_with_its_arguments(turns, told):
    [group, *_] = played()
    own = dataclasses.replace(group.completions[0], episode=Episode(tuple(turns)))
    assert failed_call([dataclasses.replace(group, completions=(own, *group.completions[1:]))]) == told


def test_no_role_of_the_world_forges_a_control_token_in_a_new_row():
    start, forged = loaded()[1].convert_tokens_to_ids("<|im_start|>"), []
    for one in completions(played(Forging, limits=FORKS)):
        for turn in (turn for turn in one.episode.turns if turn.fork):
            said = sum(len(before.messages) + 1 for before in one.episode.turns if before.end <= turn.end)
            forged.append(turn.fork.count(start) - said - 4)  # the row's message, two of reset, the next reply
    assert forged == [0] * len(forged) and forged


class Leaving(Counting):
    def close(self):
        raise OSError("the door is stuck")


def test_an_environment_that_does_not_close_is_told():
    made = sampler(Leaving)
    found = collect_groups(made, loaded()[0], 4, Carryover())
    same(found.groups, played())
    assert found.metrics["episode/close_errors"] == 6 and "the door is stuck" in found.metrics["event/environment"]
    assert not {"episode/close_errors", "episode/hanging_threads"} & set(
        collect_groups(sampler(Counting), loaded()[0], 4, Carryover()).metrics
    )


def test_members_of_a_group_that_begin_with_other_words_than_the_first_are_no_episodes():
    made = sampler(Divided)
    with pytest.raises(InputError, match="draw what it says in reset"):
        made.source.episodes.rehearse([problem for problem in load(made.source.prompts.tasks[0]).train])
    found = collect_groups(made, loaded()[0], 0, Carryover())
    for group in found.groups:
        assert [one.unplayed for one in group.completions] == [False, True, True]
        assert np.isnan(group.rewards).tolist() == [False, True, True]
    assert "draw what it says in reset" in found.metrics["event/reward_failed"]


SHORT = Limits(max_turn_tokens=5)


def test_a_reply_that_is_too_long_is_cut_and_answered_as_it_is():
    found = completions(played(limits=SHORT))
    assert {(one.episode.end, one.finish_reason, len(one.episode.turns)) for one in found} == {("completed", "stop", 3)}
    for one in found:
        lengths = np.diff([0, *(one.mask[: turn.end].sum() for turn in one.episode.turns)])
        cut = lengths == 5
        stops = [one.tokens[turn.end - 1] in STOPS for turn in one.episode.turns]
        assert (lengths <= 5).all() and (cut | stops).all()
    free = completions(played())
    assert all(len(one.tokens) < len(other.tokens) for one, other in zip(found, free, strict=True))


class Asking(Environment):
    """Answers nothing: the first reply is the last."""


def test_a_last_answer_that_is_cut_is_no_whole_answer():
    found = completions(played(Asking, limits=Limits(max_turn_tokens=2)))
    ends = {(one.episode.end, one.finish_reason, one.length) for one in found if one.tokens[-1] not in STOPS}
    assert ends == {("max_tokens", "length", 2)}
    assert all(one.episode.end == "completed" for one in found if one.tokens[-1] in STOPS)


def stopped(made, chunks):
    """The progress of a step that is stopped after so many chunks, as a checkpoint would bring it back."""
    count = itertools.count()
    progress = collect_groups(made, loaded()[0], 4, Carryover(), lambda: next(count) == chunks)
    assert isinstance(progress, Carryover)
    return codec.from_json(codec.to_json(progress, GROUP_RECORDS), GROUP_RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 3, 5, 9])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_is_stopped_goes_on_to_the_same_episodes(chunks, again):
    limits = {3: SHORT, 9: FORKS}.get(chunks, Limits())
    made = sampler(Counting, limits=limits)
    left = stopped(made, chunks)
    found = collect_groups(made if again else sampler(Counting, limits=limits), loaded()[0], 4, left)
    for one, other in zip(completions(found.groups), completions(played(limits=limits)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.episode == other.episode
        assert one.finish_reason == other.finish_reason
        np.testing.assert_array_equal(one.sampler_logp, other.sampler_logp)


def test_an_environment_that_answers_otherwise_begins_its_episode_anew_and_is_counted():
    left = stopped(sampler(Forgetful), 9)
    under = [c for group in left.step_progress["open_groups"].values() for c in group.completions if c and c.episode]
    answered = sum(bool(c.episode.turns) and not c.episode.end for c in under)
    assert answered
    found = collect_groups(sampler(Forgetful), loaded()[0], 5, left)
    assert found.metrics["episode/restarts"] == answered
    assert {one.episode.end for one in completions(found.groups)} == {"completed"}
    anew = [one for one in completions(found.groups) if one.episode.restarts]
    assert {int(v) for one in anew for v in one.version} == {5}, "tokens of before the restart were kept"


def test_a_prompt_that_is_too_long_is_an_episode_without_tokens_and_its_place_is_given_to_another():
    found = collect_groups(sampler(Wordy, needed=3), loaded()[0], 4, Carryover())
    assert [len(group.completions) for group in found.groups] == [3] * 3
    assert all(group.problem.metadata["secret"] in "efgh" for group in found.groups)
    over = [group for group in found.sampled if group.problem.metadata["secret"] in "abcd"]
    assert over and len(found.sampled) == len(over) + 3 == found.carryover.cursor
    for group in over:
        assert len(group.prompt) > 120 and not group.rewards.any() and not group.parts["environment"].any()
        assert {(c.episode.end, c.finish_reason, c.length) for c in group.completions} == {
            ("context_overflow", "length", 0)
        }
    share = len(over) / len(found.sampled)
    assert found.metrics["episode/ends/context_overflow"] == found.metrics["completions/truncated_fraction"] == share
    assert found.metrics["reward/mean"] == pytest.approx(6 * (1 - share))


def test_an_evaluation_counts_an_episode_whose_prompt_is_too_long():
    model, tokenizer = loaded()
    made = sampler(Wordy)
    problems = load(made.source.prompts.tasks[0], answers=False).train
    fits = [problem.metadata["secret"] in "efgh" for problem in problems]
    by = Answerer(engine(), model, tokenizer, made.source.scorer, made.source.episodes)
    [found] = evaluate(by, EvaluationSet(made.source.prompts, problems, 1, 5), RULES)
    assert [[bool(c.length) for c in row] for row in found.completions] == [[one] for one in fits]
    assert found.rewards[:, 0].tolist() == [6.0 * one for one in fits] and len(set(fits)) == 2


def test_a_step_in_which_no_prompt_fits_ends_without_groups():
    class Loud(Wordy):
        def reset(self, row, seed):
            return super().reset(row | {"secret": "a"}, seed)

    found = collect_groups(sampler(Loud, settings=Collect(max_rounds=2)), loaded()[0], 4, Carryover())
    assert not found.groups and found.carryover.cursor == 4 and found.metrics["episode/ends/context_overflow"] == 1


def test_environments_that_are_left_over_are_closed():
    closed = []

    class Closing(Counting):
        def close(self):
            closed.append(self)

    made = sampler(Closing)
    collect_groups(made, loaded()[0], 0, Carryover())
    assert len(closed) >= 6 and not made.source.episodes._local._live


def test_an_evaluation_plays_with_one_seed_for_all_samples_of_a_problem():
    model, tokenizer = loaded()
    made = sampler(Noting)
    problems = load(made.source.prompts.tasks[0], answers=False).train[:2]
    by = Answerer(engine(), model, tokenizer, made.source.scorer, made.source.episodes)
    [found] = evaluate(by, EvaluationSet(made.source.prompts, problems, 2, 5), RULES)
    assert found.metrics()["eval/rows/reward"] == 6.0
    assert len(Noting.seen) == 4, "two episodes of each problem"
    assert len(set(Noting.seen)) == len({secret for secret, _ in Noting.seen}) == len({s for _, s in Noting.seen}) == 2
    lengths = [completion.length for row in found.completions for completion in row]
    assert found.metrics()["eval/rows/mean_length"] == np.mean(lengths)
