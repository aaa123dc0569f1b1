"""Rows that are too long, and rows that cannot be used: refused, dropped or truncated, and counted."""

import json

import numpy as np
import pytest
from tasks.test_texts import ASK, EDITED, GOOD, STOP, TINY, A, B, loaded, plain

from jaxrl_llm.data import Pairs, Steps, Texts, load_texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Table, difference, fingerprint

LONG = {
    Texts: {"prompt": "q", "completion": "b" * 9},
    Pairs: {"prompt": "q", "chosen": "b" * 9, "rejected": "b" * 5 + "c"},
    Steps: {"prompt": "q", "completions": ["a", "b" * 9], "labels": [1, 0.5]},
}
CUT = {Texts: "b" * 6, Pairs: "b" * 6, Steps: "a\n"}


def fitted(kind, rows, most, **settings):
    """The rows of prompts without a template, of ``most`` tokens."""
    return load_texts(kind(rows, template="plain", **settings), TINY, STOP, lambda row: most)


@pytest.mark.parametrize("kind", [Texts, Pairs, Steps])
def test_overlong_rows_are_dropped_or_lose_their_ends(kind):
    rows = [GOOD[kind], LONG[kind]]
    whole = fitted(kind, rows, 99, overlong="drop")
    assert len(whole.train) == 2 and whole.notes == () and whole.left_out == ""
    assert len(fitted(kind, rows, 7).train) == 2, "whoever gives the limit refuses them"
    length = whole.train[1].length
    dropped = fitted(kind, rows, 7, overlong="drop")
    assert [plain(row) for row in dropped.train] == [plain(whole.train[0])]
    assert dropped.notes == (f"of 2 rows 1 overlong dropped (first: rows[1], {length} tokens)",)
    cut = fitted(kind, rows, 7, overlong="truncate")
    assert cut.left_out == f"of 2 rows 1 truncated (first: rows[1], {length} tokens)"
    row = cut.train[1]
    tokens = row.completions[0] if kind is Pairs else row.tokens
    assert TINY.decode(tokens) == CUT[kind] and row.length <= 7 and STOP[0] not in tokens
    if kind is Pairs:
        assert TINY.decode(row.completions[1]) == "bbbbbc", "only its end is cut off"
    if kind is Steps:
        assert (row.ends.tolist(), row.labels.tolist(), row.length) == ([1], [1.0], 3)
        assert plain(fitted(kind, rows[1:], 3, overlong="truncate").train[0]) == plain(row)
        with pytest.raises(InputError, match="1 overlong dropped"):
            fitted(kind, rows[1:], 2, overlong="truncate")
    assert difference(fingerprint(whole.train), fingerprint(cut.train)) == EDITED
    # a prompt that fills the row leaves nothing to learn, and so do completions that are equal up to the limit
    filled = fitted(kind, [GOOD[kind], LONG[kind] | {"prompt": "q" * 7}], 7, overlong="truncate")
    assert len(filled.train) == 1 and "1 overlong dropped" in filled.left_out
    if kind is Pairs:
        assert len(fitted(kind, rows, 6, overlong="truncate").train) == 1


def test_a_turn_that_is_not_learned_does_not_keep_a_truncated_row():
    row = {"messages": [ASK, A | {"weight": 0}, ASK, B]}
    (whole,) = load_texts(Texts([row]), TINY, STOP).train
    unlearned = len(whole.prompt) + int(np.argmax(whole.mask))
    settings = {"overlong": "truncate"}
    kept = load_texts(Texts([row], **settings), TINY, STOP, lambda _: unlearned + 1)
    assert kept.train[0].mask.sum() == 1 and kept.train[0].length == unlearned + 1
    with pytest.raises(InputError, match=r"no row left to train on.* of 1 rows 1 overlong dropped"):
        load_texts(Texts([row], **settings), TINY, STOP, lambda _: unlearned)


@pytest.mark.parametrize("kind", [Texts, Pairs, Steps])
def test_bad_rows_are_dropped_and_counted_on_demand(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    other = json.dumps(GOOD[kind] | {"prompt": "r"})
    path.write_text("\n".join([json.dumps(GOOD[kind]), "{", '["q"]', '{"prompt": "q"}', other]))
    found = loaded(kind(Table(str(path)), bad_rows="drop"))
    assert [row.where for row in found.train] == [f"{path}:1", f"{path}:5"]
    assert found.left_out.startswith(f"of 5 rows 3 bad dropped (first: {path}:2 is not JSON") and found.notes[0]
    with pytest.raises(InputError, match=r"rows.jsonl:2 is not JSON"):
        loaded(kind(Table(str(path))))
    path.write_text("{\n{")
    with pytest.raises(
        InputError, match=r"no row left to train on: 0 from the source.*of 2 rows 2 bad dropped"
    ) as caught:
        loaded(kind(Table(str(path)), bad_rows="drop"))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"none.jsonl not found"):
        loaded(kind(Table(str(tmp_path / "none.jsonl")), bad_rows="drop"))
    (tmp_path / "rows.parquet").write_text("{")
    with pytest.raises(InputError, match=r"rows.parquet is not a Parquet file"):
        loaded(kind(Table(str(tmp_path / "rows.parquet")), bad_rows="drop"))
