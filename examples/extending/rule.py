"""A rule: it ends a run that is good enough.

A rule decides after each step: to stop, to reset, to move a coefficient. ``row`` is the step's row of metrics.jsonl,
``own`` what the rule remembers, as JSON values. Its settings follow. For a run of your own nothing goes anywhere:
``Rules(own=(good_enough,))``.
"""

# jaxrl_llm/rules/guards.py
from functools import partial

from jaxrl_llm.rules.guards import DONE, Decided, Decision, Row, RuleMemory


def good_enough(row: Row, own: RuleMemory, accuracy: float = 0.99) -> Decided:
    """Stop after two evaluations in a row of at least ``accuracy``: a ``Rule``."""
    found = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/pass@1")]
    if not found:
        return Decision(), own
    times = own.get("times", 0) + 1 if found[0] >= accuracy else 0
    if times < 2:
        return Decision(), {"times": times}
    return Decision(DONE, f"pass@1 is {found[0]:.3f}", events={"event/good_enough": True}), {"times": times}


# jaxrl_llm/rules/guards.py, in guards_of, before return rules
def guards_of(rules):
    rules["good_enough"] = partial(good_enough, accuracy=0.9)
