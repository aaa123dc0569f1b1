"""The scorer with real functions that hang, crash and raise: one item is lost, the rest is right, nothing is left."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Format, Function, LengthPenalty, Scorer, accuracy
from jaxrl_llm.rewards.pool import Pool, RewardCall
from jaxrl_llm.tasks import ReasoningGym
from jaxrl_llm.types import Completion, Problem

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)  # the workers get this path too, and import sample_rewards from it


SAMPLES = os.path.relpath(Path(HERE) / "sample_rewards.py")


def line_of(text):
    """The number of the first line of sample_rewards.py that holds the text."""
    lines = (Path(HERE) / "sample_rewards.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def item(text, answer="3", length=3, **fields):
    tokens = np.arange(length, dtype=np.int32)
    extras = {"entropy": np.zeros(length)}
    problem = Problem("1", ({"role": "user", "content": "?"},), answer, "test", **fields)
    return problem, Completion(tokens, np.zeros(length), "stop", tokens > -1, tokens, extras, text)


def gone(process_id, within_s):
    """Whether the process ends in time; a zombie has ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_the_reward_is_the_weighted_sum_of_its_parts():
    rewards = (Accuracy(weight=2.0), LengthPenalty(0.1), Format(r"\d", weight=0.5), Format(r".*3.*"))
    with Scorer(rewards) as scorer:
        scores = scorer.score([item("3"), item("33", length=10), item("x")])
    assert list(scores.parts) == ["accuracy", "length_penalty", "format", "format_2"]
    np.testing.assert_array_equal(scores.parts["accuracy"], [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(scores.parts["format_2"], [1.0, 1.0, 0.0])
    np.testing.assert_allclose(scores.reward, [2.0 - 0.3 + 0.5 + 1.0, -1.0 + 1.0, -0.3])
    assert scores.reward.dtype == scores.accuracy.dtype == np.float64
    assert (scores.failures.errors, scores.failures.timeouts, scores.failures.message) == (0, 0, "")


def test_accuracy_is_there_without_an_accuracy_reward():
    with Scorer((LengthPenalty(0.1),)) as scorer:
        scores = scorer.score([item("3"), item("4")])
    np.testing.assert_array_equal(scores.accuracy, [1.0, 0.0])
    assert list(scores.parts) == ["length_penalty"]


def test_nothing_is_correct_or_wrong_where_nothing_is_verified():
    with Scorer((LengthPenalty(0.1),)) as scorer:
        scores = scorer.score([item("3"), item("no number", "", verifier="none"), item("3", "", verifier="none")])
    np.testing.assert_array_equal(scores.accuracy, [1.0, np.nan, np.nan])
    np.testing.assert_allclose(scores.reward, [-0.3, -0.3, -0.3])
    assert math.isnan(accuracy(*item("no number", "", verifier="none")))


def test_nothing_to_score():
    with Scorer((Accuracy(), Function("sample_rewards:length"))) as scorer:
        scores = scorer.score([])
    assert scores.reward.shape == scores.accuracy.shape == scores.parts["length"].shape == (0,)


def test_only_the_stuck_and_the_broken_items_are_lost_and_the_order_is_kept():
    texts = [
        "0",
        "hang",
        "1",
        "die",
        "2",
        "segfault",
        "3",
        "raise",
        "exit",
        "end of file",
        "None",
        "text",
        "infinite",
        "hang with the lock",
        "4",
        "true",
        "5",
    ]
    with Scorer((Function("sample_rewards:obey", weight=2.0, timeout_s=0.6),), on_error=-9.0) as scorer:
        scores = scorer.score([item(text) for text in texts])
        again = scorer.score([item("7")])
    expected = [{"true": 1.0}.get(text, float(text) if text.isdigit() else -9.0) for text in texts]
    np.testing.assert_array_equal(scores.parts["obey"], expected)
    np.testing.assert_array_equal(scores.reward, 2.0 * np.array(expected))
    assert (scores.failures.errors, scores.failures.timeouts) == (8, 2)
    assert scores.failures.of == {"obey": (17, 10)} and again.failures.of == {"obey": (1, 0)}
    assert scores.failures.message == f"{SAMPLES}:{line_of('def obey')}: call not finished after 0.6 s"
    np.testing.assert_array_equal(again.parts["obey"], [7.0])


@pytest.fixture(scope="module")
def obeying():
    """One worker for all that needs no settings of its own."""
    with Scorer((Function("sample_rewards:obey"), LengthPenalty(0.0)), workers=1) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("raise", "raise KeyError", r"KeyError: 'no such\nkey'"),
        ("raise no text", 'raise ValueError("half', r"ValueError: half a pair: \ud800"),
        ("letters", "return ACTIONS", "ValueError: could not convert string to float: 'letters'"),
        ("die", "def obey", "the worker died (exit code 7)"),
        ("segfault", "def obey", f"the worker died (exit code -{int(signal.SIGSEGV)})"),
        ("exit", '"exit"', "SystemExit: 3"),
        ("None", "def obey", "TypeError: returned None, which is not a number"),
        ("text", "def obey", "TypeError: returned '1', which is not a number"),
        ("list", "def obey", "TypeError: returned [1.0], which is not a number"),
        ("infinite", "def obey", "ValueError: returned inf; a reward is finite, or NaN where there is none"),
        (
            "huge",
            "def obey",
            "ValueError: returned -1e+39; a reward is at most 1e+15 in size, or NaN where there is none",
        ),
    ],
)
def test_the_first_failure_is_told_in_one_line_that_names_the_functions_own(obeying, text, place, message):
    failures = obeying.score([item("1"), item(text)]).failures
    assert failures.message == f"{SAMPLES}:{line_of(place)}: {message}"
    assert (failures.errors, failures.timeouts, failures.of["obey"]) == (1, 0, (2, 1))
    assert ("in obey" in failures.trace) == bool(failures.trace) == (place != "def obey")


def test_what_failed_is_counted_over_all_scorings_of_a_step(obeying):
    none, some = obeying.score([item("1")]).failures, obeying.score([item("raise"), item("1"), item("x")]).failures
    both = none + some + none
    assert both.metrics() == {
        "reward/errors": 2, "reward/timeouts": 0, "reward/obey/failed_fraction": 0.4,
        "event/reward_failed": some.message,
    }  # fmt: skip
    assert none.metrics() == {"reward/errors": 0, "reward/timeouts": 0}
    assert (some + both).message == some.message == (none + some).message


def test_sums_of_which_no_advantages_could_be_made_are_refused():
    with Scorer((LengthPenalty(-1.0, weight=1e14), LengthPenalty(-1.0, weight=9e14))) as scorer:
        assert scorer.score([item("", length=1)]).reward.tolist() == [1e15]
        with pytest.raises(InputError, match=r"weights add up to 3e\+15 in size, .* smaller weights"):
            scorer.score([item(""), item("3")])


def test_nan_means_unscorable_and_is_no_error(obeying):
    scores = obeying.score([item("nan"), item("1")])
    assert math.isnan(scores.reward[0]) and scores.reward[1] == 1.0 and scores.failures.errors == 0


@pytest.mark.slow
def test_a_failing_verifier_scores_on_error_and_counts_as_wrong():
    countdown = next(ReasoningGym("countdown", size=1).problems())
    fields = {"metadata": countdown.metadata, "verifier": "reasoning_gym", "extractor": "whole"}
    right, endless = countdown.metadata["entry"]["metadata"]["expression"], "9**(9*9**9*9**9)"
    with Scorer((Accuracy(),), timeout_s=1.5, on_error=math.nan) as scorer:
        scores = scorer.score([item(text, **fields) for text in (endless, right)])
    np.testing.assert_array_equal(scores.accuracy, [0.0, 1.0])
    np.testing.assert_array_equal(scores.parts["accuracy"], [math.nan, 1.0])
    assert scores.failures.timeouts == 1 and scores.failures.of == {"accuracy": (2, 1)}


@pytest.mark.slow
def test_math_runs_in_the_workers():
    fields = {"extractor": "boxed", "verifier": "math"}
    with Scorer((Accuracy(),)) as scorer:
        scores = scorer.score([item(rf"\boxed{{\frac{{{n}}}{{2}}}}", answer="1.5", **fields) for n in range(6)])
    np.testing.assert_array_equal(scores.accuracy, [0, 0, 0, 1, 0, 0])


def test_workers_run_without_jax_and_without_extras():
    with Scorer((Function("sample_rewards:jax_is_loaded"), Function("sample_rewards:extras"))) as scorer:
        scores = scorer.score([item("3")] * 4)
    assert not scores.parts["jax_is_loaded"].any() and not scores.parts["extras"].any() and scores.failures.errors == 0


def test_the_workers_run_side_by_side_and_live_on(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    with Scorer((Function("sample_rewards:meet"),), workers=2, timeout_s=60.0) as scorer:
        for folder in folders:
            folder.mkdir()
            assert scorer.score([item(str(folder))] * 2).failures.errors == 0
    first, second = (sorted(path.name for path in folder.iterdir()) for folder in folders)
    assert len(first) == 2 and first == second and str(os.getpid()) not in first
    assert all(gone(process_id, 1.0) for process_id in first)


@pytest.mark.slow
def test_several_batches_are_scored_at_one_time_in_workers_and_where_functions_wait(tmp_path):
    here = []

    async def meets(problem, completion):
        here.append(completion.text)
        while len(here) < 2:
            await asyncio.sleep(0.01)
        return float(here.index(completion.text))

    with Scorer((Function("sample_rewards:meet"), meets), workers=2, timeout_s=20.0) as scorer:
        coming = [scorer.begin([item(str(tmp_path))])]
        while not any(tmp_path.iterdir()):  # the first one is under way, with the only worker so far
            time.sleep(0.01)
        coming += [scorer.begin([item(f"{tmp_path}/")]), scorer.begin([])]
        last, *others = [scores() for scores in reversed(coming)]
    assert not last.reward.size and [one.failures.of["meets"] for one in others] == [(1, 0)] * 2
    assert [one.parts["meets"][0] for one in others] == [1.0, 0.0]
    assert len({one.parts["meet"][0] for one in others}) == 2 and not any(one.failures.timeouts for one in others)


def test_a_scorer_that_is_closed_gives_up_what_it_has_begun():
    begun, end = threading.Event(), threading.Event()

    def slow(problem, completion):
        begun.set()
        end.wait(20.0)
        return 1.0

    scorer = Scorer((slow, Function("sample_rewards:worker_id")))
    coming = [scorer.begin([item("3")]) for _ in range(3)]
    assert begun.wait(20.0)
    scorer.close()
    end.set()
    with pytest.raises(CancelledError):
        coming[-1]()
    with scorer:
        assert scorer.score([item("3")]).failures.errors == 0


def test_children_of_a_stuck_reward_are_killed_with_it(tmp_path):
    os.environ["CHILD_ID_FILE"] = str(tmp_path / "id")
    with Scorer((Function("sample_rewards:obey"),), workers=1, timeout_s=0.5) as scorer:
        assert scorer.score([item("leave a child")]).failures.timeouts == 1
    del os.environ["CHILD_ID_FILE"]
    assert gone((tmp_path / "id").read_text(), 1.0)


@pytest.mark.slow
def test_a_worker_that_was_killed_between_two_scorings_is_replaced():
    with Scorer((Function("sample_rewards:worker_id"),), workers=1) as scorer:
        before = int(scorer.score([item("3")]).parts["worker_id"][0])
        os.kill(before, signal.SIGKILL)
        assert gone(before, 1.0)
        scores = scorer.score([item("3")])
    assert scores.failures.errors == 0 and scores.parts["worker_id"][0] != before


@pytest.mark.slow
def test_an_item_that_its_worker_died_with_before_reading_it_is_handed_to_another():
    with Scorer((Function("sample_rewards:worker_id"),), workers=1) as scorer:
        before = int(scorer.score([item("3")]).parts["worker_id"][0])
        os.kill(before, signal.SIGSTOP)  # alive, and deaf
        death = threading.Timer(0.2, os.kill, (before, signal.SIGKILL))
        death.start()
        scores = scorer.score([item("3")])
        death.join()
    assert scores.failures.errors == 0 and scores.parts["worker_id"][0] != before


def test_a_function_that_only_the_parent_can_import_is_an_error_of_the_item():
    pool = Pool(1)
    ((outcome, same),) = [coming.result() for coming in pool.submit([RewardCall("no_such_module:reward", ((), ()))])]
    pool.close()
    assert (
        same == outcome and outcome.status == "error" and "no_such_module:reward cannot be imported" in outcome.message
    )


# A script without an "if __name__" guard: its top level must run once, not once for each worker.
SCRIPT = """
import sys
import jax
from test_scorer import item
from jaxrl_llm.rewards import Function, Scorer
print("top level", flush=True)
scorer = Scorer((Function("sample_rewards:jax_is_loaded"), Function("sample_rewards:meet")), timeout_s=60.0)
scores = scorer.score([item(sys.argv[1])] * 2)
print(scores.parts["jax_is_loaded"].sum(), *scores.parts["meet"].astype(int), flush=True)
"""
HANG = 'Scorer((Function("sample_rewards:obey"),), timeout_s=1.0, workers=1).score([item("hang with the lock")])'


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    (folder / "meeting").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(path), str(folder / "meeting")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_nothing_is_left_when_the_interpreter_exits_without_close(tmp_path):
    with script(tmp_path, SCRIPT) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0 and lines[0] == "top level" and len(lines) == 2
    with_jax, *workers = lines[1].split()
    assert with_jax == "0.0" and len(set(workers)) == 2
    assert all(gone(worker, 1.0) for worker in workers)


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    # Two workers wait for a call; a third is stuck in one and holds its interpreter's lock.
    with script(tmp_path, SCRIPT + HANG) as process:
        assert process.stdout.readline() == "top level\n"
        waiting = process.stdout.readline().split()[1:]
        stuck = stuck_worker(process.pid, waiting)
        process.kill()
    assert all(gone(worker, 1.0) for worker in waiting)
    assert gone(stuck, 5.0)


def stuck_worker(parent, known):
    """The id of the parent's worker that is not known yet."""
    threads = Path(f"/proc/{parent}/task")
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        new = {child for path in threads.glob("*/children") for child in path.read_text().split()} - set(known)
        if new:
            time.sleep(0.5)  # until it has taken the call
            return new.pop()
        time.sleep(0.02)
    raise AssertionError("no further worker was started")
