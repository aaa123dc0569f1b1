"""What decides between steps: pure functions of a step's row and of what they remember, each by itself."""

from jaxrl_llm.rules.controllers import OF_ENTROPY, Controlled, EntropyControlled, Multiplier
from jaxrl_llm.rules.decision import DONE, GUARD, LAST, UNDONE, Decision, Memory, Rule, decide
from jaxrl_llm.rules.guards import (
    ALL,
    FOUND,
    LR_SCALE,
    OF_GUARDS,
    OF_LESSONS,
    NotANumber,
    OnFinding,
    RewardFails,
    TeachesNothing,
    guards_of,
)
from jaxrl_llm.rules.phases import OF_PHASES, PHASE, PhaseEnds
from jaxrl_llm.rules.resets import AGAIN, ASKED, BY_HAND, Averaged, ByHand, OnKL, OnSchedule, OnStall, Resets, rules_of
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls

__all__ = [
    "AGAIN",
    "ALL",
    "ASKED",
    "BY_HAND",
    "DONE",
    "FOUND",
    "GUARD",
    "LAST",
    "LR_SCALE",
    "OF_ENTROPY",
    "OF_GUARDS",
    "OF_LESSONS",
    "OF_PHASES",
    "PHASE",
    "UNDONE",
    "Averaged",
    "ByHand",
    "Controlled",
    "Decision",
    "EntropyControlled",
    "Memory",
    "Multiplier",
    "NotANumber",
    "OnFinding",
    "OnKL",
    "OnSchedule",
    "OnStall",
    "Phase",
    "PhaseEnds",
    "Reaches",
    "Resets",
    "RewardFails",
    "Rule",
    "Rules",
    "Stalls",
    "TeachesNothing",
    "decide",
    "guards_of",
    "rules_of",
]
