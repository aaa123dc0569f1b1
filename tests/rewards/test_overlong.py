"""The punishment of overlong answers, as recipes set it for the rewards of a run."""

import dataclasses

import pytest
from config.test_run import replaced

from jaxrl_llm import config as configs
from jaxrl_llm.config import Run, Scoring
from jaxrl_llm.rewards import Accuracy, Format
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.tasks import Table, Task

TASK = Task(Table("problems.jsonl"), template="plain", holdout=0.1)
RUN = Run(model="tiny-random", task=TASK)


def test_the_overlong_punishment_is_the_recipes_share_of_the_budget():
    run = dataclasses.replace(RUN, rollout=Rollout(max_new_tokens=100))
    assert [(r.name, getattr(r, "cache", None)) for r in configs.rewards(run)] == [
        ("accuracy", None),
        ("soft_overlong", 20),
    ]
    assert configs.rewards(replaced(run, "recipe.overlong.share", 0.0)) == run.scoring.rewards


@pytest.mark.parametrize(("rewards", "given", "weight"), [
    ((Accuracy(),), None, 0.5), ((Accuracy(3.0), Format("a")), None, 1.5), ((Accuracy(),), 0.2, 0.2),
    ((Accuracy(),), 0.0, None),
    ((Format("a", 9.0),), None, None), ((Format("a"),), 0.2, 0.2), ((Accuracy(0.0),), None, None),
    ((Accuracy(-1.0),), None, None),
])  # fmt: skip
def test_the_overlong_punishment_is_half_of_what_a_right_answer_is_worth(rewards, given, weight):
    run = replaced(dataclasses.replace(RUN, scoring=Scoring(rewards)), "recipe.overlong.weight", given)
    for named in (run, configs.resolved(run)):
        assert [r.weight for r in configs.rewards(named)[len(rewards) :]] == ([] if weight is None else [weight])
    assert configs.resolved(run).recipe.overlong.weight == (given if weight is None else weight)
