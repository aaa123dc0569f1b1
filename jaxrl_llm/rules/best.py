"""The history of a run's results: the rows that last, and the best evaluation among them."""

from collections.abc import Iterable, Sequence

from jaxrl_llm.diagnosis.history import ROLLED_BACK
from jaxrl_llm.rules.decision import Row
from jaxrl_llm.rules.guards import PHASE
from jaxrl_llm.rules.resets import evaluation_result

OF_RESULTS = ('"eval/', PHASE, ROLLED_BACK)
"""Words in the lines of metrics.jsonl that ``best_step`` needs."""


def surviving_rows(rows: Iterable[Row], tests: Sequence[int] = ()) -> list[list[Row]]:
    """Return the rows that no rollback has undone, for each phase and each of its evaluations.

    Args:
      rows: of metrics.jsonl, in order.
      tests: steps after which evaluations were of other settings.
    """
    groups: list[list[Row]] = [[]]
    before, moved = 0, False
    for row in rows:
        if moved or any(before <= step < row["step"] for step in tests):
            groups.append([])
        before, moved = row["step"], PHASE in row
        if (back := row.get(ROLLED_BACK)) is None:
            groups[-1].append(row)
        else:  # what this row has measured is of the policy that is undone
            groups = [[one for one in group if one["step"] <= back] for group in groups]
    return groups


def best_step(rows: Iterable[Row], tests: Sequence[int] = ()) -> int | None:
    """Return the step of the best evaluation, the first of equal ones; None without any.

    Results are compared within one phase and one evaluation: the last ones with a result. The arguments are those of
    ``surviving_rows``.
    """
    for group in reversed(surviving_rows(rows, tests)):
        results = {row["step"]: result for row in group if (result := evaluation_result(row)) is not None}
        if results:
            return max(results, key=lambda step: results[step])
    return None
