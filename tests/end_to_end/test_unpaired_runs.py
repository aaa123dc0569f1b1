"""Preferences without a reference, and without pairs, through the command line: their numbers by hand."""

import json
import re

import numpy as np
import pytest
from commands import commands
from end_to_end.test_data_runs import CONFIG, SUMS, begin, gaps  # noqa: F401 (a fixture)
from end_to_end.test_resume import documented
from end_to_end.test_resume import rows as rows_of_run
from learner.rollouts import one_device

from jaxrl_llm.algorithms.preference import KTO
from jaxrl_llm.data import Pairs, Unpaired, load_texts
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.runs import load_model
from jaxrl_llm.stages.preference import balance_note
from jaxrl_llm.tasks import Table

pytestmark = pytest.mark.slow

SUMS = SUMS[:6]
TABLES = {
    "kto": [{"prompt": f"{a}+{b}=", "completion": f"{a + b * g}", "label": bool(g)} for a, b in SUMS for g in (1, 0)],
    "simpo": [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{100 * a}"} for a, b in SUMS],
}
DATA = {
    name: kind(Table(f"{name}.jsonl"), template="plain", holdout=0.34)
    for name, kind in {"kto": Unpaired, "simpo": Pairs}.items()
}
LOSSES = {"kto": "KTO(0.2)", "simpo": "SimPO()"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Both runs, two steps each of all rows."""
    folder = tmp_path_factory.mktemp("unpaired")
    for name, rows in TABLES.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = f"{DATA[name]}, loss={LOSSES[name]}"
        text = CONFIG.format(kind="Preference", data=data, rows=len(parts(name, folder).train), rank=0)
        (folder / f"{name}.py").write_text("from jaxrl_llm.algorithms.preference import KTO, SimPO\n" + text)
    answers = commands([f"train {name}.py --run_dir {name}" for name in TABLES], folder)
    assert [answer.code for answer in answers] == [0, 0], answers
    return folder


def parts(name, folder):
    """The rows of a table in two parts."""
    data = type(DATA[name])(Table(str(folder / f"{name}.jsonl")), template="plain", holdout=0.34)
    model, tokenizer = load_pretrained("tiny-random")
    return load_texts(data, tokenizer, model.config.tokens.eos)


def test_answers_with_labels_are_learned_against_the_model_at_the_start(whole, begin):  # noqa: F811
    model = load_model(str(whole / "kto"), "float32", one_device())[0]
    held_out = parts("kto", whole).held_out
    rows = [TABLES["kto"][int(row.where.rpartition(":")[2]) - 1] for row in held_out]
    apart = gaps(model, begin, [(row["prompt"], row["completion"]) for row in rows for _ in (0, 1)])[:, 0]
    good = np.array([row["label"] for row in rows])
    assert good.any() and not good.all()
    margins = apart[good][:, None] - apart[~good][None, :]
    first, second = rows_of_run(whole / "kto")[1:]
    np.testing.assert_allclose(second["eval/pairs/margin"], 0.2 * margins.mean(), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(second["eval/pairs/accuracy"], np.mean(margins > 0))
    # At the start every answer is as likely as under the reference, so that each loses 1 / 2.
    np.testing.assert_allclose([first["loss"], first["kto/point"]], [0.5, 0.0], atol=1e-5)
    assert second["loss"] < 0.5 and second["pairs/margin"] > 0


def test_without_a_reference_nothing_is_kept_of_the_model_at_the_start(whole):
    assert (whole / "kto/reference.npz").exists() and not (whole / "simpo/reference.npz").exists()
    first, second = rows_of_run(whole / "simpo")[1:]
    assert second["loss"] < first["loss"] and first["pairs/margin"] != 0


def test_every_metric_is_documented(whole):
    names = {name for run in TABLES for row in rows_of_run(whole / run) for name in row}
    assert not [name for name in names if not any(re.fullmatch(pattern, name) for pattern in documented())]


def test_weights_that_do_not_balance_good_and_bad_answers_are_told(whole):
    rows = parts("kto", whole).train
    assert sum(row.good for row in rows) * 2 == len(rows)
    assert balance_note(rows, KTO()) == balance_note(rows, KTO(desirable=1.3)) == balance_note(rows[:1], KTO()) == ""
    few = [row for place, row in enumerate(rows) if not row.good or place < 2]
    good, bad = 1, len(rows) // 2
    told = f"{good} good answers and {bad} bad ones: KTO's paper advises loss.desirable from {bad} to {4 / 3 * bad:.3g}"
    assert balance_note(few, KTO()) == f"{told} for them, now 1" and balance_note(few, KTO(desirable=bad)) == ""
