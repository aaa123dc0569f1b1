"""Rules of one's own: what they are called with, what they may return, and what happens if they fail."""

import dataclasses
from functools import partial

import pytest
from tiny import rules_in

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rules import GUARD, Decision, Rules, decide, decide_by_user_rule

SMOKE = configs.load_config("smoke")[1]


def counting(row, memory):
    return Decision(events={"event/seen": "yes"}), {"seen": memory.get("seen", 0) + 1}


def test_a_rule_of_ones_own_decides_and_remembers():
    run = dataclasses.replace(SMOKE, rules=Rules(own=(counting, lambda row, memory: None)))
    configs.validate(run)
    rules = {name: rule for name, rule in rules_in(run).items() if name.startswith("own/")}
    assert list(rules) == ["own/counting", "own/lambda"]
    decision, memory = decide(rules, {"step": 1}, {})
    decision, memory = decide(rules, {"step": 2}, memory)
    assert decision == Decision(events={"event/seen": "yes"}) and memory == {
        "own/counting": {"seen": 2},
        "own/lambda": {},
    }


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda row, memory: row["none"], "KeyError: 'none'"),
        (lambda row, memory: 0.5, "TypeError: it returned 0.5 in place of a Decision"),
        (lambda row, memory: (Decision(), {"set": {1}}), "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_rule_of_ones_own_that_fails_stops_the_run_with_its_state_saved(rule, why):
    rules = {"own": partial(decide_by_user_rule, rule=as_reward(rule))}
    decision, memory = decide(rules, {"step": 1}, {"own": {"kept": 1}})
    assert decision.stop == GUARD and f"rule lambda failed: {why}" in decision.reason
    assert decision.events["event/rule_failed"] == decision.reason and memory == {"own": {"kept": 1}}


def test_rules_of_ones_own_have_names_of_their_own():
    with pytest.raises(InputError, match="own has two rules of the name lambda: rename one"):
        configs.validate(dataclasses.replace(SMOKE, rules=Rules(own=(lambda r, m: None, lambda r, m: None))))
