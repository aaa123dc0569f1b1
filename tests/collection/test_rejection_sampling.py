"""Rows of a model's own answers against answers sampled and checked one by one; a file that survives what ends it."""

import contextlib
import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
from collection.test_episodes import collected_episodes
from several import codes, launch, said
from talkative import LONGEST, answerer, asked, task_in

from jaxrl_llm.collection.rejection_sampling import CollectionCounts, collect_data, collect_rows, open_ledger
from jaxrl_llm.data import Collected, Pairs, Steps, Texts, load_texts
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Failures
from jaxrl_llm.rewards.scorer import Scores
from jaxrl_llm.rollout.generation import SeedSpace, request_seed
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.system.paths import COLLECTED, part_of
from jaxrl_llm.tasks import Table

FORMS = {"texts": Texts, "pairs": Pairs, "steps": Steps}
OPTIONS = {"texts": {"keep": "all"}, "pairs": {"keep": "all", "match_length": True}, "steps": {}}
SEVERAL = """
import sys
from pathlib import Path
from talkative import answerer, asked, task_in
from collection.test_episodes import collected_episodes
from jaxrl_llm.cli.train import linked_processes, take_distributed
from jaxrl_llm.collection.rejection_sampling import collect_rows
with linked_processes(take_distributed(sys.argv[1:])) as peers:
    by = answerer()
    with by.scorer:
        folder = Path(f"own{peers.index}")
        folder.mkdir()
        print(collected_episodes(by, peers, Path("episodes.jsonl")))
        print(collect_rows(by, asked(by, task_in(folder), "texts", keep="all"), Path("rows.jsonl"), peers).rows)
"""


@pytest.fixture(scope="module")
def by():
    found = answerer()
    with found.scorer:
        yield found


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return task_in(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def files(by, task, tmp_path_factory):
    """By kind: (what was asked, the file, what became of the problems), from calls that nothing disturbed."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for kind in FORMS:
        question = asked(by, task, kind, **OPTIONS[kind])
        found[kind] = question, folder / f"{kind}.jsonl", collect_rows(by, question, folder / f"{kind}.jsonl")
    return found


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled(by, question, prompt, seeds, begun=None):
    """Completions of one prompt, asked by themselves."""
    by.engine.start(question.sampling(by.model.config.tokens.eos))
    handles = by.engine.submit([prompt] * len(seeds), seeds, partials=begun)
    while by.engine.busy:
        by.engine.step(by.model)
    done = dict(by.engine.collect())
    return [done[handle] for handle in handles]


def is_right(text, problem):
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and int(numbers[-1]) == int(problem.answer)


def answers_of(by, question):
    """Of each problem what the model says: (tokens, text, whether it is right and whether it ends)."""
    for number, problem in enumerate(question.problems):
        seeds = [question.answer_seed(number, sample) for sample in range(question.data.samples)]
        done = sampled(by, question, question.prompts[problem], seeds)
        texts = [bytes(int(t) for t in c.tokens if t < 256).decode(errors="replace") for c in done]
        yield (
            problem,
            [
                (c.tokens.tolist(), text, is_right(text, problem), c.tokens[-1] == 257)
                for c, text in zip(done, texts, strict=True)
            ],
        )


def test_texts_are_the_right_answers_that_end_word_for_word(by, files):
    question, path, counts = files["texts"]
    wanted = []
    right = 0
    for problem, answers in answers_of(by, question):
        right += sum(answer[2] for answer in answers)
        kept = dict.fromkeys(text for _, text, good, ends in answers if good and ends and text.strip())
        wanted += [(problem.id, text) for text in kept]
    assert [(row["id"], row["completion"]) for row in rows_of(path)] == wanted
    assert 5 < len(wanted) == counts.rows < right == counts.right < counts.answers == 84


def test_the_model_reads_its_rows_as_it_wrote_them(by, files):
    question, path, _ = files["texts"]
    task = question.data.task
    data = Texts(Table(str(path)), template=task.template, system=task.system, suffix=task.suffix)
    loaded = load_texts(data, by.tokenizer, by.model.config.tokens.eos)
    known = {problem.id: (problem, answers) for problem, answers in answers_of(by, question)}
    assert len(loaded.train) == len(rows_of(path))
    for text, row in zip(loaded.train, rows_of(path), strict=True):
        problem, answers = known[row["id"]]
        np.testing.assert_array_equal(text.prompt, question.prompts[problem])
        assert any(text.tokens.tolist() == tokens for tokens, *_ in answers) or "\ufffd" in row["completion"]
        assert text.mask.all()
    assert {type(row["prompt"]) for row in rows_of(path)} == {str, list}


def test_pairs_are_a_right_and_a_wrong_answer_and_no_answer_is_used_twice(by, files):
    question, path, counts = files["pairs"]
    rows = rows_of(path)
    assert 0 < len(rows) == counts.rows
    known = dict((problem.id, (problem, answers)) for problem, answers in answers_of(by, question))
    for row in rows:
        problem, answers = known[row["id"]]
        ended = {text: good for _, text, good, ends in answers if ends}
        assert ended[row["chosen"]] and not ended[row["rejected"]]
    for problem, answers in known.values():
        texts = {text: good for _, text, good, ends in answers if ends and text.strip()}
        used = [row[side] for row in rows if row["id"] == problem.id for side in ("chosen", "rejected")]
        assert len(set(used)) == len(used) == 2 * min(sum(texts.values()), len(texts) - sum(texts.values()))
    loaded = load_texts(Pairs(Table(str(path)), template="chatml"), by.tokenizer, by.model.config.tokens.eos)
    assert len(loaded.train) == len(rows)


@pytest.mark.slow
def test_a_label_is_the_share_of_continuations_that_are_right(by, files):
    question, path, counts = files["steps"]
    rows = rows_of(path)
    k = question.data.continuations
    recounted, more = 0, 0
    for number, (problem, answers) in enumerate(answers_of(by, question)):
        usable = {}
        for sample, (tokens, text, good, ends) in enumerate(answers):
            if ends and text.strip():
                usable.setdefault(text, (sample, tokens, good))
        mine = [row for row in rows if row["id"] == problem.id]
        assert ["\n".join(row["completions"]) for row in mine] == list(usable)
        for row, (sample, tokens, good) in zip(mine, usable.values(), strict=True):
            assert all(step.strip() for step in row["completions"]) and len(row["labels"]) == len(row["completions"])
            assert row["labels"][-1] == good and 0 <= min(row["labels"]) <= max(row["labels"]) <= 1
            whole = sampled(by, question, question.prompts[problem], [question.answer_seed(number, sample)])[0]
            for index, label in enumerate(row["labels"][:-1]):
                begin = len("".join(step + "\n" for step in row["completions"][: index + 1]).encode())
                seeds = [question.continuation_seed(number, sample, begin, c) for c in range(k)]
                done = sampled(by, question, question.prompts[problem], seeds, [first_tokens(whole, begin)] * k)
                assert all(c.tokens[:begin].tolist() == tokens[:begin] for c in done)
                assert label == np.mean([is_right(by.tokenizer.decode(c.tokens), problem) for c in done])
                recounted += 1
                more += sum(len(c.tokens) - begin for c in done)
    assert recounted > 5 and counts.tokens == counts.length + more
    assert len({label for row in rows for label in row["labels"]}) > 2
    loaded = load_texts(Steps(Table(str(path)), template="chatml"), by.tokenizer, by.model.config.tokens.eos)
    assert [len(solution.ends) for solution in loaded.train] == [len(row["labels"]) for row in rows]


def test_what_is_told_at_the_end(by, files):
    question, _, counts = files["texts"]
    answers = [answers for _, answers in answers_of(by, question)]
    assert counts.problems == 7 and counts.seconds > 0
    assert counts.solved == sum(any(answer[2] for answer in some) for some in answers)
    assert counts.ended == sum(answer[3] for some in answers for answer in some)
    assert counts.length == counts.tokens == sum(len(answer[0]) for some in answers for answer in some)
    assert counts.numbers()["pass@1"] == counts.right / 84
    told = CollectionCounts(4, 2, 32, 8, 20, 5, 640, 1000, 2.5).lines()
    assert told[0] == "  pass@1        25.0 %  8 of 32 answers are right, 20 came to their end"
    assert told[1:3] == [
        "  solved        50.0 %  2 of 4 problems have a right answer",
        "  length        20.0 tokens",
    ]
    assert told[3:] == ["  sampled     1,000 tokens in 2.5 s", "  rows        5"]


class Stop(Exception):
    """Ends a call in the midst."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_stopped_anywhere_it_goes_on_to_the_same_file(by, files, tmp_path, kind):
    question, whole, counts = files[kind]
    path = tmp_path / "rows.jsonl"

    def stop(text):
        if text.startswith(f"collecting {problems}/7"):
            raise Stop

    for problems in (0, 2, 4):
        with pytest.raises(Stop):
            collect_rows(by, question, path, status=stop)
        lines = part_of(path).read_bytes().splitlines(keepends=True)
        assert not path.exists() and len(lines) == 1 + problems
        # What a process leaves that is killed while it writes: whole lines of some problems, and half a line.
        part_of(path).write_bytes(b"".join(lines[: 1 + max(problems - 1, 0)]) + b'{"rows": [{"prompt": "to')
    heard = []
    found = collect_rows(by, question, path, status=heard.append)
    assert path.read_bytes() == whole.read_bytes() and [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
    assert dataclasses.replace(found, seconds=0) == dataclasses.replace(counts, seconds=0)
    assert heard[-1].startswith("collecting 6/7 problems")
    with pytest.raises(InputError, match="is there already: give another file with --out"):
        collect_rows(by, question, path)


@pytest.mark.parametrize(("change", "words"), [
    ({"temperature": 0.9}, r"temperature: 1.0 -> 0.9\): take the old ones"),
    ({"top_p": 0.9}, "top_p"),
    ({"samples": 5}, "samples: 12 -> 5"),
    ({"keep": "first"}, "keep: all -> first"),
    ({"match_length": False}, "match_length"),
    ({"cut_off": True}, "cut_off: False -> True"),
])  # fmt: skip
def test_a_file_that_was_begun_otherwise_is_left_alone(by, files, tmp_path, change, words):
    question, _, _ = files["pairs"]
    path = tmp_path / "rows.jsonl"
    with contextlib.suppress(Stop):
        collect_rows(by, question, path, status=lambda text: (_ for _ in ()).throw(Stop))
    before = part_of(path).read_bytes()
    other = dataclasses.replace(question, data=dataclasses.replace(question.data, **change))
    with pytest.raises(InputError, match=words):
        collect_rows(by, other, path)
    for other in (dataclasses.replace(question, seed=4), dataclasses.replace(question, problems=question.problems[1:])):
        with pytest.raises(InputError, match="was begun with other settings"):
            collect_rows(by, other, path)
    assert part_of(path).read_bytes() == before


def test_two_at_one_file_are_refused_and_so_is_another_file_of_that_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    with (
        open_ledger(path, {}),
        pytest.raises(InputError, match="is being written by another process"),
        open_ledger(path, {}),
    ):
        pass
    part_of(path).write_text('{"prompt": "mine"}\n')
    with pytest.raises(InputError, match="is not a file of a collection"), open_ledger(path, {}):
        pass
    assert part_of(path).read_text() == '{"prompt": "mine"}\n'


class Lost:
    """A scorer whose verifier fails for some of the answers."""

    def __init__(self, every):
        self.every = every

    def score(self, items, only):
        nothing = np.zeros(len(items))
        failed = np.arange(len(items)) % self.every == 0
        return Scores(nothing, nothing, {}, Failures(len(items), 0, {}, {"": "no server"}), failed)


def test_answers_that_cannot_be_verified_are_counted_and_refused_where_none_can(by, task, tmp_path):
    question = asked(by, task, "texts", keep="all")
    some = collect_rows(dataclasses.replace(by, scorer=Lost(2)), question, tmp_path / "some.jsonl")
    assert some.failed == some.answers / 2 and some.numbers()["failed_fraction"] == 0.5
    with pytest.raises(InputError, match="could be verified: no server"):
        collect_rows(dataclasses.replace(by, scorer=Lost(1)), question, tmp_path / "none.jsonl")


def test_random_numbers_are_those_of_no_other_request(by, task):
    question = asked(by, task, "steps")
    answers = [question.answer_seed(number, sample) for number in range(7) for sample in range(12)]
    places = itertools.product(range(7), range(12), range(LONGEST), range(4))
    continued = [question.continuation_seed(*place) for place in places]
    assert len({*answers, *continued}) == len(answers) + len(continued)
    assert request_seed(3, SeedSpace.EVALUATION + 10**9) < min(answers) and max(answers) < min(continued)
    assert max(continued) < request_seed(4, 0)
    with pytest.raises(InputError, match="ask fewer at a time"):
        dataclasses.replace(question, problems=question.problems * 1000, max_new_tokens=10**6)


def test_a_run_collects_once_and_then_reads_a_table(by, task, tmp_path):
    data = Texts(Collected(task, samples=6, keep="all"), holdout=0.25)
    problems = asked(by, task, "texts").problems
    first = collect_data(data, problems, lambda: by, LONGEST, 3, tmp_path, ALONE, str)
    again = collect_data(data, problems, lambda: pytest.fail("asked twice"), LONGEST, 3, tmp_path, ALONE, str)
    assert first == again and first.source == Table(str(tmp_path / COLLECTED))
    assert (first.template, first.suffix, first.holdout, first.label) == ("chatml", "!\n", 0.25, "numbers")
    loaded = load_texts(first, by.tokenizer, by.model.config.tokens.eos)
    assert loaded.train and loaded.held_out
    with pytest.raises(InputError, match=r"none of 1 answers to numbers makes a row \(0 are right"):
        hopeless = Texts(Collected(task, samples=1))
        collect_data(hopeless, problems[:1], lambda: by, 1, 3, tmp_path / "other", ALONE, str)
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.slow
def test_of_several_processes_the_first_writes_what_one_would(by, files, tmp_path):
    processes = launch(2, folder=tmp_path / "logs", program=SEVERAL)
    assert codes(processes) == [0, 0], [said(tmp_path / "logs", number)[-5:] for number in range(2)]
    rows = [said(tmp_path / "logs", number)[-1] for number in range(2)]
    assert rows[0] == rows[1] == str(files["texts"][2].rows)
    assert (tmp_path / "rows.jsonl").read_bytes() == files["texts"][1].read_bytes()
    alone = collected_episodes(by, ALONE, tmp_path / "alone.jsonl")
    assert [said(tmp_path / "logs", number)[-2] for number in range(2)] == [alone] * 2
    assert (tmp_path / "episodes.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert alone.startswith("24 episodes, ") and (tmp_path / "alone.jsonl").stat().st_size
