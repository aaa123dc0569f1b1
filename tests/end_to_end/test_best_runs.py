"""The model of the best evaluation: kept while better ones come, through kills and resumes, and read as RUN@best."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from commands import assert_refused, commands
from golden.differences import arrays_of, differences
from safetensors.numpy import load_file

from jaxrl_llm import load_pretrained, train
from jaxrl_llm.checkpoints.snapshots import BEST, kept
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.config import BatchSize, Evaluation, Output, Supervised, split_step
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.models import save_pretrained
from jaxrl_llm.rules.guards import evaluation_result
from jaxrl_llm.system.json_lines import read_rows

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"Say {digit}: ", "completion": str(digit)} for digit in range(40)]
STEPS = 10


def run_in(folder, rate=0.1, **changes):
    """A run whose held-out loss goes up and down."""
    return Supervised(
        model="tiny-random",
        data=Texts(ROWS, holdout=0.2),
        batch=BatchSize(rows=8, max_tokens=32),
        learner=Learner(optimiser=Optimiser(learning_rate=rate), minibatches=2),
        evaluation=Evaluation(every=1),
        output=Output(checkpoint_every=3, trackers=(), run_dir=str(folder)),
        **{"steps": STEPS} | changes,
    )


def best_in(folder):
    """The best step by the rows, and the steps that a run has to keep, as of its checkpoints and of its end."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if evaluation_result(row) is not None]
    first = lambda last: max((row for row in rows if row["step"] <= last), key=evaluation_result)["step"]
    return first(STEPS), {first(last) for last in (*steps_in(folder / "checkpoints"), STEPS)} - {0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run, with copies at each row, before older models go; RUN@best then; its result."""
    folder = tmp_path_factory.mktemp("best")
    seen = {}

    def look(row):
        shutil.copytree(folder / "run", folder / str(row["step"]))
        seen[row["step"]] = split_step(f"{folder / 'run'}@best")[1], steps_in(folder / "run" / BEST)

    result = train(run_in(folder / "run"), on_step=look)
    assert result == 0
    return folder, seen, result


def test_it_is_there_from_its_row_on_and_older_ones_go(whole):
    folder, seen, result = whole
    rows = list(read_rows(folder / "run/metrics.jsonl"))
    losses = [row["eval/text/loss"] for row in rows]
    bests = [int(np.argmin(losses[: step + 1])) for step in range(STEPS + 1)]
    assert [seen[step][0] for step in range(STEPS + 1)] == bests and len(set(bests)) > 3, losses
    assert all(best == 0 or best in there for best, there in seen.values())
    assert max(len(there) for _, there in seen.values()) <= 4
    assert set(steps_in(folder / "run" / BEST)) == best_in(folder / "run")[1]
    assert result.best == rows[bests[-1]] and bests[-1] in kept(folder / "run")


def test_it_has_the_parameters_of_its_step_alone(whole):
    folder, *_ = whole
    assert train(all_kept(folder / "all")) == 0
    for step in steps_in(folder / "all" / BEST):
        best, checkpoint = (arrays_of(folder / "all" / place / str(step)) for place in (BEST, "checkpoints"))
        assert best and all(name.startswith(("policy/", "updates")) for name in best)
        assert all(best[name].tobytes() == checkpoint[name].tobytes() for name in best)
    assert steps_in(folder / "all" / BEST)


def all_kept(folder):
    run = run_in(folder)
    return dataclasses.replace(run, output=dataclasses.replace(run.output, checkpoint_every=1, keep=99))


@pytest.mark.parametrize("ahead", [False, True], ids=["after its row", "before its row"])
@pytest.mark.parametrize("step", [2, 5, 8])
def test_after_a_kill_it_is_valid_and_what_follows_is_as_if_nobody_had_killed(whole, tmp_path, step, ahead):
    """A copy made at a row is what a kill leaves; without that row, what one leaves before the row is written."""
    folder = whole[0]
    shutil.copytree(folder / str(step), tmp_path / "run")
    if ahead:
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "run/metrics.jsonl").write_text("".join(lines[:-1]))
    best = split_step(f"{tmp_path / 'run'}@best")[1]
    assert best == 0 or best in kept(tmp_path / "run")
    assert train(run_in(tmp_path / "run")) == 0
    assert not list(differences(folder / "run", tmp_path / "run"))
    steps = steps_in(folder / "run" / BEST)
    assert steps_in(tmp_path / "run" / BEST) == steps
    for one in steps:
        there, here = (arrays_of(place / BEST / str(one)) for place in (folder / "run", tmp_path / "run"))
        assert all(there[name].tobytes() == here[name].tobytes() for name in there)


FLAGS = (
    "--recipe grpo --rollout.prompts 2 --evaluation.limit 4 --evaluation.every 1 --output.checkpoint_every 1 "
    "--output.keep 1 --output.trackers"
)
LORA = f"{FLAGS} --learner.lora.rank 2 --learner.lora.targets attn/q --learner.lora.base f32"
COMMANDS = {
    "never better": f"train smoke {FLAGS} --model base --steps 2 --run_dir flat",
    "eval": "eval flat@best --json",
    "eval base": "eval base --config smoke --limit 4 --json",
    "export": "export flat@best --out exported",
    "generate": "generate flat@best --prompt x --max_new_tokens 2",
    "collect": "collect flat@best --out rows.jsonl --limit 2",
    "from": f"train smoke {FLAGS} --steps 1 --run_dir from --from flat@best",
    "from again": f"train smoke {FLAGS} --steps 1 --run_dir from --from flat@best",
    "from one that began so": f"train smoke {FLAGS} --steps 1 --run_dir third --from from@best",
    "export of that": "export from@best --out exported_from",
    "model": f"train smoke {FLAGS} --steps 1 --run_dir over --model flat@best",
    "model again": f"train smoke {FLAGS} --steps 2 --run_dir over --model flat@best",
    "lora": f"train smoke {LORA} --model base --steps 1 --run_dir lora",
    "export lora": "export lora@best --out exported_lora",
    "adapter": "export lora@best --out adapter --adapter",
    "from lora": f"train smoke {LORA} --model base --steps 1 --run_dir from_lora --from lora@best",
    "off": f"train smoke {FLAGS} --steps 2 --run_dir off --output.no_keep_best",
    "not kept": "eval off@best",
    "not there": "eval none@best",
    "carry": f"train smoke {FLAGS} --steps 1 --run_dir carried --from flat@best --carry",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Commands in a folder with a model, of runs that get no better, after which ``over`` and ``off`` seem to have."""
    folder = tmp_path_factory.mktemp("first")
    save_pretrained(*load_pretrained("tiny-random"), folder / "base")
    found = {}
    for name, line in COMMANDS.items():
        found[name] = commands([line], folder)[0]
        if name in ("model", "off"):
            other = folder / {"model": "flat", "off": "off"}[name] / "metrics.jsonl"
            rows = [json.loads(line) for line in other.read_text().splitlines()]
            rows[1]["eval/chain_sum/pass@1"] = 0.75
            other.write_text("".join(json.dumps(row) + "\n" for row in rows))
            if name == "model":
                shutil.copytree(folder / "flat/checkpoints/2", folder / "flat" / BEST / "1")
    return folder, found


def weights(folder):
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


def test_step_0_is_the_model_that_the_run_began_with(answers):
    folder, found = answers
    for name in COMMANDS.keys() - {"not kept", "not there", "carry"}:
        assert found[name].code == 0, (name, found[name].err)
    assert not list((folder / "from").glob(BEST)) and "flat@best: step 0, 0.0 %" in found["never better"].out
    before, after = (json.loads(found[name].out) for name in ("eval base", "eval"))
    scores = lambda told: {name: value for name, value in told.items() if name.startswith("eval/")}
    assert scores(before) == scores(after) and after["step"] == 0
    for name in ("exported", "exported_from", "exported_lora"):
        assert weights(folder / name) == weights(folder / "base"), name
    assert "from is finished: 1 of 1 steps" in found["from again"].out


def test_it_becomes_a_number_where_another_run_begins_with_it(answers):
    folder, _ = answers
    config = lambda run: json.loads((folder / run / "config.json").read_text())
    flat = {"run": str(folder / "flat"), "step": 0, "carry": False}
    assert config("from")["from"] == config("third")["from"] == flat
    assert config("over")["model"] == "flat@0" and config("over")["steps"] == 2, "whatever is best by now"
    assert config("over")["origin"]["models"]["flat@0"]["weights"]
    assert split_step(str(folder / "flat@best")) == (folder / "flat", 1)


def test_what_is_not_there_is_one_line(answers):
    _, found = answers
    assert_refused(found["not kept"], "off has no checkpoint of step 1 of its best evaluation (output.keep_best)")
    assert_refused(found["not there"], "none@best")
    assert_refused(found["carry"], "leave --carry out")
