"""The benchmarks on their smallest sizes: what they count, and that contestants are given the same work."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import ROOT, environment

sys.path.insert(0, str(ROOT))

from bench import contestants, peers, speed, worlds
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import Embeddings
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.types import Completion, Problem

pytestmark = pytest.mark.slow
TINY = "--model tiny-random --group 2 --prompt 8 --completion 8 --repeats 2".split()


def rows(*arguments, code=0):
    """The rows that ``python -m bench ARGUMENTS`` prints; with another code, the last line of what it says."""
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    return done.stderr.splitlines()[-1] if code else [json.loads(line) for line in lines if line.startswith("{")]


def test_the_losses_that_most_runs_use_move_at_most_five_times_their_inputs():
    names = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "prorl"]
    found = rows("loss", "--presets", *names)
    assert [row["preset"] for row in found] == names
    for row in found:
        assert row["within_goal"] and 1 <= row["passes"] <= row["goal"] == 5.0, row
        assert row["moved_mb"] == pytest.approx(row["passes"] * row["least_mb"], rel=0.01)


def test_wrong_uses_are_one_line():
    assert rows("loss", "--presets", "grppo", code=1).startswith("bench loss: no preset 'grppo': there are reinforce, ")
    assert rows("speed", code=1).startswith("bench: no benchmark 'speed': there are rollout, update, ")
    assert rows("peers", "--only", "nobody", code=1).startswith("bench peers: no contestant ['nobody']: there are ours")


def test_an_update_counts_the_tokens_of_completions_and_the_padding_around_them():
    learner = "--learner.compute.row_tokens 32 --learner.compute.microbatch_rows 8".split()
    (row,) = rows("update", "--rows", 16, *TINY, *learner)
    assert row["tokens"] == 16 * 8 and row["mean_over_max"] == 1
    assert row["filled"] == 0.75, "a group of 8 + 2 * 8 tokens fills three quarters of a row of 32"
    assert row["tokens_per_s"] == pytest.approx(128 / row["seconds"], rel=0.1)
    assert 0 < row["mfu"] < 1 and row["temp_mb"] > 0 and row["backward_s"] > 0


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_of_single_tokens(tied):
    config = dataclasses.replace(speed.SHAPES["7m"], embeddings=Embeddings(tied=tied))
    model = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    D, L, F, a = config.width, config.layers, config.mlp_width, config.attention
    weights = D * a.heads * a.head_dim * 2 + D * a.kv_heads * a.head_dim * 2 + 3 * D * F
    limits, total = np.array([3, 1, 2, 2]), 0
    for prompt in (range(5), range(5)):
        total += sum(L * (2 * weights + 4 * a.heads * a.head_dim * (position + 1)) for position in prompt)
    for limit in limits:
        for position in range(5, 5 + limit):
            total += L * (2 * weights + 4 * a.heads * a.head_dim * (position + 1)) + 2 * D * config.vocab_size
    assert speed.least_operations(model, 5, limits, 2) == pytest.approx(3 * total, rel=2e-3)


def test_rollouts_draws_and_verdicts_are_measured():
    (row,) = rows("rollout", "--slots", 4, *TINY)
    assert row["tokens"] == 16 * 8 and row["slot_utilisation"] == 1 and 0 < row["mbu"] <= row["roofline"] < 1
    ways = {row["way"]: row["median_ms"] for row in rows("sampling", "--vocab", 512, "--repeats", 2)}
    assert ways.keys() == {"gumbel", "top_p by sorting", "draw: plain", "draw: top_p", "draw: min_p"}
    assert all(row["verdicts_per_s"] > 0 for row in rows("verdicts", "--programs", 4))


def test_slow_judges_and_worlds_cost_a_step_what_they_wait():
    (row,) = rows("scoring", "--steps", 2, "--prompts", 2, "--tokens", 32, "--judge_s", 0.5)
    assert row["instant"]["reward_s"] < 0.5 <= row["slow"]["step_s"] and row["in_turn_s"] == 1.0
    (row,) = rows("episodes", "--episodes", 8, "--steps", 2, "--wait_s", 0.2, "--timeout_s", 1)
    assert [row[name]["timeouts"] for name in ("instant", "slow", "hanging")] == [0, 0, 2]
    assert row["slow"]["step_s"] >= 0.2 and row["hanging"]["step_s"] >= 1


def test_every_step_after_the_first_success_has_something_to_replay():
    options = worlds.Replayed(steps=12)
    plain, replayed = (worlds.replayed(options, "grpo", 0, stores) for stores in (False, True))
    assert 1 < plain.begun == replayed.begun < 12 and abs(plain.success[0] - 1 / 200) < 1e-4
    same = slice(0, plain.begun)
    np.testing.assert_allclose(plain.success[same], replayed.success[same], rtol=1e-5)
    assert all(replayed.later) and len(replayed.later) == 12 - replayed.begun
    assert np.mean(plain.later) < 0.6 and replayed.success[-1] > plain.success[-1]


def test_the_work_is_the_same_each_time_and_lengths_are_equal_or_have_a_tail_of_mean_three_tenths():
    work = speed.Rollout(slots=4, group=4, prompt=5, completion=20, lengths="long")
    (prompts, limits), (again, same) = (speed.requests(50, 16, work) for _ in range(2))
    assert all((a == b).all() for a, b in zip(prompts, again, strict=True)) and (limits == same).all()
    assert len({prompt.tobytes() for prompt in prompts}) == 4 and 1 <= limits.min() <= limits.max() <= 20
    assert all((prompts[i] == prompts[i - i % 4]).all() for i in range(16))
    lengths = [speed.requests(9, 1000, speed.Rollout(lengths=kind))[1] for kind in ("equal", "long")]
    assert set(lengths[0].tolist()) == {128} and lengths[1].mean() / 128 == pytest.approx(0.3, abs=0.02)


def test_contestants_are_those_that_can_do_the_work():
    assert peers.chosen(("batching", "tunix")) == ["ours", "tunix", "batching"] and peers.chosen(()) == ["ours"]
    assert peers.chosen(tuple(peers.PEERS), "update") == ["ours", "tunix", "trl"]
    assert peers.chosen(tuple(peers.PEERS), "episode") == ["ours", "trl"]
    for name, peer in peers.PEERS.items():
        assert bool(peer.pins) == (name != "ours") and all(pin.count("==") == 1 for pin in peer.pins)


def test_our_own_step_samples_and_learns_from_all_tokens(tmp_path):
    flags = ["--lengths", "long", "--slots", 4, "--folder", tmp_path, *TINY, "--only", "ours"]
    (row,) = rows("peers", "--what", "step", *flags)
    question = peers.question_of(speed.Rollout("tiny-random", "long", 2, 8, 8, slots=4), "step", 259)
    assert row["tokens"] == sum(question["limits"]) and row["greedy"] == "8/8" and row["ratio"] == 1
    # The ratio is 1, and every completion weighs as much: the loss does not depend on the model.
    assert row["loss"] == pytest.approx(-np.mean(question["advantages"]), abs=1e-5) and row["grad_norm"] > 0
    # A draw from 259 nearly equal words scores about -log(259); any truncation would score higher.
    assert row["mean_logp"] == pytest.approx(-np.log(259), abs=0.3) and row["peak_mb"] > 50


def test_other_work_is_refused():
    ours = {"updates": [[-0.5, 2.0], [-0.5, 1.9]]}
    peers.same_work(ours, "peer", {"updates": [[-0.500001, 2.001], [-0.5, 1.9]]}, {"limits": []})
    for other in ([[-0.5, 2.0], [-0.5, 1.95]], [[-0.51, 2.0], [-0.5, 1.9]]):
        with pytest.raises(InputError, match="an update of peer has loss and gradient norm"):
            peers.same_work(ours, "peer", {"updates": other}, {"limits": []})
    with pytest.raises(InputError, match="peer returned 3 tokens in wrong lengths; 3 were asked for"):
        peers.same_work(None, "peer", {"completions": [[1, 2], [3]]}, {"limits": [1, 2]})


OWN = """
import dataclasses
from jaxrl_llm.config import Distillation, Run, Scoring
from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.recipes import DAPO, Overlong
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Table, Task

config = Run(
    "tiny-random",
    Task(Table("FOLDER/sums.jsonl"), template="plain", holdout=0.5),
    recipe=dataclasses.replace(DAPO, overlong=Overlong(share=0.0), filter_groups=False),
    rollout=Rollout(prompts=2, group=2, max_prompt_tokens=16, max_new_tokens=8, engine=EngineOptions(slots=4)),
    learner=Learner(compute=Compute(microbatch_rows=8)),
)
"""
TAUGHT = """
config = dataclasses.replace(config, scoring=Scoring(rewards=(), distillation=Distillation("tiny-random", "jsd")))
"""


def test_whole_runs_are_told_alike_and_tested_after_every_step(tmp_path):
    data = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(data))
    own, taught = tmp_path / "own.py", tmp_path / "taught.py"
    own.write_text(OWN.replace("FOLDER", str(tmp_path)))
    taught.write_text(own.read_text() + TAUGHT)
    work = peers.work_of(str(own), tmp_path / "model")
    assert sorted(one["prompt"] for one in work["train"] + work["test"]) == [f"{n} + 1 =" for n in range(8)]
    assert (work["clip"], work["group"], work["temperature"]) == ([0.2, 0.28], 2, 1.0)
    work = peers.work_of(str(taught), tmp_path / "other")
    assert work["beta"] == 0.5 and (Path(work["teacher"]) / "model.safetensors").is_file()
    with pytest.raises(InputError, match="smoke has other rewards, loss, updates than is set up in TRL and Tunix"):
        peers.work_of("smoke", tmp_path)
    flags = ["--only", "ours", "--repeats", 1, "--steps", 2, "--folder", tmp_path / "peers"]
    (row,) = rows("peers", "--what", "learn", "--config", own, *flags)
    assert row["steps"] == [3] and row["ratio"] == 1 and row["seconds_to_0.95"] == row["steps_to_0.98"] == [None]


def test_peers_are_rewarded_as_we_are():
    texts = ["5 - 4 = 1", "It is 1.", "1, or 2", "none", "-1", "so $1.0", "", "1,000"]
    problem = Problem("a", ({"role": "user", "content": "?"},), "1", "sums")
    one = np.zeros(1, np.int32)
    said = [Completion(one, one.astype(np.float32), "stop", one == 0, one, text=text) for text in texts]
    ours = [accuracy(problem, completion) for completion in said]
    assert contestants.reward_of(texts, ["1"] * len(texts)) == ours == [1, 1, 0, 0, 0, 1, 0, 0]


def test_what_evaluations_take_is_none_of_the_seconds(tmp_path):
    work = {"began": 90, "test": [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "?", "answer": "3"}]}
    with open(tmp_path / "told", "w+") as out:
        clock = iter([100, 103, 110, 115]).__next__
        told = contestants.Told(work, out, lambda prompts: ["It is 2."] * len(prompts), clock)
        told.step(1)
        told.step(2)
        out.seek(0)
        lines = [json.loads(line) for line in out]
    assert [(line["step"], line["seconds"], line["accuracy"]) for line in lines] == [(1, 10, 0.5), (2, 17, 0.5)]


def test_when_a_level_was_reached_and_what_a_step_takes():
    def run_of(seconds, *accuracies):
        return [
            {"step": n, "seconds": seconds * n, "accuracy": x, "peak_mb": 100.0 + n, "calls": 0}
            for n, x in enumerate(accuracies)
        ]

    runs = {"ours": [run_of(10.0, 0.5, 0.9, 0.96), run_of(10.0, 0.5, 0.9, 0.9)], "trl": [run_of(25.0, 0.5, 0.7, 0.96)]}
    ours, trl = peers.whole_rows(runs, {"config": "own", "turns": 0})
    assert (ours["step_s"], ours["ratio"], ours["peak_mb"]) == (10, 1, 102) and trl["ratio"] == 2.5
    assert ours["seconds_to_0.95"] == [20, None] and ours["steps_to_0.98"] == [None, None]
