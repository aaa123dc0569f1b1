"""Rules between steps: pure functions of a step's row and of their own memory."""

from jaxrl_llm.rules.decision import DONE, GUARD, LAST, UNDONE, Decision, Memory, Rule, decide, decide_by_own
from jaxrl_llm.rules.guards import (
    AGAIN,
    ALL,
    ASKED,
    BY_HAND,
    FOUND,
    LR_SCALE,
    OF_ENTROPY,
    OF_GUARDS,
    OF_LESSONS,
    OF_PHASES,
    PHASE,
    Resets,
    by_hand,
    entropy_controlled,
    guards_of,
    kl_controlled,
    not_a_number,
    phase_ended,
    phase_ends,
    reward_fails,
    rules_of,
)
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls
