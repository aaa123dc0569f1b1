"""Answers that are programs, and answers that would fill the memory: a verifier executes none and outlives all."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import reasoning_gym

from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rewards.gym_answer import LITERAL, SYMBOLIC, is_formula, is_literal, score_gym
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.types import Completion, Problem

pytestmark = pytest.mark.slow

FOLDER = Path(reasoning_gym.__file__).parent
EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify|compile)\([^)]*(answer|expr)")
SPELLINGS = (
    "open('{0}', 'w')", "__import__('os').system('touch {0}')", "[open('{0}', 'w')]", "(lambda: open('{0}', 'w'))()",
    "[x for x in (1,) if open('{0}', 'w')]", "sin(open('{0}', 'w'))", "x.__class__ or open('{0}', 'w')",
    "(open)('{0}', 'w')",
    "sin('ex' 'ec' '(\"open(chr(47))\")')", "ｏｐｅｎ('{0}', 'w')", "[open][0]('{0}', 'w')",
    "f'{{open(\"{0}\", \"w\")}}'",
)  # fmt: skip


def completion(text):
    none = np.zeros(0, np.int32)
    return Completion(none, np.zeros(0, np.float32), "stop", none > 0, none, text=text)


def asked(name, extractor="whole"):
    entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
    metadata = {"generator": name, "options": {}, "entry": entry}
    return Problem("1", ({"role": "user", "content": "?"},), "", name, extractor, "reasoning_gym", metadata)


@pytest.mark.parametrize("name", (*LITERAL, *SYMBOLIC))
def test_no_answer_is_executed_and_right_ones_still_count(name, tmp_path):
    problem = asked(name)
    mark = tmp_path / "ran"
    for spelling in SPELLINGS:
        assert score_gym(spelling.format(mark), problem) <= 0.1
        assert not mark.exists(), spelling
    entry = problem.metadata["entry"]
    assert score_gym(str(entry["answer"]), problem) == 1.0
    other = dataclasses.replace(
        problem, metadata=problem.metadata | {"entry": entry | {"answer": f"open('{mark}', 'w')"}}
    )
    assert score_gym("1", other) == 0.0 and not mark.exists()


def test_every_data_set_that_evaluates_answers_is_known():
    found = set()
    for path in FOLDER.rglob("*.py"):
        scorer = path.read_text().partition("def score_answer")[2].partition("\n    def ")[0]
        if EVALUATES.search(scorer):
            found.add(path.stem)
    assert found <= {*LITERAL, *SYMBOLIC} and len(found) >= 5


def test_what_evaluates_without_a_call():
    assert all(map(is_literal, ("[1, 2]", "[['a', 'b']]", "1 2 3", "['A', 'B", "A B\nC D")))
    assert not any(map(is_literal, ("[1] * 10**10", "f(1)", "9**9**9", "[x for x in y()]", "1" * 3000)))
    assert all(map(is_formula, ("2*x**3 + C", "(3 + 4) * 5", "-cos(x)/2 + sqrt(2)", "1.5e3", "3!")))
    assert not any(map(is_formula, ("x.y", "a__b", "f(x)", "(f)(x)", "'a'", "[1]", "x = 1", "lambda: 1")))


def test_a_verifier_that_fills_the_memory_loses_its_item_alone():
    hungry = dataclasses.replace(asked("countdown"), extractor="whole")
    right = str(hungry.metadata["entry"]["answer"])
    with Scorer((Accuracy(),), workers=1, timeout_s=2.0) as scorer:
        found = scorer.score([(hungry, completion(text)) for text in ("8**(8*8**8*8**8)", right)])
    assert list(found.accuracy) == [0.0, 1.0]


def test_a_power_that_is_too_large_to_be_written_out_only_equals_itself():
    problem = dataclasses.replace(asked("countdown"), verifier="math", extractor="whole", answer="10^{10^{10}}")
    answers = ("10^{10^{10}}", "9**9**9**9", "10**10000000000", "10**10**10")
    with Scorer((Accuracy(),), workers=1, timeout_s=2.0) as scorer:
        found = scorer.score([(problem, completion(text)) for text in answers])
    assert list(found.accuracy) == [1.0, 0.0, 0.0, 0.0] and not found.failures.timeouts
    plain = dataclasses.replace(problem, answer="2^{10}")
    assert accuracy(plain, completion("1024")) == accuracy(plain, completion("(2^5)^2")) == 1.0
    assert not any(map(is_formula, ("9**9**9", "10**10**10", "2**(9**9)", "8**99999999"))) and is_formula("(2**3)**2")


def test_a_formula_that_is_nested_too_deep_to_be_parsed_only_equals_itself():
    deep, other = "(" * 3000 + "1" + ")" * 3000, "[" * 3000
    problem = dataclasses.replace(asked("countdown"), verifier="math", extractor="whole", answer=deep)
    assert accuracy(problem, completion(deep)) == 1.0 and accuracy(problem, completion(other)) == 0.0
    assert accuracy(dataclasses.replace(problem, answer="((((2))))"), completion("2")) == 1.0
