"""Rows in memory: what may be given, what a config.json keeps of them, and the flags beside them."""

import dataclasses
import datetime
import json
import warnings

import pytest

from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.config import Run, changes, from_json, to_json
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Rows, Task, check, load
from jaxrl_llm.tasks.task import LARGEST_SAVED
from jaxrl_llm.types import Problem

DAY = datetime.date(2025, 7, 1)
ROWS = [{"prompt": f"What is {n} + 1?", "answer": n + 1, "day": DAY, "type": "sum"} for n in range(4)]


def through_json(run):
    return from_json(json.loads(json.dumps(to_json(run))))


def test_a_list_of_dictionaries_is_a_source():
    task = Task([*ROWS, {"prompt": [{"role": "user", "content": "x"}], "answer": "1"}], holdout=0.2)
    check(task)
    loaded = load(task)
    problems = sorted((*loaded.train, *loaded.held_out), key=lambda problem: problem.metadata["row"])
    assert [problem.answer for problem in problems] == ["1", "2", "3", "4", "1"] and len(loaded.held_out) == 1
    assert problems[2].metadata == {name: value for name, value in ROWS[2].items() if name != "prompt"} | {
        "row": "rows[2]"
    }
    assert {problem.task for problem in problems} == {"rows"} == {task.label}
    assert Task(Rows(ROWS, answer_field="type", label="kinds")).label == "kinds"


def test_a_data_set_is_a_source_and_gives_what_the_list_gives():
    import datasets

    from_dataset, from_list = (load(Task(source)).train for source in (datasets.Dataset.from_list(ROWS), ROWS))
    assert [dataclasses.astuple(problem) for problem in from_dataset] == [dataclasses.astuple(p) for p in from_list]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rows.jsonl", "source is a str: give a list of dictionaries, a datasets.Dataset .one split of it., a Table"),
        ({"train": ROWS}, "source is a dict: give a list"),
        (None, "source is a NoneType"),
        ((row for row in ROWS), "source is a generator"),
        ([{"prompt": "a", "answer": 1}, {"prompt": "b"}], r"rows\[1\] has no answer in field 'answer' .it has prompt."),
        ([{"prompt": "a", "answer": 1}, ["b"]], r"rows\[1\] is a list; a row is an object"),
    ],
)
def test_what_is_no_table_of_rows_is_refused_in_one_line(source, message):
    with pytest.raises(InputError, match=message) as caught:
        load(Task(source))
    assert "\n" not in str(caught.value)


def test_a_few_rows_are_kept_in_config_json_exactly():
    run = Run("tiny-random", Task(ROWS))
    again = through_json(run)
    assert again == run and changes(again, run) == [] and hash(again.task.source) == hash(run.task.source)
    assert load(again.task) == load(run.task)
    edited = Run("tiny-random", Task([*ROWS[:3], ROWS[3] | {"answer": 0}]))
    (change,) = changes(again, edited)
    assert change.startswith("task.source.rows: [{") and len(change) < 300


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": "x" * LARGEST_SAVED, "answer": 1}], "1 rows in memory are more than 1,000,000 characters of JSON"),
        (
            [*ROWS, {"prompt": "x", "answer": 1, "drawing": object()}],
            r"of 5 rows in memory rows\[4\] holds a value of type object",
        ),
    ],
)
def test_of_other_rows_config_json_says_why_they_are_missing(rows, reason):
    run = Run("tiny-random", Task(rows))
    again = through_json(run)
    with pytest.raises(InputError, match=f"config.json does not hold this run's problems .{reason}.: give them again"):
        load(again.task)
    assert changes(again, run) == [] and len(load(run.task).train) == len(rows)


def test_a_field_that_cannot_be_saved_is_left_out_and_named():
    loaded = load(Task([{"prompt": "x", "answer": 1, "drawing": object(), "level": 2}]))
    assert loaded.train[0].metadata == {"answer": 1, "level": 2, "row": "rows[0]"}
    assert loaded.notes == ("the field drawing is left out: it holds a value of type object, which cannot be saved",)


@dataclasses.dataclass(frozen=True)
class Letters:
    """A source of one's own."""

    count: int = 3

    @property
    def label(self):
        return "letters"

    def problems(self):
        for letter in "abcdefgh"[: self.count]:
            yield Problem(letter, ({"role": "user", "content": letter},), letter, self.label)


@dataclasses.dataclass(frozen=True)
class Nameless:
    """A source that says nothing of itself."""

    def problems(self):
        yield Problem("a", ({"role": "user", "content": "a"},), "a", "")


def test_a_source_of_ones_own_is_a_source():
    check(Task(Letters()))
    assert [problem.answer for problem in load(Task(Letters(), extractor="whole")).train] == ["a", "b", "c"]
    assert Task(Letters()).label == "letters" and Task(Nameless()).label == "Nameless"
    assert load(Task(Nameless(), extractor="whole")).train[0].task == "Nameless"


@dataclasses.dataclass(frozen=True)
class Given:
    """Yields what it is given."""

    found: tuple

    def problems(self):
        return iter(self.found)


def test_what_a_source_of_ones_own_yields_is_made_into_problems_or_refused():
    given = Given((Problem("0", "a", 1, ""), Problem("0", [{"role": "user", "content": "b"}], None, "")))
    found = load(Task(given, verifier="none"))
    assert [problem.prompt for problem in found.train] == [({"role": "user", "content": text},) for text in "ab"]
    assert [problem.answer for problem in found.train] == ["1", ""]
    clashing = Given(tuple(Problem("0", text, "1", "") for text in "abcd"))
    assert len(load(Task(clashing, holdout=0.25)).train) == 3
    with pytest.raises(InputError, match=r"Given\[0\] is a dict; a source's problems.. yields jaxrl_llm.types.Problem"):
        load(Task(Given(({"prompt": "a"},))))
    with pytest.raises(InputError, match=r"Given\[0\]: the prompt is neither text nor chat messages"):
        load(Task(Given((Problem("0", 3, "1", ""),))))
    with pytest.raises(
        InputError, match="0 has no answer, as 1 of 2 problems of Given: give all one, or take rewards that"
    ):
        load(Task(Given((Problem("0", "a", "", ""), Problem("1", "b", "1", "")))))
    check(Task(Given(()), verifier="reasoning_gym"))


def test_the_flags_of_rows_and_of_sources_of_ones_own():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = parse_flags(
            Run, ["--task.source.prompt_field", "question", "--steps", "7"], "p", "", Run("m", Task(ROWS))
        )
        own = parse_flags(Run, ["--task.source.count", "2"], "p", "", Run("m", Task(Letters())))
    assert run.task.source == Rows(ROWS, "question") and run.steps == 7
    assert own.task.source == Letters(2)
    assert not [warning for warning in heard if "Union" in str(warning.message)]
