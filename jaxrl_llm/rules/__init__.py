"""Rules between steps: pure functions of a step's row and of their own memory."""

from jaxrl_llm.rules.decision import DONE, GUARD, LAST, UNDONE, Decision, Memory, Rule, decide, decide_by_own
from jaxrl_llm.rules.guards import (
    ALL,
    FOUND,
    LR_SCALE,
    OF_GUARDS,
    OF_LESSONS,
    OF_PHASES,
    PHASE,
    guards_of,
    not_a_number,
    phase_ended,
    phase_ends,
)
from jaxrl_llm.rules.resets import (
    AGAIN,
    ASKED,
    BY_HAND,
    OF_ENTROPY,
    Resets,
    by_hand,
    entropy_controlled,
    kl_controlled,
    rules_of,
)
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls
