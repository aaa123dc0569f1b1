"""Runs with teachers, through the command line: stopped and resumed, planned, and refused where nothing could come of
it.
"""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import commands

from jaxrl_llm.models import load_pretrained, logits, save_pretrained

pytestmark = pytest.mark.slow

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"
TAUGHT = RUNS / "taught.py"
OWN = f"train {TAUGHT} --steps 1 --run_dir refused --scoring.distillation"
LINES = {
    "whole": f"train {TAUGHT} --steps 3 --run_dir whole",
    "half": f"train {TAUGHT} --steps 2 --run_dir broken",
    "rest": f"train {TAUGHT} --steps 3 --run_dir broken",
    "tokens": f"train {RUNS / 'taught_by_tokens.py'} --steps 2 --run_dir tokens --rollout.collect.staleness 1",
    "itself": f"train {RUNS / 'taught_by_itself.py'} --steps 2 --run_dir itself",
    "base": f"train {RUNS / 'taught_by_base.py'} --steps 2 --run_dir adapter",
    "texts": f"train {RUNS / 'taught_by_texts.py'} --steps 3 --run_dir texts",
    "texts begun": f"train {RUNS / 'taught_by_texts.py'} --steps 1 --run_dir resumed",
    "texts resumed": f"train {RUNS / 'taught_by_texts.py'} --steps 3 --run_dir resumed",
    "plan texts": f"plan {RUNS / 'taught_by_texts.py'} --topology v5e:2x2 --quick",
    "plan": f"plan {TAUGHT} --topology v5e:2x2 --quick",
    "tokenizer": f"{OWN}.teacher another",
    "nowhere": f"{OWN}.teacher ./nowhere",
    "beta": f"{OWN}.divergence.beta 1.5",
    "top_k": f"{OWN}.divergence.top_k 100000",
    "filter": f"{OWN}.weight 2 --recipe.filter_groups reward",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a teacher that differs from it, and one that writes other tokens."""
    made = tmp_path_factory.mktemp("distilled")
    model, tokenizer = load_pretrained("tiny-random")
    save_pretrained(model, tokenizer, made / "base")
    keys = iter(jax.random.split(jax.random.key(0), 99))
    moved = jax.tree.map(lambda x: x + 0.3 * np.abs(x).mean() * jax.random.normal(next(keys), x.shape), model)
    save_pretrained(moved, tokenizer, made / "teacher")
    save_pretrained(moved, tokenizer, made / "another")
    path = made / "another" / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"\\u00e9\\u00e9":'))
    rows = [{"prompt": f"{n}+1", "completion": f"{n + 1}"} for n in range(8)]
    (made / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_a_run_without_rewards_comes_nearer_to_its_teacher(folder, answers):
    assert answers["whole"].code == 0, answers["whole"].err
    steps = rows(folder, "whole")[1:]
    found = [row["distillation/divergence"] for row in steps]
    assert found[0] > 0 and all(row["updates"] == 1 and row["advantage/abs_mean"] == 0 for row in steps)
    assert min(found[1:]) < found[0]
    assert not any(name in row for row in steps for name in ("reward/mean", "reward/std", "event/teaches_nothing"))


def test_a_stopped_run_resumes_to_the_same_bits(folder, answers):
    assert answers["half"].code == answers["rest"].code == 0, answers["rest"].err
    names = ("loss", "grad_norm", "entropy", "distillation/divergence")
    whole, broken = ([[row.get(name) for name in names] for row in rows(folder, run)] for run in ("whole", "broken"))
    assert whole == broken and len(whole) == 4
    pins = json.loads((folder / "broken" / "config.json").read_text())["origin"]["models"]
    assert pins["teacher"]["weights"], "a teacher that has changed is refused"


def test_sampled_tokens_teach_through_the_recipe_and_stale_ones_are_weighted(folder, answers):
    assert answers["tokens"].code == 0, answers["tokens"].err
    first, second = rows(folder, "tokens")[1:]
    for row in (first, second):
        assert math.isfinite(row["distillation/kl"]) and row["advantage/nonzero_fraction"] == 1 and row["updates"] == 1
    assert first["correction"] == pytest.approx(1, abs=1e-4) and abs(second["correction"] - 1) > 1e-4


def test_a_moving_copy_of_the_policy_teaches_it_what_it_is_told(folder, answers):
    assert answers["itself"].code == 0, answers["itself"].err
    for row in rows(folder, "itself")[1:]:
        assert row["distillation/told_fraction"] == 1 and row["distillation/divergence"] > 0 and row["updates"] == 1


def test_an_adapter_is_taught_by_its_own_base_on_given_texts_too(folder, answers):
    """It begins as its base."""
    assert answers["base"].code == 0, answers["base"].err
    first, second = (row["distillation/divergence"] for row in rows(folder, "adapter")[1:])
    assert abs(first) < 1e-5 and abs(second) < 1e-3


def test_at_lambda_0_the_base_learns_the_teachers_distributions_of_the_texts_alone(folder, answers):
    """The first step has all 8 texts: its divergence is the mean over their tokens, computed here from whole rows."""
    assert answers["texts"].code == 0, answers["texts"].err
    (base, tokenizer), (teacher, _) = load_pretrained(folder / "base"), load_pretrained(folder / "teacher")
    far = []
    for n in range(8):
        prompt, completion = (tokenizer.encode(text, add_special_tokens=False) for text in (f"{n}+1", f"{n + 1}"))
        row = np.int32([[*prompt, *completion, *base.config.tokens.eos]])[:, : len(prompt) + len(completion) + 1]
        ours, theirs = (jax.nn.log_softmax(logits(model, row)[0, len(prompt) - 1 : -1]) for model in (base, teacher))
        far.append(np.sum(np.exp(theirs) * (theirs - ours), axis=-1))
    first, *later = rows(folder, "texts")[1:]
    np.testing.assert_allclose(first["distillation/divergence"], np.mean(np.concatenate(far)), rtol=1e-4)
    assert later[-1]["distillation/divergence"] < first["distillation/divergence"]
    assert first["updates"] == 1 and first["completions"] == 0 and "advantage/abs_mean" not in first
    names = ("loss", "grad_norm", "distillation/divergence")
    whole, broken = ([[row.get(name) for name in names] for row in rows(folder, run)] for run in ("texts", "resumed"))
    assert answers["texts resumed"].code == 0 and whole == broken


def test_the_plan_counts_the_teacher(answers):
    assert answers["plan"].code == answers["plan texts"].code == 0, answers["plan"].err + answers["plan texts"].err


REFUSED = {
    "tokenizer": "scoring.distillation.teacher: the tokenizer of another is not that of base: give a teacher that",
    "beta": "JensenShannon.beta must be from 0 to 1, got 1.5",
    "top_k": "scoring.distillation.divergence.top_k 100000 leaves no other token of the",
    "filter": "recipe.filter_groups reads rewards, and scoring.rewards is empty, with a teacher alone: set "
    "recipe.filter_groups False, or give a reward",
    "nowhere": "scoring.distillation.teacher: no such model directory: ./nowhere",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_work_is_refused_in_one_line(answers, name):
    assert answers[name].code == 2 and REFUSED[name] in answers[name].err.splitlines()[-1], answers[name].err
