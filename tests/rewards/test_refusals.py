"""Which completions refuse: by patterns, by any other reward, in training and in evaluations."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Format, Refusals, Scorer, Threshold
from jaxrl_llm.rewards.shaping import REFUSED
from jaxrl_llm.rollout.evaluate import group_metrics
from jaxrl_llm.types import Completion, Group, Problem

PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
REFUSING = (
    "I'm sorry, but I can't help with that.",
    "I’m unable to assist with this request.",
    "Sorry, but that is something I will not do.",
    "I cannot provide instructions for this.",
    "As an AI, I don't have opinions on it.",
    "I must respectfully decline.",
    "That would be against my guidelines.",
    "WE WON'T DISCUSS THIS.",
)
ANSWERING = (
    "The answer is 3.",
    "Sorry for the delay: the answer is 3.",
    "You can't divide by 0, so there is none.",
    "She said: I can do that.",
    "I am able to help: 3.",
    "As an aid to memory, write it down.",
    "",
)


def completion(text):
    tokens = np.zeros(3, np.int32)
    return Completion(tokens, np.zeros(3), "stop", np.ones(3, bool), tokens, text=text)


@pytest.mark.parametrize(("text", "wanted"), [(t, 1.0) for t in REFUSING] + [(t, 0.0) for t in ANSWERING])
def test_common_refusals_in_english_are_found_and_answers_are_none(text, wanted):
    assert Refusals()(PROBLEM, completion(text)) == wanted


def test_other_languages_have_patterns_of_their_own():
    german = Refusals((r"\bleider nicht\b", "tut mir leid"))
    assert german(PROBLEM, completion("Das kann ich leider\nNicht")) == 0.0
    assert german(PROBLEM, completion("Das kann ich Leider nicht")) == 1.0
    assert Refusals("nein")(PROBLEM, completion("nein")) == 1.0, "one pattern need not be in a tuple"
    assert Refusals("a.b")(PROBLEM, completion("a\nb")) == 1.0


def test_only_the_beginning_is_looked_at():
    late = "The letter ends so: " + REFUSING[0]
    assert Refusals()(PROBLEM, completion(late)) == 1.0
    assert Refusals(within=20)(PROBLEM, completion(late)) == 0.0


@pytest.mark.parametrize(("refusals", "words"), [
    (Refusals(()), "Refusals has no pattern"),
    (Refusals(("no", "")), "or an empty one"),
    (Refusals(("(",)), r"Refusals pattern '\(' is not a regular expression"),
    (Refusals(within=0), "Refusals.within must be at least 1 character, got 0"),
])  # fmt: skip
def test_what_can_find_nothing_is_refused(refusals, words):
    with pytest.raises(InputError, match=words):
        Scorer((refusals,))


def test_refusals_are_a_part_of_their_own_and_no_reward():
    texts = ("I cannot help with that: 3", "3", "4")
    items = [(PROBLEM, completion(text)) for text in texts]
    watched = {REFUSED: Threshold(Refusals(), 0.5)}
    with Scorer((Accuracy(),), watched=watched, on_request={"asked": Format("4")}) as scorer:
        whole, only = scorer.score(items), scorer.score(items, only=(REFUSED, "not there"))
        asked = scorer.score(items, only=("asked",))
    assert whole.reward.tolist() == whole.accuracy.tolist() == only.accuracy.tolist() == [1, 1, 0]
    assert whole.parts.keys() == {"accuracy", REFUSED} and only.parts.keys() == {REFUSED}
    assert whole.parts[REFUSED].tolist() == only.parts[REFUSED].tolist() == [1, 0, 0]
    assert {name: part.tolist() for name, part in asked.parts.items()} == {"asked": [0, 0, 1]}


def failing(problem, completion):
    return 1.0 / len(completion.text)


def test_what_cannot_be_told_is_left_out():
    items = [(PROBLEM, completion(text)) for text in ("", "a", "abcd")]
    with Scorer((Accuracy(),), workers=1, watched={REFUSED: Threshold(failing, 0.5)}) as scorer:
        found = scorer.score(items).parts[REFUSED]
    np.testing.assert_array_equal(found, [np.nan, 1, 0])


def test_the_share_of_a_steps_completions_is_told_where_it_is_measured():
    made = tuple(map(completion, ("a", "b")))
    group = Group(PROBLEM, np.zeros(1, np.int32), made, np.zeros(2), np.zeros(2), {REFUSED: np.array([1.0, 0.0])})
    other = dataclasses.replace(group, parts={REFUSED: np.array([1.0, np.nan])})
    assert group_metrics([group, other])["completions/refusal_fraction"] == 2 / 3
    assert not [name for name in group_metrics([dataclasses.replace(group, parts={})]) if "refus" in name]
