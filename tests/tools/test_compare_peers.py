"""The comparison with peers, as far as it needs none but our own: real runs, and the table's arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import tool

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import logits
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.types import Completion, Problem

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import bench_rollout  # noqa: E402
import compare_peers  # noqa: E402
import peer_checks  # noqa: E402
import peer_learning  # noqa: E402
import peer_processes  # noqa: E402

pytestmark = pytest.mark.slow

TINY = tuple("--model tiny-random --slots 4 --group 2 --prompt 8 --completion 8 --repeats 2".split())


def run(*arguments):
    return tool("compare_peers", *arguments)


def answer(seconds, computed=100, others=0.0):
    return {
        "seconds": seconds,
        "cpu_s": 2 * seconds,
        "computed": computed,
        "others": others,
        "peak_mb": round(10 * seconds),
    }


def first_answer(**fields):
    return {"warmup_s": 9.04, "settings": "as it comes", "versions": {"peer": "1.0"}, **fields}


def test_a_run_with_our_own_sampler_counts_and_checks_its_tokens(tmp_path):
    done = run("--only", "ours", "--lengths", "long", "--folder", str(tmp_path / "peers"), *TINY)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    found = json.loads(lines[-1])
    options = bench_rollout.Options(slots=4, group=2, prompt=8, completion=8, lengths="long")
    _, limits = bench_rollout.work_of(options, 259)
    ours = found["rows"]["ours"]
    assert found["requests"] == 16 and found["tokens"] == limits.sum()
    assert ours["greedy"] == "8/8" and found["ratios"] == {}
    assert ours["tokens_per_s"] == pytest.approx(found["tokens"] / ours["seconds"], rel=0.1)
    # A draw from 259 nearly equal words scores about -log(259); any truncation would score higher.
    assert ours["mean_logp"] == pytest.approx(-np.log(259), abs=0.3)
    assert lines[0].split()[0] == "seconds" and lines[1].split()[0] == "ours"


def test_a_step_of_our_own_samples_and_learns_from_all_tokens(tmp_path):
    done = run("--what", "step", "--only", "ours", "--lengths", "long", "--folder", str(tmp_path / "peers"), *TINY)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    options = bench_rollout.Options(slots=4, group=2, prompt=8, completion=8, lengths="long")
    question = compare_peers.question_of(options, "step", 259)
    ours = found["rows"]["ours"]
    assert found["requests"] == 4 and found["tokens"] == sum(question["limits"])
    # The ratio is 1, and every completion weighs as much: the loss does not depend on the model.
    assert ours["loss"] == pytest.approx(-np.mean(question["advantages"]), abs=1e-5)
    assert ours["greedy"] == "8/8" and ours["grad_norm"] > 0 and ours["peak_mb"] > 50
    assert 0 < ours["useful"] < 1


def test_what_is_learned_from_has_the_lengths_that_are_sampled():
    options = bench_rollout.Options(slots=8, group=4, prompt=5, completion=20, lengths="long")
    question = compare_peers.question_of(options, "update", 50)
    assert [len(tokens) for tokens in question["completions"]] == question["limits"] and len(
        question["advantages"]
    ) == 8
    assert len(compare_peers.question_of(options, "rollout", 50)["prompts"]) == 32


def test_an_update_is_told_by_its_loss_and_norm_and_nothing_that_was_not_sampled():
    found = compare_peers.seen(None, {}, {}, {"updates": [[-0.25, 1.5], [-0.25, 1.4]]})
    assert found == {"loss": -0.25, "grad_norm": 1.5}


def test_other_losses_and_gradients_than_ours_are_refused():
    ours = [[-0.5, 2.0], [-0.5, 1.9]]
    peer_checks.same_updates("peer", ours, [[-0.500001, 2.001], [-0.5, 1.9]])
    for other in ([[-0.5, 2.0], [-0.5, 1.95]], [[-0.51, 2.0], [-0.5, 1.9]]):
        with pytest.raises(SystemExit, match=r"compare_peers: update [12] of peer has loss and gradient norm"):
            peer_checks.same_updates("peer", ours, other)


def test_an_unknown_contestant_is_one_line():
    done = run("--only", "ours,nobody")
    assert done.code == 1
    assert done.err == "compare_peers: no contestant 'nobody': there are ours, tunix, trl, batching\n"


def test_the_work_is_the_same_each_time_and_comes_group_by_group():
    options = bench_rollout.Options(slots=4, group=4, prompt=5, completion=20, lengths="long")
    (prompts, limits), (again, same) = (bench_rollout.work_of(options, 50) for _ in range(2))
    assert len(prompts) == len(limits) == 16
    assert all((a == b).all() for a, b in zip(prompts, again, strict=True)) and (limits == same).all()
    assert len({prompt.tobytes() for prompt in prompts}) == 4
    assert all((prompts[i] == prompts[i - i % 4]).all() for i in range(16))
    assert limits.min() >= 1 and limits.max() <= 20


def test_lengths_are_equal_or_have_a_tail_of_mean_three_tenths():
    options = [bench_rollout.Options(slots=250, lengths=kind) for kind in ("equal", "long")]
    lengths = [bench_rollout.work_of(option, 9)[1] for option in options]
    assert set(lengths[0].tolist()) == {128}
    assert lengths[1].mean() / 128 == pytest.approx(0.3, abs=0.02)


def test_ours_always_takes_part_and_comes_first():
    assert compare_peers.chosen("batching, ours,tunix") == ["ours", "tunix", "batching"]
    assert compare_peers.chosen("") == ["ours"]
    assert compare_peers.chosen("batching,trl", "update") == ["ours", "trl"]
    assert compare_peers.chosen("batching,tunix,trl", "episode") == ["ours", "trl"]
    assert compare_peers.chosen("batching,trl", "step") == ["ours", "trl", "batching"]


def test_a_row_holds_medians_and_a_ratio_is_the_peers_time_over_ours():
    ours = compare_peers.row(first_answer(), [answer(2.0), answer(1.0, others=0.25), answer(9.0)], 100)
    peer = compare_peers.row(first_answer(), [answer(5.0, 400), answer(4.0, 400), answer(6.0, 400)], 100)
    assert ours["seconds"] == 2.0 and ours["tokens_per_s"] == 50.0 and ours["useful"] == 1.0
    assert ours["spread"] == 4.0 and ours["others"] == 0.25 and ours["warmup_s"] == 9.0
    assert ours["cpu_s"] == 4.0 and ours["peak_mb"] == 90
    assert (
        peer["useful"] == 0.25 and compare_peers.row(first_answer(), [answer(5.0, 400)], 100, phases=2)["useful"] == 0.5
    )
    assert compare_peers.ratios({"ours": ours, "peer": peer}) == {"peer": 2.5}
    checks = {"greedy": "8/8", "mean_logp": -1.0}
    header, *lines = compare_peers.table({"ours": ours | checks, "peer": peer | checks}).splitlines()
    assert [line.split()[-1] for line in (header, *lines)] == ["ratio", "1.0", "2.5"]
    assert len({len(line) for line in (header, *lines)}) == 1


def test_the_score_is_the_mean_of_single_scores_and_no_prompt_or_padding_counts():
    model = compare_peers.lively(bench_rollout.Options(model="tiny-random"))
    prompts, completions = [[1, 2], [3, 4, 5]], [[6, 7, 8, 9], [10]]
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        out = np.asarray(logits(model, [prompt + completion]), np.float64)[0]
        out -= np.log(np.exp(out).sum(axis=-1, keepdims=True))
        scores += [out[len(prompt) - 1 + i, token] for i, token in enumerate(completion)]
    assert peer_checks.mean_logp(model, prompts, completions) == pytest.approx(np.mean(scores), abs=1e-5)


def test_agreement_ends_where_two_texts_part():
    assert peer_checks.agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert peer_checks.agreement([1, 2], [1, 2, 3]) == 2
    assert peer_checks.agreement([5], [6]) == 0


def test_completions_of_other_lengths_are_refused():
    peer_checks.checked("peer", {"completions": [[1], [2, 3]]}, [1, 2])
    peer_checks.checked("peer", {"seconds": 1.0}, [1, 2])  # an update samples none
    with pytest.raises(SystemExit, match="compare_peers: peer returned 3 tokens in wrong lengths; 3 were asked for"):
        peer_checks.checked("peer", {"completions": [[1, 2], [3]]}, [1, 2])


def test_every_peer_has_exact_versions_and_ours_has_no_environment(tmp_path):
    for name, peer in peer_processes.PEERS.items():
        assert (TOOLS / "peers" / peer.script).is_file()
        assert (TOOLS / "peers" / peer_learning.script_of(name, {})).is_file()
        assert bool(peer.pins) == (name != "ours")
        assert all(len(pin.split("==")) == 2 and pin.split("==")[1][0].isdigit() for pin in peer.pins)
    assert peer_processes.python_of((), tmp_path) == Path(sys.executable) and not list(tmp_path.iterdir())


def test_a_worker_that_dies_is_told_with_the_end_of_its_log(tmp_path):
    worker = peer_processes.started("ours", tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)compare_peers: ours ended without an answer.*KeyError: 'model'"):
        worker.ask({"mode": ""})
    worker.close()


OWN = """
import dataclasses
from jaxrl_llm.config import Run
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
    steps=9,
)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn")
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(8)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "own.py").write_text(OWN.replace("FOLDER", str(folder)))
    return folder / "own.py"


def test_a_run_of_ours_is_tested_after_every_step(own, tmp_path):
    found = peer_learning.learn(str(own), ["ours"], 1, tmp_path, steps=2)
    (lines,) = found["runs"]["ours"]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["completions"] for line in lines] == [0, 4, 8]
    seconds = [line["seconds"] for line in lines]
    assert 0 < seconds[0] < seconds[1] < seconds[2] and all(line["accuracy"] == 0 for line in lines)
    assert found["levels"]["0.95"] == {"ours": {"reached": 0, "of": 1, "ratio": None}}
    assert peer_learning.table(found).splitlines()[1].split() == ["ours", "0.95", "-", "-", "-", "-", "-", "0/1", "-"]


def test_peers_are_told_the_same_prompts_and_problems(own, tmp_path):
    work = peer_learning.work_of(str(own), tmp_path)
    told = work["train"] + work["test"]
    assert sorted(one["prompt"] for one in told) == [f"{n} + 1 =" for n in range(8)]
    assert all(int(one["answer"]) == int(one["prompt"].split()[0]) + 1 for one in told) and len(work["train"]) == 4
    assert (work["clip"], work["group"], work["temperature"]) == ([0.2, 0.28], 2, 1.0)


TAUGHT = """
from jaxrl_llm.config import Distillation, Scoring
taught = Distillation("tiny-random", SIGNAL)
recipe = dataclasses.replace(config.recipe, filter_groups=False)
config = dataclasses.replace(config, recipe=recipe, scoring=Scoring(rewards=(), distillation=taught))
"""


def test_a_teacher_takes_the_place_of_rewards(own, tmp_path):
    taught, other = tmp_path / "taught.py", tmp_path / "other.py"
    taught.write_text(own.read_text() + TAUGHT.replace("SIGNAL", '"jsd"'))
    other.write_text(own.read_text() + TAUGHT.replace("SIGNAL", '"jsd", weight=2.0'))
    work = peer_learning.work_of(str(taught), tmp_path / "model")
    assert work["beta"] == 0.5 and (Path(work["teacher"]) / "model.safetensors").is_file()
    for name, script in (("trl", "distil_trl.py"), ("ours", "learn_ours.py")):
        assert peer_learning.script_of(name, work) == script and (TOOLS / "peers" / script).is_file()
    assert compare_peers.chosen("trl,tunix,batching", "distillation") == ["ours", "trl"]
    with pytest.raises(InputError, match="has other teacher than compare_peers sets up"):
        peer_learning.work_of(str(other), tmp_path / "model")


def test_steps_and_memory_are_compared_with_ours():
    lines = [[{"seconds": at * 2.0, "peak_mb": 100.0 + at} for at in range(4)]]
    other = [[{"seconds": at * 5.0, "peak_mb": None} for at in range(3)]]
    assert peer_learning.each_step({"ours": lines, "trl": other}) == {
        "ours": {"step_s": 2.0, "peak_mb": 103.0, "ratio": 1.0},
        "trl": {"step_s": 5.0, "peak_mb": None, "ratio": 2.5},
    }


def test_what_peers_would_run_otherwise_is_refused(tmp_path):
    with pytest.raises(InputError, match="smoke has other rewards, loss, updates than compare_peers sets up"):
        peer_learning.work_of("smoke", tmp_path)


def test_peers_are_rewarded_as_we_are():
    texts = ["5 - 4 = 1", "It is 1.", "1, or 2", "none", "-1", "so $1.0", "", "1,000"]
    script = "from learning import OUT, json, reward_of, sys; print(reward_of(*json.load(sys.stdin)), file=OUT)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        input=json.dumps([texts, ["1"] * len(texts)]), capture_output=True, text=True, cwd=TOOLS / "peers",
    )  # fmt: skip
    problem = Problem("a", ({"role": "user", "content": "?"},), "1", "sums")
    one = np.zeros(1, np.int32)
    said = [Completion(one, one.astype(np.float32), "stop", one == 0, one, text=text) for text in texts]
    ours = [accuracy(problem, completion) for completion in said]
    assert json.loads(done.stdout) == ours == [1, 1, 0, 0, 0, 1, 0, 0]


TELL = """
from learning import Told
test = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "?", "answer": "3"}]
work = {"began": 90, "prompts": 2, "group": 4, "test": test}
told = Told(work, lambda prompts: ["It is 2."] * len(prompts), iter([100, 103, 110, 115]).__next__)
told.step(1)
told.step(2)
"""


def test_what_evaluations_take_is_none_of_the_seconds():
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, cwd=TOOLS / "peers")
    first = {"step": 1, "seconds": 10, "completions": 8, "accuracy": 0.5, "calls": 0}
    wanted = [first, {"step": 2, "seconds": 17, "completions": 16, "accuracy": 0.5, "calls": 0}]
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted


def test_when_a_level_was_reached():
    def run_of(*accuracies):
        return [
            {"step": n, "seconds": 10.0 * n, "completions": 64 * n, "accuracy": x} for n, x in enumerate(accuracies)
        ]

    runs = {"ours": [run_of(0.5, 0.96, 0.9), run_of(0.5, 0.9, 0.97), run_of(0.5, 0.95)]}
    runs["trl"] = [run_of(0.5, 0.6, 0.7, 0.96), run_of(0.5, 0.95), run_of(0.5, 0.6)]
    runs["tunix"] = [run_of(0.5), run_of(0.5), run_of(0.5, 0.99)]
    found = peer_learning.summed_up(runs, 0.95)
    ours = {
        "reached": 3,
        "of": 3,
        "seconds": 10,
        "completions": 64,
        "step": 1,
        "fastest": 10,
        "slowest": 20,
        "ratio": 1,
    }
    assert found["ours"] == ours
    assert found["trl"] == ours | {
        "reached": 2,
        "seconds": 30,
        "completions": 192,
        "step": 3,
        "slowest": 30,
        "ratio": 3,
    }
    assert found["tunix"] == {"reached": 1, "of": 3, "ratio": None}
