"""Runs that others made: their code is executed by those who trust it alone, and their own makers are not asked."""

import dataclasses
import json
import os
import shutil
import stat
import sys

import pytest
from commands import ROOT

from jaxrl_llm import config as configs
from jaxrl_llm.config import Origin, Scoring
from jaxrl_llm.config.code import named
from jaxrl_llm.config.origin import KEY, SHIPPED, SIGNED
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Function, StepFunction
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.tasks import Task

SMOKE = configs.load_config("smoke")[1]
PROJECT = ROOT / "tests" / "fixtures" / "project"
NOT_MADE_HERE = r"uses code of its own \(.*\), and was not made by you on this machine: read it, and add --trust"


@pytest.fixture(autouse=True)
def cache(tmp_path):
    """A cache directory of one's own, and a process that forgets the modules of the project."""
    os.environ["JAXRL_LLM_CACHE"] = str(tmp_path / "cache")
    yield tmp_path / "cache"
    del os.environ["JAXRL_LLM_CACHE"]


def saved(folder, run, **origin):
    """The config.json of a run that began in a folder, as this user made it."""
    path = folder / "runs" / "mine" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    configs.write(path, configs.to_json(run) | Origin(str(folder), **origin).to_json())
    return path


def with_reward(name):
    return dataclasses.replace(SMOKE, scoring=Scoring((Function(name),)))


def refused(path, **options):
    with pytest.raises(InputError, match=NOT_MADE_HERE) as error:
        configs.read(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def evil(tmp_path):
    """A folder with a module that leaves a mark as soon as it is imported."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil_reward.py").write_text(
        f"import dataclasses\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "def score(problem, completion):\n    return 1.0\n"
        "@dataclasses.dataclass(frozen=True)\nclass Shaping:\n    share: float = 0.5\n"
    )
    yield folder
    assert not (tmp_path / "ran").exists(), "it was executed"


def test_who_made_a_run_here_is_not_asked(evil, cache):
    path = saved(evil, with_reward("evil_reward:score"))
    assert len(json.loads(path.read_text())[SIGNED]) == 64
    assert configs.read(path).run == with_reward("evil_reward:score")
    key = cache / KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    moved = shutil.move(path.parent, evil / "runs" / "other")
    assert configs.read(moved / "config.json").run == with_reward("evil_reward:score")


def test_a_run_without_code_of_its_own_has_no_signature_and_needs_none(evil, cache):
    path = saved(evil, dataclasses.replace(SMOKE, task=dataclasses.replace(SMOKE.task, extractor="tag:answer")))
    assert SIGNED not in json.loads(path.read_text()) and not cache.exists()
    for place in (str(evil), "/nowhere"):
        before = list(sys.path)
        assert configs.read(path).run.task.extractor == "tag:answer" and sys.path == before, place


@pytest.mark.parametrize(
    "change",
    [
        lambda data, key: data.pop(SIGNED),
        lambda data, key: data.update({SIGNED: "0" * 64}),
        lambda data, key: data.update({SIGNED: "ä\udce9"}),
        lambda data, key: data.update({SIGNED: None}),
        lambda data, key: data.update(seed=7),
        lambda data, key: data["origin"].update(folder="/tmp"),
        lambda data, key: key.write_bytes(b"another machine's key, 32 bytes.."[:32]),
        lambda data, key: key.unlink(),
        lambda data, key: key.chmod(0o640),
        lambda data, key: key.write_bytes(b""),
        lambda data, key: (key.rename(key.with_name("k")), key.symlink_to("k")),
    ],
)
def test_a_run_without_the_right_signature_is_refused(evil, cache, change):
    path = saved(evil, with_reward("evil_reward:score"))
    data = json.loads(path.read_text())
    change(data, cache / KEY)
    path.write_text(json.dumps(data))
    told = refused(path)
    assert "evil_reward:score in " in told
    assert configs.read(path, own=False).run.seed == data["seed"], "a model alone can be loaded"
    with configs.trusting():
        assert configs.read(path).run.scoring.rewards[0].path == "evil_reward:score"
    with pytest.raises(InputError), configs.trusting(False):
        configs.read(path)


def test_another_file_of_the_same_name_is_refused(evil):
    """A signed run is copied to where a module of this name is another."""
    (evil / "once.py").write_text("1 / 0\n")
    path = saved(evil, with_reward("once:score"))
    (evil / "once.py").rename(evil / "elsewhere.py")
    assert "once:score in no file" in refused(path)
    (evil / "once").mkdir()
    (evil / "once" / "__init__.py").write_text("1 / 0\n")
    assert f"once:score in {evil / 'once' / '__init__.py'}" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"scoring.rewards": (Function("os:system"),)},
        {"scoring.rewards": (StepFunction("subprocess:run"),)},
        {"task.keep": "evil_reward:score"},
        {"task.tools": ("jaxrl_llm.environments.examples:multiply", "evil_reward:score")},
        {"task.environment": "evil_reward:score"},
        {"task.environment": {"extractor": "evil_reward:score"}},
        {"task.tools": ("jaxrl_llm.rewards.sandbox:run_python",)},
        {"rules": Rules(phases=(Phase("one", 1), Phase("two", changes={"task.keep": "evil_reward:score"})))},
        {"evaluation.task": Task([{"prompt": "a", "answer": "b"}], keep="evil_reward:score")},
    ],
)
def test_names_of_functions_count_wherever_they_are(evil, change):
    (name, value), *_ = change.items()
    part, _, field = name.partition(".")
    run = dataclasses.replace(
        SMOKE, **{part: dataclasses.replace(getattr(SMOKE, part), **{field: value}) if field else value}
    )
    path = saved(evil, run)
    data = json.loads(path.read_text())
    assert SIGNED in data
    path.write_text(json.dumps({key: item for key, item in data.items() if key != SIGNED}))
    refused(path)


def test_classes_count_and_their_files_are_not_executed(evil, tmp_path):
    path = saved(evil, SMOKE)
    data = json.loads(path.read_text())
    data["origin"]["modules"] = {"evil_reward": str(evil / "evil_reward.py")}
    data["recipe"]["shaping"] = [{"type": "evil_reward:Shaping"}]
    path.write_text(json.dumps(data))
    for calls in (True, False):
        assert f"evil_reward:Shaping in {evil / 'evil_reward.py'}" in refused(path, calls=calls)
    data["origin"]["modules"] = {}
    path.write_text(json.dumps(data))
    assert not configs.is_whole(configs.read(path).run), "a class of no recorded module is never executed"


def test_a_run_that_is_only_compared_may_have_the_classes_that_are_there_already(tmp_path):
    project = shutil.copytree(PROJECT, tmp_path / "project")
    found = configs.find_config(str(project / "mine.py"))
    path = saved(project, found.run, modules=configs.own_modules(found.run))
    data = json.loads(path.read_text())
    del data[SIGNED]
    path.write_text(json.dumps(data))
    assert configs.read(path, calls=False).run == found.run
    refused(path)


def test_functions_of_this_package_are_no_code_of_a_run():
    names = [f"{module}:f" for module in SHIPPED] + ["s3://bucket/x", "a: b", ":f", "f:", "tag:x y"]
    assert list(named({"type": "jaxrl_llm.x:Y", "a": names, "extractor": "after:think"})) == []
    assert list(named({"type": "x:Y", "extractor": "after:think"})) == [("x:Y", True), ("after:think", False)]
    assert next(named(["os:system", {"changes": {"task.extractor": "tag:x"}}])) == ("os:system", False)


def test_a_reward_in_the_configurations_file_is_found_again_by_those_who_may_execute_it(tmp_path, cache):
    file = tmp_path / "own_reward.py"
    file.write_text(
        "import dataclasses\nfrom jaxrl_llm.config import Scoring, load_config\n"
        "def short(problem, completion):\n    return -1.0\n"
        "config = dataclasses.replace(load_config('smoke')[1], scoring=Scoring((short,)))\n"
    )
    found = configs.find_config(str(file))
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    configs.write(path, configs.to_json(found.run) | found.origin.to_json())
    read = lambda: configs.with_lost(configs.read(path).run, path).scoring.rewards[0]
    assert read().function(None, None) == -1.0
    os.environ["JAXRL_LLM_CACHE"] = str(tmp_path / "of another user")
    assert not hasattr(read(), "function") and f"(read {file}, and add --trust to execute it)" in read().reason
    with configs.trusting():
        assert read().function(None, None) == -1.0
        file.unlink()
        assert not hasattr(read(), "function"), "it says what it did before"
    plain = tmp_path / "run" / "plain.json"
    configs.write(plain, configs.to_json(SMOKE) | found.origin.to_json())
    assert configs.with_lost(SMOKE, plain) is SMOKE
