"""Runs that learn from data, through the command line: their numbers by hand, broken off and gone on with, in two
processes.
"""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import commands
from end_to_end.test_resume import documented, plain
from end_to_end.test_resume import rows as rows_of_run
from learner.rollouts import one_device
from several import codes, launch, said
from tiny import logprob_and_entropy

from jaxrl_llm.data import Pairs, Steps, Texts, load_texts
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import causal_rows, forward, logits
from jaxrl_llm.models.heads import random_scalar_head, with_scalar_head
from jaxrl_llm.runs import find_run, load_model, load_trained
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.stages.preference import at_start
from jaxrl_llm.tasks import Table

pytestmark = pytest.mark.slow

CONFIG = """
from jaxrl_llm.config import *
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.models.config import Lora
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
config = {kind}(
    "tiny-random", {data}, batch=BatchSize({rows}, 24),
    learner=Learner(Optimiser(learning_rate=3e-3, weight_decay=0.1), lora=Lora({rank}, base="f32")), steps=2,
    evaluation=Evaluation(every=1), output=Output(checkpoint_every=1, keep=9, trackers=()),
)
"""
ANOTHER_ROW = """
with open("prm.jsonl", "a") as file:
    file.write('{"prompt": "1+0=", "completions": ["1", "1"], "labels": [1, 1]}')
"""
SUMS = [(1, 2), (3, 4), (50, 6), (7, 8), (2, 20), (9, 9), (8, 1), (6, 6), (4, 13), (5, 5), (3, 9), (70, 1)]
TABLES = {
    "sft": [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in SUMS],
    "dpo": [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{100 * a}"} for a, b in SUMS],
    "rm": [
        {"prompt": f"{a}+{b}=", "completions": [f"{a + b}", f"{a + b + 1}", f"{100 * a}"][: 2 + a % 2], "margin": 0.5}
        for a, b in SUMS
    ],
    "prm": [{"prompt": f"{a}+{b}=", "completions": [f"{a}", f"{a + b}"], "labels": [1, b / 20]} for a, b in SUMS],
}
DATA = {
    name: kind(Table(f"{name}.jsonl"), template="plain", holdout=0.25)
    for name, kind in {"sft": Texts, "dpo": Pairs, "rm": Pairs, "prm": Steps}.items()
}
KINDS = {"sft": ("Supervised", 2), "dpo": ("Preference", 0), "rm": ("RewardModel", 0), "prm": ("RewardModel", 0)}
"""And the rank of their adapters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in TABLES.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        kind, rank = KINDS[name]
        whole = CONFIG.format(kind=kind, data=DATA[name], rows=train_rows(name, folder), rank=rank)
        (folder / f"{name}.py").write_text(whole)
    return folder


def loaded(name, folder):
    """The rows of a table in two parts."""
    data = DATA[name]
    placed = type(data)(Table(str(folder / f"{name}.jsonl")), template="plain", holdout=0.25)
    model, tokenizer = load_pretrained("tiny-random")
    return load_texts(placed, tokenizer, model.config.tokens.eos)


def train_rows(name, folder):
    """So many that each step learns from all of them."""
    return len(loaded(name, folder).train)


@pytest.fixture(scope="module")
def whole(folder):
    """Every stage, undisturbed."""
    answers = commands([f"train {name}.py --run_dir whole/{name}" for name in TABLES], folder)
    assert [answer.code for answer in answers] == [0] * len(TABLES), answers
    return folder / "whole"


def cut_off(folder, name, place, step):
    """What a run leaves behind that is killed after the row of step 2, the last checkpoint being that of ``step``."""
    shutil.copytree(folder / "whole" / name, folder / place)
    for number in range(step + 1, 3):
        shutil.rmtree(folder / place / "checkpoints" / str(number))
    with (folder / place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')


RESUMED = {"sft": 1, "dpo": 1, "rm": 1, "prm": 1, "early": 0}
"""The last checkpoint of each run that is broken off; the last one is of preferences too."""


@pytest.fixture(scope="module")
def broken(folder, whole):
    """Every stage, broken off; of preferences once without the reference's file, once before the first checkpoint, and
    once before the first step: then another model begins in the same folder.
    """
    for name, step in RESUMED.items():
        cut_off(folder, name if name in TABLES else "dpo", f"broken/{name}", step)
    (folder / "broken/dpo/reference.npz").unlink()
    kept = (folder / "broken/early/reference.npz").stat()
    cut_off(folder, "dpo", "broken/other", 0)
    metrics = folder / "broken/other/metrics.jsonl"
    metrics.write_text(metrics.read_text().partition("\n")[0])
    lines = [f"train {name if name in TABLES else 'dpo'}.py --run_dir broken/{name}" for name in RESUMED]
    lines.append("train dpo.py --run_dir broken/other --model whole/sft --steps 1")
    (folder / "changed.py").write_text(ANOTHER_ROW + (folder / "prm.py").read_text())
    *answers, refused = commands([*lines, "train changed.py --run_dir broken/prm --steps 3"], folder)
    assert [answer.code for answer in answers] == [0] * len(lines), answers
    assert refused.code == 2 and "of prm are not those that the run began with" in refused.err.splitlines()[-1]
    assert "there were" in refused.err and "put the old ones back" in refused.err and "Traceback" not in refused.err
    found = (folder / "broken/early/reference.npz").stat()
    assert (found.st_ino, found.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns), "the reference was made again"
    return folder / "broken"


def arrays(run, step=2):
    """All arrays of a checkpoint by name, read without the trainer."""
    with ocp.PyTreeCheckpointer() as reader:
        place = run / "checkpoints" / str(step) / "state"
        tree = reader.metadata(place).item_metadata.tree
        plainly = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(place, args=ocp.args.PyTreeRestore(restore_args=plainly))


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_broken_off_ends_as_one_that_was_not(name, whole, broken):
    one, other = whole / (name if name in TABLES else "dpo"), broken / name
    first, second = rows_of_run(one), rows_of_run(other)
    assert [row["step"] for row in second] == [0, 1, 2] and "event/resumed" in second[RESUMED[name] + 1]
    assert list(map(plain, first)) == list(map(plain, second))
    assert [row["epoch"] for row in second[1:]] == [1, 2], "each step takes all rows"
    ours, theirs = arrays(one), arrays(other)
    assert ours.keys() == theirs.keys() and {key.split("/")[0] for key in ours} >= {"policy", "opt_state", "updates"}
    for key, value in ours.items():
        assert np.asarray(value).tobytes() == np.asarray(theirs[key]).tobytes(), key
    host = [json.loads((run / "checkpoints/2/host/metadata").read_text()) for run in (one, other)]
    assert host[0] == host[1]


def test_a_reference_that_is_lost_is_made_anew(whole, broken):
    kept, found = (np.load(run / "dpo/reference.npz") for run in (whole, broken))
    assert sorted(kept.files) == ["held_out", "key", "train"] and kept["train"].dtype == np.float64
    for part in kept.files:
        np.testing.assert_array_equal(found[part], kept[part])


def test_a_reference_is_kept_and_read_unless_it_is_torn_or_of_other_pairs(tmp_path):
    path = tmp_path / "reference.npz"
    made = []

    def of(key, value):
        def compute():
            made.append(key)
            return {"train": np.full((2, 2), value)}

        return float(at_start(path, key, ALONE, compute)["train"][0, 0])

    assert [of("one", 1.0), of("one", 2.0), of("other", 3.0), of("other", 4.0)] == [1.0, 1.0, 3.0, 3.0]
    path.write_bytes(path.read_bytes()[:-40])
    assert [of("other", 5.0), of("other", 6.0)] == [5.0, 5.0] and made == ["one", "other", "other"]
    path.write_bytes(b"")
    assert of("other", 7.0) == 7.0 and [entry.name for entry in tmp_path.iterdir()] == ["reference.npz"]


def test_what_was_computed_from_another_model_is_not_learned_against(whole, broken):
    first, second = rows_of_run(broken / "other")[:2]
    assert first["eval/pairs/margin"] == 0, "a model is at no distance from itself"
    np.testing.assert_allclose(second["loss"], np.log(2), rtol=1e-6)


@pytest.fixture(scope="module")
def begin():
    """The model that all runs begin with."""
    return load_pretrained("tiny-random")[0]


ROWS = 32


@jax.jit
def logp_of(model, rows):
    """Log-probabilities of rows' tokens, one completion in each row, where they stand."""
    found, _ = logprob_and_entropy(logits(model, rows), jnp.roll(rows, -1, axis=1))
    return jnp.roll(found, 1, axis=1)


@jax.jit
def values_of(model, rows):
    """Values of the states before each place."""
    return jnp.roll(forward(model.decoder, causal_rows(rows)) @ model.weights.scalar[...], 1, axis=1)


def written(completions):
    """int32[ROWS, 24]: prompts with their completions, given as bytes of text; 257 ends them."""
    rows = np.zeros((ROWS, 24), np.int32)
    for row, (prompt, answer) in zip(rows, completions, strict=False):
        tokens = [*prompt.encode(), *answer.encode(), 257]
        row[: len(tokens)] = tokens
    return rows


def at_answers(found, completions):
    """What is found at the tokens of each answer and its end, and one place behind."""
    return [
        np.asarray(x, np.float64)[len(p) : len(p) + len(a) + 2] for x, (p, a) in zip(found, completions, strict=False)
    ]


def answers_of(row):
    """Prompt and completion of each that a row has."""
    texts = row.get("completions") or [row["chosen"], row["rejected"]]
    return [(row["prompt"], text) for text in texts]


def part(name, folder, held_out):
    """The rows of a table that are held out, or the others."""
    found = loaded(name, folder)
    lines = [int(row.where.rpartition(":")[2]) - 1 for row in (found.held_out if held_out else found.train)]
    assert len(found.held_out) >= 2 and len(found.train) >= 6
    return [TABLES[name][line] for line in lines if line < len(TABLES[name])]  # changed.py adds one


def last(whole, name):
    return rows_of_run(whole / name)[-1]


def test_texts_are_learned_and_tested_by_their_likelihood(whole, folder, begin):
    found = rows_of_run(whole / "sft")
    for row, held_out, model in (
        (found[1]["loss"], False, begin),
        (found[0]["eval/text/loss"], True, begin),
        (found[2]["eval/text/loss"], True, load_model(str(whole / "sft"), "float32", one_device())[0]),
    ):
        texts = [(row["prompt"], row["completion"]) for row in part("sft", folder, held_out)]
        logp = np.concatenate([x[:-1] for x in at_answers(logp_of(model, written(texts)), texts)])
        np.testing.assert_allclose(row, -logp.mean(), rtol=1e-5)
    assert found[2]["eval/text/loss"] != found[0]["eval/text/loss"]
    np.testing.assert_allclose(found[2]["eval/text/perplexity"], np.exp(found[2]["eval/text/loss"]), rtol=1e-9)


def gaps(model, begin, completions):
    """Log-probability of each answer less that at the start, nats."""
    both = [logp_of(one, written(completions)) for one in (model, begin)]
    new, old = ([x[:-1].sum() for x in at_answers(found, completions)] for found in both)
    return np.subtract(new, old).reshape(-1, 2)


def test_preferences_are_learned_against_the_model_at_the_start(whole, folder, begin):
    model = load_model(str(whole / "dpo"), "float32", one_device())[0]
    completions = [both for row in part("dpo", folder, True) for both in answers_of(row)]
    margins = gaps(model, begin, completions) @ [1, -1]
    row = last(whole, "dpo")
    np.testing.assert_allclose(row["eval/pairs/margin"], 0.1 * margins.mean(), rtol=1e-3)
    np.testing.assert_allclose(row["eval/pairs/accuracy"], np.mean(margins > 0))
    second = load_trained(find_run(str(whole / "dpo@1")), one_device())[0]
    completions = [both for row in part("dpo", folder, False) for both in answers_of(row)]
    margins = gaps(second, begin, completions) @ [1, -1]
    np.testing.assert_allclose(row["loss"], np.mean(np.log1p(np.exp(-0.1 * margins))), rtol=1e-4)


def test_the_first_gradient_of_preferences_is_that_of_the_log_ratio(whole, folder, begin):
    completions = [both for row in part("dpo", folder, False) for both in answers_of(row)]
    rows = written(completions)
    mask = np.zeros(rows.shape, np.float32)
    for number, (prompt, answer) in enumerate(completions):
        mask[number, len(prompt) : len(prompt) + len(answer) + 1] = (-1.0) ** number
    slope = jax.jit(jax.grad(lambda model: jnp.sum(mask * logp_of(model, rows))))(begin)
    norm = np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(slope)))
    first = rows_of_run(whole / "dpo")[1]
    np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(first["grad_norm"], norm * 0.1 / 2 / (len(completions) / 2), rtol=1e-4)


def test_a_reward_model_is_tested_by_the_scores_of_whole_answers(whole, folder):
    model = load_model(str(whole / "rm"), "float32", one_device())[0]
    accuracy, margin, mean = [], [], []
    for row in part("rm", folder, True):
        scores = [x[-1] for x in at_answers(values_of(model, written(answers_of(row))), answers_of(row))]
        pairs = [a - b for i, a in enumerate(scores) for b in scores[i + 1 :]]
        accuracy.append(np.mean(np.greater(pairs, 0)))
        margin.append(np.mean(pairs))
        mean.append(np.mean(scores))
    row = last(whole, "rm")
    np.testing.assert_allclose(row["eval/pairs/accuracy"], np.mean(accuracy), rtol=1e-6)
    np.testing.assert_allclose(row["eval/pairs/margin"], np.mean(margin), rtol=1e-3)
    np.testing.assert_allclose(row["eval/pairs/reward_mean"], np.mean(mean), rtol=1e-3)


def test_a_reward_model_begins_with_the_head_that_its_seed_draws(whole, folder, begin):
    model = with_scalar_head(begin, random_scalar_head(begin, 0))
    losses = []
    for row in part("rm", folder, False):
        scores = [x[-1] for x in at_answers(values_of(model, written(answers_of(row))), answers_of(row))]
        ahead = np.array([a - b for i, a in enumerate(scores) for b in scores[i + 1 :]])
        losses.append(np.log1p(np.exp(row["margin"] - ahead)).mean())
    loss = rows_of_run(whole / "rm")[1]["loss"]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    assert abs(loss - np.log1p(np.exp(0.5))) > 1e-3, "no tie"


def test_a_process_reward_model_is_tested_at_the_ends_of_steps(whole, folder, begin):
    trained = load_model(str(whole / "prm"), "float32", one_device())[0]
    drawn = with_scalar_head(begin, random_scalar_head(begin, 0))
    told = last(whole, "prm")["eval/steps/loss"], rows_of_run(whole / "prm")[1]["loss"]
    for model, held_out, loss in zip((trained, drawn), (True, False), told, strict=True):
        losses = []
        for row in part("prm", folder, held_out):
            first, second = row["completions"]
            solution = [(row["prompt"], f"{first}\n{second}")]
            (found,) = at_answers(values_of(model, written(solution)), solution)
            for label, value in zip(row["labels"], (found[len(first) + 1], found[-2]), strict=True):
                losses.append(-label * np.log(1 / (1 + np.exp(-value))) - (1 - label) * np.log(1 / (1 + np.exp(value))))
        np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)


def test_two_processes_learn_what_one_does(whole, folder):
    place = folder / "two"
    processes = launch(2, "train", "dpo.py", "--run_dir", "two/run", "--steps", "1", folder=place)
    assert codes(processes) == [0, 0], [said(place, number) for number in range(2)]
    assert np.load(place / "run/reference.npz")["key"] == np.load(whole / "dpo/reference.npz")["key"]
    for name in ("train", "held_out"):
        found, wanted = (np.load(run / "reference.npz")[name] for run in (place / "run", whole / "dpo"))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for one, two in zip(rows_of_run(whole / "dpo"), rows_of_run(place / "run"), strict=False):
        assert plain(one).keys() == plain(two).keys()
        for key, value in plain(one).items():
            if value is not None:
                np.testing.assert_allclose(two[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


def test_every_metric_is_documented(whole):
    known = list(documented())
    names = {name for run in TABLES for row in rows_of_run(whole / run) for name in row if name != "event/resumed"}
    assert not [name for name in names if not any(re.fullmatch(pattern, name) for pattern in known)]
