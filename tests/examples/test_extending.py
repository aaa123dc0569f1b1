"""The examples that need nothing in the package, in one run, as a user would write it."""

import dataclasses
import json

import numpy as np
import pytest
from extending.environment import Secret
from extending.own_task import Backwards
from extending.reward import in_place

from jaxrl_llm import train
from jaxrl_llm.config import Scoring, load_config
from jaxrl_llm.environments import Limits
from jaxrl_llm.tasks import Task, load
from jaxrl_llm.types import Completion

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_a_source_gives_the_same_problems_again_and_holds_some_out():
    task = Task(Backwards("abc", 2), extractor="whole", template="plain", holdout=0.25)
    loaded = load(task)
    assert loaded == load(task) and len(loaded.train) == 7 and len(loaded.held_out) == 2
    assert not {problem.id for problem in loaded.train} & {problem.id for problem in loaded.held_out}
    assert all(problem.answer == problem.id[::-1] for problem in loaded.train)


def test_a_secret_is_drawn_from_the_seed_and_ends_the_episode():
    for seed in range(20):
        game = Secret()
        game.reset({}, seed)
        answers = [game.step({"role": "assistant", "content": f" {guess}"}) for guess in range(4)]
        right = [answer.reward == 1.0 for answer in answers]
        assert right == [str(guess) == game.secret for guess in range(4)]
        assert [answer.done for answer in answers] == [*right[:3], True]


def test_a_reward_counts_the_letters_in_place():
    problem = load(Task(Backwards("abc", 2), extractor="whole", template="plain")).train[0]
    said = lambda text: in_place(problem, Completion(*[np.zeros(1)] * 2, "stop", *[np.zeros(1)] * 2, text=text))
    assert (
        said(problem.answer) == 1.0 == said(f" {problem.answer}\n") and said(problem.answer[0]) == 0.5 and said("") == 0
    )


@pytest.mark.slow
def test_a_run_takes_them_as_they_are(tmp_path):
    smoke = load_config("smoke")[1]
    run = dataclasses.replace(
        smoke,
        task=Task(Backwards(), extractor="whole", environment=Secret, template=TEMPLATE, verifier="none"),
        scoring=Scoring(rewards=(in_place,)),
        rollout=dataclasses.replace(smoke.rollout, prompts=2, group=4, episode=Limits(max_turns=2)),
        learner=dataclasses.replace(smoke.learner, minibatches=1),
        evaluation=dataclasses.replace(smoke.evaluation, every=0),
        output=dataclasses.replace(smoke.output, run_dir=str(tmp_path), trackers=()),
        steps=1,
    )
    assert train(run) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(rows[-1]["reward/in_place"]) and 1 <= rows[-1]["episode/turns"] <= 2
