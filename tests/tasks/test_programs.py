"""Generated programming problems: their references pass their tests, and what is wrong does not."""

import collections
import dataclasses

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.code import grade
from jaxrl_llm.tasks import Programs, Task, load
from jaxrl_llm.tasks.programs import TEMPLATES, load_solution

PROBLEMS = list(Programs().problems())
OF_TEMPLATE = {problem.metadata["template"]: problem for problem in PROBLEMS}


def passes(solution, tests):
    """Whether a solution passes tests, in this process: the solutions of this package are no strangers."""
    names = {"solve": load_solution(solution)}
    try:
        for test in tests:
            exec(test, names)
    except (AssertionError, IndexError, ValueError, TypeError):
        return False
    return True


@pytest.mark.slow
def test_there_are_enough_of_each_level_and_no_two_are_equal():
    levels = collections.Counter(problem.metadata["level"] for problem in PROBLEMS)
    assert len(PROBLEMS) >= 200 and min(levels[level] for level in (1, 2, 3)) >= 50
    assert len({problem.prompt[0]["content"] for problem in PROBLEMS}) == len(PROBLEMS) == sum(levels.values())
    assert set(OF_TEMPLATE) == set(TEMPLATES)
    assert list(Programs().problems()) == PROBLEMS, "they are the same every time"
    other = list(Programs(seed=1).problems())
    assert {one.metadata["solution"] for one in other} == {one.metadata["solution"] for one in PROBLEMS} != other
    few = list(Programs(levels=(3,), size=7, tests=4).problems())
    assert [(one.metadata["level"], len(one.metadata["tests"])) for one in few] == [(3, 4)] * 7


def test_solutions_pass_their_own_tests_and_no_others_of_their_kind():
    kinds = collections.defaultdict(list)
    for problem in PROBLEMS:
        kinds[problem.metadata["template"]].append(problem.metadata)
    for name, kind in kinds.items():
        for one in kind:
            assert passes(one["solution"], one["tests"]), one
            results = {test.partition(" == ")[2] for test in one["tests"]}
            assert len(results) > 1 and len(set(one["tests"])) == 6, (name, "one value for all would pass")
            for other in kind:
                assert other is one or not passes(other["solution"], one["tests"]), (name, other["solution"])


@pytest.mark.sandbox("landlock+seccomp")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_sandbox_agrees(name):
    metadata = OF_TEMPLATE[name].metadata
    solution, tests = metadata["solution"], metadata["tests"]
    assert grade(f"Here it is:\n```python\n{solution}```\nDone.", tests[-2:]).score == 1.0
    first = tests[0].partition(" == ")[2]
    head = solution.partition("\n")[0]
    wrong = grade(f"{head}\n    return {first}\n", tests[:2])
    assert wrong.score == 0.5 and set(wrong.results) == {"passed", "failed"}


def test_whole_problems_are_held_out():
    found = load(Task(Programs(levels=(1, 2)), extractor="whole", verifier="code", holdout=0.25))
    train, held_out = ({one.metadata["solution"] for one in part} for part in (found.train, found.held_out))
    assert not train & held_out and len(held_out) == round(0.25 * len(train | held_out))
    assert not found.notes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"levels": (4,)}, r"has levels \(4,\); choose of 1, 2, 3"),
        ({"levels": ()}, "choose of 1, 2, 3"),
        ({"tests": 1}, "give at least 2"),
        ({"size": -1}, "or 0 for all"),
    ],
)
def test_what_cannot_be_made_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        list(dataclasses.replace(Programs(), **change).problems())
