"""A run's directory: who holds it, which one is chosen, and with whose weights it begins."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from storages import BUCKET, on_another_machine, storage

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.step_files import CHECKSUMS, file_sums
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.config import LoadedConfig, Origin, Scoring, Start, changed_since
from jaxrl_llm.config.origin import recorded_best, with_step_numbers
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Function, ModelReward
from jaxrl_llm.rules import Reaches, Rules, Stalls
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.system.paths import COLLECTED, InUse, alone
from jaxrl_llm.system.storage import folder, mirror, system
from jaxrl_llm.trainer.launch import Result, choose_directory, claim_directory, decide_start, first_weights
from jaxrl_llm.trainer.state import remove_old_best

SMOKE = configs.dated(configs.resolved(configs.load_config("smoke")[1]), "2025-07-01")
HOLD = "import sys\nfrom pathlib import Path\nfrom jaxrl_llm.system.paths import alone\n" \
       "with alone(Path(sys.argv[1]), 'go'):\n    print('held', flush=True)\n    sys.stdin.read()\n"  # fmt: skip


def lying(run, place):
    """The run in another directory."""
    return dataclasses.replace(run, output=dataclasses.replace(run.output, run_dir=str(place)))


def found(directory, **changes):
    """The smoke test's configuration as a run in a directory."""
    return LoadedConfig("smoke", dataclasses.replace(lying(SMOKE, directory), **changes), Origin(str(directory.parent)))


def begun(directory, *steps, start=None, **changes):
    """A run in a directory that has some checkpoints."""
    one = found(directory, **changes)
    with claim_directory(directory, dataclasses.replace(one, origin=dataclasses.replace(one.origin, start=start))):
        pass
    for step in steps:
        place = directory / "checkpoints" / str(step)
        place.mkdir(parents=True)
        (place / "empty").touch()
        (place / CHECKSUMS).write_text(json.dumps(file_sums(place, ["empty"])))
    return one.run


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    arguments = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        arguments, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path, holder):
    config = tmp_path / "config.json"
    config.write_text("theirs")
    with pytest.raises(InUse) as refusal, claim_directory(tmp_path, found(tmp_path)):
        pass
    who = f"process {holder.pid} on {socket.gethostname()}"
    assert str(refusal.value) == f"{tmp_path} is in use by {who}: wait until it ends, or take --fresh for a new folder"
    assert config.read_text() == "theirs" and not (tmp_path / ".config.json").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with claim_directory(tmp_path, found(tmp_path)):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert json.loads(config.read_text())["steps"] == SMOKE.steps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_a_folder_is_let_go_whatever_happens(tmp_path):
    for error in (InputError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), alone(tmp_path, "go"):
            with pytest.raises(InUse), alone(tmp_path, "go"):
                pass
            raise error
    with alone(tmp_path, "go"):
        pass
    assert not list(tmp_path.iterdir())


def test_who_comes_second_removes_nothing(tmp_path):
    directory = tmp_path / "runs" / "new"
    with claim_directory(directory, found(directory)):
        with pytest.raises(InUse), claim_directory(directory, found(directory, seed=3)):
            pass
        assert json.loads((directory / "config.json").read_text())["seed"] == 0
    with pytest.raises(InputError, match="nothing came of it"), claim_directory(tmp_path / "other", found(directory)):
        raise InputError("nothing came of it")
    assert directory.is_dir() and not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", [COLLECTED, f"{COLLECTED}.part"])
def test_answers_that_were_collected_are_not_removed(tmp_path, name):
    directory = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt), claim_directory(directory, found(directory)):
        (directory / name).touch()
        raise KeyboardInterrupt
    assert sorted(path.name for path in directory.iterdir()) == [name, "config.json"]
    with pytest.raises(InputError, match=r"was begun with other settings \(seed: 0 -> 3\)"):
        choose_directory(found(directory, seed=3).run, "new", fresh=False)


def test_what_does_not_change_the_past_may_change_and_is_recorded(tmp_path):
    directory = tmp_path / "x"
    begun(directory, 4)
    optimiser = dataclasses.replace(SMOKE.learner.optimiser, learning_rate=3e-6)
    rules = dataclasses.replace(SMOKE.rules, guards=("no_signal",))
    changes = {"learner": dataclasses.replace(SMOKE.learner, optimiser=optimiser), "rules": rules}
    other = decide_start(ALONE, found(directory, steps=99, **changes), False, None)[1]
    assert [step for step, _ in other.origin.changed] == [4]
    with claim_directory(directory, other):
        (directory / "checkpoints" / "7").mkdir()
    rate = f"learner.optimiser.learning_rate: {SMOKE.learner.optimiser.learning_rate} -> 3e-06"
    lines = f"{rate}; rules.guards.0: None -> no_signal"
    assert changed_since(directory, 4) == lines and changed_since(directory, 5) == ""
    again = decide_start(ALONE, found(directory, steps=99, **changes), False, None)[1]
    assert again.origin.changed == other.origin.changed, "it is told once"
    with pytest.raises(InputError, match=r"rollout.group: \d+ -> 5"):
        decide_start(ALONE, found(directory, rollout=dataclasses.replace(SMOKE.rollout, group=5)), False, None)


def test_another_runs_weights_begin_a_run_of_their_own(tmp_path):
    old, new, third = (tmp_path / name for name in ("x", "x-2", "x-3"))
    settings = begun(old, 2, 4)
    start = Start(str(old), 4)
    choose = lambda run, start=start, fresh=False: choose_directory(run, "x", fresh, start)[0]
    assert choose(settings) == new
    begun(new, start=start)
    assert choose(settings) == new  # killed before there was anything to lose
    (new / "metrics.jsonl").write_text('{"step": 1}\n')
    slower = dataclasses.replace(settings, learner=dataclasses.replace(settings.learner, epochs=2))
    assert choose(settings) == new  # the same command goes on
    assert choose(slower) == choose(settings, Start(str(old), 2)) == choose(settings, fresh=True) == third
    assert choose(lying(settings, tmp_path / "free")) == tmp_path / "free"
    with pytest.raises(InputError, match="x-2 was begun with other settings"):
        choose_directory(lying(slower, new), "x", False)


def test_a_run_knows_whose_weights_it_began_with_as_long_as_it_needs_them(tmp_path):
    old, new = tmp_path / "x", tmp_path / "x-2"
    begun(old, 2, 4)
    start, other = Start(str(old), 4), Start(str(old), 2)
    begun(new, start=start)
    assert (
        first_weights(new, None) is None and first_weights(new, other) == other
    )  # nothing is begun yet: the command says it
    (new / "metrics.jsonl").write_text('{"step": 1}\n')
    assert first_weights(new, None) == start
    shutil.rmtree(old / "checkpoints" / "4")
    with pytest.raises(InputError, match=r"x-2 begins with step 4 of .*x, which is missing"):
        first_weights(new, None)
    (new / "checkpoints" / "1").mkdir(parents=True)
    assert first_weights(new, None) == start


def test_a_run_with_what_cannot_be_saved_goes_on_from_the_program_that_began_it(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine:
        share: float = 0.5

    shaped = dataclasses.replace(SMOKE.recipe, shaping=(Mine(),))
    settings = begun(tmp_path / "x", 2, recipe=shaped)
    assert choose_directory(settings, "x", False)[0] == tmp_path / "x"
    with pytest.raises(InputError, match="was begun with other settings"):
        choose_directory(dataclasses.replace(settings, seed=3), "x", False)


NAMES = "Engine PRESETS RECIPES Run Sampling Task load_pretrained policy_loss train"


@pytest.mark.slow
def test_the_package_offers_its_names_when_they_are_asked_for(tmp_path):
    program = (
        "import sys, jaxrl_llm\n"
        "assert not {'jax', 'numpy', 'flax', 'tyro'} & set(sys.modules), 'the package alone loads something slow'\n"
        f"assert set({NAMES.split()!r}) <= set(dir(jaxrl_llm)) and jaxrl_llm.__all__\n"
        "import jaxrl_llm.trainer.launch, jaxrl_llm.cli.train, jaxrl_llm.trainer.loop\n"
        f"from jaxrl_llm import {NAMES.replace(' ', ', ')}\n"
        "assert callable(train) and train is jaxrl_llm.trainer.launch.train is jaxrl_llm.train\n"
        "from jaxrl_llm.algorithms import PRESETS as presets\n"
        "assert PRESETS is presets and isinstance(Run, type)\n"
        "try:\n    jaxrl_llm.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "module 'jaxrl_llm' has no attribute 'nothing'\n", done.stderr
    assert not (Path(configs.__file__).parents[1] / "train.py").exists()


def test_a_run_of_which_nothing_comes_removes_no_other_beside_it(tmp_path):
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    with pytest.raises(InputError, match="refused"), claim_directory(first, found(first)):
        second.mkdir()
        raise InputError("refused")
    assert not first.exists() and second.is_dir(), "runs was made by the first one"
    with pytest.raises(InputError, match="refused"), claim_directory(tmp_path / "a" / "b" / "c", found(first)):
        raise InputError("refused")
    assert not (tmp_path / "a").exists() and tmp_path.exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_several_processes_do_not_write_to_s3(tmp_path, resumed):
    address = "s3://bucket/run"
    one = found(mirror(address) if resumed else tmp_path)
    one = one if resumed else dataclasses.replace(one, run=lying(one.run, address))
    with pytest.raises(InputError, match="only one process writes to s3://; give gs://, or a shared folder"):
        decide_start(Peers(0, 2), one, False, None)


@pytest.mark.slow
def test_fresh_takes_a_free_address(tmp_path):
    storage("gs")
    on_another_machine(tmp_path / "one")
    address = f"gs://{BUCKET}/launch/run"
    one = dataclasses.replace(found(tmp_path), run=lying(SMOKE, address))
    with claim_directory(mirror(address), one):
        pass
    on_another_machine(tmp_path / "other")
    assert choose_directory(one.run, "x", False)[0] == mirror(address)
    assert choose_directory(one.run, "x", True)[0] == mirror(f"{address}-2")
    assert json.loads((mirror(address) / "config.json").read_text())["output"]["run_dir"] == address
    with pytest.raises(InputError, match="nothing came of it"), claim_directory(mirror(f"{address}-2"), one):
        raise InputError("nothing came of it")
    assert not folder(f"{address}-2").exists() and system(address).find(f"{address}-2") == []


OWN = Function("math:isnan")
BOUND = Reaches("kl", above=0.5, times=2)
ENDS = {
    "the same command": ("phase", {"until": BOUND}, {}, True),
    "more steps": ("phase", {"until": BOUND}, {"steps": 99}, True),
    "a guard that has nothing to do with it": ("phase", {"until": BOUND, "guards": ("no_signal",)}, {}, True),
    "other evaluations": ("phase", {"until": BOUND}, {"evaluation": dataclasses.replace(SMOKE.evaluation, limit=3)}, 1),
    "without until": ("phase", {}, {}, False),
    "longer": ("phase", {"until": Reaches("kl", above=0.5, times=3)}, {}, False),
    "higher": ("phase", {"until": Reaches("kl", above=0.7, times=2)}, {}, False),
    "lower, which held": ("phase", {"until": Reaches("kl", above=0.4, times=2)}, {}, True),
    "stalls, which held": ("phase", {"until": Stalls(1)}, {}, True),
    "stalls, more": ("phase", {"until": Stalls(2)}, {}, False),
    "stalls of a metric": ("phase", {"until": Stalls(1, "kl")}, {}, True),
    "solved": ("teaches_nothing", {}, {}, True),
    "solved, less patience": ("teaches_nothing", {}, {"patience": 2}, True),
    "solved, more patience": ("teaches_nothing", {}, {"patience": 4}, False),
    "solved, patience without end": ("teaches_nothing", {}, {"patience": 0}, False),
    "a rule of one's own": ("own/isnan", {"own": (OWN,)}, {}, True),
    "without it": ("own/isnan", {}, {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_run_that_a_rule_has_ended_stays_so_until_the_rule_would_not(tmp_path, capsys, case):
    """Rows 2 and 6 are evaluated, and 4 was undone by a rollback; a checkpoint of another step tells nothing."""
    rule, rules, given, stays = ENDS[case]
    changes = dict(given)
    directory = tmp_path / "x"
    before = {"phase": {"until": BOUND}, "own/isnan": {"own": (OWN,)}}.get(rule, {})
    collect = dataclasses.replace(SMOKE.rollout.collect, patience=changes.pop("patience", 3))
    changes |= {"rollout": dataclasses.replace(SMOKE.rollout, collect=collect)}
    every = {"steps": 12, "evaluation": dataclasses.replace(SMOKE.evaluation, every=2)}
    begun(directory, 6, **every, rules=Rules(**before))
    rows = [{"step": 0, "eval/x/pass@1": 0.5}, {"step": 2, "eval/x/pass@1": 0.6}, {"step": 3, "kl": 0.1}]
    rows += [{"step": 4, "kl": 0.9, "eval/x/pass@1": 0.9, "rollback/to_step": 3}]
    rows += [{"step": 5, "kl": 0.6}, {"step": 6, "kl": 0.6, "eval/x/pass@1": 0.6}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    memory = {"teaches_nothing": {"empty": 4, "solved": 3}, "phase": {"steps": 6, "times": 2}}
    place = directory / "checkpoints/6/host"
    place.mkdir()
    again = found(directory, **every | changes, rules=Rules(**rules))
    again = dataclasses.replace(
        again, run=dataclasses.replace(again.run, evaluation=dataclasses.replace(again.run.evaluation, every=2))
    )
    for step, ended in ((6, stays), (4, False)):
        ending = {"step": step, "rule": rule, "reason": "it is over"}
        (place / "metadata").write_text(json.dumps({"memory": memory | {"ended": ending}, "phase": 0}))
        assert (decide_start(ALONE, again, False, None)[1] is None) == bool(ended)
    told = capsys.readouterr().out
    line = f"{directory} is finished: it ended at step 6 of {again.run.steps}: it is over. "
    assert told.startswith(line) == bool(stays) and told.count("\n") == stays


def result(step, value=None, **more):
    return {"step": step} | ({} if value is None else {"eval/x/pass@1": value}) | more


HISTORIES = {
    "the best alone": ([result(0, 0.1), result(2, 0.5), result(4, 0.4)], [2, 4], [1, 2, 4], [], 2, [2]),
    "as of an older checkpoint": ([result(0, 0.1), result(2, 0.3), result(6, 0.5)], [4, 6], [1, 2, 6], [], 6, [2, 6]),
    "before any checkpoint": ([result(0, 0.1), result(2, 0.3), result(3, 0.5)], [], [2, 3], [], 3, [3]),
    "undone, but not as of its checkpoint": (
        [result(0, 0.1), result(2, 0.3), result(4, 0.9), result(5, 0.8, **{"rollback/to_step": 2})],
        [2, 4, 5], [2, 4], [], 2, [2, 4],
    ),
    "undone": (
        [result(0, 0.1), result(2, 0.3), result(4, 0.9), result(5, **{"rollback/to_step": 2}), result(6, 0.2)],
        [5, 6], [2, 4], [], 2, [2],
    ),
    "of another phase": (
        [result(0, 0.9), result(2, 0.8, **{"event/phase": "b"}), result(4, 0.2)], [4], [4], [], 4, [4]
    ),
    "of another evaluation": (
        [result(0, 0.1), result(2, 0.9), result(4, 0.2)], [4], [2, 4], [[2, ["evaluation.limit: 3 -> 9"]]], 4, [4]
    ),
    "of the same evaluation": (
        [result(0, 0.1), result(2, 0.9), result(4, 0.2)], [4], [2, 4],
        [[2, ["evaluation.every: 3 -> 9", "steps: 1 -> 2"]]], 2, [2],
    ),
    "step 0": ([result(0, 0.9), result(2, 0.9), result(4, None)], [2, 4], [3], [], 0, []),
    "without records": ([], [2], [1, 2], [], None, [1, 2]),
    "not kept": ([result(0, 0.1), result(2, 0.3), result(3, 0.5)], [2, 4], [2], [], 3, [2]),
    "kept as a checkpoint": ([result(0, 0.1), result(2, 0.3), result(4, 0.5)], [4], [2], [], 4, []),
}  # fmt: skip


@pytest.mark.parametrize("case", HISTORIES)
def test_the_best_model_is_that_of_rows_that_last_and_others_go_unless_a_checkpoint_has_them(tmp_path, case):
    rows, checkpoints, there, changed, best, left = HISTORIES[case]
    directory = tmp_path / "x"
    begun(directory, *checkpoints)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((directory / "config.json").read_text())
    config["origin"]["changed"] = changed
    (directory / "config.json").write_text(json.dumps(config))
    for step in there:
        (directory / "best" / str(step)).mkdir(parents=True)
    remove_old_best(directory)
    assert steps_in(directory / "best") == left and len(list((directory / "best").iterdir())) == len(left)
    for number in checkpoints:
        assert case == "not kept" or recorded_best(directory, last=number) in {0, None, *left, *checkpoints}, number
    if best is None:
        with pytest.raises(InputError, match=r"x@best: no evaluation has a result yet: .* give .*x@STEP"):
            configs.split_step(f"{directory}@best")
        return
    assert configs.split_step(f"{directory}@best") == (directory, best)
    row = Result.of(0, directory).best
    assert row is not None and row["step"] == best
    (directory / "best").mkdir(exist_ok=True)
    better, unmeasured, equal = result(9, 2.0), result(9, float("nan")), result(9, row["eval/x/pass@1"])
    assert [recorded_best(directory, one) for one in (better, unmeasured, equal)] == [9, best, best]


def test_a_name_of_the_best_model_becomes_its_number_once(tmp_path):
    directory = tmp_path / "x"
    begun(directory, 2)
    (directory / "metrics.jsonl").write_text(json.dumps(result(2, 0.5)) + "\n")
    judge = ModelReward(f"{directory}@best")
    run = dataclasses.replace(SMOKE, model=f"{directory}@best", scoring=Scoring((judge,)))
    found = with_step_numbers(run, Origin(str(tmp_path)))
    assert (found.model, found.scoring.rewards[0].path) == (f"{directory}@2",) * 2
    (directory / "metrics.jsonl").write_text("")
    again = with_step_numbers(run, Origin(str(tmp_path)), [f"{directory}@2", "other@3"])
    assert again == found and with_step_numbers(SMOKE, Origin(str(tmp_path))) == SMOKE
    beside = dataclasses.replace(SMOKE, model="x@best")
    (directory / "metrics.jsonl").write_text(json.dumps(result(2, 0.5)) + "\n")
    assert with_step_numbers(beside, Origin(str(tmp_path))).model == "x@2"
    for name in ("none@best", "org/model@best"):
        assert with_step_numbers(dataclasses.replace(SMOKE, model=name), Origin(str(tmp_path))).model == name
