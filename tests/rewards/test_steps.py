"""Rewards of steps: where they end, what is said of them, and what of them reaches the learner."""

import json
import math

import numpy as np
import pytest
from rewards import sample_steps
from rewards.test_scorer import item

from jaxrl_llm import codec
from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import Accuracy, Failures, LengthPenalty, Scorer, StepFunction, functions
from jaxrl_llm.rewards.functions import Lost
from jaxrl_llm.rewards.scorer import SCORE_RECORDS, merge_shares, token_index
from jaxrl_llm.types import Completion

WORDS = StepFunction("sample_steps:words")
TEXTS = ("ab c", "", "é 😀!")
NAN = math.nan


@pytest.fixture(scope="module")
def tokenizer():
    return load_pretrained("tiny-random")[1]


def written(text, tokenizer):
    """A completion of the byte tokenizer, with its stop token."""
    tokens = np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
    size = len(tokens)
    found = Completion(tokens, np.zeros(size, np.float32), "stop", np.ones(size, bool), np.zeros(size, np.int32))
    return item("")[0], Completion(**vars(found) | {"text": text})


def scored(rewards, tokenizer, texts=TEXTS, **settings):
    with Scorer(rewards, **settings) as scorer:
        scorer.tokenizer = tokenizer
        return scorer.score([written(text, tokenizer) for text in texts])


def test_a_step_ends_in_the_token_that_completes_its_last_character(tokenizer):
    text = "aé😀\n b"  # of 1, 2, 4, 1, 1 and 1 bytes, each of them a token
    tokens = written(text, tokenizer)[1].tokens.tolist()
    ends = [token_index(text, tokens, end, tokenizer) for end in range(1, len(text) + 1)]
    assert ends == [len(text[:end].encode()) - 1 for end in range(1, len(text) + 1)] and len(tokens) == 11


def test_steps_stand_at_their_last_tokens_and_are_no_part_of_the_sum(tokenizer):
    scores = scored((LengthPenalty(1.0), StepFunction("sample_steps:words", weight=2.0)), tokenizer)
    expected = ([NAN, 4.0, NAN, 2.0, NAN], [NAN], [NAN, 2.0, NAN, NAN, NAN, NAN, NAN, 4.0, NAN])
    assert len(scores.steps) == 3 and {x.dtype for x in scores.steps} == {np.dtype("float32")}
    for found, wanted in zip(scores.steps, expected, strict=True):
        np.testing.assert_array_equal(found, np.float32(wanted))
    np.testing.assert_array_equal(scores.reward, [-5.0, -1.0, -9.0])
    assert list(scores.parts) == ["length_penalty", "steps"]
    np.testing.assert_array_equal(scores.parts["steps"], [1.5, NAN, 1.5])
    assert scores.failures == Failures(of={"length_penalty": (3, 0), "steps": (3, 0)})


def test_several_step_rewards_are_added_up_at_each_token(tokenizer):
    def twice(problem, completion):
        return [(4, 1.0), (1, 0.5), (4, 2.0)] if completion.text else []

    tokens = StepFunction("sample_steps:in_batches", 0.5, "tokens", name="tokens")
    scores = scored((WORDS, StepFunction(twice, weight=10.0), tokens), tokenizer, ("ab c", ""))
    np.testing.assert_array_equal(scores.steps[0], np.float32([5.0, 2.5, 1.0, 32.5, 2.0]))
    np.testing.assert_array_equal(scores.steps[1], np.float32([0.0]))
    assert list(scores.parts) == ["steps", "steps_2", "tokens"]
    np.testing.assert_array_equal(scores.parts["steps_2"], [3.5 / 3, NAN])
    np.testing.assert_array_equal(scores.reward, [0.0, 0.0])


@pytest.mark.slow
def test_without_a_tokenizer_only_the_means_are_there(tokenizer):
    scores = scored((WORDS,), tokenizer)
    with Scorer((WORDS,)) as scorer:
        without = scorer.score([written(text, tokenizer) for text in TEXTS])
    assert without.steps == () and len(scores.steps) == 3
    np.testing.assert_array_equal(without.parts["steps"], scores.parts["steps"])


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (3.0, TypeError, "returned 3.0, which is not a list of pairs (position, value)"),
        (None, TypeError, "returned None, which is not a list"),
        ({1: 2}, TypeError, "returned {1: 2}, which is not a list"),
        ([1, 2], TypeError, "returned the step 1, which is not a pair (position, value)"),
        ([(1.5, 1.0)], TypeError, "returned the position 1.5, which is not a whole number"),
        ([(4, 1.0)], ValueError, "returned the position 4 of a completion with characters 1 to 3"),
        ([(0, 1.0)], ValueError, "returned the position 0 of a completion with characters 1 to 3"),
        ([(1, math.inf)], ValueError, "returned inf"),
        ([(1, math.nan)], ValueError, "returned nan for the step at 1"),
        ([(1, "good")], TypeError, "returned 'good', which is not a number"),
    ],
)
def test_nonsense_of_steps_is_named(said, kind, told):
    with pytest.raises(kind) as raised:
        functions.as_steps(said, item("abc", length=5)[1], "characters")
    assert told in str(raised.value)


def test_positions_are_those_of_characters_or_of_tokens():
    completion = item("abc", length=5)[1]
    assert functions.as_steps(((at, 1) for at in np.array([3, 1])), completion, "characters") == [(3, 1.0), (1, 1.0)]
    assert functions.as_steps([(0, True), (4, 2)], completion, "tokens") == [(0, 1.0), (4, 2.0)]
    with pytest.raises(ValueError, match="position 5 of a completion with tokens 0 to 4"):
        functions.as_steps([(5, 1.0)], completion, "tokens")


def test_a_function_that_fails_gives_its_completion_no_steps(tokenizer):
    scores = scored((StepFunction(sample_steps.picky),), tokenizer, ("", "ok"))
    assert scores.failures.errors == 1 and scores.failures.of == {"steps": (2, 1)}
    assert "ValueError: returned the position 0 of a completion with characters 1 to 0" in scores.failures.message
    np.testing.assert_array_equal(scores.parts["steps"], [NAN, 1.0])
    assert np.isnan(scores.steps[0]).all() and scores.steps[1][1] == 1.0
    np.testing.assert_array_equal(scores.reward, [0.0, 0.0])


def test_steps_that_failed_leave_a_completion_unscorable_where_that_is_asked_for(tokenizer):
    scores = scored((LengthPenalty(1.0), StepFunction(sample_steps.picky)), tokenizer, ("", "ok"), on_error=NAN)
    np.testing.assert_array_equal(scores.reward, [NAN, -3.0])


def test_what_a_share_says_of_steps_comes_through_bit_for_bit(tokenizer):
    whole = scored((Accuracy(), StepFunction("sample_steps:words", 0.1)), tokenizer)
    shares = [scored((Accuracy(), StepFunction("sample_steps:words", 0.1)), tokenizer, TEXTS[at::2]) for at in (0, 1)]
    gathered = merge_shares(
        [
            codec.from_json(json.loads(json.dumps(codec.to_json(share, SCORE_RECORDS))), SCORE_RECORDS)
            for share in shares
        ],
        3,
    )
    assert [x.tobytes() for x in gathered.steps] == [x.tobytes() for x in whole.steps]
    assert {x.dtype for x in gathered.steps} == {np.dtype("float32")}
    alone = scored((StepFunction("sample_steps:words", 0.1),), tokenizer, TEXTS[:1])
    idle = scored((StepFunction("sample_steps:words", 0.1),), tokenizer, ())
    assert len(merge_shares([alone, idle], 1).steps) == 1, "a process may have nothing to score"


def test_a_step_function_survives_config_json_or_says_that_it_is_lost():
    named = StepFunction(sample_steps.words, 0.5, "tokens", timeout_s=2.0)
    assert named.path in ("rewards.sample_steps:words", "sample_steps:words")
    assert configs.from_json(json.loads(json.dumps(configs.to_json(named)))) == named
    local = StepFunction(lambda problem, completion: [])
    assert configs.from_json(configs.to_json(local)) == Lost("steps", 1.0, "it is a lambda")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (
            StepFunction("sample_steps:words", positions="lines"),
            "positions 'lines'; give characters or tokens",
        ),
        (StepFunction("sample_steps:absent"), "has no absent"),
        (
            StepFunction("sample_steps:words", timeout_s=0.0),
            "timeout_s 0.0; give more than 0 seconds",
        ),
        (StepFunction("sample_steps:words", weight=NAN), "weight nan; give a finite number"),
        (StepFunction("sample_steps:words", name="a/b"), "name 'a/b'; give a text without a slash"),
        (StepFunction(lambda: []), "cannot be a reward"),
    ],
)
def test_a_step_function_that_cannot_work_is_refused(reward, told):
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        Scorer((reward,))
