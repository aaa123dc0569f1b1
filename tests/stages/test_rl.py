"""What a step hands to the learner, with next to no model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import TEMPERATURE, UpdateBy, forward_on, one_device
from rich.console import Console
from tiny import tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GDPO
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.config import Evaluation, Run, Scoring, load_config, resolved
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Learner, Sample, Training, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import logits
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import Format, Scorer
from jaxrl_llm.rewards.shaping import name_rewards
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.problems import load_problems, problem_fingerprints
from jaxrl_llm.stages.programs import coefficients_of, ingredients_of, policy_objectives
from jaxrl_llm.stages.rl import Reinforcement, samples_at, shown_places, split_rewards, with_ratios
from jaxrl_llm.stages.stage import Stage, StepOutcome, check_problems
from jaxrl_llm.tasks import Task
from jaxrl_llm.telemetry.progress import Progress, Schedule
from jaxrl_llm.types import Completion, Group, Problem

REWARDS = (Format("a+", weight=2.0), Format("[ab]+", weight=-1.0))
TEXTS = (("a", "b", "c", "ab"), ("aa", "c", "c", "b"))


def scored(scorer, texts):
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
    size = np.zeros(1)
    completions = tuple(Completion(size, size, "stop", size == 0, size, text=text) for text in texts)
    scores = scorer.score([(problem, completion) for completion in completions])
    return Group(problem, size, completions, scores.reward, scores.accuracy, scores.parts)


def normal(values, axis=None):
    deviation = values - values.mean(axis, keepdims=True)
    count = values.size if axis is None else values.shape[axis]
    return deviation / np.sqrt((deviation**2).sum(axis, keepdims=True) / (count - 1))


def test_an_estimator_of_several_rewards_sees_two_of_one_name_and_applies_their_weights():
    with Scorer(REWARDS) as scorer:
        groups = [scored(scorer, texts) for texts in TEXTS]
    algorithm = dataclasses.replace(PRESETS["grpo"], advantage=GDPO(eps=0.0))
    algorithm, rewards = split_rewards(algorithm, name_rewards(REWARDS), groups)
    columns = [np.array([[1, 0, 0, 0], [1, 0, 0, 0]]), np.array([[1, 1, 0, 1], [1, 0, 0, 1]])]
    np.testing.assert_array_equal(rewards, np.stack(columns, axis=-1))
    expected = normal(2.0 * normal(columns[0], 1) - normal(columns[1], 1))
    np.testing.assert_allclose(jax.jit(algorithm.advantage)(rewards.astype(np.float32)), expected, atol=1e-5)


def test_weights_of_the_estimator_come_before_those_of_the_rewards():
    with Scorer(REWARDS) as scorer:
        groups = [scored(scorer, TEXTS[0])]
    given = dataclasses.replace(PRESETS["grpo"], advantage=GDPO((1.0, 3.0)))
    assert split_rewards(given, name_rewards(REWARDS), groups)[0] == given


def with_rows(train, test=None, **changes):
    """A run that needs no answers."""
    tested = None if test is None else Task(test)
    run = Run("tiny-random", Task(train), Scoring((Format("a"),)), RECIPES["grpo"], evaluation=Evaluation(task=tested))
    return dataclasses.replace(run, **changes)


def prints(run):
    with Progress(Schedule(1), console=Console(quiet=True)) as progress:
        read = load_problems(run, tiny_tokenizer(), progress.status)
    return json.loads(json.dumps(problem_fingerprints(run, read)))


def test_long_prompts_are_dropped_and_counted_where_the_task_says_so():
    def read(*lengths):
        run = with_rows([{"prompt": "a" * length} for length in lengths])
        run = dataclasses.replace(run, task=dataclasses.replace(run.task, overlong="drop", template="plain"))
        with Progress(Schedule(1), console=Console(quiet=True)) as progress:
            return load_problems(run, tiny_tokenizer(), progress.status)

    assert [len(one.prompt[0]["content"]) for one in read(5, 300, 256).all_train] == [5, 256]
    assert "1 of 3 problems of rows dropped: their prompts have over 256 tokens" in read(5, 300, 256).notes
    assert not any("dropped" in note for note in read(5, 6).notes)
    with pytest.raises(InputError, match=r"2 of 2 problems of rows dropped: .*; raise --rollout.max_prompt_tokens"):
        read(300, 400)


def test_a_run_is_gone_on_with_on_its_own_problems_and_may_be_tested_on_others():
    some, others = [{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a"}, {"prompt": "c"}]
    began = prints(with_rows(some, some))
    check_problems(began, prints(with_rows(some, some)), "rows")
    check_problems(began, prints(with_rows(some, others)), "rows")
    check_problems(began, prints(with_rows(some)), "rows")
    check_problems({}, prints(with_rows(some)), "rows")  # begun before problems had fingerprints
    with pytest.raises(
        InputError, match=r"the training problems of rows are not .* 2 as before, but prompts have changed"
    ):
        check_problems(began, prints(with_rows(others, some)), "rows")
    tested, found = [name for name in began if name != "training"], prints(with_rows(some, some))
    assert tested[0].startswith("evaluation ") and len(tested) == 1
    with pytest.raises(InputError, match="the evaluation problems of rows are not those that the run began with"):
        check_problems(began, found | {tested[0]: prints(with_rows(others))["training"]}, "rows")


def test_what_rewards_right_answers_is_refused_once_none_is_known():
    with pytest.raises(InputError, match=r"task rows without reference answers, but recipe.shaping RelativeLength"):
        prints(with_rows([{"prompt": "a"}], recipe=RECIPES["kimi_k1_5"]))
    assert prints(with_rows([{"prompt": "a", "answer": 1}], recipe=RECIPES["kimi_k1_5"]))["training"]["count"] == 1


def learned(run, update, groups, coefficient, step, status=lambda text: None):
    """The outcome of learning from groups at a step; ``update`` stands for the compiled one."""
    mesh, ingredients = one_device(), ingredients_of(run)
    state = create_state(tiny("windows"), build(run.learner.optimiser), run.recipe.algorithm.needs_reference, mesh)
    given = {} if coefficient is None else {"kl_coef": coefficient}
    training = (Training(policy_objectives(run, ingredients), UpdateBy(update)),)
    forward = forward_on(mesh, Layout(2, 40, 10))
    stage = Reinforcement(
        run=run, training=training, forward=forward, label="digits", tokenizer=tiny_tokenizer(), sampler=None,
        transfer=None, evaluate_tasks=None, ingredients=ingredients, status=status,
    )  # fmt: skip
    return stage.learn(state, RolloutBatch(groups, [], Carryover(), 4, 0, {}), given, step)


def group_of(*tokens):
    """A group of two completions of these tokens, of which the second is better."""
    size = len(tokens)
    nothing = np.zeros(size, np.float32)
    completion = Completion(np.array(tokens, np.int32), nothing, "stop", np.ones(size, bool), np.zeros(size, np.int32))
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
    return Group(problem, np.array([1, 2], np.int32), (completion, completion), np.array([0.0, 1.0]), np.zeros(2))


def noting(seen):
    """An update that moves nothing and notes the coefficient and the first token that it is to learn."""

    def update(state, packed, coefficients):
        seen.append((coefficients.get("kl_coef"), int(packed.predictions.target[0, 0, 0])))
        told = {"refused/empty": 0.0, "refused/not_finite": 0.0, "loss": 0.0}
        return state, {name: jnp.float32(value) for name, value in told.items()}

    return update


@pytest.mark.parametrize("coefficient", [0.7, None])
def test_a_coefficient_that_was_moved_reaches_the_update(coefficient):
    run, seen = dataclasses.replace(resolved(load_config("smoke")[1]), learner=Learner()), []
    learned(run, noting(seen), [group_of(3, 4)], coefficient, 1)
    assert seen == [(coefficient, 3)]


def test_progress_tells_that_a_step_learns_before_its_first_pass():
    run, said = dataclasses.replace(resolved(load_config("smoke")[1]), learner=Learner()), []
    seen = noting([])
    learned(run, lambda *given: (said.append("an update"), seen(*given))[1], [group_of(3, 4)], None, 1, said.append)
    assert said[0] == "updating" and said[-1] == "an update" and {*said} == {"updating", "an update"}
    stage = Stage(run=run, training=(), forward=None, label="", status=said.append)
    assert stage.update(None, [], {}, 1, 0.0) == (None, {"updates": 0.0, "time/update_s": 0.0})
    assert said[-1] == "updating", "of any stage"


@pytest.mark.parametrize("controller", [None, AdaptiveKL(0.1)])
@pytest.mark.parametrize("target_kl", [None, 0.2])
def test_an_update_is_given_the_coefficients_that_a_plan_gives_it(controller, target_kl):
    run = resolved(load_config("smoke")[1])
    recipe = dataclasses.replace(run.recipe, controller=controller)
    run = dataclasses.replace(run, recipe=recipe, learner=Learner(target_kl=target_kl))
    given = []

    def update(state, packed, coefficients):
        given.append(coefficients.keys())
        return noting([])(state, packed, coefficients)

    learned(run, update, [group_of(3, 4)], coefficients_of(run, ingredients_of(run)).get("kl_coef"), 1)
    names = {"temperature", *coefficients_of(run, ingredients_of(run)), *(["target_kl"] if target_kl else [])}
    assert given == [names] and "kl_coef" in names


def test_each_step_orders_its_later_epochs_anew():
    run = dataclasses.replace(resolved(load_config("smoke")[1]), learner=Learner(epochs=3, minibatches=4))
    orders = []
    for step in (1, 2):
        seen = []
        learned(run, noting(seen), [group_of(n, 1) for n in (3, 4, 5, 6)], None, step)
        orders.append([token for _, token in seen])
    assert orders[0][:4] == orders[1][:4] == [3, 4, 5, 6] and orders[0] != orders[1]


def test_samples_are_followed_to_the_policy_after_the_step():
    run = resolved(load_config("smoke")[1])
    mesh = one_device()
    state = create_state(tiny("windows"), build(run.learner.optimiser), False, mesh)
    forward = forward_on(mesh, Layout(2, 40, 10))
    prompt, tokens = np.array([1, 2], np.int32), np.array([3, 4, 5, 6], np.int32)
    scores = np.asarray(logits(tiny("windows"), np.array([[*prompt, *tokens]])), np.float64)[0, 1:-1] / TEMPERATURE
    logp = (scores - np.log(np.exp(scores).sum(-1, keepdims=True)))[np.arange(4), tokens]
    gained = np.array([0.3, 0.3, -0.3, 0.1])
    mask = np.array([True, True, True, False])
    sample = Sample(prompt, tokens, mask, arrays={
        "sampler_logp": (logp - gained).astype(np.float32), "advantages": np.array([1, -1, -1, 1], np.float32)
    })  # fmt: skip
    (found,) = with_ratios([sample], PRESETS["ppo"], forward, model_of(state, "policy"))
    np.testing.assert_allclose(found.arrays["ratio"], np.where(mask, np.exp(gained), np.nan), rtol=1e-4)
    np.testing.assert_array_equal(found.arrays["clipped"], [1, 0, 1, np.nan])


@pytest.mark.parametrize(
    ("most", "told"), [(0, ["", "", ""]), (1, ["b", "c", "a"]), (2, ["ca", "bc", "ab"]), (9, ["abc"] * 3)]
)
def test_groups_are_written_down_in_turn(most, told):
    written = [["abc"[place] for place in shown_places(3, most, step)] for step in (1, 2, 3)]
    assert ["".join(names) for names in written] == told
    assert shown_places(0, most, 1) == []


def test_of_some_groups_alone_samples_are_written_down():
    with Scorer(REWARDS) as scorer:
        groups = [scored(scorer, texts) for texts in (*TEXTS, TEXTS[0])]
    groups = [
        dataclasses.replace(group, completions=tuple(
            dataclasses.replace(one, tokens=one.tokens.copy()) for one in group.completions
        ))
        for group in groups
    ]  # fmt: skip
    samples = [
        [Sample(one.tokens, one.tokens, one.mask, place=(n, i)) for i, one in enumerate(group.completions)]
        for n, group in enumerate(groups)
    ]
    others = [Sample(np.zeros(1), np.zeros(1), np.ones(1, bool))]
    assert shown_places(len(groups), 2, 2) == [1, 2]
    shown = samples_at([1, 2], [samples[1], others, samples[2], samples[0]])
    assert [id(one.tokens) for one in shown] == [id(one.tokens) for one in (*samples[1], *samples[2])]
    assert [one.place for one in shown] == [(n, i) for n in range(2) for i in range(4)]
    assert samples_at([], samples) == []


class Ahead(Reinforcement):
    """Samples nothing, and learns nothing but the critic's numbers of a step."""

    def next_batch(self, weights, version, carry, must_stop=lambda: False):
        return RolloutBatch([], [], dataclasses.replace(carry, cursor=carry.cursor + 1), 0, version, {})

    def learn(self, state, batch, coefficients, number):
        return StepOutcome(state, dataclasses.replace(batch.carryover, critic=[[4.0, 1.0, 0.5]]), {})


@pytest.mark.parametrize("concurrent", [False, True])
def test_groups_that_are_sampled_ahead_carry_what_the_critic_has_measured_meanwhile(concurrent):
    run = resolved(load_config("smoke")[1])
    stage = Ahead(
        run=run, training=(), forward=None, label="", tokenizer=None, sampler=None, transfer=lambda policy: policy,
        evaluate_tasks=None, ingredients=ingredients_of(run), samples_ahead=True, concurrent=concurrent,
    )  # fmt: skip
    state = create_state(tiny("windows"), build(run.learner.optimiser), False, one_device())
    carry = stage.step(state, Carryover(), {}, 1, lambda before_update=False: False).carry
    assert isinstance(carry, RolloutBatch) and carry.carryover == Carryover(cursor=2, critic=[[4.0, 1.0, 0.5]])
    stopped = stage.step(state, carry, {}, 2, lambda before_update=False: before_update)
    assert stopped.carry is carry and stopped.row is None
