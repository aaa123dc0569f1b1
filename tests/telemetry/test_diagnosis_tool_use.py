"""Troubles of episodes: tools that are never called or always in vain, and turns that grow; and what is none."""

import numpy as np
import pytest
from histories import healthy, kinds, rise, rows, sick

from jaxrl_llm.telemetry import diagnose

OF_EPISODES = {"tools_unused", "tools_failing", "turns_growing"}
STEPS = 100


def found(reward=None, **columns):
    base = healthy(STEPS, 0.02, 1, np.full(STEPS, 0.2) if reward is None else reward)
    few = {"reward/mean": base["reward/mean"]}
    named = {f"episode/{name}": np.full(STEPS, float(value)) for name, value in columns.items()}
    return kinds(diagnose(rows(few | named))) & OF_EPISODES


def test_what_was_so_from_the_first_step_is_found():
    assert found(tools=2, tool_calls=0) == {"tools_unused"}
    assert found(tools=2, tool_calls=1, tool_errors=0.95) == {"tools_failing"}
    assert found(tools=2, tool_calls=0, tool_errors=1) == {"tools_failing"}, "calls that cannot be read fail too"


def test_what_is_no_trouble_is_not_found():
    assert found(tools=0, tool_calls=0, turns=3) == set(), "there are no tools"
    assert found(tools=2, tool_calls=1, tool_errors=0.3, turns=3) == set()
    assert found(tools=2, tool_calls=0.001, tool_errors=0.001) == {"tools_unused"}, "of hardly a call nothing is known"
    assert found(rise(STEPS), tools=2, tool_calls=0) == set(), "the task is learned without"


@pytest.mark.parametrize("kind", sorted(OF_EPISODES))
def test_a_run_that_learns_meanwhile_is_left_alone(kind):
    columns, _ = sick(kind, STEPS, 50, "step", 0.02)
    columns |= {"reward/mean": rise(STEPS, 0.1, 0.7)}
    assert kind not in kinds(diagnose(rows(columns)))
