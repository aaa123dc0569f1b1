"""Six whole runs, each run once and looked at by many tests: the commands as users type them, in real processes."""

import copy
import json
import math
import shutil
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorstore
from commands import commands, logged
from golden.differences import arrays_of, difference, differences, of_said, without_clocks

from jaxrl_llm.config import load_config, resolved

TESTS = Path(__file__).parents[1]
RUNS, CONFIGS = TESTS / "golden" / "runs", TESTS.parent / "configs"
LINES = {
    "grpo": f"train {CONFIGS}/smoke.py --steps 3 --run_dir grpo",
    "whole": f"train {RUNS}/dapo.py --steps 5 --run_dir whole",
    "episodes": f"train {CONFIGS}/guessing_smoke.py --steps 2 --rollout.prompts 4 --rollout.group 8 "
    "--evaluation.limit 8 --output.checkpoint_every 1 --run_dir episodes",
    "dpo": f"train {RUNS}/dpo.py --steps 4 --run_dir dpo",
    "sft": f"train {RUNS}/sft.py --steps 4 --run_dir sft",
    "reward": f"train {RUNS}/reward.py --run_dir reward",
}
STEPS = {"grpo": 3, "whole": 5, "episodes": 2, "dpo": 4, "sft": 4, "reward": 4}
OF_POLICY = ("grpo", "whole", "episodes")
EVERY_ROW = {"loss", "grad_norm", "lr", "updates", "time/update_s", "time/step_s"}
OF_SAMPLES = {
    "reward/mean", "reward/std", "reward/zero_std_fraction", "completions/mean_length",
    "completions/truncated_fraction", "entropy", "sampler/logp_abs_diff_mean", "time/rollout_s", "time/reward_s",
    "throughput/sampled_tokens_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole_runs")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


@pytest.fixture(scope="module")
def rows(answers, folder):
    return {
        name: [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in LINES
    }


@pytest.mark.parametrize("name", LINES)
def test_a_run_ends_with_its_steps_its_records_and_its_state(answers, rows, folder, name):
    assert answers[name].code == 0, answers[name].err
    assert [row["step"] for row in rows[name]] == list(range(STEPS[name] + 1))
    learned = [row for row in rows[name][1:] if row["updates"]]
    assert learned and all(row.keys() >= EVERY_ROW for row in learned)
    assert all(math.isfinite(row[key]) for row in learned for key in ("loss", "grad_norm", "lr"))
    assert any(key.startswith("eval/") for key in rows[name][0]), "step 0 is the evaluation before training"
    arrays = arrays_of(folder / name / "checkpoints" / str(STEPS[name]))
    assert arrays and all(np.isfinite(array.astype(np.float32)).all() for array in arrays.values())
    assert (folder / name / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", OF_POLICY)
def test_a_step_of_a_policy_measures_what_it_sampled(rows, name):
    learned = [row for row in rows[name][1:] if row["updates"]]
    assert all(row.keys() >= OF_SAMPLES for row in learned)
    assert all(row["sampler/logp_abs_diff_mean"] < 1e-4 for row in learned[:1]), "one model samples and learns"
    assert all(0 <= (row["reward/zero_std_fraction"] or 0) <= 1 < row["completions/mean_length"] for row in learned)


@pytest.mark.parametrize("name", LINES)
def test_the_configuration_of_a_run_is_whole_and_typed(answers, folder, name):
    saved = load_config(str(folder / name))[1]
    assert type(saved) is type(load_config(LINES[name].split()[1])[1])
    assert resolved(saved).steps == STEPS[name]


def test_samples_are_written_with_their_rewards(answers, folder):
    samples = [json.loads(line) for line in (folder / "grpo" / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if sample["kind"] == "training"]
    assert trained and {sample["step"] for sample in trained} <= {1, 2, 3}
    for sample in trained:
        has_digit = any(letter in "0123456789" for letter in sample["completion"])
        assert sample["reward"] == sample["parts"]["format"] == float(has_digit)


def test_grpo_computes_what_it_always_did(rows):
    """Rewards are those of the same 64 completions on every processor; the rest agrees to rounding."""
    first = rows["grpo"][1]
    assert first["reward/mean"] == first["reward/format"] == 0.40625
    assert first["completions"] == 64 and first["updates"] == 2 and first["reward/errors"] == 0
    np.testing.assert_allclose(first["entropy"], 5.463836, rtol=2e-4)
    np.testing.assert_allclose(first["kl"], 0.114067, rtol=2e-2)
    np.testing.assert_allclose(first["grad_norm"], 1.139265, rtol=2e-2)
    np.testing.assert_allclose(first["advantage/abs_mean"], 0.893561, rtol=1e-4)


def test_a_killed_run_resumes_to_the_same_end(answers, folder):
    log, line = folder / "killed.log", f"train {RUNS}/dapo.py --steps 5 --run_dir killed"
    killed, metrics = logged(log, *line.split(), folder=folder), folder / "killed" / "metrics.jsonl"
    while killed.poll() is None and not (metrics.exists() and '"step": 2,' in metrics.read_text()):
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, log.read_text()
    assert logged(log, *line.split(), folder=folder).wait() == 0, log.read_text()
    assert "continuing at step" in log.read_text()
    assert difference(folder / "whole", folder / "killed") == ""


def test_a_comparison_of_runs_names_what_differs(answers, folder):
    whole, other = folder / "sft", folder / "sft_changed"
    shutil.copytree(whole, other)
    assert difference(whole, other) == ""
    step = other / "checkpoints" / "4"
    name = sorted(arrays_of(step))[0]
    place = {"driver": "ocdbt", "base": f"file://{step}/state/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": place | {"path": f"{name}/"}}).result()
    array[...] = array.read().result() + np.asarray(1, array.dtype.numpy_dtype)
    assert difference(whole, other).startswith(f"checkpoints/4, {name}: differs by up to ")
    host = step / "host" / "metadata"
    host.write_text(host.read_text().replace('"phase": 0', '"phase": 1'))
    assert difference(whole, other) == "checkpoints/4, host/phase: 0, 1"
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"lr": 0.001', '"lr": 0.002', 1))
    assert difference(whole, other).startswith("metrics.jsonl, step 1, lr: 0.001")
    shutil.rmtree(other)
    shutil.copytree(folder / "whole", other)
    arrays = next(iter(sorted(other.glob("checkpoints/*/host/arrays.zlib"), reverse=True)))
    arrays.write_bytes(zlib.compress(zlib.decompress(arrays.read_bytes())[:-1] + b"!"))
    assert difference(folder / "whole", other).endswith("arrays of the host state")
    samples = other / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"completion": "', '"completion": "!', 1))
    assert difference(folder / "whole", other) == "samples.jsonl, line 1"
    shutil.rmtree(other)
    shutil.copytree(whole, other)
    metrics.write_text(metrics.read_text().replace('"lr": ', '"rate": '))
    assert difference(whole, other) != "" == next(differences(whole, other, {"lr": "rate"}), "")


def test_what_commands_said_is_compared_without_the_clock():
    said = [{"command": "train", "code": 0, "lines": [["finished 3 steps"], ["a guard stopped it"]]}]
    assert not list(of_said(said, said))
    (other,) = copy.deepcopy(said)
    other["code"] = 3
    assert list(of_said(said, [other])) == ["exit code of train: 0, 3"]
    other |= {"code": 0, "lines": [["finished 3 steps"], []]}
    assert list(of_said(said, [other])) == ["stderr of train: 1, 0 lines"]
    lines = [
        f"step 1/2  loss 0.05  tokens/s {rate}  seconds {s}  left {s} s" for rate, s in ((290, 5.3), ("12 k", 0.2))
    ]
    assert len({without_clocks(line) for line in lines}) == 1
    assert len({without_clocks(line.replace("0.05", str(number))) for number, line in enumerate(lines)}) == 2


def test_dynamic_sampling_keeps_groups_that_can_teach(rows):
    for row in rows["whole"][1:]:
        if row["updates"]:
            assert row["advantage/nonzero_fraction"] == 1 and row["dynamic_sampling/kept_fraction"] <= 1


def test_preferences_begin_at_log_2(rows):
    first = rows["dpo"][1]
    np.testing.assert_allclose(first["loss"], math.log(2), rtol=1e-5)
    assert rows["dpo"][-1]["loss"] < first["loss"]


def test_supervised_learning_begins_near_the_uniform_distribution_and_learns(rows):
    first, last = rows["sft"][1], rows["sft"][-1]
    assert abs(first["loss"] - 5.5) < 0.5 and last["loss"] < first["loss"] - 0.5


def test_a_reward_model_learns_the_order_of_its_pairs(rows):
    first, last = rows["reward"][1], rows["reward"][-1]
    assert abs(first["loss"] - math.log(2)) < 0.1 and "pairs/accuracy" in last
    assert any(key.endswith("accuracy") for key in rows["reward"][-1] if key.startswith("eval/"))


def test_episodes_have_turns_and_their_ends(rows):
    for row in rows["episodes"][1:]:
        ends = sum(value for key, value in row.items() if key.startswith("episode/ends/"))
        np.testing.assert_allclose(ends, 1)
        assert 1 <= row["episode/turns"] <= 4 and row["reward/environment"] == row["reward/mean"]
