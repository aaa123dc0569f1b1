"""A person's own classes, modules and data beside a configuration, and what a run's config.json says of them."""

import dataclasses
import json
import os
import shutil
import sys

import pytest
from commands import ROOT

from jaxrl_llm import config as configs
from jaxrl_llm.config import Evaluation, Origin, Scoring, Start
from jaxrl_llm.config.files import Unsaveable
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Function
from jaxrl_llm.runs import find_start
from jaxrl_llm.tasks import HubDataset, Table, Task

PROJECT = ROOT / "tests" / "fixtures" / "project"
SMOKE = configs.load_config("smoke")[1]


@pytest.fixture
def project(tmp_path):
    """A folder with a configuration that imports what lies beside it."""
    return shutil.copytree(PROJECT, tmp_path / "project")


def write(directory, run, origin):
    """The config.json of a run in a directory."""
    directory.mkdir(parents=True)
    path = directory / "config.json"
    configs.write(path, configs.to_json(run) | origin.to_json())
    return path


def saved(project):
    """The project's configuration and its config.json, as a run in ``runs/mine`` has it."""
    found = configs.find_config(str(project / "mine.py"))
    origin = dataclasses.replace(found.origin, folder=str(project), modules=configs.own_modules(found.run))
    return found.run, write(project / "runs" / "mine", found.run, origin)


def test_a_configuration_imports_what_lies_beside_it(project):
    found = configs.find_config(str(project / "mine.py"))
    assert found.origin == Origin(os.getcwd(), str(project / "mine.py"))
    assert type(found.run.recipe.algorithm.surrogate).__name__ == "Squared"
    configs.validate(found.run)  # which looks for the reward's module
    assert sys.modules["my_rewards"].__file__ == str(project / "my_rewards.py")


def test_what_lies_beside_the_newest_configuration_is_found(project, tmp_path):
    other = shutil.copytree(project, tmp_path / "other")
    (other / "my_rewards.py").write_text("def digits(problem, completion):\n    return 7.0\n")
    for folder in (project, other, project):
        run = configs.load_config(str(folder / "mine.py"))[1]
        assert sys.modules[type(run.recipe.shaping[0]).__module__].__file__ == str(folder / "pieces.py")
        assert run.scoring.rewards[0].function.__code__.co_filename == str(folder / "my_rewards.py")
        assert sum(place in (str(project), str(other)) for place in sys.path) <= 2


def test_an_error_beside_a_configuration_is_named_with_its_line(project):
    (project / "pieces.py").write_text("import math\n\nmath.nothing\n")
    with pytest.raises(InputError, match=r"pieces\.py, line 3: AttributeError"):
        configs.load_config(str(project / "mine.py"))
    (project / "pieces.py").write_text("import math\nx = (\n")
    with pytest.raises(InputError, match=r"pieces\.py, line 2: SyntaxError"):
        configs.load_config(str(project / "mine.py"))


def test_a_run_with_own_classes_is_read_again(project):
    run, path = saved(project)
    data = json.loads(path.read_text())
    assert data["origin"]["modules"] == {"pieces": str(project / "pieces.py")}
    assert configs.whole(configs.read(path).run) == run
    configs.validate(run)
    for name in ("pieces", "my_rewards", "jaxrl_llm_config_mine"):
        del sys.modules[name]
    sys.path.remove(str(project))  # as in a new process
    assert configs.to_json(configs.whole(configs.read(path).run)) == configs.to_json(run)
    configs.validate(configs.whole(configs.read(path).run))


def test_a_class_of_the_configuration_itself_is_read_again(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom jaxrl_llm.config import load_config\n"
        "@dataclasses.dataclass(frozen=True)\nclass Half:\n    share: float = 0.5\n"
        "smoke = load_config('smoke')[1]\n"
        "config = dataclasses.replace(smoke, recipe=dataclasses.replace(smoke.recipe, shaping=(Half(0.25),)))\n"
    )
    found = configs.find_config(str(tmp_path / "mine.py"))
    origin = dataclasses.replace(found.origin, modules=configs.own_modules(found.run))
    path = write(tmp_path / "run", found.run, origin)
    assert configs.whole(configs.read(path).run) == found.run
    del sys.modules["jaxrl_llm_config_mine"]
    assert configs.whole(configs.read(path).run).recipe.shaping[0].share == 0.25


def test_nothing_of_a_run_is_run_that_it_did_not_record(project, tmp_path):
    _, path = saved(project)
    data = json.loads(path.read_text())
    (project / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for kind in (
        "evil:Evil",
        "jaxrl_llm.nowhere:Learner",  # of a module that a later version has moved
        "os:system",
        "pieces:jnp",
        "pieces:dataclasses.dataclass",
        "pieces:ReasoningGym.problems",
    ):
        path.write_text(json.dumps(data | {"learner": {"type": kind}}))
        refused = f"it names {kind}, which is not a configuration class of this version"
        with pytest.raises(InputError, match=refused), configs.trusting():
            configs.whole(configs.read(path).run)
    assert not (tmp_path / "ran").exists()
    # Nor anything of its own where only the model is wanted.
    data["origin"]["modules"]["pieces"] = str(project / "evil.py")
    path.write_text(json.dumps(data))
    assert configs.read(path, own=False).run.learner == SMOKE.learner
    assert not (tmp_path / "ran").exists()


def test_a_module_that_is_gone_or_another_is_told_in_one_line(project, tmp_path):
    _, path = saved(project)  # without a copy
    (project / "pieces.py").rename(project / "moved.py")
    del sys.modules["pieces"]
    with pytest.raises(InputError, match=r"it has classes of .*pieces.py, which is missing: put it back"):
        configs.whole(configs.read(path).run)
    (project / "pieces.py").write_text("import dataclasses\n1 / 0\n")
    with pytest.raises(InputError, match=r"pieces\.py: ZeroDivisionError"):
        configs.whole(configs.read(path).run)
    (tmp_path / "pieces.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(InputError, match=r"the module pieces is .*, and the run has .*: rename one of them"):
        configs.whole(configs.read(path).run)
    sys.path.remove(str(tmp_path))
    del sys.modules["pieces"]


def test_what_cannot_be_saved_is_told_when_it_is_read(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Inner:
        share: float = 0.5

    shaped = dataclasses.replace(SMOKE, recipe=dataclasses.replace(SMOKE.recipe, shaping=(Inner(), {1, 2})))
    path = write(tmp_path / "run", shaped, Origin(str(tmp_path)))
    with pytest.raises(InputError, match=r"config.json: its class .*Inner is not at the top of a file"):
        configs.whole(configs.read(path).run)
    run = configs.read(path).run
    assert configs.changes(run, configs.as_read(shaped)) == [] and run.model == "tiny-random"
    assert "the run holds a set, which only the program that started it has" in run.recipe.shaping[1].why
    algorithm = configs.to_json(SMOKE.recipe.algorithm) | {"surrogate": {"unsaveable": "gone"}}
    assert configs.from_json(algorithm) == Unsaveable("gone")  # which cannot be made without it


def test_data_and_models_are_found_from_another_folder(project, tmp_path, request):
    task = Task(Table("sums.jsonl"), template="plain")
    run = dataclasses.replace(
        SMOKE, model="weights", task=task, evaluation=Evaluation(task=Task(HubDataset("sets/own")))
    )
    origin = Origin(str(project))
    assert configs.located(run, origin) == dataclasses.replace(
        run, task=Task(Table(str(project / "sums.jsonl")), template="plain")
    )
    for name in ("weights", "sets/own"):
        (project / name).mkdir(parents=True)
    here = configs.located(run, origin)
    assert (here.model, here.evaluation.task.source.name) == (str(project / "weights"), str(project / "sets" / "own"))
    moved = shutil.move(project, tmp_path / "moved")
    assert configs.located(run, origin) == run
    assert configs.located(run, origin, moved / "runs" / "mine").task.source.path == str(moved / "sums.jsonl")
    assert configs.located(run, Origin("/nowhere", str(moved / "mine.py"))).model == str(moved / "weights")
    request.addfinalizer(lambda here=os.getcwd(): os.chdir(here))
    os.chdir(moved)
    assert configs.located(run, Origin(str(moved))) == run  # as it was said, where it was said
    absolute = dataclasses.replace(run, model="/weights", task=Task(Table("/sums.jsonl")))
    assert configs.located(absolute, Origin(str(moved))) == absolute


def test_a_runs_directory_is_a_configuration_that_lies_there(project):
    run, path = saved(project)
    for given in (path.parent, path):
        found = configs.find_config(str(given))
        there = dataclasses.replace(run.output, run_dir=str(path.parent))
        assert (found.name, found.run) == ("mine", dataclasses.replace(run, output=there))
        assert found.origin.config == str(project / "mine.py") and found.located.task.source.path == str(
            project / "sums.jsonl"
        )
    copied = shutil.copy(path, project / "again.json")
    assert configs.load_config(str(copied)) == ("project", run)


def test_a_step_of_a_run_has_a_name(project):
    _, path = saved(project)
    directory = path.parent
    for step in (2, 4):
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    assert find_start(str(directory)) == Start(str(directory), 4)
    assert find_start(f"{directory}@2") == Start(str(directory), 2)
    assert configs.split_step("runs/x@y") == (configs.split_step("runs/x@y")[0], None)
    with pytest.raises(InputError, match="has no checkpoint of step 3: it keeps 2, 4"):
        find_start(f"{directory}@3")
    (project / "runs" / "mine@4").mkdir()
    with pytest.raises(InputError, match="mine@4 is not a run"):
        find_start(f"{directory}@4")  # a folder of this name comes first
    origin = Origin(str(project), start=Start(str(directory), 2))
    path = write(project / "runs" / "new", SMOKE, origin)
    assert json.loads(path.read_text())["from"] == {"run": str(directory), "step": 2, "carry": False}
    assert configs.read(path).origin == origin


def test_own_rewards_by_name_are_no_classes(project):
    run = dataclasses.replace(SMOKE, scoring=Scoring((Function("my_rewards:digits"),)))
    assert configs.own_modules(run) == {}
