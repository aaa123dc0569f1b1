"""Which completion is shown when, and that nothing in it reaches beyond its line."""

import dataclasses

import numpy as np
import pytest
from rich.cells import cell_len

from jaxrl_llm.system.text import abridge, head, tail
from jaxrl_llm.telemetry.screens import EXAMPLE_S, Example, Panel, choose_example
from jaxrl_llm.types import Completion, Episode, Group, Problem, Turn

NONE = np.zeros(0, np.int32)


def group(prompt, **texts):
    """A group whose completions are worth what is given."""
    problem = Problem(prompt, ({"role": "system", "content": "s"}, {"role": "user", "content": prompt}), "", "sums")
    completions = tuple(Completion(NONE, NONE, "stop", NONE, NONE, text=text) for text in texts)
    rewards = np.array(list(texts.values()), float)
    return Group(problem, NONE, completions, rewards, rewards)


GROUPS = [group("first", a=1.0, b=0.5, c=float("nan")), group("second", d=0.0, e=1.0), group("third", f=0.0)]


def test_the_best_and_the_worst_take_turns_and_so_do_those_that_are_alike():
    shown = [choose_example(3, GROUPS, turn) for turn in range(5)]
    assert [(one.prompt, one.completion) for one in shown] == [
        ("first", "a"), ("second", "d"), ("second", "e"), ("third", "f"), ("first", "a")
    ]  # fmt: skip
    assert [(one.step, one.which, one.reward) for one in shown[:2]] == [(3, "best", 1.0), (3, "lowest", 0.0)]


def test_of_an_episode_all_turns_are_shown():
    turns = (Turn(1, {"role": "assistant", "content": "hot"}, ({"role": "user", "content": "colder"},)),)
    [one] = group("first", a=1.0).completions
    episode = dataclasses.replace(one, episode=Episode((*turns, Turn(2, {"role": "assistant", "content": "cold"}))))
    played = dataclasses.replace(group("first", a=1.0), completions=(episode,))
    assert choose_example(1, [played], 0).completion == "[assistant] hot [user] colder [assistant] cold"


def test_where_all_are_alike_none_is_the_best():
    one = choose_example(1, [group("p", a=0.5, b=0.5)], 0)
    assert one.which == "" and one.lines(60)[0] == "step 1  reward 0.500  p"
    assert choose_example(1, [group("p", a=float("nan"))], 0) is None and choose_example(1, [], 1) is None


def test_each_is_shown_for_a_while_however_fast_the_steps_are():
    now = [100.0]
    panel = Panel(lambda: now[0])
    panel.show_example(0, [])
    seen = []
    for step in range(1, 8):
        panel.show_example(step, GROUPS)
        seen.append((panel.example.step, panel.example.completion))
        now[0] += EXAMPLE_S / 2 - (step == 3)  # the fourth comes a second too early
    assert seen == [(1, "a"), (1, "a"), (3, "d"), (3, "d"), (3, "d"), (6, "e"), (6, "e")]


HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;title\x07 a\r\nb\x00 [bold]c[/bold] \u202eback\u200b\x9b2J 8"


@pytest.mark.parametrize("text", [HOSTILE, HOSTILE * 400, "和" * 99, "word " * 99, "", "\n\n", "x" * 5000])
@pytest.mark.parametrize("width", [60, 61, 80, 120])
def test_an_example_has_two_lines_that_fit_and_drive_no_terminal(text, width):
    example = choose_example(12345, [group(text or "?", **{text: -0.25}), group("p", a=1.0)], 1)
    for mark in ("…", "..."):
        lines = example.lines(width, mark)
        assert len(lines) == 2 and all(cell_len(line) <= width and line.isprintable() for line in lines)
    assert lines[0].startswith("step 12345  lowest reward -0.250  ")
    if text == HOSTILE * 400:
        assert lines[0].endswith("2J 8") and lines[1].endswith("2J 8") and "red" in lines[1]


def test_an_empty_completion_is_told_as_such():
    assert Example(2, "best", 1.0, "p", "").lines(60) == ["step 2  best reward 1.000  p", "  (nothing)"]


def test_lines_are_cut_by_the_columns_of_their_letters():
    assert head("和和和和", 7) == "和和和…" and tail("和和和和", 7) == "…和和和"
    assert head("和和和和", 6) == "和和…" and tail("和和和和", 6) == "…和和"
    assert head("abcdef", 5, "...") == "ab..." and tail("abcdef", 5, "...") == "...ef"
    assert head("abc", 3) == tail("abc", 3) == abridge("abc", 3) == "abc"
    assert abridge("和" * 9 + "終", 9) == "和 … 終"


def test_an_example_stands_above_the_finding():
    panel = Panel()
    panel.show_example(10, [group("1 + 1 =", **{"is [red]2[/red]": 1.0, "3": 0.0})])
    panel.finding = "stalled since step 3: no"
    assert [line.plain for line in panel.lines(100)] == [
        "step 10  best reward 1.000  1 + 1 =",
        "  is [red]2[/red]",
        "stalled since step 3: no",
    ]


def test_a_terminal_gets_letters_that_it_knows():
    panel = Panel()
    panel.show_example(10, [group("é" * 99, **{"€ 5": 1.0})])
    panel.finding = "long " * 40
    where, what, found = [line.plain for line in panel.lines(80, "ascii")]
    assert (where, what) == ("step 10  reward 1.000  ..." + "?" * 54, "  ? 5")
    assert len(found) == 80 and found.endswith("long lo...")
    assert [line.plain for line in panel.lines(80)][:2] == ["step 10  reward 1.000  …" + "é" * 56, "  € 5"]
