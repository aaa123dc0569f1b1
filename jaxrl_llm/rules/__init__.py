"""What decides between steps: pure functions of a step's row and of what they remember, each by itself."""

from jaxrl_llm.rules.controllers import Controlled, EntropyControlled, Multiplier
from jaxrl_llm.rules.decision import DONE, GUARD, Decision, Memory, Rule, decide
from jaxrl_llm.rules.guards import NotANumber, RewardFails, TeachesNothing, guards_of
from jaxrl_llm.rules.resets import ASKED, BY_HAND, Averaged, ByHand, OnKL, OnSchedule, OnStall, Resets, rules_of

__all__ = [
    "ASKED",
    "BY_HAND",
    "DONE",
    "GUARD",
    "EntropyControlled",
    "Averaged",
    "ByHand",
    "Controlled",
    "Decision",
    "Memory",
    "Multiplier",
    "NotANumber",
    "OnKL",
    "OnSchedule",
    "OnStall",
    "Resets",
    "RewardFails",
    "Rule",
    "TeachesNothing",
    "decide",
    "guards_of",
    "rules_of",
]
