"""Completions that continue a program of their row: ``CodeTests(before=...)``, as ``code_smoke`` uses it."""

import dataclasses

import pytest
from rewards.test_hostile_answers import completion

from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import CodeTests, Scorer
from jaxrl_llm.tasks import load

pytestmark = pytest.mark.sandbox("landlock+seccomp")
SMOKE = load_config("code_smoke")[1]


@pytest.mark.slow
def test_a_completion_ends_the_program_of_its_row():
    problems = {one.metadata["tests"][2]: one for one in load(SMOKE.task, False).train}
    four = next(one for one in problems.values() if "above(4) is False" in one.prompt[-1]["content"])
    with Scorer(SMOKE.scoring.rewards, workers=1) as scorer:
        found = scorer.score([(four, completion(text)) for text in ("4", "8", "```\n4\n```", "?", "")])
    assert list(found.parts["code_tests"]) == [1.0, 0.6, 1.0, 0.0, 0.0]


def test_a_row_without_its_beginning_is_refused():
    problems = load(SMOKE.task, False).train
    with pytest.raises(InputError, match=r"column start: there is no text; name the column"):
        CodeTests(before="start").check(problems)
    number = dataclasses.replace(problems[0], metadata=problems[0].metadata | {"begin": 1})
    with pytest.raises(InputError, match="column begin"):
        CodeTests(before="begin").check([number])
