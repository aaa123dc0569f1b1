"""References that no answer reaches are counted, named and refused where they are most."""

import json
import threading

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.scorer import REFERENCES_FILE, Scorer
from jaxrl_llm.tasks import Task, load


def rows(answers):
    return [{"prompt": f"{place}?", "answer": answer} for place, answer in enumerate(answers)]


@pytest.mark.parametrize("answers", [["5%", "10%", "1"], ["1/2", "3/4"], ["four", "5 apples"]])
def test_a_task_with_mostly_such_references_is_refused(answers):
    with pytest.raises(
        InputError, match=rf"2 of {len(answers)} references of rows are not .*'{answers[0]}' \(rows.0.\)"
    ):
        load(Task(rows(answers)))


def test_a_few_are_counted_and_named():
    (note,) = load(Task(rows(["1", "2", "3%"]))).notes
    assert note.startswith("1 of 3 references of rows are not reached by any answer") and "'3%' (rows[2])" in note
    assert "answer_extractor last_number" in note
    assert len(load(Task(rows(["1%"])), answers=False).notes) == 1, "nobody reads which answers are right"


@pytest.mark.parametrize("extractor", ["boxed", "whole", "tag:answer", "after:think"])
def test_usual_references_reach_themselves(extractor):
    answers = ["5%", r"\$18.90", "1/2", "x=3", "(A)", "5 cm", "1e-3", "- 5", r"9{,}500", "5 apples", "10:30 PM"]
    assert load(Task(rows(answers), extractor=extractor)).notes == ()


def test_mathematical_ones_are_tried_by_a_sample_and_then_all(tmp_path):
    found = load(Task(rows([*map(str, range(300)), "d}"]), extractor="boxed", verifier="math")).train
    told = []
    with Scorer([], workers=1, folder=tmp_path) as scorer:
        assert scorer.check(found, note=told.append) == []
        kept = tmp_path / REFERENCES_FILE
        for thread in threading.enumerate():
            if thread.name == "references":
                thread.join(60)
        assert len(told) == 1 and told[0].startswith("1 of 301 references of rows are not reached")
        assert list(json.loads(kept.read_text()).values()) == [told]
        assert scorer.check(found, note=told.append) == told[:1], "kept, and not tried again"
        lost = load(Task(rows(["a}", "b}", "1"]), extractor="boxed", verifier="math")).train
        with pytest.raises(InputError, match="2 of 3 references of rows are not reached"):
            scorer.check(lost)
        assert scorer.check(lost, needed=False)
        scorer.check(lost, needed=False, note=told.append)
    assert len(told) == 1, "what the sample has shown is not said again"
