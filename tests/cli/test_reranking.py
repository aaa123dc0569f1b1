"""``jaxrl-llm eval --rerank``: the best of several answers, against scores of each of them alone."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from commands import assert_refused, commands
from stages.test_judges import scalar_model
from talkative import LONGEST, talkative, task_in

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.preference import solution_score
from jaxrl_llm.cli import eval as command
from jaxrl_llm.cli.asking import load_policy
from jaxrl_llm.engine import Sampling
from jaxrl_llm.models import save_pretrained, scores
from jaxrl_llm.rollout import Engine
from jaxrl_llm.rollout.evaluate import majority, reranked
from jaxrl_llm.rollout.generation import OpenRequests, generate_all
from jaxrl_llm.stages.judges import first_fall
from jaxrl_llm.stages.taught import RewardFormat
from jaxrl_llm.tasks import Prompts, extract

pytestmark = pytest.mark.slow

SAMPLES = 4
STEP = re.compile(r"(?:[^\S\n]*\n)*[^\n]*\S[^\n]*(?:\n[^\S\n]*(?=\n|\Z))*\n?")
"""A line that is not blank, with the blank ones behind it; the first takes those before it too."""
CONFIG = """
import dataclasses
from jaxrl_llm.config import load_config
from jaxrl_llm.tasks import Table, Task
task = Task(Table("{table}"), template="chatml", suffix="!\\n")
base = load_config("smoke")[1]
engine = dataclasses.replace(base.rollout.engine, slots=16)
rollout = dataclasses.replace(base.rollout, engine=engine, max_new_tokens={new})
config = dataclasses.replace(base, task=task, rollout=rollout)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerank")
    task_in(folder, 24)
    (folder / "counting.py").write_text(CONFIG.format(table=folder / "numbers.jsonl", new=LONGEST))
    model, tokenizer = talkative()
    save_pretrained(model, tokenizer, folder / "model")
    save_pretrained(scalar_model("one"), tokenizer, folder / "rm")
    told = RewardFormat("ranking", score_at="stop").to_json()
    save_pretrained(scalar_model("one"), tokenizer, folder / "answers", None, told)
    return folder


def evaluated(folder, by, give_up_after=0, chunk=None):
    """What an evaluation found, its settings being those of the command line."""
    settings = configs.find_config(str(folder / "counting.py")).located
    engine = dataclasses.replace(settings.rollout.engine, chunk=chunk or settings.rollout.engine.chunk)
    rollout = dataclasses.replace(settings.rollout, engine=engine)
    settings = dataclasses.replace(settings, rollout=rollout)
    options = dataclasses.replace(
        command.default_options(settings),
        samples=SAMPLES,
        temperature=1.0,
        rerank=str(folder / ("answers" if by == "score" else "rm")),
        rerank_by=by,
        give_up_after=give_up_after,
    )
    command.check_options(options, settings)
    _, (found,), _, _ = command.evaluate_answers(str(folder / "model"), None, settings, options, False, None)
    return found, settings.task


def step_ends(made):
    """Characters of the answer, each of which is a token, up to the end of each step."""
    return np.cumsum([len(step) for step in STEP.findall(made.text)]).tolist()


def by_hand(folder, found, task, by):
    """The score of each answer, every prefix in a row of its own."""
    tokenizer = load_policy(str(folder / "model"), None).tokenizer
    prompts = Prompts(task, tokenizer)
    prefixes, whose = [], []
    for number, (problem, row) in enumerate(zip(found.problems, found.completions, strict=True)):
        for place, made in enumerate(row):
            for end in [len(made.tokens)] if by == "score" else step_ends(made):
                prefixes.append([*prompts[problem], *made.tokens[:end]])
                whose.append((number, place))
    rows = np.zeros((len(prefixes), max(map(len, prefixes))), np.int32)
    for row, prefix in zip(rows, prefixes, strict=True):
        row[: len(prefix)] = prefix
    values = np.asarray(scores(scalar_model("one"), rows, [len(prefix) for prefix in prefixes]), np.float64)
    return [[values[[w == (n, g) for w in whose]] for g in range(SAMPLES)] for n in range(len(found.problems))]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def total(steps, by):
    """One score of the scores of an answer's steps."""
    if by == "score":
        return steps[0]
    if not len(steps):
        return 0.0
    beliefs = sigmoid(steps)
    if by == "last":
        return beliefs[-1]
    lowest = by == "minimum"
    wanted = min(beliefs) if lowest else math.prod(beliefs)
    np.testing.assert_allclose(solution_score(beliefs, by), wanted, 1e-5)
    return wanted


@pytest.mark.parametrize("by", ["score", "product", "minimum", "last"])
def test_the_best_answer_is_the_one_whose_own_score_is_highest(folder, by):
    found, task = evaluated(folder, by)
    values = by_hand(folder, found, task, by)
    assert by == "score" or any(len(steps) > 1 for row in values for steps in row)
    table = np.array([[total(steps, by) for steps in row] for row in values])
    best = found.correct[np.arange(len(table)), table.argmax(axis=1)]
    np.testing.assert_array_equal(found.best, best)
    votes = sigmoid(table) if by == "score" else table
    for row, problem, weights, made in zip(found.correct, found.problems, votes, found.completions, strict=True):
        sums = {}
        for right, weight, one in zip(row, weights, made, strict=True):
            answer = extract(one.text, problem.extractor)
            if answer is not None:
                known = sums.setdefault(answer, [0.0, right])
                known[0] += weight
        wanted = max(sums.values(), key=lambda pair: pair[0])[1] if sums else 0
        assert found.weighted[found.problems.index(problem)] == wanted
    assert 0 < found.best.mean() < 1 and not np.array_equal(found.best, found.correct[:, 0])


@pytest.fixture(scope="module")
def by_last(folder):
    """An evaluation in which nothing is ended, and the score of each step of its answers."""
    found, task = evaluated(folder, "last")
    return found, by_hand(folder, found, task, "last")


@pytest.mark.parametrize("chunk", [2, 16])
def test_an_answer_ends_with_the_step_at_which_its_score_has_fallen(folder, by_last, chunk):
    whole, values = by_last
    found, _ = evaluated(folder, "last", 1, chunk)
    ended = 0
    for n, (row, cut_row) in enumerate(zip(whole.completions, found.completions, strict=True)):
        for g, (made, cut) in enumerate(zip(row, cut_row, strict=True)):
            said = values[n][g]
            hopeless = [j for j in range(1, len(said) - 1) if said[j] < said[j - 1]]  # another step has begun by then
            kept = step_ends(made)[hopeless[0]] if hopeless else len(made.tokens)
            np.testing.assert_array_equal(cut.tokens, made.tokens[:kept])
            assert (cut.finish_reason, cut.text) == (
                ("aborted", made.text[:kept]) if hopeless else (made.finish_reason, made.text)
            )
            assert found.correct[n, g] == (whole.correct[n, g] and not hopeless)
            ended += bool(hopeless)
    assert 0 < ended < whole.correct.size
    assert found.metrics()["eval/numbers/given_up"] == pytest.approx(ended / whole.correct.size)
    assert "eval/numbers/given_up" not in whole.metrics()


@pytest.mark.parametrize(
    ("scores", "falls", "wanted"),
    [
        ([0.5, 0.4, 0.3], 2, 2),
        ([0.5, 0.4, 0.4, 0.3], 2, None),
        ([0.5, 0.4, 0.6, 0.5, 0.4, 0.3], 2, 4),
        ([0.5, 0.4, 0.3], 3, None),
        ([0.5], 1, None),
    ],
)
def test_only_falls_in_a_row_count(scores, falls, wanted):
    assert first_fall(scores, falls) == wanted


def test_what_has_no_hope_is_not_sampled_on():
    model, tokenizer = talkative()
    engine = Engine(model, 2, 96, 2)
    prompts = [np.asarray(tokenizer(text)["input_ids"]) for text in ("one", "two", "three", "four")]
    sampling = Sampling(1.0, 0, 1.0, 64)

    def watch(made):
        return {n: 3 for n, one in made.items() if n != 2 and len(one.tokens) >= 3}

    def answers(watch=None):
        requests = OpenRequests(engine, sampling)
        requests.submit(range(4), prompts, range(4))
        return list(generate_all(requests, model, tokenizer, watch=watch).values())

    ended = answers(watch)
    assert [len(one.tokens) for one in ended] == [3, 3, 64, 3]
    assert [one.finish_reason for one in ended] == ["aborted", "aborted", "length", "aborted"]
    steps = engine.decode_steps
    assert 64 <= steps <= 72  # of the one that goes on; 128 where the others do too
    whole = answers()
    assert engine.decode_steps == 128
    for one, other in zip(ended, whole, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens[: len(one.tokens)])
        assert other.text.startswith(one.text)


def test_what_was_ended_has_no_vote_and_is_never_chosen(by_last):
    found, _ = by_last
    said = dataclasses.replace(found.completions[0][0], text="7", finish_reason="stop")
    votes = [said, *[dataclasses.replace(said, text="8", finish_reason="aborted")] * 3]
    right = np.array([True, False, False, False])
    problem = dataclasses.replace(found.problems[0], extractor="last_number")
    assert majority(problem, votes, right) == 1
    one = dataclasses.replace(found, problems=(problem,), completions=(tuple(votes),), correct=right[None])
    chosen = reranked(one, np.array([[0.1, 0.9, 0.9, 0.9]]), np.array([[0.1, 0.9, 0.9, 0.9]]))
    assert (chosen.best[0], chosen.weighted[0]) == (1, 1)


LINE = "eval model --config counting.py --temperature 1 --samples 4"
SHOWN = {
    "json": f"{LINE} --rerank rm --rerank_by product --json",
    "table": f"{LINE} --rerank rm --rerank_by product --give_up_after 3",
}
REFUSED = {
    f"{LINE} --rerank rm --samples 1": ["--rerank chooses one of several", "--samples is 1: set it to at least 2"],
    f"{LINE} --rerank_by last": ["--rerank_by last needs a process reward model: add --rerank"],
    f"{LINE} --give_up_after 2": ["--give_up_after 2 needs a process reward model: add --rerank"],
    f"{LINE} --rerank rm --give_up_after 2": ["--give_up_after 2 reads the scores of steps", "--rerank_by product"],
    f"{LINE} --rerank rm --rerank_by last --give_up_after -1": ["--give_up_after must be at least 0, got -1"],
    f"{LINE} --rerank nowhere": ["--rerank: no such model: nowhere"],
    f"{LINE} --rerank model": ["--rerank: model is a language model, which gives no score"],
    f"{LINE} --rerank rm --task.verifier none": ["--rerank has nothing to measure on task numbers", "verifier"],
    f"{LINE} --rerank rm --rerank_by best": ["--rerank_by: expected one of score, product, minimum, last, got 'best'"],
}


@pytest.fixture(scope="module")
def answers(folder):
    lines = [*SHOWN.values(), *REFUSED]
    return dict(zip([*SHOWN, *REFUSED], commands(lines, folder), strict=True))


def test_people_and_programs_see_it_beside_the_other_numbers(answers):
    for name in SHOWN:
        assert answers[name].code == 0, answers[name].err
    said = json.loads(answers["json"].out)
    assert (said["rerank"], said["rerank_by"]) == ("rm", "product")
    table = answers["table"].out.splitlines()[2:]  # after what is asked, and that all problems are
    names = ["avg@4", "pass@2", "pass@4", "maj@4", "rerank@4", "weighted", "given", "length"]
    assert [row.split()[0] for row in table] == names
    assert table[4].split()[1] == f"{100 * said['eval/numbers/rerank@4']:.1f}"
    assert len({row.index(".") for row in table}) == 1, "one column"


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_choose_is_refused_in_one_line(answers, line):
    assert_refused(answers[line], *REFUSED[line])
