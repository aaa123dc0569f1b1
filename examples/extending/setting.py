"""A setting: ``rules.farthest`` ends a run with a policy too far from its reference.

A setting is a field of the class that it belongs to. Its annotation gives its allowed values (``Count``, ``Range``,
``Choice``) and its behaviour: ``FREE`` may change when a run is resumed, ``RECORDED`` too, and the change is reported
(``jaxrl_llm/system/setting.py`` has all). Flags, config.json, refusals and the comparison with an earlier start know it
from the field alone. Conflicts with other settings are refused in the class's ``check``. Describe it in the class's
docstring.
"""

# jaxrl_llm/rules/settings.py, at the top: from jaxrl_llm.system.setting import FREE
from typing import Annotated

from jaxrl_llm.system.setting import FREE, Range


# jaxrl_llm/rules/settings.py, in Rules, after rollbacks: Annotated
class Rules:
    farthest: Annotated[float | None, Range("(0, inf)"), FREE] = None


# jaxrl_llm/rules/guards.py
import math
from functools import partial

from jaxrl_llm.rules.guards import GUARD, Decided, Decision, Row, RuleMemory


def farthest(row: Row, own: RuleMemory, kl: float) -> Decided:
    """Stop after a step whose KL to the reference is above ``kl``, nats per token: a ``Rule``."""
    measured = row.get("kl", math.nan)
    if math.isnan(measured) or measured <= kl:  # a run without a reference measures none
        return Decision(), own
    return Decision(GUARD, f"kl is {measured:.3f}, above rules.farthest {kl:g}"), own


# jaxrl_llm/rules/guards.py, in guards_of, before return rules
def guards_of(run, rules):
    if run.rules.farthest is not None:
        rules["farthest"] = partial(farthest, kl=run.rules.farthest)
