"""Runs with a critic, through the command line: broken off, gone on with, begun from one another; what is refused."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from end_to_end.test_resume import documented
from learner.rollouts import one_device

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GAE, GroupZScore, Whitened
from jaxrl_llm.checkpoints.store import Checkpoints, flatten
from jaxrl_llm.config.checks import notes
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Critic, Optimiser
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import NewRole, abstract_state, create_state
from jaxrl_llm.models import load_pretrained, save_pretrained
from jaxrl_llm.models.config import Lora, Rope
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.pretrained import TINY
from jaxrl_llm.recipes import RECIPES, Overlong
from jaxrl_llm.rewards.shaping import RelativeLength
from jaxrl_llm.stages.taught import RewardFormat
from jaxrl_llm.tasks.template import template_fingerprint
from jaxrl_llm.trainer.state import take_other_roles

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "ppo.py"
RUN = configs.load_config(str(CONFIG))[1]
LINES = {
    "whole": f"train {CONFIG} --run_dir whole",
    "half": f"train {CONFIG} --run_dir broken --steps 2",
    "rest": f"train {CONFIG} --run_dir broken",
    "adapters": f"train {CONFIG} --run_dir adapters --steps 2 --learner.lora.rank 2 --recipe.critic.adapter "
    "--recipe.critic.epochs 3 --rollout.collect.staleness 1",
    "other": f"train {CONFIG} --run_dir other --steps 2 --recipe.critic.model scores",
    "short": f"train {CONFIG} --recipe.critic.model short",
    "words": f"train {CONFIG} --recipe.critic.model words",
    "taught": f"train {CONFIG} --recipe.critic.model taught",
    "nothing": f"train {CONFIG} --recipe.critic.model missing",
}


def other_models(folder):
    """Models of one layer that a critic may begin as, or may not."""
    _, tokenizer = load_pretrained("tiny-random")
    config = dataclasses.replace(TINY, layers=1)
    save_pretrained(initialise(config, jax.random.key(0), scale=0.2), tokenizer, folder / "scores")
    attention = dataclasses.replace(TINY.attention, rope=Rope(max_positions=39))
    save_pretrained(
        initialise(dataclasses.replace(config, attention=attention), jax.random.key(0)), tokenizer, folder / "short"
    )
    plain = RewardFormat("ranking", None, "plain", template_fingerprint("plain", tokenizer))
    model = with_scalar_head(initialise(config, jax.random.key(0)))
    save_pretrained(model, tokenizer, folder / "taught", None, plain.to_json())
    save_pretrained(
        initialise(dataclasses.replace(config, vocab_size=300), jax.random.key(0)), tokenizer, folder / "words"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    other_models(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain(row):
    """A step's metrics but for what the clock decides, and for the evaluation at the end of the first half."""
    clock = ("time/", "throughput/", "event/resumed", "eval/")
    return {name: value for name, value in row.items() if not name.startswith(clock)}


def saved(folder, step):
    """Arrays by name of one checkpoint of a critic that began as the policy's layers."""
    model, _ = load_pretrained("tiny-random")
    others = [NewRole("critic", with_scalar_head, build(RUN.recipe.critic.optimiser))]
    like = abstract_state(model, build(RUN.learner.optimiser), True, others=others)
    with Checkpoints(folder / "checkpoints") as store:
        return jax.device_get(flatten(store.restore(step, like, one_device())[0]))


def part(arrays, name):
    return {key.removeprefix(name): x for key, x in arrays.items() if key.startswith(name)}


def same(one, other):
    return one.keys() == other.keys() and all(
        np.asarray(one[k]).tobytes() == np.asarray(other[k]).tobytes() for k in one
    )


def test_a_resumed_run_goes_on_bit_for_bit(folder, answers):
    for name in ("whole", "half", "rest"):
        assert answers[name].code == 0, answers[name].err
    whole, broken = rows(folder / "whole"), rows(folder / "broken")
    assert [plain(row) for row in whole] == [plain(row) for row in broken] and len(whole) == 4
    one, other = saved(folder / "whole", 3), saved(folder / "broken", 3)
    assert same(one, other) and any(name.startswith("roles/critic/opt_state") for name in one)
    assert int(one["updates"]) == 8 and int(one["roles/critic/updates"]) == 12


def test_what_the_critic_explains_is_pooled_over_the_steps_on_both_sides_of_a_break(folder, answers):
    steps = rows(folder / "broken")[1:]
    assert steps[2]["event/resumed"] and len(steps) == 3
    for count, last in enumerate(steps, start=1):
        left, there = (
            sum(row["critic/tokens"] * row[f"critic/{name}_variance"] for row in steps[:count])
            for name in ("residual", "returns")
        )
        assert last["critic/explained_variance_pooled"] == pytest.approx(1 - left / there, abs=1e-9)
    assert last["critic/explained_variance_pooled"] != pytest.approx(last["critic/explained_variance"], abs=1e-6)


def test_while_the_critic_warms_up_policy_and_version_stay(folder, answers):
    first, second = saved(folder / "whole", 1), saved(folder / "whole", 2)
    assert same(part(first, "policy/"), part(first, "reference/")) and first["updates"] == 0
    assert not same(part(second, "policy/"), part(second, "reference/")) and second["updates"] == 4
    assert not same(part(first, "roles/critic/params/decoder/"), part(first, "policy/"))
    row = rows(folder / "whole")[1]
    assert row["updates"] == 0 and row["critic/updates"] == 4 and "loss" not in row
    assert not any(name.startswith("event/teaches_nothing") for name in row)
    assert "the critic learns alone in the first step (recipe.critic.warmup)" in answers["whole"].err


OF_UPDATES = {"loss", "clip_fraction", "grad_norm", "lr", "updates"}
NAMES = OF_UPDATES | {"explained_variance", "explained_variance_pooled", "returns_mean", "values_mean", "tokens"}


@pytest.mark.parametrize("name", ["whole", "adapters", "other"])
def test_every_kind_of_critic_is_trained_and_told(folder, answers, name):
    assert answers[name].code == 0, answers[name].err
    metrics = rows(folder / name)[1:]
    for row in metrics:
        assert {f"critic/{one}" for one in NAMES} <= row.keys()
        assert row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/updates"] >= 2
    assert metrics[0]["critic/values_mean"] == 0 == metrics[0]["critic/explained_variance"], "its head begins at 0"
    if len(metrics) > 1:
        assert metrics[1]["critic/values_mean"] != 0 and metrics[1]["updates"] == 4
        assert metrics[1]["critic/updates"] == (6 if name == "adapters" else 4), "recipe.critic.epochs, minibatches"
    known = list(documented())
    names = {name for row in metrics for name in row if not name.startswith("event/")}
    assert not [name for name in names if not any(re.fullmatch(pattern, name) for pattern in known)]


def test_the_controller_waits_for_the_policy_and_moves_the_kl_in_the_reward(folder, answers):
    metrics = rows(folder / "whole")[1:]
    assert [row["kl_coef"] for row in metrics[:2]] == [0.02, 0.02], "nothing to measure while the critic warms up"
    for before, after in itertools.pairwise(metrics[1:]):
        assert before["controller/kl"] > 1e-9 and after["kl_coef"] == 2 * before["kl_coef"]
    assert metrics[1]["reward/zero_std_fraction"] is None, "one completion of each prompt"


def test_a_run_that_begins_with_another_has_its_critic_or_a_new_one_of_its_policy(folder, answers):
    begins = NewRole("critic", with_scalar_head, build(RUN.recipe.critic.optimiser))
    model, _ = load_pretrained("tiny-random")
    state = create_state(model, build(RUN.learner.optimiser), False, one_device(), others=[begins])
    said = []
    found = take_other_roles(state, [begins], folder / "whole" / "checkpoints" / "2", one_device(), said.append)
    there = part(saved(folder / "whole", 2), "roles/critic/params/")
    assert same(part(jax.device_get(flatten(found)), "roles/critic/params/"), there)
    assert not any(np.any(x) for x in jax.tree.leaves(found.roles["critic"].opt_state)), "its optimiser is new"
    moved = state.with_role("policy", params=jax.tree.map(lambda x: 2 * x, state.policy.params))
    new = take_other_roles(moved, [begins], folder / "other" / "checkpoints" / "2", one_device(), said.append)
    assert said == ["the critic begins with its weights there too"], "the other one has fewer layers"
    decoder = new.roles["critic"].params.decoder
    for one, policy in zip(jax.tree.leaves(decoder), jax.tree.leaves(moved.policy.params), strict=True):
        np.testing.assert_array_equal(one, policy)
        assert one.unsafe_buffer_pointer() != policy.unsafe_buffer_pointer()


def test_critics_that_cannot_read_what_the_policy_writes_are_refused(answers):
    assert_refused(answers["short"], "recipe.critic.model short was made for 39 positions", "40")
    assert_refused(answers["words"], "recipe.critic.model words has a vocabulary of 300", "259")
    assert_refused(answers["nothing"], "recipe.critic.model", "missing")
    assert_refused(answers["taught"], "recipe.critic.model taught learned from chats in the template plain", "'chatml'")


def with_recipe(**changes):
    return dataclasses.replace(RUN, recipe=dataclasses.replace(RUN.recipe, **changes))


def with_critic(**changes):
    return with_recipe(critic=dataclasses.replace(RUN.recipe.critic, **changes))


def with_learner(run, **changes):
    return dataclasses.replace(run, learner=dataclasses.replace(run.learner, **changes))


REFUSED = {
    "GAE needs values, and recipe.critic is None: set recipe.critic Critic": with_recipe(critic=None),
    "recipe.critic has nothing to do, since recipe.algorithm.advantage Whitened": with_recipe(
        algorithm=PRESETS["reinforce_pp"]
    ),
    "recipe.critic.clip must be above 0, or None, got 0": with_critic(clip=0.0),
    "recipe.critic.warmup must be at least 0, got -1": with_critic(warmup=-1),
    "recipe.critic.epochs must be at least 0, got -1": with_critic(epochs=-1),
    "set learner.lora.rank above 0, or recipe.critic.adapter False": with_critic(adapter=True),
    "set recipe.critic.model None, or recipe.critic.adapter False": with_learner(
        with_critic(adapter=True, model="tiny-random"), lora=Lora(2)
    ),
    "recipe.critic.optimiser.learning_rate must be above 0, and finite, got 0": with_critic(
        optimiser=Optimiser(learning_rate=0.0)
    ),
    "rounds away steps of 1e-05 .recipe.critic.optimiser.learning_rate": with_learner(
        with_critic(optimiser=Optimiser(learning_rate=1e-5)), dtype="bfloat16"
    ),
    "rollout.group 1 leaves nothing to compare": with_recipe(critic=None, algorithm=PRESETS["grpo"], controller=None),
    "rollout.group 1 leaves recipe.filter_groups accuracy nothing to compare": with_recipe(filter_groups="accuracy"),
    "rollout.group 1 leaves recipe.shaping RelativeLength nothing": with_recipe(shaping=(RelativeLength(),)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(words):
    run = REFUSED[words]
    if "filter_groups" in words or "RelativeLength" in words:
        run = dataclasses.replace(run, scoring=configs.Scoring())
    with pytest.raises(InputError, match=words) as caught:
        configs.validate(run)
    assert "\n" not in str(caught.value)


def test_what_works_is_not_refused():
    configs.validate(RUN)
    configs.validate(with_recipe(critic=None, algorithm=PRESETS["reinforce_pp"], controller=None))
    lora = with_learner(with_critic(adapter=True, optimiser=Optimiser(learning_rate=1e-5)), lora=Lora(2))
    configs.validate(lora)
    for estimator, fine in ((GAE(), True), (Whitened(), True), (Whitened("group"), False), (GroupZScore(), False)):
        assert getattr(estimator, "compares", True) != fine


def test_the_rows_have_room_for_the_state_after_the_last_token():
    assert RUN.longest_row == RUN.rollout.max_length + 1
    assert configs.with_recipe(RUN, "ppo").longest_row == RUN.rollout.max_length
    tight = dataclasses.replace(RUN, learner=RUN.learner.computing(row_tokens=RUN.rollout.max_length))
    with pytest.raises(InputError, match=f"set it to at least {RUN.rollout.max_length + 1}"):
        configs.validate(tight)


def test_pieces_that_do_nothing_are_told():
    once = with_learner(RUN, minibatches=1, epochs=1)
    assert any("recipe.critic.clip never binds" in line for line in notes(once))
    assert not any("recipe.critic.clip" in line for line in notes(RUN))
    again = with_critic(epochs=2)
    assert not any("recipe.critic.clip" in line for line in notes(with_learner(again, minibatches=1, epochs=1)))
    assert any(
        "recipe.critic.warmup 3 leaves the policy none of 3 steps" in line for line in notes(with_critic(warmup=3))
    )
    cut = notes(with_recipe(overlong=Overlong(drop=True)))
    assert any("the value of the state after them is never read" in line for line in cut)


def test_the_recipe_is_a_value_with_its_critic():
    recipe = RECIPES["ppo"]
    assert recipe.critic == Critic() and recipe.critic.optimiser.learning_rate == 9e-6
    assert recipe.algorithm.needs_reference and recipe.algorithm.advantage.estimator == GAE(1.0, 0.95, whiten=True)
