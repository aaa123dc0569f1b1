"""Functions of your own as rewards: by name in a worker, as they are in this process, and what a configuration
keeps.
"""

import dataclasses
import functools
import os
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
from rewards import sample_forms as forms

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Format, Function, LengthPenalty, Local, Scorer
from jaxrl_llm.rewards.functions import as_reward, importable
from jaxrl_llm.rewards.pool import MOST_STUCK
from jaxrl_llm.rewards.shaping import check_reward, name_rewards
from jaxrl_llm.tasks import Task
from jaxrl_llm.types import Completion, Problem

SAMPLES = "rewards.sample_forms"


def item(text, **metadata):
    prompt = ({"role": "user", "content": "why?"},)
    completion = Completion(np.arange(3), np.zeros(3), "stop", np.ones(3, bool), np.zeros(3, int), text=text)
    return Problem("1", prompt, "7", "sums", metadata={"level": 1} | metadata), completion


@dataclasses.dataclass(frozen=True)
class Times:
    """A reward of somebody's own: a value with what every reward has."""

    factor: float
    weight: float = 1.0
    name: str = "times"

    def __call__(self, problem, completion):
        return self.factor * float(completion.text)


class Object:
    def __call__(self, problem, completion):
        return 1 / float(completion.text)


def scored(rewards, texts, **settings):
    with Scorer(rewards, **settings) as scorer:
        return scorer.score([item(text) for text in texts])


def test_whatever_can_be_called_is_a_reward():
    offset = 10

    def closure(problem, completion):
        return offset + float(completion.text)

    rewards = (
        closure,
        lambda p, c: os.getpid(),
        functools.partial(forms.by_any_name, missing=0),
        Times(3.0, 0.5),
        Object(),
        Accuracy(),
    )
    scores = scored(rewards, ["2", "7"])
    assert list(scores.parts) == ["closure", "lambda", "by_any_name", "times", "Object", "accuracy"]
    assert [part.tolist() for part in scores.parts.values()] == [
        [12.0, 17.0], [os.getpid()] * 2, [3.0, 8.0], [6.0, 21.0], [0.5, 1 / 7], [0.0, 1.0],
    ]  # fmt: skip
    assert scores.reward[0] == 12 + os.getpid() + 3 + 0.5 * 6 + 0.5


def test_the_verifier_alone_calls_no_reward():
    called = []
    with Scorer((Local(lambda p, c: called.append(c.text) or 1.0), Accuracy())) as scorer:
        assert scorer.verify([item("7"), item("8")]).tolist() == [1.0, 0.0] and called == []
        assert scorer.score([item("7")]).reward.tolist() == [2.0] and called == ["7"]


def test_what_others_can_import_runs_in_a_worker_in_every_form():
    rewards = (
        forms.process,
        forms.single,
        forms.trl,
        forms.judge,
        Function(f"{SAMPLES}:batch", 0.5),
        Function(forms.completion_only, 2.0),
    )
    scores = scored(rewards, ["2", "4", "6"], workers=1)
    assert scores.failures.message == ""
    assert len(set(scores.parts["process"])) == 1 and scores.parts["process"][0] != os.getpid()
    assert [scores.parts[name].tolist() for name in list(scores.parts)[1:]] == [
        [3, 5, 7], [6, 6, 6], [1, 2, 3], [6, 8, 10], [0, 0, 0],
    ]  # fmt: skip


def test_a_batch_that_fails_in_a_worker_loses_all_and_says_where():
    scores = scored((forms.whole_batch_fails, forms.single), ["2", "x", "4"], workers=1, on_error=-1.0)
    assert scores.parts["whole_batch_fails"].tolist() == [-1.0] * 3 and scores.parts["single"].tolist() == [3, -1, 5]
    assert scores.failures.of == {"whole_batch_fails": (3, 3), "single": (3, 1)} and scores.failures.errors == 4
    assert scores.failures.message.endswith("ZeroDivisionError: division by zero")
    assert scores.failures.message.startswith(os.path.relpath(forms.__file__) + ":")


def test_an_exception_in_a_batch_is_the_failure_of_one():
    def some(problems, completions):
        return [ConnectionError("lost") if one.text == "x" else 1.0 for one in completions]

    scores = scored((some,), ["2", "x", "4"], on_error=-1.0)
    assert scores.parts["some"].tolist() == [1.0, -1.0, 1.0] and scores.failures.of == {"some": (3, 1)}
    assert scores.failures.message.endswith("ConnectionError: lost")


@pytest.mark.slow
def test_what_hangs_in_this_process_is_given_up_and_the_others_are_scored():
    end, begun = threading.Event(), []

    def slow(problem, completion):
        begun.append(completion.text)
        end.wait(60 if completion.text == "hang" else 0)
        return 1.0

    with Scorer((Local(slow, timeout_s=1.0),), on_error=-1.0) as scorer:
        scores = scorer.score([item(text) for text in ("1", "hang", "2")])
    with Scorer((Local(slow, timeout_s=0.1),)) as scorer:
        stuck = scorer.score([item("hang")] * (MOST_STUCK + 1)).failures
        calls = begun.count("hang")
        end.set()
        for thread in threading.enumerate():
            if thread.name == "rewards":
                thread.join(5)
        again = [scorer.score([item("1")]).failures.timeouts for _ in range(3)]
    place = f"{os.path.relpath(__file__)}:{slow.__code__.co_firstlineno + 2}"
    assert scores.parts["slow"].tolist() == [1.0, -1.0, 1.0] and scores.failures.timeouts == 1
    assert scores.failures.message == f"{place}: call not finished after 1 s"
    assert stuck.timeouts == MOST_STUCK + 1 and calls <= 1 + MOST_STUCK and 0 in again


def test_functions_of_this_process_are_called_one_after_the_other_in_the_order_of_their_submission():
    calls, inside = [], threading.Lock()

    def slow(problem, completion):
        assert inside.acquire(blocking=False)
        time.sleep(0.001)
        calls.append(completion.text)
        inside.release()
        return 1.0

    with Scorer((slow,)) as scorer:
        coming = [scorer.begin([item(f"{batch} {number}") for number in range(3)]) for batch in range(6)]
        found = [scores() for scores in reversed(coming)]
    assert calls == [f"{batch} {number}" for batch in range(6) for number in range(3)]
    assert all(one.failures.errors == 0 for one in found)


def test_a_name_of_the_program_that_runs_is_called_in_it():
    sys.modules["__main__"].brevity = brevity = lambda problem, completion: -float(len(completion.text))
    try:
        reward = as_reward(Function("__main__:brevity", weight=0.5))
        assert reward == Local(brevity, 0.5)
        assert scored((Function("__main__:brevity", weight=0.5),), ["two"]).reward.tolist() == [-1.5]
    finally:
        del sys.modules["__main__"].brevity
    with pytest.raises(
        InputError, match="__main__:brevity: the notebook or script that runs has no brevity; define it"
    ):
        check_reward(as_reward(Function("__main__:brevity")))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda problem, completion: 1.0, "it is a lambda"),
        (functools.partial(forms.single), "it is an object of type partial"),
        (Object(), "it is an object of type Object"),
        (Object().__call__, "it belongs to a class"),
    ],
)
def test_what_no_other_process_can_import_is_kept_as_it_is(function, reason):
    assert importable(function) == (None, reason) and as_reward(function) == Local(function)


def test_what_has_a_name_is_kept_by_its_name():
    assert as_reward(forms.single) == Function(f"{SAMPLES}:single") and as_reward(Accuracy()) == Accuracy()
    renamed = functools.wraps(forms.single)(lambda problem, completion: 1.0)  # its name is that of another function
    assert importable(renamed) == (None, f"{SAMPLES}:single is something else")
    elsewhere = types.FunctionType(forms.single.__code__, {"__name__": "made_from_a_file"}, "single")
    assert importable(elsewhere) == (None, "it belongs to a file that was run, not imported")


@pytest.mark.parametrize("given", [3, "sample_forms:single", Accuracy, None])
def test_what_cannot_be_called_is_no_reward(given):
    with pytest.raises(InputError, match="which is not a reward: give a function, or one such as Accuracy"):
        as_reward(given)


def test_no_two_columns_have_one_name():
    def accuracy(problem, completion):
        return 1.0

    rewards = [
        Format("a"),
        Format("b"),
        Local(accuracy),
        Accuracy(),
        Function("m:mean"),
        Function("m:format_2"),
        Format("c"),
    ]
    assert list(name_rewards(rewards)) == [
        "format",
        "format_2",
        "accuracy_2",
        "accuracy",
        "mean_2",
        "format_2_2",
        "format_3",
    ]
    assert list(name_rewards(rewards).values()) == rewards


def test_a_configuration_keeps_names_and_says_what_it_cannot_keep():
    scoring = configs.Scoring(rewards=(forms.single, lambda p, c: 1.0, Local(Times(3.0)), Accuracy()))
    assert [type(reward) for reward in scoring.rewards] == [Function, Local, Local, Accuracy]
    saved = configs.to_json(scoring)
    assert saved["rewards"][0] == configs.to_json(Function(f"{SAMPLES}:single"))
    assert (saved["rewards"][1]["name"], saved["rewards"][1]["reason"]) == ("lambda", "it is a lambda")
    assert saved["rewards"][2]["function"]["factor"] == 3.0
    del saved["rewards"][2]
    again = configs.from_json(saved)
    run = configs.Run("m", Task([{"prompt": "?", "answer": "!"}]))
    assert configs.reloads(run) and not configs.reloads(dataclasses.replace(run, scoring=scoring))
    assert configs.to_json(again) == saved  # who goes on with the run from its source is not told of a change
    for reward in (again.rewards[0], again.rewards[2]):
        check_reward(reward)
    with pytest.raises(
        InputError, match=r"^reward lambda is not in config.json, since it is a lambda: train from the Python"
    ):
        check_reward(again.rewards[1])


@pytest.mark.parametrize(("reward", "words"), [
    (Function(f"{SAMPLES}:single", timeout_s=0.0), "timeout_s 0.0; give more than 0 seconds"),
    (Function(f"{SAMPLES}:nothing"), "has no nothing"),
    (Local(lambda p: 1.0), "cannot be a reward"),
    (Times(1.0, weight=float("nan")), "weight nan; give a finite number"),
])  # fmt: skip
def test_a_function_that_cannot_work_is_refused(reward, words):
    with pytest.raises(InputError, match=words):
        Scorer((LengthPenalty(0.1), reward))


def test_rewards_of_ones_own_have_flags_and_no_warnings():
    run = configs.Run("m", Task([{"prompt": "?", "answer": "!"}]), configs.Scoring((Times(2.0), lambda p, c: 1.0)))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = parse_flags(
            configs.Run, ["--scoring.rewards.0.factor", "3", "--scoring.rewards.1.weight", "0.5"], "p", "", run
        )
    assert found.scoring.rewards == (Times(3.0), dataclasses.replace(run.scoring.rewards[1], weight=0.5))
    assert not [warning for warning in heard if warning.category is not DeprecationWarning]
