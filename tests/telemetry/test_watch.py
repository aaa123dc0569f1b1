"""A finding is told once, when it begins to be found, also after a resume; it is no part of what a run decides."""

import io

import numpy as np
from histories import healthy, rise, rows, sick
from rich.console import Console

from jaxrl_llm.diagnosis import FindingTracker
from jaxrl_llm.telemetry import Finding
from jaxrl_llm.telemetry.progress import Progress, Schedule

SICK = rows(*sick("truncation", 60, 30))


def told(watch, some):
    """(step of the row, kind) of all that is told."""
    return [(row["step"], finding.kind) for row in some for finding in watch.new(row)]


def test_each_kind_is_told_once_soon_after_it_began():
    found = told(FindingTracker(60), SICK)
    assert [kind for _, kind in found] == ["truncation"] and 30 < found[0][0] <= 50


def test_what_was_found_before_a_resume_is_not_told_again():
    whole = told(FindingTracker(60), SICK)[0][0]
    assert told(FindingTracker(60, SICK[: whole + 1]), SICK[whole + 1 :]) == []
    assert told(FindingTracker(60, SICK[:31]), SICK[31:]) == [(whole, "truncation")]


def test_it_looks_after_evaluations_and_every_so_many_steps():
    untested = [{"step": row["step"], "kl": 5.0 if row["step"] > 12 else 0.01} for row in SICK]
    assert told(FindingTracker(60), untested) == [(20, "kl_runaway")]
    untested[17]["eval/sums/pass@1"] = 0.5
    assert told(FindingTracker(60), untested) == [(17, "kl_runaway")]


def test_a_longer_history_is_looked_at_less_often():
    untested = [{"step": step, "kl": 5.0 if step > 900 else 0.01} for step in range(1, 1001)]  # by tens: 920
    assert told(FindingTracker(1000), untested) == [(964, "kl_runaway")]


def test_a_run_has_stalled_once_it_has_for_half_of_the_steps_that_it_is_to_make():
    flat = rows({"reward/mean": np.full(60, 0.3)})
    assert told(FindingTracker(60), flat) == [(40, "stalled")]
    assert told(FindingTracker(58), flat) == [(30, "stalled")]
    assert told(FindingTracker(200), flat) == []


def test_numbers_may_be_of_numpy_and_not_there():
    some = [{"step": row["step"], "kl": np.float32(np.nan), "entropy": None} for row in SICK]
    assert told(FindingTracker(60), some) == []
    for kind in (np.float32, np.array):
        assert told(FindingTracker(60), [{"step": row["step"], "kl": kind(row["step"] ** 2 / 99)} for row in SICK])


def shown(watch, some):
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    with Progress(Schedule(60), console=console, tracker=watch) as progress:
        for row in some:
            progress.show_events(row["step"], row)
    return console.file.getvalue().splitlines()


def test_a_finding_is_two_lines_of_progress():
    lines = shown(FindingTracker(60), SICK)
    assert len(lines) == 2
    assert lines[0].startswith("step ") and "truncation since step 30: 60 % of the completions are cut off" in lines[0]
    assert lines[1].startswith("  Answers that are cut off") and "Try a larger --rollout.max_new_tokens" in lines[1]
    assert shown(None, SICK) == shown(FindingTracker(60), rows(healthy(60), rise(60))) == []


def test_a_finding_is_a_plain_value():
    finding = Finding("truncation", 3, "what", "why", "remedy")
    assert finding == Finding("truncation", 3, "what", "why", "remedy") and hash(finding)
