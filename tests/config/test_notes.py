"""What a run says of its settings before it begins: which pieces do nothing, and what would make them act."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.ratios import SequenceMask, TruncatedIS
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, MiniRL, MirrorDescent, PenaltyKL, PPOClip
from jaxrl_llm.config import Run, Scoring
from jaxrl_llm.config.checks import inert
from jaxrl_llm.environments import Environment
from jaxrl_llm.environments.examples import multiply
from jaxrl_llm.learner import Learner, Moments, Optimiser
from jaxrl_llm.recipes import RECIPES, Overlong
from jaxrl_llm.rewards import Format
from jaxrl_llm.rewards.shaping import RelativeLength
from jaxrl_llm.rollout import Collect, Rollout
from jaxrl_llm.rules import Resets
from jaxrl_llm.tasks import Table, Task

RUN = Run(model="tiny-random", task=Task(Table("problems.jsonl"), template="plain"))
FORMAT = Scoring((Format("a"),))
"""Rewards of which none says what a right answer is worth."""


def run_of(name, minibatches=1, epochs=1, collect=Collect(), prompts=8, scoring=Scoring(), **changes):
    """A resolved run of a recipe; ``changes`` are of the recipe."""
    run = dataclasses.replace(
        RUN,
        recipe=dataclasses.replace(RECIPES[name], **changes),
        rollout=Rollout(prompts=prompts, collect=collect),
        learner=Learner(minibatches=minibatches, epochs=epochs),
        scoring=scoring,
    )
    return configs.resolved(run)


def with_algorithm(name, **pieces):
    return {"algorithm": dataclasses.replace(PRESETS[name], **pieces)}


def without_filter(name):
    return {"filter_groups": False} if RECIPES[name].filter_groups else {}


IDLE = {
    "grpo": "the clip range never binds",
    "dr_grpo": "the clip range never binds",
    "dapo": "the clip range never binds",
    "gspo": "the clip range never binds",
    "cispo": "the cap never binds",
    "sapo": "the gate never closes",
    "prorl_v1": "the clip range never binds",
    "prorl_v2": "the clip range never binds",
    "kimi_k1_5": "tau does nothing",
    "deepseek_v3_2": "the clip range never binds, the sequence filter drops nothing",
    "minirl": "the clip range never binds, the weight against the sampler is 1",
    "gigpo": "the clip range never binds",
    "mt_grpo": "the clip range never binds",
    "reinforce_pp": "the clip range never binds",
    "ppo": "the clip range never binds, recipe.critic.clip never binds",
    "arpo": "the clip range never binds",
    "top_entropy": "the clip range never binds",
}


@pytest.mark.parametrize("name", RECIPES)
def test_of_one_update_a_batch_it_is_said_what_waits_for_a_second(name):
    said = [line for line in inert(run_of(name, **without_filter(name))) if line.startswith("one update a batch")]
    assert [line.partition(": ")[2].partition(";")[0] for line in said] == ([IDLE[name]] if name in IDLE else [])
    several = 2 if name == "mt_grpo" else 4  # as the paper makes, or the usual ones
    assert all(f"; --learner.minibatches {several}" in line for line in said)
    for several in ({"minibatches": 2}, {"epochs": 2}):
        assert not [line for line in inert(run_of(name, **several)) if line.startswith("one update")], several


@pytest.mark.slow(but=("grpo-surrogate0", "sapo-surrogate3", "penalty-surrogate6"))
@pytest.mark.parametrize(("name", "surrogate"), [
    ("grpo", PPOClip(0.0, 0.0, 1.01)), ("gspo", PPOClip(0.5, 0.5)), ("cispo", CISPO(1.0, 1.0)),
    ("sapo", SAPO(9.0, 0.1)),
    ("kimi_k1_5", MirrorDescent(10.0)), ("minirl", MiniRL(9.0, 9.0)), ("penalty", PenaltyKL()),
])  # fmt: skip
def test_what_is_said_to_wait_does_nothing_while_ratios_are_1(name, surrogate):
    penalty = dataclasses.replace(PRESETS["grpo"], surrogate=PenaltyKL(), kl=None, kl_coef=1.0)
    algorithm = dataclasses.replace(
        PRESETS.get(name, penalty), **({"kl": None, "kl_coef": 0.0} if name == "grpo" else {})
    )
    other = dataclasses.replace(
        algorithm, surrogate=surrogate, kl_coef=50.0 if name == "penalty" else algorithm.kl_coef
    )
    assert algorithm.surrogate.idle
    logp = np.log(np.float32([[0.5, 0.2, 0.7], [0.3, 0.6, 0.4]]))

    def gradient(algorithm, old_logp):
        batch = PolicyBatch(np.float32([1.0, -0.5]), np.ones(logp.shape, bool), old_logp, sampler_logp=logp)
        return np.asarray(jax.grad(lambda x: policy_loss(algorithm, x, batch)[0])(logp))

    np.testing.assert_allclose(gradient(algorithm, None), gradient(other, None), rtol=1e-5)
    moved = logp - np.float32([[0.5, -0.6, 0.7], [-0.8, 0.9, 0.3]])
    assert np.abs(gradient(algorithm, moved) - gradient(other, moved)).max() > 0.01


def test_the_line_says_what_the_paper_does():
    assert inert(run_of("gspo", prompts=64)) == [
        "one update a batch: the clip range never binds; --learner.minibatches 4 (the paper makes 4 updates)"
    ]
    assert "4 (the paper makes 8 updates of 128 completions), but 64 comp" in inert(run_of("dr_grpo"))[0]
    assert inert(run_of("grpo"))[0].startswith("one update a batch, as in the paper: ")
    assert inert(run_of("dapo", prompts=256))[0].endswith(
        "--learner.minibatches 16 (the paper makes 16 updates of 512 completions)"
    )


def test_a_small_batch_is_told_what_more_updates_of_it_are_worth():
    few = lambda **settings: [line for line in inert(run_of("gspo", **settings)) if "are few for" in line]
    assert len(few()) == 1 and few()[0].endswith(
        ", but 64 completions are few for it: papers have 128 or more an update"
    )
    assert few(prompts=64) == few(prompts=1) == few(minibatches=2) == []


@pytest.mark.parametrize(
    ("prompts", "flag"), [(1, "--learner.epochs 2"), (2, "minibatches 2"), (3, "minibatches 2"), (7, "minibatches 3")]
)
def test_the_flag_that_is_advised_works(prompts, flag):
    run = run_of("sapo", prompts=prompts)
    assert f"{flag} (" in inert(run)[0]
    name, value = flag.rpartition(".")[2].split()
    advised = dataclasses.replace(run, learner=dataclasses.replace(run.learner, **{name: int(value)}))
    configs.validate(advised)
    assert inert(advised) == []


def test_estimators_of_turns_are_told_that_tools_alone_reward_none():
    run = run_of("mt_grpo")
    for changes, silent in (({"tools": (multiply,)}, False), ({"environment": Environment}, True)):
        told = configs.notes(dataclasses.replace(run, task=dataclasses.replace(run.task, **changes)))
        assert any("MTGRPO reads the rewards of turns, and task" in line for line in told) != silent


def test_tokens_of_earlier_steps_are_compared_with_the_policy_of_their_time():
    but = "the clip range never binds except on tokens of earlier steps;"
    assert but in inert(run_of("dapo"))[0]
    for collect in (Collect(interrupt=True), Collect(token_budget=8)):
        assert but in inert(run_of("grpo", collect=collect))[0]
        assert but not in inert(run_of("grpo", collect=dataclasses.replace(collect, learn_earlier=False)))[0]


def test_where_sampling_runs_ahead_what_compares_with_the_sampler_acts():
    ahead = Collect(staleness=1)
    assert inert(run_of("deepseek_v3_2", collect=ahead)) == []
    assert (
        "one update a batch, as in the paper: the clip range never binds;" in inert(run_of("minirl", collect=ahead))[0]
    )
    assert len(inert(run_of("grpo", collect=ahead))) == 1  # the old policy is the live one all the same


def test_settings_beside_the_recipe_wait_too():
    run = run_of("rloo")
    learner = dataclasses.replace(run.learner, target_kl=0.1)
    assert ": learner.target_kl stops nothing;" in inert(dataclasses.replace(run, learner=learner))[0]
    assert inert(dataclasses.replace(run, learner=dataclasses.replace(learner, epochs=2))) == []
    carried = dataclasses.replace(run_of("dapo"), learner=learner)
    assert (
        ": the clip range never binds except on tokens of earlier steps, learner.target_kl stops nothing;"
        in inert(carried)[0]
    )
    penalty = with_algorithm("grpo", surrogate=PenaltyKL(), kl=None, kl_coef=1.0)
    assert "the penalty is 0" in inert(run_of("grpo", **penalty))[0]


def test_a_correction_needs_a_gap():
    for correction in (TruncatedIS(), SequenceMask()):
        corrected = with_algorithm("grpo", correction=correction)
        said = [line for line in inert(run_of("grpo", minibatches=2, **corrected)) if type(correction).__name__ in line]
        assert len(said) == 1 and "--rollout.collect.staleness 1" in said[0]
        assert not inert(run_of("grpo", minibatches=2, collect=Collect(staleness=1), **corrected))
    # A loss without a ratio leaves tokens of earlier steps to its correction.
    corrected = with_algorithm("reinforce", correction=TruncatedIS())
    assert inert(run_of("grpo", **corrected)) and not inert(
        run_of("grpo", collect=Collect(interrupt=True), **corrected)
    )


def test_what_begins_after_the_end_is_said():
    late = {"resets": Resets(reference_every=101, optimiser_every=100)}
    assert inert(run_of("grpo", minibatches=2, **late)) == [
        "recipe.resets.reference_every 101 never comes in 100 steps"
    ]
    kimi = run_of("kimi_k1_5", minibatches=8)
    assert inert(kimi) == [] and kimi.recipe.shaping[0].warmup == 50
    short = dataclasses.replace(kimi, steps=6)
    assert inert(short) == ["the length reward begins after 50 updates, and the run makes 48"]
    assert inert(dataclasses.replace(kimi, steps=7)) == []
    even = run_of("kimi_k1_5", minibatches=5, shaping=(RelativeLength(warmup=500),))
    assert inert(even) == ["the length reward begins after 500 updates, and the run makes 500"]


def test_an_optimiser_that_begins_anew_too_often_is_told_of():
    anew = lambda run: [line for line in configs.notes(run) if line.startswith("the optimiser is reset")]
    assert anew(run_of("kimi_k1_5", prompts=64)) == [
        "the optimiser is reset after every update, and AdamW's steps are the signs of one gradient; "
        "--learner.minibatches 10, "
        "or --recipe.resets.optimiser_every 10"
    ]
    assert (
        "after every 4 updates, and its moments average over 10; --learner.minibatches 8 --learner.epochs 2, or"
        in anew(run_of("kimi_k1_5", minibatches=4))[0]
    )
    assert not anew(run_of("kimi_k1_5", minibatches=5, epochs=2)) and not anew(run_of("dapo"))
    assert not anew(run_of("kimi_k1_5", minibatches=2, resets=Resets(optimiser_every=5)))
    never = run_of("kimi_k1_5", resets=Resets(optimiser_every=3))
    assert anew(never) and not anew(dataclasses.replace(never, steps=2))
    muon = dataclasses.replace(run_of("kimi_k1_5"), learner=Learner(Optimiser(name="muon", moments=Moments(b1=0.95))))
    assert "its moments average over 20" in anew(muon)[0]


def test_what_needs_a_right_answer_says_so_where_there_is_none():
    unverified = run_of("dapo", 2, scoring=FORMAT)
    assert any(
        "recipe.overlong.share 0.2 punishes nothing; --recipe.overlong.weight W" in line
        for line in configs.notes(unverified)
    )
    for sized in (
        run_of("dapo", 2),
        run_of("dapo", 2, scoring=FORMAT, overlong=Overlong(share=0.2, weight=0.5)),
        run_of("gspo", 2, scoring=FORMAT),
    ):
        assert not any("overlong" in line for line in configs.notes(sized))
    by_reward = dataclasses.replace(unverified, recipe=dataclasses.replace(unverified.recipe, filter_groups="reward"))
    assert "no Accuracy among the rewards: groups are filtered by reward" in configs.notes(by_reward)
    for other in (run_of("dapo"), run_of("gspo", scoring=FORMAT)):
        assert not any("filtered" in line for line in configs.notes(other))


def test_a_punishment_of_what_the_loss_leaves_out_is_told_of():
    told = lambda run: [
        line for line in configs.notes(run) if line.startswith("completions that are cut off are punished")
    ]
    assert len(told(run_of("dapo", overlong=Overlong(drop=True, share=0.2)))) == 1
    assert not told(run_of("dapo")) and not told(run_of("gspo", overlong=Overlong(drop=True)))


@pytest.mark.parametrize("name", configs.config_names())
def test_a_shipped_configuration_of_a_paper_makes_its_updates(name):
    run = configs.resolved(configs.load_config(name)[1])
    if not isinstance(run, configs.Run):
        return  # what learns from data follows no paper's counts
    said = [line for line in configs.notes(run) if not line.startswith("one update a batch, as in the paper")]
    assert said == [] or name.endswith("quickstart") or name == "process_smoke"
