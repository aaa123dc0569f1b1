"""What one phase leaves to the next: stored successes, streams of prompts, the order of problems, what is solved."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxrl_llm.begin import with_phase
from jaxrl_llm.config import MAX_SEED, Mixture, Part, in_phase, load_config, resolved, shared_by_phases, validate
from jaxrl_llm.recipes import DAPO, GRPO
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout.replay import Solved, Success
from jaxrl_llm.rules import DONE, Phase, Rules, decide, guards_of
from jaxrl_llm.stages.leaving import same_rewards, stream_left, successes_left
from jaxrl_llm.stages.problems import streams_of
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.types import Completion, Problem

RUN = load_config(str(Path(__file__).parent / "fixtures" / "runs" / "phased.py"))[1]


def phased(*phases, **changes):
    run = resolved(dataclasses.replace(RUN, rules=Rules(phases), **changes))
    validate(run)
    return run


def test_stored_successes_stay_where_completions_score_the_same():
    run = resolved(dataclasses.replace(RUN, recipe=dataclasses.replace(DAPO, overlong_weight=0.5)))
    assert same_rewards(run, dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, filter_groups=False)))
    assert not same_rewards(run, dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, overlong_weight=1.0)))
    weighed = Mixture((Part(run.task, rewards=(Format(".*[0-9].*", weight=2.0),)),))
    assert not same_rewards(run, dataclasses.replace(run, task=weighed))
    assert not same_rewards(run, dataclasses.replace(run, scoring=dataclasses.replace(run.scoring, on_error=-1.0)))


def solved(tokens):
    """What is stored of a problem that was answered with so many tokens."""
    completion = Completion(np.arange(tokens), np.zeros(tokens), "stop", np.ones(tokens, bool), np.zeros(tokens))
    return Solved(np.zeros(2, np.int32), (Success(completion, 1.0, 1.0, {}),), 0, 1.0)


def test_stored_successes_stay_where_they_are_right_and_fit():
    digits, letters = (dataclasses.replace(RUN.task, name=name) for name in ("digits", "letters"))
    before = dataclasses.replace(RUN, task=Mixture((digits, letters)))
    store = {"digits/a": solved(3), "digits/b": solved(8), "letters/c": solved(3)}

    def left(**changes):
        return set(successes_left(store, before, dataclasses.replace(before, **changes)))

    assert left() == set(store)
    assert left(rollout=dataclasses.replace(RUN.rollout, max_new_tokens=3)) == {"digits/a", "letters/c"}
    boxed = dataclasses.replace(digits, extractor="boxed")
    assert left(task=Mixture((boxed, letters))) == {"letters/c"}, "another answer is cut out of it"
    short = Part(digits, max_new_tokens=4)
    assert left(task=Mixture((short, letters))) == {"digits/a", "letters/c"}
    assert left(learner=dataclasses.replace(RUN.learner, keep_sampling_mask=True)) == set()


def test_streams_of_tasks_that_stay_go_on_and_shares_count_anew():
    digits, letters, new = (dataclasses.replace(RUN.task, name=name) for name in ("digits", "letters", "new"))
    before = dataclasses.replace(RUN, task=Mixture((digits, letters)))
    memory = {"asked": {"digits": 7, "letters": 6}, "streams": {"digits": {"tries": 1}, "letters": {}}}
    assert stream_left(memory, before, before) == memory
    heavier = dataclasses.replace(before, task=Mixture((Part(digits, 3.0), Part(letters, 1.0))))
    assert stream_left(memory, before, heavier) == memory | {"before": memory["asked"]}
    other = dataclasses.replace(before, task=Mixture((digits, new)))
    kept = stream_left(memory, before, other)
    assert kept == {"asked": {"digits": 7}, "before": {"digits": 7}, "streams": {"digits": {"tries": 1}}}
    assert stream_left(memory, before, dataclasses.replace(before, task=new)) == {}


def test_the_order_of_problems_is_the_same_in_all_phases():
    run = phased(Phase("a", 1), Phase("b", 1), Phase("c"), seed=MAX_SEED - 1)
    assert {shared_by_phases(in_phase(run, number).seed) for number in range(3)} == {(MAX_SEED - 1) % (1 << 16)}
    assert shared_by_phases(5) == 5
    asked = [Problem(str(i), ({"role": "user", "content": str(i)},), "1", "digits") for i in range(9)]
    streams = [streams_of(in_phase(run, number), [asked]) for number in range(3)]
    orders = [[stream.next(number, {})[0].id for number in range(9)] for stream in streams]
    assert orders[0] == orders[1] == orders[2] and len(set(orders[0])) == 9


def test_a_phase_whose_problems_are_solved_gives_way_to_the_next():
    run = phased(Phase("easy", 9), Phase("hard", reset=True, changes={"recipe": GRPO}))
    stage = Stage(training=(), forward=None, label="sums", rules=guards_of(in_phase(run, 0)))
    row = {"step": 3, "updates": 0.0, "reward/accuracy": 1.0, "dynamic_sampling/kept_fraction": 0.0}
    row |= {"reward/zero_std_fraction": 1.0, "completions": 0, "completions/mean_length": 3.0}
    memory = {"teaches_nothing": {"empty": 2}}
    last, _ = decide(with_phase(stage, run, 1).rules, row, memory)
    assert last.stop == DONE and last.reason.startswith("solved: ")
    goes_on, after = decide(with_phase(stage, run, 0).rules, row, memory)
    assert goes_on.stop is None and goes_on.next_phase and goes_on.snapshot
    assert goes_on.events["event/phase"].startswith("hard (easy ended since it is solved: ")
    assert goes_on.events["event/reference_reset"] and after["teaches_nothing"] == {"empty": 0}
