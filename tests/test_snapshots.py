"""Snapshots: what a run was when something began anew stays, and is a model like any other."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from learner.rollouts import one_device
from tiny import tiny

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import Checkpoints, holds, restore_policy, steps_in
from jaxrl_llm.cli.asking import Desk
from jaxrl_llm.cli.distance import measure
from jaxrl_llm.cli.policy import Policy
from jaxrl_llm.evaluate import Evaluated
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import load_pretrained, logits
from jaxrl_llm.snapshots import keep, kept
from jaxrl_llm.tasks import Prompts, Table, Task, load
from jaxrl_llm.types import Completion

RUNS = Path(__file__).parent / "fixtures" / "runs"
LINES = {
    "train": f"train {RUNS / 'ruled.py'} --run_dir run --output.keep 1",
    "to itself": "eval run@3 --kl_to run@3 --json",
    "to the end": "eval run@3 --kl_to run --samples 2 --json --out answers.jsonl",
    "to a model": "eval run --kl_to tiny-random --temperature 0.5",
    "greedy": "eval run --kl_to run@3 --temperature 0",
    "cut off": "eval run --kl_to run@3 --top_p 0.5",
    "to nothing": "eval run --kl_to run@2",
    "nothing": "eval run@2",
    "export": "export run@3 --out model",
    "generate": "generate run@3 --prompt x --max_new_tokens 2",
    "from": f"train {RUNS / 'ruled.py'} --from run@3 --run_dir other --steps 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def test_a_reset_keeps_a_snapshot_that_outlives_checkpoints(folder, answers):
    assert answers["train"].code == 0, answers["train"].err
    assert steps_in(folder / "run" / "checkpoints") == [4] and steps_in(folder / "run" / "snapshots") == [3]
    assert [path.parent.name for path in kept(folder / "run").values()] == ["snapshots", "checkpoints"]


def test_a_snapshot_is_found_by_every_command_that_takes_a_run(folder, answers):
    for name in ("export", "generate", "from"):
        assert answers[name].code == 0, answers[name].err
    assert "run@3, step 3, is written to model" in answers["export"].out
    assert "its weights; the optimiser is new, as a snapshot keeps none" in answers["from"].err
    origin = json.loads((folder / "other" / "config.json").read_text())["from"]
    assert origin == {"run": str(folder / "run"), "step": 3}
    for name in ("nothing", "to nothing"):
        assert_refused(answers[name], "run has no checkpoint of step 2: it keeps 4 and snapshots of 3")


def test_the_distance_between_two_is_part_of_an_evaluation(folder, answers):
    same, moved = (json.loads(answers[name].out) for name in ("to itself", "to the end"))
    assert (same["kl_to"], same["kl_to_step"], same["temperature"]) == ("run@3", 3, 1.0)
    assert same["eval/digits/kl_k1"] == same["eval/digits/kl_k3"] == 0
    assert moved["kl_to_step"] == 4 and 0 < moved["eval/digits/kl_k3"] < 1
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
    settings = configs.resolved(configs.load_json(folder / "run" / "config.json"))

    def completion(length):
        zeros = np.zeros(length)
        mask = np.ones(length, bool)
        tokens = random.integers(0, 256, length).astype(np.int32)
        return Completion(tokens, zeros.astype(np.float32), "length", mask, zeros.astype(np.int32))

    rows = tuple((completion(3 + i), completion(6)) for i in range(2))
    desk = Desk(Policy("tiny-random", None, None, model, tokenizer, one_device()), prompts, None, None, None)
    found = Evaluated("digits", tuple(problems), rows, None, None)

    class Options:
        max_new_tokens, temperature, samples = 8, 0.5, len(rows[0])

    (far,) = measure(str(folder / "model"), desk, settings, Options, [found], lambda text: None)
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
