"""The engine ends completions that repeat themselves, at the token where the rule says so, interrupted or not."""

import numpy as np
import pytest
from engine.test_engine import PROMPTS, SEEDS, finished, model

from jaxrl_llm.engine.sampling import tail_after
from jaxrl_llm.rollout import Engine, Repetition, Sampling
from jaxrl_llm.rollout.groups import is_finished

ENGINE = Engine(model(), slots=4, max_length=60, chunk=3)
LONG = {"temperature": 0.0, "max_new_tokens": 40}
"""Greedy completions of a tiny model soon go round in circles."""


def ends_at(completion, rule):
    """The first length at which the rule ends it, or None; by the host's own state."""
    logp = completion.extras["policy_logp"]
    for count in range(1, len(completion.tokens) + 1):
        tail = tail_after(completion.tokens[:count], logp[:count], rule)
        periods = np.arange(1, rule.longest_period + 1)
        repeats = rule.times and (tail.runs >= (rule.times - 1) * periods).any()
        if repeats or (rule.tail and tail.confident >= rule.tail):
            return count
    return None


@pytest.mark.parametrize("rule", [Repetition(longest_period=6, times=3), Repetition(probability=0.3, tail=4)])
def test_a_completion_ends_where_it_repeats_itself(rule):
    whole = ENGINE.generate(model(), PROMPTS, SEEDS, Sampling(**LONG))
    found = ENGINE.generate(model(), PROMPTS, SEEDS, Sampling(**LONG, repetition=rule))
    ends = [ends_at(completion, rule) for completion in whole]
    assert any(ends)
    for completion, all_, end in zip(found, whole, ends, strict=True):
        assert completion.finish_reason == ("repetition" if end else "length")
        assert completion.tokens.tolist() == all_.tokens[:end].tolist()


def test_a_repetition_at_the_last_token_of_a_budget_is_the_end():
    rule = Repetition(longest_period=6, times=3)
    sampling = Sampling(**LONG, repetition=rule)
    wanted = ENGINE.generate(model(), PROMPTS, SEEDS, sampling)
    limits = [len(c.tokens) for c in wanted]
    ENGINE.start(sampling)
    found = finished(ENGINE, ENGINE.submit(PROMPTS, SEEDS, limits))
    assert [c.finish_reason for c in found] == [c.finish_reason for c in wanted]
    assert "repetition" in {c.finish_reason for c in found if is_finished(c, 40)}
    before = finished(ENGINE, ENGINE.submit(PROMPTS, SEEDS, [limit - 1 for limit in limits]))
    assert {c.finish_reason for c in before} == {"length"}


def test_an_interruption_does_not_hide_a_repetition():
    rule = Repetition(longest_period=6, times=3)
    sampling = Sampling(**LONG, repetition=rule)
    whole = ENGINE.generate(model(), PROMPTS, SEEDS, sampling)
    ENGINE.start(sampling)
    handles = ENGINE.submit(PROMPTS, SEEDS, [2] * len(PROMPTS))
    first = finished(ENGINE, handles)
    again = finished(ENGINE, ENGINE.submit(PROMPTS, SEEDS, partials=first))
    assert {completion.finish_reason for completion in first} == {"length"}
    assert "repetition" in {completion.finish_reason for completion in again}
    for found, wanted in zip(again, whole, strict=True):
        assert found.tokens.tolist() == wanted.tokens.tolist() and found.finish_reason == wanted.finish_reason
