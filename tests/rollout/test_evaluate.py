"""pass@k against counting all subsets, majority votes, and evaluation with a real engine."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from rollout.simulation import ToyEngine

from jaxrl_llm.cli.eval import EvalOptions, task_lines
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Accuracy, Format, Function, Scorer
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.rollout import evaluate as evaluation
from jaxrl_llm.rollout.evaluate import (
    EvaluationSet,
    TaskEvaluation,
    evaluate,
    majority,
    pass_at,
    reranked,
    score_answers,
)
from jaxrl_llm.rollout.generation import Answerer, SeedSpace, request_seed
from jaxrl_llm.tasks import Prompts, Table, Task, load
from jaxrl_llm.types import Completion, Episode, Problem

PROBLEM = Problem("1", ({"role": "user", "content": "1 + 1?"},), "2", "sums")


def completion(text):
    return Completion(
        np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", np.ones(3, bool), np.zeros(3, np.int32), text=text
    )


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n):
    correct = np.arange(n)[None] < np.arange(n + 1)[:, None]
    for k in range(1, n + 1):
        wanted = [
            np.mean([any(row[list(subset)]) for subset in itertools.combinations(range(n), k)]) for row in correct
        ]
        np.testing.assert_allclose(pass_at(correct, k), wanted, atol=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.zeros((1, 1024), bool)
    correct[0, 0] = True
    np.testing.assert_allclose(pass_at(correct, 512), 0.5)


@pytest.mark.parametrize(("texts", "right", "wanted"), [
    (["2", "3", "2"], [1, 0, 1], 1.0),
    (["3", "2", "3"], [0, 1, 0], 0.0),
    (["3", "2"], [0, 1], 0.0),
    (["2", "3"], [1, 0], 1.0),
    (["no number", "none", "2"], [0, 0, 1], 1.0),
    (["nothing", "at all"], [0, 0], 0.0),
])  # fmt: skip
def test_the_most_frequent_answer_counts_and_ties_go_to_the_first(texts, right, wanted):
    assert majority(PROBLEM, [completion(t) for t in texts], np.array(right, bool)) == wanted


def test_answers_vote_together_in_whatever_width_they_are_written():
    whole = dataclasses.replace(PROBLEM, extractor="whole")
    assert majority(whole, [completion(t) for t in ("3", "２", "2", "3", "２")], np.array([0, 1, 1, 0, 1], bool)) == 1.0


@pytest.mark.parametrize(("weights", "wanted"), [
    ([0.9, 0.2, 0.3, 0.0], 1.0),
    ([0.5, 0.3, 0.4, 9.0], 0.0),
    ([0.5, 0.25, 0.25, 1.0], 1.0),
    ([0.0, 0.0, 0.0, 1.0], 1.0),
])  # fmt: skip
def test_a_weighted_majority_adds_up_what_each_answer_is_worth(weights, wanted):
    texts, right = ["2", "3", "3", "no number"], np.array([1, 0, 0, 1], bool)
    assert majority(PROBLEM, [completion(t) for t in texts], right, np.array(weights)) == wanted


def test_the_answer_that_a_reward_model_likes_best_counts():
    texts = (("2", "3", "2"), ("3", "2", "5"), ("3", "2", "5"))
    rows = tuple(tuple(completion(text) for text in row) for row in texts)
    correct = np.array([[text == "2" for text in row] for row in texts])
    found = TaskEvaluation("sums", (PROBLEM,) * 3, rows, correct, np.array([1.0, 0.0, 0.0]))
    scores = np.array([[-3.0, -1.0, -2.0], [0.5, 0.75, 0.5], [4.0, 4.0, -8.0]])
    assert not [name for name in found.metrics() if "rerank" in name or "weighted" in name]
    chosen = reranked(found, scores, np.array([[0.3, 0.5, 0.3], [0.5, 0.6, 0.5], [0.2, 0.2, 0.1]]))
    assert chosen.best.tolist() == [0.0, 1.0, 0.0] and chosen.weighted.tolist() == [1.0, 1.0, 0.0]
    metrics = chosen.metrics()
    assert metrics["eval/sums/rerank@3"] == 1 / 3 and metrics["eval/sums/weighted_maj@3"] == 2 / 3
    assert metrics.items() >= found.metrics().items()


def test_metrics_have_the_pinned_names():
    rows = tuple(tuple(completion("2") for _ in range(6)) for _ in range(2))
    correct = np.array([[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
    found = TaskEvaluation("sums", (PROBLEM, PROBLEM), rows, correct, np.array([1.0, 0.0])).metrics()
    names = {"pass@1", "pass@2", "pass@4", "pass@6", "maj@6", "problems", "mean_length"}
    assert found.keys() == {f"eval/sums/{name}" for name in names}
    np.testing.assert_allclose(
        [found["eval/sums/pass@1"], found["eval/sums/pass@2"], found["eval/sums/pass@6"]], [1 / 12, 1 / 6, 0.5]
    )
    assert (found["eval/sums/maj@6"], found["eval/sums/problems"], found["eval/sums/mean_length"]) == (0.5, 2.0, 3.0)
    single = TaskEvaluation("sums", (PROBLEM,), rows[:1], np.array([[True]]), np.array([1.0])).metrics()
    assert single.keys() == {"eval/sums/pass@1", "eval/sums/problems", "eval/sums/mean_length"}


def test_without_a_verifier_the_mean_reward_of_what_could_be_scored_is_reported():
    rows = tuple(tuple(completion("2") for _ in range(2)) for _ in range(2))
    found = TaskEvaluation("sums", (PROBLEM, PROBLEM), rows, None, None, np.array([[1.0, np.nan], [0.5, 3.0]]))
    assert found.metrics() == {"eval/sums/reward": 1.5, "eval/sums/problems": 2.0, "eval/sums/mean_length": 3.0}
    nothing = TaskEvaluation("sums", (PROBLEM,), rows[:1], None, None, np.full((1, 2), np.nan))
    assert np.isnan(nothing.metrics()["eval/sums/reward"])


NAN = float("nan")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_answers_that_could_not_be_scored_count_nowhere(k):
    """As if they had not been asked for: each problem has the chances of its other answers."""
    draw = np.random.default_rng(3)
    correct, failed = draw.random((6, 4)) < 0.5, draw.random((6, 4)) < 0.4
    failed[0], failed[1] = True, False
    found = pass_at(correct & ~failed, k, failed)
    for row, lost, value in zip(correct, failed, found, strict=True):
        left = row[~lost]
        wanted = NAN if len(left) < k else pass_at(left[None], k)[0]
        np.testing.assert_equal(value, wanted)


def test_an_evaluation_tells_what_could_not_be_scored():
    rows = (tuple(map(completion, ("2", "2", "3", "2"))), tuple(map(completion, "3333")))
    failed = np.array([[0, 1, 1, 0], [1, 1, 1, 1]], bool)
    correct, maj = np.array([[1, 0, 0, 1], [0, 0, 0, 0]], bool), np.array([1.0, 0.0])
    found = TaskEvaluation("sums", (PROBLEM, PROBLEM), rows, correct, maj, failed=failed, failure="no server")
    metrics = found.metrics()
    assert metrics["eval/sums/pass@1"] == metrics["eval/sums/pass@2"] == metrics["eval/sums/maj@4"] == 1
    assert metrics["eval/sums/failed_fraction"] == 0.75 and np.isnan(metrics["eval/sums/pass@4"])
    whole = TaskEvaluation("others", (PROBLEM,), rows[:1], correct[:1], maj[:1])
    both = evaluation.EvaluationReport({}, (found, whole)).metrics()
    assert both["eval/average/failed_fraction"] == 0.375 and "eval/others/failed_fraction" not in both
    assert both["event/evaluation_failed"] == "sums: 6 of 8 answers could not be scored: no server"
    lost = dataclasses.replace(found, failed=np.ones((2, 4), bool))
    assert np.isnan([lost.metrics()[f"eval/sums/{name}"] for name in ("pass@1", "pass@2", "maj@4")]).all()
    evaluation.EvaluationReport({}, (found,)).check()
    with pytest.raises(InputError, match="sums: 8 of 8 answers could not be scored: no server"):
        evaluation.EvaluationReport({}, (found, lost)).check()


def broken(completion):
    if "3" in completion.text:
        raise OSError("no server")
    return 1.0


def test_a_reward_that_fails_is_no_reward_of_0():
    problem = dataclasses.replace(PROBLEM, verifier="none")
    with Scorer((Function(broken),), 1) as scorer:
        for texts, reward, fraction in (("2323", 1.0, 0.5), ("3333", NAN, 1.0), ("2222", 1.0, 0.0)):
            found = score_answers("sums", (problem,), (tuple(map(completion, texts)),), scorer)
            np.testing.assert_equal(found.metrics()["eval/sums/reward"], reward)
            assert found.metrics().get("eval/sums/failed_fraction", 0.0) == fraction
            assert ("no server" in found.failure) == bool(fraction)


@pytest.mark.parametrize("verifier", ["none", "match"])
def test_an_episode_whose_environment_fails_is_left_out_of_an_evaluation(verifier):
    fine, lost = Episode(end="completed", reward=2.0), Episode(end="environment_error", reward=NAN, error="no server")
    row = tuple(dataclasses.replace(completion("2"), episode=one) for one in (fine, lost, fine, lost))
    problem = dataclasses.replace(PROBLEM, verifier=verifier)
    with Scorer((), 1) as scorer:
        found = score_answers("sums", (problem,), (row,), scorer)
    name, worth = {"none": ("reward", 2.0), "match": ("pass@1", 1.0)}[verifier]
    assert found.metrics()[f"eval/sums/{name}"] == worth and found.metrics()["eval/sums/failed_fraction"] == 0.5
    assert found.failure.startswith("no server")


def test_a_verifier_that_cannot_tell_is_no_wrong_answer():
    """Of objects of the program alone nobody else knows what is equal."""
    program = (
        "class V:\n    def __init__(self, x):\n        self.x = x\n"
        "    def __add__(self, other):\n        return V(self.x + other.x)\n"
        "    def __eq__(self, other):\n        return self.x == other.x"
    )
    row = tuple(map(completion, (f"```python\n{program}\n```", "```python\nx = 1\n```")))
    problem = dataclasses.replace(
        PROBLEM, extractor="whole", verifier="code", metadata={"tests": ["assert V(1) + V(2) == V(3)"]}
    )
    with Scorer((), 1) as scorer:
        found = score_answers("programs", (problem,), (row,), scorer)
    assert found.failed.tolist() == [[True, False]] and "not counted" in found.failure
    assert found.metrics()["eval/programs/pass@1"] == 0 and found.metrics()["eval/programs/failed_fraction"] == 0.5


class NotingEngine(ToyEngine):
    """Remembers the seeds that it was last given."""

    def submit(self, prompts, seeds, *rest):
        self.seeds = list(seeds)
        return super().submit(prompts, seeds, *rest)


def test_evaluation_and_training_never_share_a_seed():
    assert request_seed(3, SeedSpace.EVALUATION - 1) < request_seed(3, SeedSpace.EVALUATION) < request_seed(4, 0)
    _, tokenizer = load_pretrained("tiny-random")
    problems = [dataclasses.replace(PROBLEM, id=str(n), verifier="none") for n in range(2)]
    prompts = Prompts(Task([{"prompt": "?"}], template="chatml"), tokenizer)
    engine = NotingEngine(4)
    with Scorer((Format("a"),)) as scorer:
        evaluate(Answerer(engine, None, tokenizer, scorer), EvaluationSet(prompts, problems, 3, 5), Sampling())
    assert engine.seeds == [request_seed(5, SeedSpace.EVALUATION + n) for n in range(6)]
    assert min(engine.seeds) > request_seed(5, SeedSpace.EVALUATION - 1), (
        "training would have to ask for 2^39 completions"
    )


def test_a_real_evaluation_is_the_same_twice_and_counts_what_it_says(tmp_path):
    path = tmp_path / "digits.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}", "answer": n}) + "\n" for n in range(4)))
    task = Task(Table(str(path)), template="chatml")
    problems = load(task).train
    model, tokenizer = load_pretrained("tiny-random")
    engine = Engine(model, slots=4, max_length=64, chunk=4)
    heard = []
    with Scorer((Accuracy(),), 1) as scorer:
        asked = EvaluationSet(Prompts(task, tokenizer), problems, 3, 5)
        rules = Sampling(max_new_tokens=6)
        by = Answerer(engine, model, tokenizer, scorer)
        (first,), (second,) = (evaluate(by, asked, rules, heard.append) for _ in range(2))
    assert first.task == "digits" and first.correct.shape == (4, 3) and first.maj.shape == (4,)
    assert [[c.text for c in row] for row in first.completions] == [[c.text for c in row] for row in second.completions]
    assert len({c.tokens.tobytes() for row in first.completions for c in row}) == 12
    assert first.metrics()["eval/digits/pass@1"] == first.correct.mean()
    assert all(line.startswith("evaluating: sampling ") for line in heard) and heard


def test_what_could_not_be_scored_leaves_the_error_a_number():
    nan = float("nan")
    told = lambda *rewards: task_lines(
        "m",
        EvalOptions(Task([{"prompt": "1 + 1?", "answer": "2"}]), samples=2),
        TaskEvaluation("t", (PROBLEM,) * 3, ((completion("2"),) * 2,) * 3, None, None, np.array(rewards)),
    )
    lines = told([1.0, nan], [0.5, 0.5], [nan, nan])
    assert lines[1:3] == ["  reward             0.667  +- 0.250", "  not scored           3 of 6 answers"]
    assert not any("scored" in line for line in told([1, 0], [1, 1], [0, 0]))
    assert any("nan  +- 0.000" in line for line in told(*[[nan, nan]] * 3))
