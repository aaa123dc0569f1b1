"""Completions of several turns: lengths, the last turn, and what is shown."""

import numpy as np

from jaxrl_llm.types import Completion, Episode, Turn

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": "x"}}}
TURNS = (
    Turn(
        2,
        {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
        ({"role": "tool", "content": "6"},),
        0.5,
        1,
        1,
    ),
    Turn(6, {"role": "assistant", "content": "six"}),
)


def completion(mask, **more):
    count = len(mask)
    return Completion(np.arange(count), np.zeros(count), "stop", np.array(mask, bool), np.zeros(count, int), **more)


def test_the_length_counts_what_was_sampled_and_the_last_turn_follows_the_last_word_of_others():
    whole = completion([1, 1, 0, 0, 1, 1], episode=Episode(TURNS))
    assert (whole.length, whole.last_turn) == (4, 4)
    assert (completion([1, 1]).length, completion([1, 1]).last_turn, completion([]).last_turn) == (2, 0, 0)
    assert completion([1, 0]).length == 2, "without an episode all tokens count"
    assert completion([1, 0]).last_turn == 2, "nothing of the next turn is there yet"


def test_all_turns_are_shown_after_who_spoke():
    whole = completion([1, 1, 0, 0, 1, 1], text="six", episode=Episode(TURNS, "completed"))
    assert [message["role"] for message in whole.messages] == ["assistant", "tool", "assistant"]
    assert whole.transcript == ("[assistant] let me see\nmultiply(a=3, b='x')\n\n[tool] 6\n\n[assistant] six")
    assert whole.played == {
        "episode": {
            "end": "completed",
            "turns": [
                {"role": "assistant", "text": "let me see\nmultiply(a=3, b='x')", "reward": 0.5, "errors": 1},
                {"role": "tool", "text": "6"},
                {"role": "assistant", "text": "six", "reward": 0.0},
            ],
        }
    }
    assert completion([1, 1], text="six").played == {}
    alone = completion([1, 1], text="six")
    assert alone.transcript == "six" and alone.messages == [{"role": "assistant", "content": "six"}]
