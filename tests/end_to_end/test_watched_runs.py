"""Runs that measure more than they learn from, through the command line: how far the policy is from its beginning, who
refuses, and how often today's answers beat the first ones.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from learner.rollouts import one_device

from jaxrl_llm.checkpoints.store import Checkpoints, flatten
from jaxrl_llm.config import from_json, load_config, read, to_json, validate, whole
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Format, Hinge, ModelReward, Refusals, StepReward, Threshold
from jaxrl_llm.telemetry import diagnose

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "watched.py"
PLAIN = f"train {CONFIG} --output.checkpoint_every 2"
LINES = {
    "off": f"{PLAIN} --run_dir off",
    "on": f"{PLAIN} --run_dir on --monitor-kl",
    "half": f"{PLAIN} --run_dir half --monitor_kl --steps 2",
    "rest": f"{PLAIN} --run_dir half --output.monitor_kl",
    "from": f"{PLAIN} --run_dir from --from off@4 --steps 1 --monitor_kl",
    "begun without": f"{PLAIN} --run_dir off --monitor_kl",
    "begun with": f"{PLAIN} --run_dir on --steps 9",
    "measured": f"train {CONFIG} --recipe grpo --run_dir no --monitor_kl",
    "from data": "train sft_quickstart --run_dir no --monitor_kl",
    "eval": "eval on --json",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder):
    """Rows of all steps without what the clock decides."""
    clock = ("time/", "throughput/", "event/resumed")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: x for name, x in json.loads(line).items() if not name.startswith(clock)} for line in lines]


def saved(folder, step):
    """Arrays by name of one checkpoint."""
    run = whole(read(folder / "config.json").run)
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), run.output.monitor_kl)
    with Checkpoints(folder / "checkpoints") as store:
        state, _ = store.restore(step, like, one_device())
    return {name: np.asarray(array) for name, array in jax.device_get(flatten(state)).items()}


def test_a_watched_kl_changes_nothing_that_a_run_learns(folder, answers):
    for name in ("off", "on"):
        assert answers[name].code == 0, answers[name].err
    plain, watched = (rows(folder / name) for name in ("off", "on"))
    assert len(plain) == 5 and not any(row.pop("kl", None) for row in plain)
    found = [row.pop("kl", None) for row in watched]
    assert plain == watched, "all that is measured beside it is the same to the last bit"
    assert found[0] is None and found[1] == 0 < min(found[2:]), found
    before, after = (saved(folder / name, 4) for name in ("off", "on"))
    references = {name: after.pop(name) for name in list(after) if name.startswith("reference/")}
    assert before.keys() == after.keys() and references
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], name)


def test_the_reference_is_the_first_policy(folder, answers):
    first = load_pretrained("tiny-random")[0]
    kept = {name: x for name, x in saved(folder / "on", 4).items() if name.startswith("reference/")}
    weights = [np.asarray(x) for x in jax.tree.leaves(first)]
    assert len(weights) == len(kept)
    for array in kept.values():
        assert any(array.shape == x.shape and np.array_equal(array, x) for x in weights)


def test_a_run_that_watches_goes_on_bit_for_bit(folder, answers):
    assert (answers["half"].code, answers["rest"].code) == (0, 0), answers["rest"].err
    assert rows(folder / "half") == rows(folder / "on")


def test_a_run_from_another_ones_weights_watches_how_far_it_is_from_those(folder, answers):
    assert answers["from"].code == 0, answers["from"].err
    assert [row.get("kl") for row in rows(folder / "from")] == [None, 0.0]


def test_the_diagnosis_reads_it(folder, answers):
    """A KL that a recipe does not hold is one that can run away."""
    written = [json.loads(line) for line in (folder / "on" / "metrics.jsonl").read_text().splitlines()]
    later = [written[-1] | {"step": step, "kl": 0.01 + 0.001 * step + (step > 40) * 2.0} for step in range(5, 80)]
    assert "kl_runaway" in {finding.kind for finding in diagnose(later)}
    assert "kl_runaway" not in {finding.kind for finding in diagnose([row | {"kl": None} for row in later])}


def test_what_cannot_be_watched_is_refused(folder, answers):
    for name, words in {
        "begun without": ("off was begun with other settings (output.monitor_kl: False -> True)", "--fresh"),
        "begun with": ("on was begun with other settings (output.monitor_kl: True -> False)", "--fresh"),
        "measured": ("output.monitor_kl True has nothing to add: recipe.algorithm.kl_coef 0.04", "leave it out"),
        "from data": ("output.monitor_kl is for reinforcement learning", "leave it out"),
    }.items():
        assert_refused(answers[name], *words)


@pytest.mark.parametrize(("changes", "words"), [
    ({"task": None, "every": 0}, "evaluation.judge digits has no answers to compare: set task.holdout above 0"),
    ({"judge": Format("a", weight=2.0)}, "evaluation.judge has the weight 2, which nothing reads"),
    ({"judge": Format("(")}, "is not a regular expression"),
    ({"judge": StepReward("a")}, "evaluation.judge is the step reward steps"),
])  # fmt: skip
def test_a_judge_of_nothing_is_refused(changes, words):
    run = load_config(str(CONFIG))[1]
    validate(run)
    with pytest.raises(InputError, match=re.escape(words)):
        validate(dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, **changes)))


@pytest.mark.parametrize(("refusals", "words"), [
    (Refusals(()), "Refusals has no pattern"),
    (Format("a", weight=2.0), "format in Threshold has the weight 2, which nothing reads"),
    (StepReward("a"), "Threshold holds the step reward steps"),
])  # fmt: skip
def test_refusals_that_nothing_can_tell_are_refused(refusals, words):
    run = load_config(str(CONFIG))[1]
    with pytest.raises(InputError, match=re.escape(words)):
        validate(dataclasses.replace(run, scoring=dataclasses.replace(run.scoring, refusals=refusals)))


def test_runs_from_data_have_no_policy_to_judge():
    run = load_config("sft_quickstart")[1]
    with pytest.raises(InputError, match=r"^evaluation.judge compares the answers of a policy in reinforcement"):
        validate(dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, judge=Format("a"))))


@pytest.mark.parametrize("given", [Refusals(), Threshold(ModelReward("runs/rm"), 1.5), Hinge(Format("a"), 0.5)])
def test_what_tells_and_what_judges_are_read_again(given):
    run = load_config(str(CONFIG))[1]
    run = dataclasses.replace(
        run,
        scoring=dataclasses.replace(run.scoring, refusals=given),
        evaluation=dataclasses.replace(run.evaluation, judge=given),
    )
    found = from_json(json.loads(json.dumps(to_json(run))))
    assert found.scoring.refusals == given == found.evaluation.judge


def answers_in(path, **wanted):
    """Texts of the rows of a file that have these values."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["completion"] for row in found if wanted.items() <= row.items()]


def digits(text):
    return sum(character.isdigit() for character in text)


def test_evaluations_tell_how_often_the_first_policy_is_beaten(folder, answers):
    first = answers_in(folder / "on" / "first_answers.jsonl")
    by_step = {row["step"]: row for row in rows(folder / "on")}
    assert first == answers_in(folder / "on" / "samples.jsonl", kind="evaluation", step=0) and len(first) == 10
    assert "eval/digits/win_rate" not in by_step[0], "the first answers have nothing before them"
    assert len(set(first)) > 3
    for step in (2, 4):
        today = answers_in(folder / "on" / "samples.jsonl", kind="evaluation", step=step)
        wanted = [(np.sign(digits(new) - digits(old)) + 1) / 2 for new, old in zip(today, first, strict=True)]
        assert by_step[step]["eval/digits/win_rate"] == np.mean(wanted)
    assert today != first and "eval/digits/win_rate" not in by_step[1]


def test_refusals_are_measured_and_not_learned_from(folder, answers):
    pattern = re.compile("[a-m]", re.IGNORECASE)
    for row in rows(folder / "on"):
        texts = answers_in(folder / "on" / "samples.jsonl", kind="evaluation", step=row["step"])
        if texts:
            wanted = np.mean([pattern.search(text) is not None for text in texts])
            assert row["eval/digits/refusals"] == wanted
    told = json.loads(answers["eval"].out)
    assert (told["eval/digits/refusals"], "eval/digits/win_rate" in told) == (wanted, False)
    lines = [json.loads(line) for line in (folder / "on" / "samples.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "training"]
    for line in lines:
        assert line["parts"]["completions/refusal"] == (pattern.search(line["completion"]) is not None)
        assert line["reward"] == line["parts"]["format"]
    shares = [row["completions/refusal_fraction"] for row in rows(folder / "on")[1:]]
    assert all(0 < share <= 1 for share in shares), shares
