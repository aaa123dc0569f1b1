"""Ladders of ablations: what each rung changes, the statistics by hand, a real run that is stopped and goes on."""

import dataclasses
import json
import math
import operator
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ROOT, environment, forked

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import DAPO

ORIGIN = configs.Origin("").to_json()
TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import ablate  # noqa: E402
from ladder_statistics import accuracy_of, area, gain_at_equal_tokens, interval, lines_of, measures_of, ranking, table  # noqa: E402
from ladders import LADDERS, Rung  # noqa: E402

pytestmark = pytest.mark.slow

TINY = """--model tiny-random --steps 40 --rollout.prompts 2 --rollout.group 2 --rollout.engine.slots 4
--rollout.max_new_tokens 2 --rollout.engine.chunk 2 --learner.epochs 1 --learner.minibatches 1
--learner.compute.row_tokens 32
--evaluation.every 40 --evaluation.limit 2 --evaluation.samples 1""".split()
OWN = """
import dataclasses
from jaxrl_llm.config import load_config

def every(problem):
    return True

given = load_config("ablation_smoke")[1]
config = dataclasses.replace(given, task=dataclasses.replace(given.task, keep="own:every"))
"""
MANY = """
import contextlib, io, json, sys
import ablate
answers = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = ablate.main(arguments)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def answers(lines, folder):
    """Exit code, stdout and stderr of ablate with each of these arguments, in one process."""
    done = forked(MANY, json.dumps(lines), folder, PYTHONPATH=f"{ROOT}:{TOOLS}")
    assert done.code == 0, done.err
    return json.loads(done.out)


def rows(accuracies, entropy=1.0, every=10):
    """A run's rows: an evaluation every so many steps, the first before training."""
    found = []
    for step in range((len(accuracies) - 1) * every + 1):
        row = {"step": step, "time/step_s": 0.5}
        if step:
            row |= {"entropy": entropy, "completions/truncated_fraction": 0.25, "clip_fraction/low": 0.0}
            row |= {"clip_fraction/high": 0.01, "throughput/sampled_tokens_per_s": 500.0, "time/rollout_s": 0.2}
        if step % every == 0:
            row |= {"eval/x/pass@1": accuracies[step // every], "eval/x/mean_length": 7.0, "time/evaluation_s": 2.0}
        found.append(row)
    return found


def write(path, run):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run))


def test_intervals_are_those_by_hand():
    found = interval([0.5, 0.6, 0.7])
    assert (found.mean, found.n) == (pytest.approx(0.6), 3)
    assert found.half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom, s = 0.1
    assert not found.holds_zero and interval([-0.1, 0.0, 0.2]).holds_zero
    assert math.isnan(interval([0.5]).half) and interval([0.5]).holds_zero


def test_measures_of_a_run_are_those_by_hand():
    found = measures_of(rows([0.0, 1.0, 0.5, 0.6]))
    assert found["accuracy"] == pytest.approx(0.7)  # the first evaluation is none of the last three
    assert found["area"] == pytest.approx((0.5 + 0.75 + 0.55) / 3)
    assert found["seconds"] == pytest.approx(31 * 0.5 + 4 * 2)
    assert found["sampled"] == pytest.approx(30 * 500 * 0.2 / 1000)
    assert (found["entropy"], found["length"], found["truncated"]) == (1.0, 7.0, 0.25)
    assert area([(0, 0.0), (10, 1.0), (30, 1.0)]) == pytest.approx(25 / 30)


def test_a_gain_is_of_pairs_with_the_same_seed():
    # Seeds differ by far more than the rungs: only pairs tell that the second rung is better.
    runs = {
        "a": {0: rows([0.1] * 4), 1: rows([0.5] * 4), 2: rows([0.9] * 4)},
        "b": {0: rows([0.12] * 4), 1: rows([0.52] * 4), 2: rows([0.93] * 4), 3: rows([0.0] * 4)},
        "c": {0: rows([0.2] * 4), 1: rows([0.4] * 4)},
    }
    lines = lines_of([Rung("a", {}, published=30), Rung("b", {}), Rung("c", {}, onto="a"), Rung("d", {})], runs)
    assert [line.onto for line in lines] == [None, "a", "a"]  # d has no run yet
    beyond = lines_of([Rung("a", {}), Rung("c", {}), Rung("b", {})], runs)[2]
    assert beyond.gain.n == 2 and beyond.total == lines[1].gain
    assert lines[1].gain.mean == pytest.approx(0.07 / 3) and lines[1].gain.n == 3 and not lines[1].gain.holds_zero
    assert lines[1].gain.half == pytest.approx(4.302653 * math.sqrt(1 / 3) * 0.01 / math.sqrt(3), rel=1e-6)
    written = table(lines).splitlines()
    assert written[2].startswith("| a | 3 | 0.500 ± 0.994 |  |  |") and written[2].endswith("| 30 |")
    assert "| +0.023 ± 0.014 over a, 3 pairs | +0.023 ± 0.014, 3 pairs | +0.023 ± 0.014, 3 pairs |" in written[3]
    assert "+0.000 ± 1.271 over a: within noise, 2 pairs" in written[4]


def test_a_gain_at_equal_tokens_is_read_where_the_shorter_run_ended():
    few = rows([0.0, 0.1, 0.2, 0.3, 0.4])  # 1, 2, 3, 4 thousand tokens after 10, 20, 30, 40 steps
    many = [row | {"time/rollout_s": 0.4} if row["step"] else row for row in rows([0.0, 0.5, 0.6, 0.7, 0.9])]
    # The evaluations at 2, 3, 4 thousand: 0.2, 0.3, 0.4; there the longer run has 0.5, half-way to 0.6, and 0.6.
    assert gain_at_equal_tokens(many, few) == pytest.approx((0.3 + 0.25 + 0.2) / 3)
    assert gain_at_equal_tokens(few, many) == pytest.approx(-0.25)


@pytest.mark.parametrize("ladder", LADDERS)
def test_each_rung_changes_the_run_and_can_work(ladder):
    # What is taken out of a recipe has to be in it.
    names = {"prolonged": "mixture_smollm2", "arpo": "lookup_quickstart"}
    base = configs.load_config(names.get(ladder, "ablation_smoke"))[1]
    found = ablate.settings_of(base, LADDERS[ladder])
    for number, rung in enumerate(LADDERS[ladder]):
        configs.validate(found[rung.name])
        if number:
            before = found[rung.onto or LADDERS[ladder][number - 1].name]
            changes = [one.split(":")[0] for one in configs.changes(before, found[rung.name])]
            changes = [name for name in changes if name != "recipe.overlong.weight"]  # filled in from the rewards
            assert changes and all(name.startswith(tuple(rung.changes)) for name in changes), (rung.name, changes)
    own = {ablate.slug(name): run for name, run in found.items()}
    assert len(own) == len(found)
    for other in LADDERS if ladder != "arpo" else ():  # the others' task has no episodes
        shared = {ablate.slug(name): run for name, run in ablate.settings_of(base, LADDERS[other]).items()}
        assert all(shared[name] == own[name] for name in shared.keys() & own.keys())


def begun(run):
    """The settings that a run has written down."""
    return configs.dated(configs.resolved(run), "2025-07-01")


def test_a_run_with_other_settings_is_not_taken_for_a_rungs(tmp_path):
    run = configs.load_config("ablation_smoke")[1]
    rung = ablate.Planned("GRPO", configs.resolved(run), tmp_path / "grpo")
    write(rung.directory, rows([0.1, 0.2]))
    for name, other in {
        "rollout.group: 4 -> 8": dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, group=4)),
        "evaluation.samples: 1 -> 4": dataclasses.replace(
            run, evaluation=dataclasses.replace(run.evaluation, samples=1)
        ),
    }.items():
        (rung.directory / "config.json").write_text(json.dumps(configs.to_json(begun(other)) | ORIGIN))
        with pytest.raises(InputError, match=f"other settings .{name}.: give another --folder"):
            ablate.check_same(rung)
    elsewhere = dataclasses.replace(run, output=dataclasses.replace(run.output, run_dir="x"), steps=7)
    (rung.directory / "config.json").write_text(json.dumps(configs.to_json(begun(elsewhere)) | ORIGIN))
    ablate.check_same(rung)
    shorter = dataclasses.replace(rung, run=dataclasses.replace(rung.run, steps=5))
    with pytest.raises(InputError, match="has made 10 steps, 5 are asked for: give --steps 10"):
        ablate.check_same(shorter)


def test_where_nothing_is_verified_the_reward_is_compared():
    found = [{name.replace("pass@1", "reward"): x for name, x in row.items()} for row in rows([0.0, 1.0, 0.5])]
    assert accuracy_of(found) == "eval/x/reward" and measures_of(found)["length"] == 7.0
    assert accuracy_of([*found, *rows([0.2])]) == "eval/x/pass@1"


def test_a_rung_is_added_to_the_one_before_or_to_the_one_it_names():
    rungs = [Rung("a", {"rollout.group": 2}), Rung("b", {"rollout.prompts": 3}), Rung("c", {"steps": 5}, onto="a")]
    found = ablate.settings_of(configs.load_config("ablation_smoke")[1], rungs)
    assert (found["b"].rollout.group, found["b"].rollout.prompts, found["b"].steps) == (2, 3, 100)
    assert (found["c"].rollout.group, found["c"].rollout.prompts, found["c"].steps) == (2, 16, 5)


def test_the_ladder_ends_with_the_recipe():
    last = list(ablate.settings_of(configs.load_config("ablation_smoke")[1], LADDERS["dapo"]).values())[-1].recipe
    for field in ("algorithm", "filter_groups", "overlong.drop", "overlong.share", "temperature", "resets"):
        assert operator.attrgetter(field)(last) == operator.attrgetter(field)(DAPO), field


def test_the_table_comes_from_metrics_alone(tmp_path):
    for number, rung in enumerate(LADDERS["clip"]):
        for seed in range(2):
            run = rows([0.1, 0.2 + 0.1 * number, 0.3 + 0.1 * number + 0.01 * seed], entropy=1.0 + number)
            if number == 1:
                run = [row | {"kl": 0.01 * row["step"]} for row in run]
            whole = (number, seed) != (2, 1)
            write(tmp_path / ablate.slug(rung.name) / f"seed-{seed}", run if whole else run[:7])
    given = "ablation_smoke --ladder clip --draw --seeds 2 --steps 20 --json --folder .".split()
    ((code, out, err),) = answers([given], tmp_path)
    assert (code, err) == (0, "")
    *page, last = out.splitlines()
    numbers = json.loads(last)
    assert [one["rung"] for one in numbers] == [rung.name for rung in LADDERS["clip"]]
    # 10 steps of 500 tokens a second in 0.2 seconds.
    assert numbers[0]["curves"]["1"] == [[0.0, 0.1], [pytest.approx(1000), 0.2], [pytest.approx(2000), 0.31]]
    assert numbers[1]["gain"]["mean"] == pytest.approx(0.2 / 3) and numbers[2]["entropy"]["mean"] == 3.0
    assert "Not finished and left out: clip 0.4, seed 1 (step 6)." in page
    assert "clip 0.28 0.00% and 1.00%" in "".join(page) and (tmp_path / "clip.md").read_text().splitlines() == page
    assert json.loads((tmp_path / "clip.json").read_text()) == numbers
    assert "band:" not in (tmp_path / "clip.svg").read_text(), "few rungs are drawn as curves"


def test_a_picture_of_many_rungs_has_their_accuracies_in_order(tmp_path):
    runs = {
        name: {seed: rows([0.1, end + 0.01 * seed]) for seed in range(2)}
        for name, end in zip("abc", (0.5, 0.9, 0.2), strict=True)
    }
    ranking(lines_of([Rung(name, {}) for name in "abc"], runs), tmp_path / "whole.svg")
    drawn = (tmp_path / "whole.svg").read_text()
    heights = {name: drawn.index(f"<!-- {name} -->") for name in "abc"}  # written from the lowest to the highest
    assert heights["c"] < heights["a"] < heights["b"] and "band: a -->" in drawn


WRONG = {
    "": "a configuration is missing",
    "ablation_smoke": "which ladder? give --ladder objectives, dapo, prorl",
    "ablation_smoke --ladder dappo": "no ladder 'dappo': did you mean dapo?",
    "ablation_smoke --ladder dapo --seeds 0": "--seeds 0: give how many",
    "ablation_smok --ladder dapo": "did you mean ablation_smoke?",
    "ablation_base --ladder dapo": "is no run of reinforcement learning",
    "ablation_smoke --ladder dapo --run_dir x": "--run_dir is each run's own: give --folder",
    "ablation_smoke --ladder dapo --step 3": "no option --step: did you mean --steps",
    "ablation_smoke --ladder dapo --draw": "no run of this ladder is finished",
    "ablation_smoke --ladder dapo --model tiny-random --evaluation.every 0": "GRPO: a ladder compares accuracies",
    "ablation_smoke --ladder dapo --learner.epochs 0": "GRPO: learner.epochs",
    "ablation_smoke --ladder dapo": "runs/ablation_base",
}


def test_wrong_uses_are_one_line_and_leave_nothing(tmp_path):
    found = answers([line.split() for line in WRONG], tmp_path)
    for (line, message), (code, out, err) in zip(WRONG.items(), found, strict=True):
        assert (code, out) == (2, "") and err.startswith("ablate: ") and err.count("\n") == 1, (line, err)
        assert message in err, (line, err)
    assert not list(tmp_path.iterdir())


def test_a_ladder_that_is_stopped_goes_on_and_keeps_what_is_finished(tmp_path):
    first, *others = LADDERS["clip"]
    (tmp_path / "own.py").write_text(OWN)  # code of one's own is that of each run
    for rung in others:
        write(tmp_path / ablate.slug(rung.name) / "seed-0", rows([0.1] * 5))
    program = [sys.executable, str(TOOLS / "ablate.py"), "own.py", "--ladder", "clip", "--seeds", "1", *TINY]
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    program += ["--folder", str(tmp_path)]
    run = tmp_path / ablate.slug(first.name) / "seed-0"
    with subprocess.Popen(program, **options, stdout=subprocess.PIPE) as ladder:
        while ladder.poll() is None and not any('"step": 1' in line for line in lines_in(run)):
            time.sleep(0.02)
        ladder.send_signal(signal.SIGINT)
        said = ladder.communicate()[1]
    assert ladder.returncode == 75 and "stopped; the same command goes on from here" in said, said
    before = lines_in(run)
    assert 1 < len(before) < 41
    ended = subprocess.run(program, **options, stdout=subprocess.PIPE, check=False)
    assert ended.returncode == 0 and "2 of 3 runs are finished already" in ended.stderr, ended.stderr
    after = [json.loads(line) for line in lines_in(run)]
    assert lines_in(run)[: len(before)] == before and [row["step"] for row in after] == list(range(41))
    assert [row["step"] for row in after if "event/resumed" in row] == [len(before)]
    assert ended.stdout.startswith("| rung | seeds | accuracy |") and "| clip 0.28 | 1 | 0.100 |" in ended.stdout
    ((code, out, err),) = answers([[*program[2:], "--draw", "--rollout.group", "4"]], tmp_path)
    assert (code, out) == (2, "") and "was run with other settings (rollout.group: 2 -> 4)" in err, err


def lines_in(run):
    """The lines of a run's metrics, none before there are any."""
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []
