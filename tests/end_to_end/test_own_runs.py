"""Runs with own classes and data beside their configuration, named from another folder; and runs begun with another's
weights.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from commands import ROOT, commands
from learner.rollouts import one_device

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.store import Checkpoints, parts_of, restore_parts, restore_policy
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained

pytestmark = pytest.mark.slow

SLOWER = "--learner.optimiser.learning_rate 1e-3"
FROM_ELSEWHERE = {
    "eval": "eval {run} --json",
    "eval 1": "eval {run}@1 --json",
    "export": "export {run}@1 --out model",
    "eval export": "eval model --config {project}/mine.py --json",
    "go on": "train {run} --steps 3 --output.samples 8",
    "from": "train {run} --from {run}@1 --steps 1",
    "from again": "train {run} --from {run}@1 --steps 1",
    "slower": f"train {{run}} --from {{run}}@1 --steps 1 {SLOWER}",
    "carried": "train {run} --from {run}@2 --carry --steps 1 --output.samples 8 --run_dir carried",
    "carried alone": "train smoke --carry",
    "structure": "train smoke --from {run} --learner.lora.rank 2",
}
OF_A_STRANGER = {
    "eval": "eval {run}",
    "train": "train {run} --steps 4",
    "collect": "collect {run} --out answers.jsonl",
    "report": "report {run} --out report.html",
    "export": "export {run} --out exported",
    "generate": "generate {run} --prompt 1 --max_new_tokens 2",
    "generate --trust": "generate {run} --prompt 1 --trust",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "tests" / "fixtures" / "project", folder / "project")
    (folder / "elsewhere").mkdir()
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    """A run in its project, and what is done with it from another folder."""
    begun = commands(["train mine.py"], folder / "project")
    reward = folder / "project" / "my_rewards.py"
    reward.write_text(reward.read_text().replace("return ", "return 0.0 + "))  # the same in other words
    names = {"run": folder / "project/runs/mine", "project": folder / "project"}
    lines = [line.format(**names) for line in FROM_ELSEWHERE.values()]
    found = {"begun": begun[0]} | dict(zip(FROM_ELSEWHERE, commands(lines, folder / "elsewhere"), strict=True))
    shutil.copy(folder / "project/runs/mine/config.json", folder / "alone.json")
    edited = "train {project}/mine.py --run_dir {run} --steps 4 --output.keep 9".format(**names)
    return found | {"edited": commands([edited], folder / "elsewhere")[0]}


def state_of(directory, step):
    """Policy, optimiser and reference of a checkpoint."""
    run = configs.whole(configs.read(directory / "config.json").run)
    model, _ = load_pretrained(run.model)
    with Checkpoints(directory / "checkpoints", 9) as store:
        return jax.device_get(
            store.restore(step, abstract_state(model, build(run.learner.optimiser), True), one_device())[0]
        )


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_a_run_with_own_classes_is_gone_on_with_tested_and_exported_from_elsewhere(folder, answers):
    for name in ("begun", "eval", "eval 1", "export", "eval export", "go on", "edited", "from", "from again", "slower"):
        assert answers[name].code == 0, (name, answers[name].err)
    directory = folder / "project" / "runs" / "mine"
    rows = {row["step"]: row for row in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())}
    assert list(rows) == [0, 1, 2, 3, 4]
    told = "goes on with other code than before (code/my_rewards.py changed); --fresh begins a new run"
    assert told in answers["edited"].err and told not in answers["begun"].err + answers["go on"].err
    assert rows[4]["event/settings"] == "code/my_rewards.py changed" and "event/settings" not in rows[3]
    copies = [(directory / "code" / number / "my_rewards.py").read_text() for number in "12"]
    assert copies[1] == (folder / "project" / "my_rewards.py").read_text() != copies[0]
    logged = {name: value for name, value in rows[2].items() if name.startswith("eval/")}
    found = json.loads(answers["eval"].out)
    assert logged and {name: found[name] for name in logged} == logged
    ours, theirs = (json.loads(answers[name].out) for name in ("eval 1", "eval export"))
    assert (ours["step"], theirs["step"]) == (1, None)
    assert {k: v for k, v in ours.items() if "/" in k} == {k: v for k, v in theirs.items() if "/" in k}
    saved = json.loads((folder / "alone.json").read_text())
    assert saved["output"]["run_dir"] is None and saved["task"]["source"]["path"] == "sums.jsonl"
    assert not (folder / "elsewhere" / "runs").exists()


def test_a_run_begins_with_the_weights_of_another(folder, answers):
    runs = folder / "project" / "runs"
    old, new, slower = (runs / name for name in ("mine", "mine-2", "mine-3"))
    assert sorted(path.name for path in runs.iterdir()) == ["mine", "mine-2", "mine-3"]
    assert "mine-2 is finished: 1 of 1 steps" in answers["from again"].out
    for directory in (new, slower):
        assert json.loads((directory / "config.json").read_text())["from"] == {
            "run": str(old),
            "step": 1,
            "carry": False,
        }
    assert "its weights and its optimiser" in answers["from"].err
    assert "its weights; the optimiser is new, as its settings are" in answers["slower"].err
    before, after, slow = state_of(old, 1), state_of(new, 1), state_of(slower, 1)
    # The reference of a new run is what it began with.
    assert same(after.reference, before.policy.params) and same(slow.reference, before.policy.params)
    assert not same(after.policy.params, before.policy.params) and not same(before.reference, before.policy.params)
    counts = [
        int(max(x for x in jax.tree.leaves(state.policy.opt_state) if x.ndim == 0)) for state in (before, after, slow)
    ]
    assert counts == [2, 4, 2]  # two minibatches a step: the optimiser went on, or began anew
    assert int(after.policy.updates) == int(slow.policy.updates) == 2


def test_another_model_or_adapter_is_refused(folder, answers):
    last = answers["structure"].err.splitlines()[-1]
    assert answers["structure"].code == 2 and last.startswith("jaxrl-llm: step 3 of "), last
    assert (
        "has Lora(rank=0, " in last
        and "this run Lora(rank=2, " in last
        and "set learner.lora to what it is there" in last
    )
    assert not (folder / "elsewhere/runs").exists()
    other = jax.eval_shape(lambda: load_pretrained(ROOT / "tests/fixtures/models/qwen2")[0])
    with pytest.raises(InputError, match=r"the checkpoint has policy/.*: give the model that it was trained from"):
        restore_policy(folder / "project/runs/mine/checkpoints/1", other, one_device())


def test_parts_of_a_checkpoint_are_read_alone(folder, answers):
    directory = folder / "project" / "runs" / "mine"
    whole = state_of(directory, 1)
    like = parts_of(None, jax.eval_shape(lambda: whole.policy.opt_state))
    found = restore_parts(directory / "checkpoints" / "1", like, one_device()).policy
    assert same(found.opt_state, whole.policy.opt_state) and found.params is None


def test_a_run_that_carries_goes_on_where_the_other_one_was(folder, answers):
    assert answers["carried"].code == 0, answers["carried"].err
    assert "continues the data, curriculum and stored successes of" in answers["carried"].err
    asked = {}
    for directory in (folder / "project" / "runs" / "mine", folder / "elsewhere" / "carried"):
        samples = map(json.loads, (directory / "samples.jsonl").read_text().splitlines())
        asked[directory.name] = [(row["step"], row["prompt"], row["completion"]) for row in samples]
    again = sorted((prompt, text) for step, prompt, text in asked["carried"] if step == 1)
    assert again == sorted((prompt, text) for step, prompt, text in asked["mine"] if step == 3)
    assert len({prompt for prompt, _ in again}) == 8 + 5, "of the step, and of the evaluation"
    assert configs.read(folder / "elsewhere" / "carried" / "config.json").origin.start.carry
    assert answers["carried alone"].code == 2 and "name it with --from RUN" in answers["carried alone"].err


def test_a_place_in_other_problems_is_not_carried(folder, answers):
    sums = folder / "project" / "sums.jsonl"
    text = sums.read_text()
    sums.write_text("".join(text.splitlines(True)[1:]))
    try:
        line = f"train {folder / 'project/runs/mine'} --from {folder / 'project/runs/mine'}@2 --carry --run_dir changed"
        (answer,) = commands([line], folder / "elsewhere")
    finally:
        sums.write_text(text)
    assert answer.code == 2 and "there were 16 and there are 15" in answer.err and "leave --carry out" in answer.err
    assert not (folder / "elsewhere" / "changed").exists()


def test_a_run_of_a_stranger_executes_nothing(folder, answers):
    theirs = shutil.copytree(folder / "project", folder / "theirs")
    mark = folder / "ran"
    config = theirs / "runs" / "mine" / "config.json"
    for place in (theirs, *(config.parent / "code").iterdir()):
        for name in ("pieces.py", "my_rewards.py"):
            with (place / name).open("a") as file:
                file.write(f"\nopen({str(mark)!r}, 'a').write({name!r})\n")
    config.write_text(config.read_text().replace(str(folder / "project"), str(theirs)))  # still with a signature
    lines = {name: line.format(run=config.parent) for name, line in OF_A_STRANGER.items()}
    asked = dict(zip(lines, commands(list(lines.values()), folder / "elsewhere"), strict=True))
    for name in ("eval", "train", "collect"):
        assert asked[name].code == 2 and asked[name].err.count("\n") == 1, asked[name].err
        assert f"in {config.parent / 'code/2/pieces.py'}" in asked[name].err and "--trust" in asked[name].err
    for name in ("report", "export", "generate"):
        assert asked[name].code == 0, asked[name].err
    assert asked["generate --trust"].code == 2 and "--trust" in asked["generate --trust"].err
    assert not mark.exists()
