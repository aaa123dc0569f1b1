"""Settings that differ from their defaults, as config.json lists them."""

import dataclasses

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.surrogates import CISPO
from jaxrl_llm.codec import flat
from jaxrl_llm.config import Run, Scoring
from jaxrl_llm.recipes import DAPO
from jaxrl_llm.rewards import Accuracy, Format
from jaxrl_llm.tasks import Table, Task


@pytest.mark.parametrize("name", configs.config_names())
def test_the_settings_that_were_chosen_are_names_of_the_json(name):
    _, run = configs.load_config(name)
    known = flat(configs.to_json(run), whole_lists=True)
    assert all(any(one == key or key.startswith(f"{one}.") for key in known) for one in configs.chosen(run))


def test_a_setting_is_chosen_if_it_differs_from_its_default():
    run = Run(model="tiny-random", task=Task(Table("problems.jsonl"), template="plain", holdout=0.1))
    given = ["model", "task.type", "task.source.type", "task.source.path", "task.template", "task.holdout"]
    assert configs.chosen(run) == given, "the learning rate of its kind is a default"
    algorithm = dataclasses.replace(DAPO.algorithm, surrogate=CISPO(2.0), entropy_coef=0.1)
    recipe = dataclasses.replace(DAPO, algorithm=algorithm)
    scoring = Scoring(rewards=(Accuracy(), Format("x")), timeout_s=7.0)
    run = dataclasses.replace(run, scoring=scoring, recipe=recipe, steps=7)
    assert configs.chosen(run)[len(given) :] == [
        "scoring.rewards.1.type", "scoring.rewards.1.pattern", "scoring.timeout_s", "recipe.algorithm.surrogate.type",
        "recipe.algorithm.surrogate.ratio_max", "recipe.algorithm.entropy_coef", "steps",
    ]  # fmt: skip
