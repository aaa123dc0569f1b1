"""Replay of successes: what is stored, which groups it changes, and that a replayed token's ratio is the true one."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import TEMPERATURE, WIDTH, T, moved, policy_gradient, unpacked_logp
from rollout.simulation import ToySource, drawn, places, sampler, steps
from tiny import largest_difference, tiny

from jaxrl_llm import codec
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.config import load_config, notes, validate
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout
from jaxrl_llm.learner.batch import pack
from jaxrl_llm.learner.samples import advantage_of, to_samples
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import Format
from jaxrl_llm.rewards.shaping import REJECTED
from jaxrl_llm.rollout import Collect, Engine, Replay, Sampling
from jaxrl_llm.rollout.collect import collect_groups
from jaxrl_llm.rollout.groups import (
    GROUP_RECORDS,
    count_sampled_tokens,
    informative,
    is_replaceable,
    pick_success,
    replay_successes,
)
from jaxrl_llm.types import Completion, Group, Problem

SEED = 5


def completion(mark, reason="stop"):
    """One of two tokens, told apart by the first."""
    return Completion(
        np.array([mark, 1], np.int32),
        np.array([-0.5, -mark], np.float32),
        reason,
        np.ones(2, bool),
        np.zeros(2, np.int32),
    )


def group(accuracy, problem="p", marks=None, reasons=None, rewards=None, prompt=(7, 8), **parts):
    """A scored group; its rewards are twice the accuracy unless given."""
    accuracy = np.asarray(accuracy, float)
    marks, reasons = marks or range(len(accuracy)), reasons or ["stop"] * len(accuracy)
    made = tuple(completion(mark, reason) for mark, reason in zip(marks, reasons, strict=True))
    found = {"accuracy": accuracy} | {name: np.asarray(part, float) for name, part in parts.items()}
    given = 2 * accuracy if rewards is None else np.asarray(rewards, float)
    return Group(Problem(problem, (), "1", "toy"), np.asarray(prompt, np.int32), made, given, accuracy, found)


def kept(*groups, settings=Replay(), left_out=(), store=None):
    """The store after these groups, one after the other, and what was replaced."""
    store, replaced = store or {}, {}
    for number, one in enumerate(groups):
        store, more = replay_successes(settings, store, {number: one}, SEED, left_out)
        replaced |= more
    return store, replaced


def marks_of(store, problem="p"):
    return [int(one.completion.tokens[0]) for one in store[f"toy/{problem}"].successes]


def test_the_last_successes_of_each_problem_are_stored_first_in_first_out():
    rounds = [group([1, 0, 1], marks=[10 * n, 10 * n + 1, 10 * n + 2]) for n in range(6)]
    store, replaced = kept(*rounds, group([1, 1, 0], "q"), settings=Replay(5))
    assert marks_of(store) == [32, 40, 42, 50, 52] and marks_of(store, "q") == [0, 1] and not replaced
    assert Replay().per_prompt == 8


def test_only_what_could_be_learned_from_is_stored():
    reasons, gate = ["stop", "length", "stop", "repetition", "stop", "stop"], {REJECTED: [0, 0, 0, 0, 0, 1]}
    one = group([1, 1, 0, 1, 1, 1], reasons=reasons, rewards=[2, 2, 0, 2, np.nan, 2], **gate)
    assert marks_of(kept(one, left_out=("length", "repetition"))[0]) == [0]
    assert marks_of(kept(one)[0]) == [0, 1, 3]
    assert kept(group([0, 0.5, np.nan]))[0] == {}


def test_where_all_have_failed_the_first_member_gives_way_scores_and_all():
    before = group([1, 0, 0, 0], marks=[9, 1, 2, 3], length=[0.25, 1, 1, 1])
    after = group([0.5, 0.5, 0.5, np.nan], marks=[4, 5, 6, 7], rewards=[0.1, 1, 0.2, np.nan], length=[3, 4, 5, 6])
    store, replaced = kept(before, after)
    (found,) = replaced.values()
    assert [int(c.tokens[0]) for c in found.completions] == [9, 5, 6, 7]
    np.testing.assert_array_equal(found.rewards, [2, 1, 0.2, np.nan])
    np.testing.assert_array_equal(found.accuracy, [1, 0.5, 0.5, np.nan])
    np.testing.assert_array_equal(found.parts["length"], [0.25, 4, 5, 6])
    assert after.rewards[0] == 0.1 and int(after.completions[0].tokens[0]) == 4, "what was sampled stays as it was"
    assert found.completions[0].sampler_logp.tolist() == [-0.5, -9] and found.completions[0].version.tolist() == [0, 0]
    assert informative(found) and not informative(after) and marks_of(store) == [9]


@pytest.mark.parametrize("accuracy", [[0, 1, 0], [1, 1, 1], [0, np.nan, np.nan], [np.nan] * 3, [0.5, 0.75, 0.25]])
def test_a_group_with_a_success_or_without_a_known_failure_stays(accuracy):
    assert not is_replaceable(group(accuracy)) and not kept(group([1, 0, 0]), group(accuracy))[1]


def test_what_followed_another_prompt_or_was_scored_by_other_rewards_is_forgotten():
    for other in (group([0, 0], prompt=(7, 9)), group([0, 0], length=[1, 2])):
        store, replaced = kept(group([1, 0]), other)
        assert store == {} and not replaced
    store, replaced = kept(group([1, 0]), group([0, 0], "q"))
    assert not replaced, "a success is of its own problem"


def test_each_success_is_taken_as_often_and_seed_and_number_say_which():
    successes = kept(group([1, 1, 1, 0]))[0]["toy/p"].successes
    counts = np.bincount([int(pick_success(successes, 3, n).completion.tokens[0]) for n in range(3000)], minlength=3)
    assert (np.abs(counts - 1000) < 100).all()
    assert [id(pick_success(successes, 3, n)) for n in range(20)] == [
        id(pick_success(successes, 3, n)) for n in range(20)
    ]
    assert [id(pick_success(successes, 4, n)) for n in range(20)] != [
        id(pick_success(successes, 3, n)) for n in range(20)
    ]


def test_where_there_is_no_room_the_problem_that_was_solved_best_gives_way():
    made = [group([1, 0, 0], "hard"), group([1, 1, 1], "easy"), group([1, 1, 0], "half"), group([1, 1, 0], "late")]
    names = lambda store: {name.removeprefix("toy/") for name in store}
    assert names(kept(*made, settings=Replay(8, 3))[0]) == {"hard", "half", "late"}
    assert names(kept(*made, settings=Replay(8, 2))[0]) == {"hard", "late"}
    partly = [group([1, 0.5, 0], "half"), group([1, 0.75, 0.75], "nearly")]
    assert names(kept(*partly, settings=Replay(8, 1))[0]) == {"half"}, "a large part of an answer counts, too"
    fallen = [*made[:2], group([0, 0, 0], "easy"), *made[2:]]
    assert names(kept(*fallen, settings=Replay(8, 2))[0]) == {"hard", "easy"}, "by its latest group"
    again = [group([1, 1, 0], name) for name in ("half", "late", "half", "more")]
    assert names(kept(*again, settings=Replay(8, 2))[0]) == {"half", "more"}, "of two the one that was right longer ago"
    failing = kept(*again[:2], *(group([0, 0, 0], name) for name in ("late", "half")))[0]
    assert names(kept(group([0, 0, 0], "other"), settings=Replay(8, 1), store=failing)[0]) == {"late"}


def test_the_store_is_replaced_and_comes_back_from_a_checkpoint_as_it_was():
    first = kept(group([1, 0, 1]), group([1, 0, 0], "q"))[0]
    written = lambda store: json.dumps(codec.to_json(store, GROUP_RECORDS))
    before = written(first)
    again = codec.from_json(json.loads(before), GROUP_RECORDS)
    assert written(again) == before
    turned = dict(reversed(again.items()))
    more = {7: group([0, 0, 0]), 8: group([1, 0, 0], "r"), 9: group([0, 0, 0], "q")}
    results = [replay_successes(Replay(8, 2), store, more, SEED, ()) for store in (first, again, turned)]
    assert written(first) == before, "the store that is handed in stays as it was"
    for store, replaced in results[1:]:
        assert {n: written(s) for n, s in store.items()} == {n: written(s) for n, s in results[0][0].items()}
        assert written(list(replaced.values())) == written(list(results[0][1].values())) and len(replaced) == 2


@dataclasses.dataclass(frozen=True)
class Few(ToySource):
    """Four problems in turn, of which an eighth of the groups hold a right answer; a shaping that reads the group."""

    seed: int = SEED

    def new_group(self, number, memory):
        asked, memory = super().new_group(number % 4, memory)
        return dataclasses.replace(asked, number=number), memory

    def scores(self, whole):
        found, failures = super().scores(whole)
        right = lambda n: np.eye(self.group)[1] * (drawn(n, 3, 8) == 0)
        return {n: dataclasses.replace(g, rewards=right(n), accuracy=right(n)) for n, g in found.items()}, failures

    def shape_rewards(self, groups, version, budget):
        return {n: dataclasses.replace(g, rewards=g.rewards - g.rewards.mean()) for n, g in groups.items()}

    def learns(self, memory):
        return True

    def observe(self, memory, groups):
        return {"right": memory.get("right", 0) + sum(int(g.accuracy.sum()) for g in groups)}


def replaying(**settings):
    """Steps of four groups."""
    made = sampler(4, 16, max_rounds=2, **settings)
    return dataclasses.replace(made, source=Few(4, 0.0))


@pytest.mark.parametrize("filter_groups", ["accuracy", "reward", False])
def test_replaced_groups_can_teach_and_metrics_are_of_what_was_sampled(filter_groups):
    made = replaying(replay=Replay(), filter_groups=filter_groups)
    found = steps(made, 8)
    plain = steps(dataclasses.replace(made, admission=dataclasses.replace(made.admission, collect=Collect(2))), 8)
    count = lambda some: sum(informative(g) for step in some for g in step.groups)
    assert count(found) > 2 * count(plain) > 0
    replaced = [step.metrics["replay/replaced"] for step in found]
    assert sum(replaced) > 8 and max(replaced[-2:]) >= 3
    right = 0
    for step in found:
        sampled = step.sampled
        right += sum(g.accuracy.sum() for g in sampled)
        assert step.metrics["reward/accuracy"] == np.mean([g.accuracy for g in sampled]) <= 0.25
        assert all(g.completions[0].finish_reason == "stop" and g.accuracy[0] == 0 for g in sampled)
        taken = [g for g in step.groups if g.accuracy[0] == 1]
        assert all(g.rewards.tolist() == [0.75, -0.25, -0.25, -0.25] for g in taken), "shaping sees the new group"
        assert step.carryover.stream_memory["right"] == right
    last = found[-1]
    assert last.metrics["replay/prompts"] == len(last.carryover.successes) == 4
    assert last.metrics["replay/stored"] == sum(len(one.successes) for one in last.carryover.successes.values()) > 4
    assert not any(name.startswith("replay/") for name in plain[0].metrics) and not plain[-1].carryover.successes


def test_the_member_that_gave_way_is_thrown_away():
    made = replaying(replay=Replay(), filter_groups=False)
    step = steps(made, 8)[-1]
    gone = [
        one
        for one, other in zip(step.sampled, step.groups, strict=True)
        if one.accuracy.tolist() != other.accuracy.tolist()
    ]
    assert len(gone) == step.metrics["replay/replaced"] > 0
    thrown = sum(len(g.completions[0].tokens) for g in gone)
    learned = count_sampled_tokens(step.groups)
    assert step.metrics["rollout/useful_fraction"] == learned / (learned + thrown)


def test_a_step_goes_on_from_a_checkpoint_with_the_same_successes():
    whole = steps(replaying(replay=Replay(2, 3), interrupt=True), 7)
    left = codec.from_json(json.loads(json.dumps(codec.to_json(whole[3].carryover, GROUP_RECORDS))), GROUP_RECORDS)
    assert left.successes
    for version in range(4, 7):
        found = collect_groups(replaying(replay=Replay(2, 3), interrupt=True), None, version, left)
        left = found.carryover
        assert json.dumps(codec.to_json(left, GROUP_RECORDS)) == json.dumps(
            codec.to_json(whole[version].carryover, GROUP_RECORDS)
        )
        assert places(found.groups) == places(whole[version].groups)
        assert found.metrics["replay/replaced"] == whole[version].metrics["replay/replaced"]
    assert sum(step.metrics["replay/replaced"] for step in whole[4:])


OLD, NEW = tiny("windows"), moved(tiny("windows"), tiny("windows", 5), 0.03)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def replaced():
    """A group that failed under the policy of update 3, with what the policy of update 0 once answered right."""
    engine = Engine(OLD, slots=8, max_length=WIDTH, chunk=4)
    rules = Sampling(TEMPERATURE, max_new_tokens=T, stop_ids=(3, 5, 9, 11, 12, 13))
    once = engine.generate(OLD, [PROMPT] * 4, range(4), rules)
    engine.start(rules)
    handles = engine.submit([np.asarray(PROMPT, np.int32)] * 4, range(10, 14))
    while engine.busy:
        engine.step(NEW, 3)
    done = dict(engine.collect())
    problem, prompt = Problem("p", (), "1", "toy"), np.asarray(PROMPT, np.int32)
    longest = int(np.argmax([len(c.tokens) for c in once]))
    right, wrong = np.eye(4)[longest], np.array([0.0, 0, 0, 0.2])
    store, _ = replay_successes(Replay(), {}, {0: Group(problem, prompt, tuple(once), right, right)}, SEED, ())
    failing = Group(problem, prompt, tuple(done[handle] for handle in handles), wrong, np.zeros(4))
    _, found = replay_successes(Replay(), store, {1: failing}, SEED, ())
    assert f"{problem.task}/{problem.id}" in store and len(once[longest].tokens) > 2
    return found[1], once[longest]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_the_ratio_of_a_replayed_token_is_the_true_one_and_so_is_the_gradient(replaced, name):
    group, once = replaced
    algorithm = dataclasses.replace(PRESETS[name], kl_coef=0.0, kl=None)
    samples, _ = to_samples(algorithm, [group], 3, group.rewards[None], (), T, {})
    (members,) = samples
    assert not members[0].arrays["fresh"].any() and all(s.arrays["fresh"].all() for s in members[1:])
    assert members[0].mask.all() and members[0].arrays["sampler_logp"].tolist() == once.sampler_logp.tolist()
    assert advantage_of(members[0]) > 0 > advantage_of(members[1])

    def by_hand(model):
        """The loss, token by token, of arrays that packing never saw; and the mean ratio."""
        logp = unpacked_logp(model, members)
        total, ratios = 0.0, []
        for row, sample in enumerate(members):
            count = len(sample.tokens)
            mine = logp[row, :count]
            old = jnp.asarray(once.sampler_logp) if row == 0 else jax.lax.stop_gradient(mine)
            gap = mine - old
            gap = jnp.full(count, gap.mean()) if name == "gspo" else gap
            ratio = jnp.exp(gap)
            low, high = (1 - algorithm.surrogate.low, 1 + algorithm.surrogate.high)
            advantage = jnp.float32(advantage_of(sample))
            term = -jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)
            weight = {"dr_grpo": 1 / T}.get(name, 1 / count)
            total += term.sum() * weight / len(members)
            ratios.append(ratio)
        return total, jnp.concatenate(ratios)

    if name == "dr_grpo":
        algorithm = dataclasses.replace(algorithm, reduce=dataclasses.replace(algorithm.reduce, length=T))
    (loss, ratios), wanted = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(NEW)
    packed = pack(members, Layout(2, 22, T), ("policy",))
    found, metrics = jax.jit(lambda model: policy_gradient(model, packed, algorithm))(NEW)
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-5) and abs(float(loss)) > 1e-3
    assert float(jnp.abs(ratios[: len(once.tokens)] - 1).max()) > 0.05, "the policy has moved since"
    assert float(metrics["ratio"]) == pytest.approx(float(ratios.mean()), abs=1e-5)
    assert largest_difference(found, wanted) < 2e-4


def test_without_earlier_tokens_nothing_of_a_success_counts(replaced):
    group, _ = replaced
    samples, _ = to_samples(PRESETS["grpo"], [group], 3, group.rewards[None], (), T, {}, learn_earlier=False)
    assert not samples[0][0].mask.any() and samples[0][1].mask.all()


def a_run(replay=Replay(), recipe="grpo", **changes):
    """A run that replays; ``changes``: of its parts, by their names."""
    run = dataclasses.replace(load_config("quickstart")[1], recipe=RECIPES[recipe])
    changes["collect"] = {"replay": replay} | changes.get("collect", {})
    waiting = dataclasses.replace(run.rollout.collect, **changes.pop("collect"))
    changes["rollout"] = {"collect": waiting} | changes.get("rollout", {})
    parts = {name: dataclasses.replace(getattr(run, name), **fields) for name, fields in changes.items()}
    return dataclasses.replace(run, **parts)


REFUSED = {
    "replay.per_prompt must be at least 1, got 0": {"replay": Replay(0)},
    "replay.prompts must be at least 1, got 0": {"replay": Replay(8, 0)},
    "no reward says so: add Accuracy()": {"scoring": {"rewards": (Format("x"),)}},
    "rollout.group is 1: set it to at least 2": {"rollout": {"group": 1}, "recipe": "ppo"},
    "rollout.collect.learn_earlier False leaves those out": {"collect": {"learn_earlier": False}},
    "Likelihood of recipe rloo has none": {"recipe": "rloo"},
    "set rollout.top_k 0, rollout.top_p 1": {"learner": {"keep_sampling_mask": True}, "rollout": {"top_k": 5}},
    "set recipe.critic None": {"recipe": "ppo"},
    "learner.target_kl 0.1 would count them": {"learner": {"target_kl": 0.1}},
}


@pytest.mark.parametrize("told", REFUSED)
def test_settings_in_which_its_ratios_would_not_be_true_are_refused(told):
    with pytest.raises(InputError) as raised:
        validate(a_run(**REFUSED[told]))
    assert told in str(raised.value) and "rollout.collect.replay" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "kimi_k1_5", "deepseek_v3_2", "minirl", "prorl_v2"])
def test_losses_with_a_ratio_may_replay(name):
    validate(a_run(recipe=name))


def test_one_update_a_batch_is_clipped_on_replayed_tokens_then():
    idle = lambda replay: [
        line for line in notes(a_run(replay, learner={"minibatches": 1, "epochs": 1})) if "one update" in line
    ]
    assert "except on tokens of earlier steps" in idle(Replay())[0] and "except on" not in idle(None)[0]
