"""What a run keeps: snapshots for good, checkpoints that are whole, and requests that no kill loses."""

import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands, logged
from learner.rollouts import one_device
from tiny import tiny

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.snapshots import keep, kept, newest_whole
from jaxrl_llm.checkpoints.store import Checkpoints, holds, restore_policy, steps_in
from jaxrl_llm.cli.asking import Policy
from jaxrl_llm.cli.eval import measure_distance
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import load_pretrained, logits
from jaxrl_llm.rollout.evaluate import TaskEvaluation
from jaxrl_llm.tasks import Prompts, Table, Task, load
from jaxrl_llm.trainer.state import read_reset_request, request_reset
from jaxrl_llm.types import Completion

pytestmark = pytest.mark.slow

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
RULED = f"train {RUNS / 'ruled.py'} --steps 3 --recipe.resets.optimiser_every 0"
BY_HAND = f"{RULED} --run_dir asked --recipe.resets.reference_every 0"
LINES = {
    "train": f"{RULED} --run_dir run --output.keep 2 --recipe.resets.reference_every 1",
    "to itself": "eval run@1 --kl_to run@1 --json",
    "to the end": "eval run@1 --kl_to run --samples 2 --json --out answers.jsonl",
    "to a model": "eval run --kl_to tiny-random --temperature 0.5",
    "greedy": "eval run --kl_to run@1 --temperature 0",
    "cut off": "eval run --kl_to run@1 --top_p 0.5",
    "to nothing": "eval run --kl_to run@4",
    "nothing": "eval run@4",
    "export": "export run@1 --out model",
    "generate": "generate run@1 --prompt x --max_new_tokens 2",
    "from": f"{RULED} --from run@1 --run_dir other --steps 1 --recipe.resets.reference_every 0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def test_a_reset_keeps_a_snapshot_that_outlives_checkpoints(folder, answers):
    assert answers["train"].code == 0, answers["train"].err
    assert steps_in(folder / "run" / "checkpoints") == [2, 3] and steps_in(folder / "run" / "snapshots") == [1, 2, 3]
    assert [path.parent.name for path in kept(folder / "run").values()] == ["snapshots", "checkpoints", "checkpoints"]


def test_a_snapshot_is_found_by_every_command_that_takes_a_run(folder, answers):
    for name in ("export", "generate", "from"):
        assert answers[name].code == 0, answers[name].err
    assert "run@1, step 1, is written to model" in answers["export"].out
    assert "its weights; the optimiser is new, as a snapshot keeps none" in answers["from"].err
    origin = json.loads((folder / "other" / "config.json").read_text())["from"]
    assert origin == {"run": str(folder / "run"), "step": 1, "carry": False}
    for name in ("nothing", "to nothing"):
        assert_refused(answers[name], "run has no checkpoint of step 4: it keeps 2, 3 and snapshots of 1, 2, 3")


def test_the_distance_between_two_is_part_of_an_evaluation(folder, answers):
    same, moved = (json.loads(answers[name].out) for name in ("to itself", "to the end"))
    assert (same["kl_to"], same["kl_to_step"], same["temperature"]) == ("run@1", 1, 1.0)
    assert same["eval/digits/kl_k1"] == same["eval/digits/kl_k3"] == 0
    assert moved["kl_to_step"] == 3 and 0 < moved["eval/digits/kl_k3"] < 1
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    tokens = np.array([row["tokens"] for row in rows])
    for name in ("kl_k1", "kl_k3"):
        mean = float(np.average([row[name] for row in rows], weights=tokens))
        assert mean == pytest.approx(moved[f"eval/digits/{name}"], abs=1e-9)
    assert "KL (k3)" in answers["to a model"].out and "nats a token to tiny-random" in answers["to a model"].out
    assert_refused(answers["greedy"], "--temperature is 0: set --temperature 1")
    assert_refused(answers["cut off"], "--top_p is 0.5: set --top_p 1")


def test_the_distance_is_that_of_the_two_models_own_log_probabilities(folder, answers):
    task = Task(Table(str(RUNS / "digits.jsonl")), template="chatml")
    model, tokenizer = load_pretrained("tiny-random")
    other, _ = load_pretrained(str(folder / "model"))
    prompts, problems, random = Prompts(task, tokenizer), load(task).train[:2], np.random.default_rng(0)
    settings = configs.resolved(configs.whole(configs.read(folder / "run" / "config.json").run))

    def completion(length):
        zeros = np.zeros(length)
        mask = np.ones(length, bool)
        tokens = random.integers(0, 256, length).astype(np.int32)
        return Completion(tokens, zeros.astype(np.float32), "length", mask, zeros.astype(np.int32))

    rows = tuple((completion(3 + i), completion(6)) for i in range(2))
    policy = Policy("tiny-random", None, None, model, tokenizer, one_device())
    found = TaskEvaluation("digits", tuple(problems), rows, None, None)

    class Options:
        max_new_tokens, temperature, samples = 8, 0.5, len(rows[0])

    (far,) = measure_distance(str(folder / "model"), policy, prompts, settings, Options, [found], lambda text: None)
    wanted = []
    for problem, completions in zip(problems, rows, strict=True):
        for one in completions:
            ids = np.concatenate([prompts[problem], one.tokens])[None].astype(np.int32)
            p, q = (
                np.asarray(jax.nn.log_softmax(logits(m, ids)[0] / 0.5), np.float64)[
                    np.arange(-len(one.tokens) - 1, -1), one.tokens
                ]
                for m in (model, other)
            )
            wanted.append([len(one.tokens), np.sum(p - q), np.sum(np.exp(q - p) - 1 - (q - p))])
    np.testing.assert_allclose(far.sums, wanted, atol=2e-3)
    assert far.sums[:, 2].min() > 1e-2, "the models should differ"


def test_a_snapshot_of_a_step_that_comes_again_is_replaced_and_holds_no_optimiser(tmp_path):
    states = [create_state(tiny(seed=seed), build(Optimiser()), True, one_device()) for seed in (0, 1)]
    for state in states:
        keep(tmp_path, 7, state)
    (place,) = kept(tmp_path).values()
    shapes = jax.eval_shape(lambda state: state, states[1])
    found = restore_policy(place, shapes.policy.params, one_device())
    jax.tree.map(np.testing.assert_array_equal, found, states[1].policy.params)
    assert not holds(place, shapes) and not holds(place, shapes._replace(frozen={}))
    with Checkpoints(tmp_path / "checkpoints") as store:
        store.save(7, states[0], {})
    assert [path.parent.name for path in kept(tmp_path).values()] == ["checkpoints"]
    shutil.rmtree(tmp_path / "checkpoints")


def rows(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def killed_once_asked(folder):
    """A run that was asked to reset, and killed once that was done, before its first checkpoint."""
    (folder / "asked").mkdir()
    request_reset(folder / "asked", True)
    arguments = f"{BY_HAND} --steps 60 --output.checkpoint_every 59".split()
    process = logged(folder / "log", *arguments, folder=folder)
    while process.poll() is None and not any(row["step"] >= 2 for row in rows(folder / "asked")):
        time.sleep(0.002)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def gone_on(folder, answers):
    """Runs that go on, by name: the one that was killed, one whose newest checkpoint has a flipped bit, one without a
    whole one; and the first row of the killed one."""
    killed_once_asked(folder)
    first = rows(folder / "asked")[1]
    assert read_reset_request(folder / "asked") and not steps_in(folder / "asked" / "checkpoints"), "it is not safe yet"
    for name in ("damaged", "lost"):
        shutil.copytree(folder / "run", folder / name)
        for step in (3,) if name == "damaged" else (2, 3):
            files = [path for path in (folder / name / "checkpoints" / str(step)).rglob("*") if path.is_file()]
            largest = max(files, key=os.path.getsize)
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 4
            largest.write_bytes(content)
    went = LINES["train"].replace("--run_dir run", "--run_dir {}")
    lines = {
        "asked": f"{BY_HAND} --output.checkpoint_every 2",
        "entropy": f"train {RUNS / 'entropic.py'} --run_dir entropic",
        "export": "export damaged --out another",
        "damaged": went.format("damaged"),
        "lost": went.format("lost"),
    }
    return dict(zip(lines, commands(list(lines.values()), folder), strict=True)), first


def test_a_kill_before_the_next_checkpoint_loses_no_request(folder, gone_on):
    answers, first = gone_on
    assert first["event/reference_reset"] == "by hand" and first["event/optimiser_reset"]
    assert answers["asked"].code == 0, answers["asked"].err
    again = rows(folder / "asked")
    assert [row.get("event/reference_reset") for row in again] == [None, "by hand", None, None]
    assert again[1]["loss"] == first["loss"] and again[1]["event/resumed"]
    assert not read_reset_request(folder / "asked") and steps_in(folder / "asked" / "snapshots") == [1]
    assert "step 1: reference reset: by hand" in answers["asked"].err


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_so(folder, gone_on):
    answers, _ = gone_on
    assert_refused(answers["export"], "damaged/checkpoints/3 is damaged (file state/", "give another: damaged@1, dam")
    assert answers["damaged"].code == 0, answers["damaged"].err
    assert "checkpoints/3 is damaged (file state/" in answers["damaged"].err
    before, after = rows(folder / "run"), rows(folder / "damaged")
    assert [row["step"] for row in after] == [0, 1, 2, 3] and after[:3] == before[:3]
    assert after[3]["event/resumed"].endswith("its checksum differs); resuming from 2")
    assert after[3]["loss"] == before[3]["loss"] and after[3]["kl"] == before[3]["kl"]
    assert steps_in(folder / "damaged" / "checkpoints") == [2, 3], "it was saved again"
    assert newest_whole(folder / "damaged") == (3, "")
    assert (folder / "damaged" / "checkpoints" / "3.damaged").is_dir()


def test_a_coefficient_of_the_entropy_moves_from_step_to_step_and_is_saved(folder, gone_on):
    answers, _ = gone_on
    assert answers["entropy"].code == 0, answers["entropy"].err
    steps = rows(folder / "entropic")[1:]
    # The target is far above any entropy of 256 bytes, and the rate is such that the third step meets the bound.
    assert [row["entropy_coef"] for row in steps] == [0.0, 0.25, 0.375] and all(row["kl_coef"] for row in steps)
    assert [row["loss"] < -1 for row in steps] == [False, True, True], "the bonus is in the loss"
    host = json.loads((folder / "entropic" / "checkpoints" / "3" / "host" / "metadata").read_text())
    assert host["memory"]["entropy"] == {"moved": 0.375} and host["coefficients"]["entropy_coef"] == 0.375
    assert len(configs.whole(configs.read(folder / "entropic" / "config.json").run).recipe.controllers) == 2


def test_a_run_without_a_whole_checkpoint_says_what_is_left(folder, gone_on):
    answers, _ = gone_on
    assert_refused(
        answers["lost"], "lost has no whole checkpoint: checkpoints/3 is damaged", "; checkpoints/2 is damaged",
        "--from lost@3 for a new run from that snapshot, or --fresh to start over",
    )  # fmt: skip
    assert steps_in(folder / "lost" / "checkpoints") == [2, 3] and len(rows(folder / "lost")) == 4
