"""Runs on disk as models for others, and which weights the models have that a run reads: decided when it begins, and
the same at each later start.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.config import LoadedConfig, Origin, Preference, RewardModel, Start, Supervised
from jaxrl_llm.data import Collected, Pairs, Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Critic, Learner
from jaxrl_llm.models.config import Lora
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import Accuracy, ModelReward
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.runs import decide_model_versions, find_run, keep_dependencies, mesh_here, model_checker, needs_base
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.system.paths import COLLECTED
from jaxrl_llm.tasks import Table
from jaxrl_llm.trainer.launch import claim_directory

SMOKE = configs.dated(configs.resolved(configs.load_config("smoke")[1]), "2025-07-01")
JUDGED = dataclasses.replace(SMOKE, scoring=configs.Scoring((ModelReward(("rm", "other@3")),)))


def a_run(folder, run, *steps, **origin):
    """A run in a folder, with checkpoints whose files are told apart by their step."""
    with claim_directory(folder, LoadedConfig(folder.name, run, Origin(str(folder.parent), **origin))):
        for step in steps:
            place = folder / "checkpoints" / str(step)
            (place / "host").mkdir(parents=True)
            (place / "host" / "metadata").write_text(json.dumps({"phase": step // 2}))
            (place / "checksums.json").write_text(json.dumps({"state/d": [8, step]}))
    return folder


@pytest.fixture
def at(tmp_path):
    """A folder with two reward models."""
    for name in ("rm", "other"):
        a_run(tmp_path / name, RewardModel("tiny-random", Pairs(Table("rm.jsonl"))), 2, 3)
    return tmp_path


def decided(at, run=JUDGED, start=None, began=True):
    return decide_model_versions(LoadedConfig("run", run, Origin(str(at))), at / "run", began, start)


def begun(at, run=JUDGED, *steps, start=None):
    """A run that began with what is there now."""
    pins = decided(at, run, start, began=False)
    a_run(at / "run", run, *steps, models=pins, start=start)
    return pins


def changed(at, *names):
    """A step that was written anew."""
    for name in names:
        (at / name / "checksums.json").write_text('{"state/d": [8, 7]}')


def test_a_name_stands_for_the_newest_checkpoint_of_the_beginning(at):
    pins = begun(at, JUDGED, 1)
    assert {name: pin.step for name, pin in pins.items()} == {"rm": 3, "other@3": 3} and pins["rm"].weights["files"]
    (at / "rm/checkpoints/5").mkdir()
    assert decided(at) == pins and decided(at, began=False)["rm"].step == 5, "what did not begin is another run's"
    saved = configs.read(at / "run/config.json")
    assert saved.origin.models == pins and saved.run == configs.as_read(JUDGED), "the settings say what was said"
    run = find_run(str(at / "run")).run
    assert run.scoring.rewards[0].paths == (str(at / "rm@3"), str(at / "other@3")) and run.model == "tiny-random"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda at: shutil.rmtree(at / "rm/checkpoints/3"),
            "rm is not as it was when {run} began (step 3 was read, ",
        ),
        (lambda at: shutil.rmtree(at / "rm"), "step 3 was read, and it is gone"),
        (
            lambda at: changed(at, "other/checkpoints/3"),
            "other@3 is not as it was when {run} began (the files of ",
        ),
    ],
)
def test_what_has_changed_is_refused_with_what_to_do(at, change, words):
    begun(at, JUDGED, 1)
    change(at)
    with pytest.raises(InputError) as refusal:
        decided(at)
    said = str(refusal.value)
    assert said.startswith("reward model: ") and words.format(run=at / "run") in said and "\n" not in said
    assert f"begin a new run, which reads it as it is now, with --from {at / 'run'} (on from its weights) or" in said


def test_what_a_start_does_not_read_may_go(at):
    phases = (Phase("first", 2), Phase("second", changes={"scoring.rewards": (ModelReward("other"), Accuracy())}))
    recipe = dataclasses.replace(RECIPES["ppo"], critic=Critic(model="critic"))
    run = dataclasses.replace(
        SMOKE, recipe=recipe, rules=Rules(phases=phases), scoring=configs.Scoring((ModelReward("rm"),))
    )
    shutil.copytree(at / "rm", at / "critic")
    start = Start(str(at / "critic"), 2)
    pins = begun(at, configs.resolved(run), start=start)
    assert set(pins) == {"rm", "other", "critic", f"{at / 'critic'}@2"}
    changed(at, "critic/checkpoints/2")
    with pytest.raises(InputError, match=r"--from: .* is not as it was"):
        decided(at, run, start)
    (at / "run/checkpoints/1/host").mkdir(parents=True)
    (at / "run/checkpoints/1/host/metadata").write_text('{"phase": 0}')
    shutil.rmtree(at / "critic")
    assert decided(at, run, start) == pins, "with the step of its first weights, whose copy it may keep"
    shutil.rmtree(at / "rm")
    with pytest.raises(InputError, match=r"^reward model: .*it is gone"):
        decided(at, run)
    (at / "run/checkpoints/1/host/metadata").write_text('{"phase": 1}')
    assert decided(at, run)["rm"] == pins["rm"], "the phase that it judged is over"


def test_an_adapter_stays_beside_the_step_that_it_was_trained_beside(at):
    lora = dataclasses.replace(SMOKE, model="rm", learner=dataclasses.replace(SMOKE.learner, lora=Lora(2)))
    begun(at, lora, 1)
    (at / "rm/checkpoints/5").mkdir()
    start = Start(str(at / "run"), 1)
    other = decided(at, dataclasses.replace(lora, model="other"), start, began=False)
    assert decided(at, lora, start, began=False)["rm"].step == 3 and other["other"].step == 3
    shutil.rmtree(at / "rm/checkpoints/3")
    with pytest.raises(InputError, match=r"^model: .* reads it as it is now, with --fresh$"):
        decided(at, lora, start, began=False)


def test_a_run_that_holds_all_its_weights_goes_on_where_its_first_model_is_not_as_it_was(at, capsys):
    run = dataclasses.replace(SMOKE, model="rm")
    begun(at, run)
    changed(at, "rm/checkpoints/3")
    (at / "run/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match=r"^model: .*the files of step 3 have changed"):
        decided(at, run)
    (at / "run/checkpoints/1").mkdir(parents=True)
    shutil.move(at / "rm/checkpoints/3", at / "rm/checkpoints/4")
    assert decided(at, run)["rm"].step == 4
    assert "step 3 was read, and it keeps 2, 4); the run's own checkpoint has its weights" in capsys.readouterr().err
    pairs = Preference("rm", Pairs(Table("rm.jsonl")), seed=SMOKE.seed)
    with pytest.raises(InputError, match=r"^model: "):
        decided(at, pairs)


def test_other_weights_in_a_directory_are_refused_where_they_are_read(at):
    run = dataclasses.replace(SMOKE, model="base")
    first, other = ({"w": np.full(2, value, np.float32)} for value in (1, 2))

    def compared(weights):
        found = LoadedConfig("run", run, Origin(str(at), models=decided(at, run)), at / "run")
        model_checker(found, at / "run", ALONE)("base", "float32", lambda: weights_digest(weights))

    a_run(at / "run", run, models=decided(at, run, began=False))
    compared(first)
    with pytest.raises(InputError, match=r"^model: base is not as it was .*its weights have changed"):
        compared(other)


def test_a_run_with_a_checkpoint_needs_its_models_weights_where_its_answers_are_gone(tmp_path):
    learned = Supervised("base", Texts(Collected(SMOKE.task)))
    assert needs_base(learned, tmp_path) and not needs_base(SMOKE, tmp_path)
    (tmp_path / COLLECTED).touch()
    assert not needs_base(learned, tmp_path)


@pytest.mark.parametrize("lost", ["rm/checkpoints/3", "rm"])
def test_a_step_that_the_run_has_kept_is_read_where_it_is_gone_or_another(at, lost):
    pins = begun(at, JUDGED, 1)
    found = configs.read(at / "run/config.json")
    told = []
    (at / "rm/checkpoints/3/state").mkdir()
    (at / "rm/checkpoints/3/state/d").write_text("weights!")
    (at / "other/checkpoints/3/state").mkdir()
    keep_dependencies(found, at / "run", told.append)
    why = "(it went away meanwhile): leave it where it is"
    assert told == [f"jaxrl-llm: {at / 'other@3'} is not kept in {at / 'run'} as well {why}"]
    assert found.pinned.scoring.rewards[0].paths[0] == str(at / "rm@3"), "as long as it is as it was"
    shutil.rmtree(at / lost)
    copy = at / "run/needs" / f"rm-{pins['rm'].mark}"
    assert decided(at) == pins and found.pinned.scoring.rewards[0].paths == (f"{copy}@3", str(at / "other@3"))
    assert find_run(f"{copy}@3").directory == copy / "checkpoints/3"
    keep_dependencies(found, at / "run", told.append)
    assert decided(at) == pins, "it is not dropped"


def test_runs_that_began_from_each_other_are_no_endless_way(at):
    a_run(at / "run", dataclasses.replace(SMOKE, model="run@1"), 1)
    pins = decide_model_versions(
        LoadedConfig("run", configs.read(at / "run/config.json").run, Origin(str(at))), at / "other", False, None
    )
    a_run(at / "run", dataclasses.replace(SMOKE, model="run@1"), models=pins)
    keep_dependencies(configs.read(at / "run/config.json"), at / "other", lambda line: None)


SCORES = RewardModel("tiny-random", Pairs(Table("rm.jsonl")))
MACHINES = {
    "fixed sizes": {"mesh": MeshShape(2, 2, 2)},
    "devices that sample": {"mesh": MeshShape(rollout=4)},
    "slices": {"mesh": MeshShape(2, slices=4)},
    "experts divided": {"mesh": MeshShape(fsdp=1, expert=8)},
    "rows": {"learner": Learner().computing(microbatch_rows=48)},
    "row's length": {"learner": Learner().computing(row_tokens=4096)},
    "a TPU's kernel": {"learner": Learner().computing(attention="splash")},
}


@pytest.mark.parametrize("run", [JUDGED, SCORES], ids=["policy", "reward model"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_model_is_used_on_the_devices_that_are_there(tmp_path, machine, run):
    plain = dataclasses.replace(run, learner=Learner(), mesh=MeshShape())
    found = [
        find_run(str(a_run(tmp_path / name, dataclasses.replace(plain, **changes), 2))).run
        for name, changes in (("here", {}), ("there", MACHINES[machine]))
    ]
    runs = [configs.to_json(dataclasses.replace(one, output=plain.output)) for one in found]
    assert runs[0] == runs[1] and mesh_here(found[1].mesh).size == 8


def test_no_device_is_set_aside_where_nothing_learns():
    with pytest.raises(InputError, match=r"^--mesh.rollout 2 sets devices aside, and nothing learns: leave it out$"):
        mesh_here(MeshShape(rollout=2))
    with pytest.raises(InputError, match="does not fit 8 devices"):
        mesh_here(MeshShape(3))
