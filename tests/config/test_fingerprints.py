"""Fingerprints of a run's own code: what changes them, and what does not."""

import dataclasses
import functools
import importlib
import linecache
import operator

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.config import Scoring, changed_code, code_of
from jaxrl_llm.config.fingerprints import VERSION
from jaxrl_llm.config.origin import make_findable
from jaxrl_llm.rewards import Function
from jaxrl_llm.tasks import Table, Task

SMOKE = configs.load_config("smoke")[1]
MODULE = '''
"""Rewards."""
import math
from {beside} import weight

LIMIT = 3


def helper(text):
    return len(text) * LIMIT


def short(problem, completion):
    """Rewards short texts."""
    return -weight(helper(completion.text))


def other(problem, completion):
    return math.pi


class World:
    def reset(self, row, seed):
        return helper(row)
'''
SAME = {
    "a comment": ("return len", "# long\n    return len"),
    "a docstring": ("Rewards short texts.", "Other words."),
    "another function": ("math.pi", "math.e"),
    "a new line": ("LIMIT = 3", "LIMIT  =  3\nMORE = 4"),
}
OTHER = {
    "the function": ("return -weight", "return 2 - weight"),
    "what it calls": ("* LIMIT", "+ LIMIT"),
    "a number": ("LIMIT = 3", "LIMIT = 4"),
    "a default": ("def helper(text)", "def helper(text, more=1)"),
}


@pytest.fixture
def write(tmp_path):
    """Writes a module with rewards, and one beside it."""

    def write(change=("", ""), factor=1):
        beside = f"beside_{tmp_path.name}"
        (tmp_path / f"{beside}.py").write_text(f"def weight(x):\n    return x * {factor}\n")
        (tmp_path / f"mine_{tmp_path.name}.py").write_text(MODULE.format(beside=beside).replace(*change))
        make_findable(tmp_path)
        return f"mine_{tmp_path.name}"

    return write


def with_rewards(*rewards, **changes):
    return dataclasses.replace(SMOKE, scoring=Scoring(rewards), **changes)


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_a_functions_code_is_what_it_needs(write, name):
    run = with_rewards(Function(f"{write()}:short"))
    before = code_of(run)
    write((SAME | OTHER)[name])
    after = code_of(run)
    assert (list(before) == list(after) == [run.scoring.rewards[0].path] and before == code_of(run)) or name in OTHER
    assert (before != after) == (name in OTHER)
    changed = changed_code(before, after)
    assert [line.partition(": ")[0] for line in changed] == [f"code of {run.scoring.rewards[0].path}"] * (name in OTHER)


def test_what_is_imported_from_a_file_beside_it_counts(write):
    run = with_rewards(Function(f"{write()}:short"), Function(f"{write()}:other"))
    before = code_of(run)
    write(factor=2)
    assert [name for name, print_ in code_of(run).items() if print_ != before[name]] == [run.scoring.rewards[0].path]


def test_environments_and_functions_that_are_held_count_by_their_source(write):
    module = importlib.import_module(write())
    add = lambda scale: lambda problem, completion: len(completion.text) * scale
    task = Task(Table("none.jsonl"), environment=module.World)
    run = with_rewards(add(2), functools.partial(module.other), task=task)
    found = code_of(run)
    assert {"lambda", "World", "other"} <= {name.rpartition(":")[2] for name in found}
    again = code_of(with_rewards(add(2), functools.partial(module.other), task=task))
    assert again == found != code_of(with_rewards(add(3), functools.partial(module.other), task=task))
    write(("return helper(row)", "return 1"))
    now = code_of(run)
    assert {name.rpartition(":")[2] for name in now if now[name] != found[name]} == {"World"}


def test_a_notebooks_cells_count(write):
    def cell(text, space):
        name = f"<ipython-input-{len(cells)}>"
        cells.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), space)
        return space

    cells = []
    space = cell("def part(x):\n    return x + 1\n", {"__name__": "__main__"})
    reward = cell("def graded(problem, completion):\n    return part(len(completion.text))\n", space)["graded"]
    before = code_of(with_rewards(reward))
    cell("def part(x):\n    return x + 2\n", space)
    assert [*before] == ["graded"] and before != code_of(with_rewards(reward))


def test_code_without_a_source_and_of_other_pythons_is_not_compared():
    class Callable:
        def __call__(self, problem, completion):
            return 1.0

    made = {}
    exec("def reward(problem, completion):\n    return 1.0", made)
    assert code_of(with_rewards(made["reward"])) == {} == code_of(SMOKE)
    assert code_of(with_rewards(Callable())).keys() <= {"Callable"} and not code_of([operator.add, len, print, min])
    assert not changed_code({"a": "2.7:1", "b": f"{VERSION}:1"}, {"a": f"{VERSION}:2", "c": f"{VERSION}:3"})
    assert changed_code({"b": f"{VERSION}:1"}, {"b": f"{VERSION}:2"}) == [f"code of b: {VERSION}:1 -> {VERSION}:2"]
