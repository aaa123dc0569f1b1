"""The simulator of a step's tail: it counts what the engine does, and what reading, waiting and stragglers cost."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout import Engine, EngineOptions, Sampling
from jaxrl_llm.types import Prompt

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import simulate_tail as tail

pytestmark = pytest.mark.slow

LIMITS = [3, 40, 17, 64, 16, 1, 33, 20, 9, 64] * 2
PROMPTS = [[1 + n // 2, 5, 7] for n in range(len(LIMITS))]


def test_its_slots_pass_the_steps_of_the_engine():
    """The engine samples to each request's limit; the simulator is told these lengths."""
    model = tiny()
    engine = Engine(model, slots=17, max_length=80, chunk=16, group=2, form=None)
    clock = tail.Clock()
    slots = tail.Slots(engine._spec, tail.Costs(2.0, 0.0), lambda seed: LIMITS[seed], clock)
    prompts = [Prompt(np.asarray(prompt, np.int32)) for prompt in PROMPTS]
    for sampler in (engine, slots):
        sampler.start(Sampling(max_new_tokens=64))
        sampler.submit(prompts, range(len(LIMITS)), LIMITS, [None] * len(LIMITS))
    done, read = [], 0
    while len(done) < len(LIMITS):
        count = engine.step(model)
        ended = [(handle, len(completion.tokens)) for handle, completion in engine.collect()]
        assert slots.step(None) == count and slots.held == engine._scheduler._shape
        assert [(handle, len(completion.tokens)) for handle, completion in slots.collect()] == ended
        done, read = done + ended, read + count
    assert read == sum(LIMITS) == slots.tally["tokens"] and sorted(done) == list(enumerate(LIMITS))
    assert engine.slot_steps == slots.slot_steps and engine.decode_steps == slots.tally["steps"] == clock.now / 2


@pytest.fixture(scope="module")
def rows():
    """Of DAPO's run in small, without its filter; a judge scores one completion after the other."""
    run = configs.find_config("dapo_qwen2_5_32b").run
    engine = EngineOptions(slots=32, chunk=64)
    rollout = dataclasses.replace(run.rollout, prompts=8, group=8, max_new_tokens=2048, engine=engine)
    run = dataclasses.replace(run, rollout=rollout, recipe=dataclasses.replace(run.recipe, filter_groups=False))
    options = tail.Options("dapo_qwen2_5_32b", "v5p:2x2x2", judge_s=0.05, judges=1, steps=3)
    return tail.rows(configs.resolved(run), options)


def test_reading_by_length_reads_little_more_than_live_columns(rows):
    ours, longest = rows["as configured"], rows["every slot to the longest"]
    assert 1.0 <= ours["read/live"] < 1.15 < 1.5 < longest["read/live"]
    assert ours["seconds"] < longest["seconds"]


def test_interrupted_stragglers_leave_no_slot_idle_and_tokens_of_earlier_policies(rows):
    ours, interrupted = rows["as configured"], rows["--rollout.collect.interrupt"]
    assert interrupted["seconds"] < ours["seconds"] and interrupted["in use"] > ours["in use"]
    assert ours["empty"] > 0.2 > interrupted["empty"] and interrupted["earlier"] > 0 == ours["earlier"]


def test_scores_beside_sampling_are_waited_for_less(rows):
    ours, waited = rows["as configured"], rows["scores waited for"]
    assert waited["waiting"] == pytest.approx(0.05 * 64) and ours["waiting"] < waited["waiting"] / 2
    assert ours["seconds"] < waited["seconds"] and ours["in use"] == waited["in use"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--median", "0"], "--median must be above 0"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--judges", "0"], "--judges must be at least 1"),
        (["--sigma", "-1"], "--sigma must be from 0 to 5, got -1"),
        (["--judge_s", "-1"], "--judge_s must be from 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        tail.main(["dapo_qwen2_5_32b", "--topology", "v5p:2x2x2", *given])
