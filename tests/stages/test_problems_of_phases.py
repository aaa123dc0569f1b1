"""What one phase leaves to the next: stored successes, streams of prompts, the order of problems, what is solved."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import codec
from jaxrl_llm.config import (
    SHIFT,
    Mixture,
    Part,
    in_phase,
    load_config,
    resolved,
    tasks_in,
    validate,
)
from jaxrl_llm.config.run import MAX_SEED
from jaxrl_llm.recipes import DAPO, GRPO, Overlong
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout.groups import Carryover, PartialGroup, ProblemSuccesses, Success
from jaxrl_llm.rules import DONE, Phase, Reaches, Rules, decide, guards_of
from jaxrl_llm.stages.problems import carry_stream, carry_successes, prompt_stream, same_rewards
from jaxrl_llm.stages.programs import ingredients_of
from jaxrl_llm.stages.rl import Reinforcement
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.tasks import Curriculum, EasyToHard
from jaxrl_llm.trainer.state import add_phase_rule
from jaxrl_llm.types import Completion, Group, Problem

RUN = load_config(str(Path(__file__).parents[1] / "fixtures" / "runs" / "phased.py"))[1]


def phased(*phases, **changes):
    run = resolved(dataclasses.replace(RUN, rules=Rules(phases), **changes))
    validate(run)
    return run


def test_stored_successes_stay_where_completions_score_the_same():
    run = resolved(dataclasses.replace(RUN, recipe=dataclasses.replace(DAPO, overlong=Overlong(share=0.2, weight=0.5))))
    assert same_rewards(run, dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, filter_groups=False)))
    heavier = dataclasses.replace(run.recipe, overlong=Overlong(share=0.2, weight=1.0))
    assert not same_rewards(run, dataclasses.replace(run, recipe=heavier))
    weighed = Mixture((Part(run.task, rewards=(Format(".*[0-9].*", weight=2.0),)),))
    assert not same_rewards(run, dataclasses.replace(run, task=weighed))
    assert not same_rewards(run, dataclasses.replace(run, scoring=dataclasses.replace(run.scoring, on_error=-1.0)))


def solved(tokens):
    """What is stored of a problem that was answered with so many tokens."""
    completion = Completion(np.arange(tokens), np.zeros(tokens), "stop", np.ones(tokens, bool), np.zeros(tokens))
    return ProblemSuccesses(np.zeros(2, np.int32), (Success(completion, 1.0, 1.0, {}),), 0, 1.0)


def test_stored_successes_stay_where_they_are_right_and_fit():
    digits, letters = (dataclasses.replace(RUN.task, name=name) for name in ("digits", "letters"))
    before = dataclasses.replace(RUN, task=Mixture((digits, letters)))
    store = {"digits/a": solved(3), "digits/b": solved(8), "letters/c": solved(3)}

    def left(**changes):
        after = dataclasses.replace(before, **changes)
        return set(carry_successes(store, before, after))

    assert left() == set(store)
    assert left(rollout=dataclasses.replace(RUN.rollout, max_new_tokens=3)) == {"digits/a", "letters/c"}
    boxed = dataclasses.replace(digits, extractor="boxed")
    assert left(task=Mixture((boxed, letters))) == {"letters/c"}, "another answer is cut out of it"
    short = Part(digits, max_new_tokens=4)
    assert left(task=Mixture((short, letters))) == {"digits/a", "letters/c"}
    assert left(learner=dataclasses.replace(RUN.learner, keep_sampling_mask=True)) == set()
    alone = dataclasses.replace(RUN, task=letters)
    called = dataclasses.replace(RUN, task=Mixture((dataclasses.replace(letters, name="abc"), boxed)))
    assert set(carry_successes(store, alone, called)) == {"abc/c"}, "whatever it is called"


def test_a_phase_leaves_the_successes_that_fit_the_next_one_and_no_group_of_its_own():
    run = resolved(RUN)
    store = {f"{run.task.label}/a": solved(3), f"{run.task.label}/b": solved(8)}
    stage = Reinforcement(
        training=(), forward=None, label="", run=run, tokenizer=None, sampler=None, transfer=None, evaluate_tasks=None,
        ingredients=ingredients_of(run),
    )  # fmt: skip
    left = Carryover(cursor=5, unfinished=(PartialGroup(4, (None,)),), successes=store, step_progress={"cursor": 6})
    seen = dataclasses.replace(left, critic=[[4.0, 1.0, 0.5]])
    assert stage.carry_over(seen, run, run) == left, "a critic's window is that of one phase"
    shorter = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, max_new_tokens=3))
    after = stage.carry_over(left, run, shorter)
    assert set(after.successes) == {f"{run.task.label}/a"} and not after.unfinished and after.cursor == 5
    assert not after.step_progress


def test_another_run_takes_up_the_place_and_the_successes_as_those_of_no_policy_of_its_own():
    run = resolved(RUN)
    place = f"{run.task.label}/a"
    stage = Reinforcement(
        training=(), forward=None, label="", run=run, tokenizer=None, sampler=None, transfer=None, evaluate_tasks=None,
        ingredients=ingredients_of(run),
    )  # fmt: skip
    groups = (PartialGroup(4, (None,)),)
    left = Carryover(cursor=5, unfinished=groups, texts=3, successes={place: solved(3)}, step_progress={"cursor": 6})
    found = stage.carry_over(left, run, run, new_run=True)
    assert found.cursor == 5 and found.texts == 3 and not found.unfinished and not found.step_progress
    assert found.successes[place].successes[0].completion.version.tolist() == [-1, -1, -1]
    assert stage.carry_over(None, run, run, new_run=True) is None
    boxed = dataclasses.replace(run, task=dataclasses.replace(run.task, extractor="boxed"))
    assert not stage.carry_over(left, run, boxed, new_run=True).successes, "answers were judged in another way there"


def test_streams_of_tasks_that_stay_go_on_and_shares_count_anew():
    digits, letters = (dataclasses.replace(RUN.task, name=name) for name in ("digits", "letters"))
    new = dataclasses.replace(RUN.task, name="new", holdout=0.5)
    before = dataclasses.replace(RUN, task=Mixture((digits, letters)))
    memory = {"asked": {"digits": 7, "letters": 6}, "streams": {"digits": {"tries": 1}, "letters": {}}}
    assert carry_stream(memory, 13, before, before) == memory
    heavier = dataclasses.replace(before, task=Mixture((Part(digits, 3.0), Part(letters, 1.0))))
    assert carry_stream(memory, 13, before, heavier) == memory | {"before": memory["asked"]}
    other = dataclasses.replace(before, task=Mixture((digits, new)))
    kept = carry_stream(memory, 13, before, other)
    assert kept == {"asked": {"digits": 7}, "before": {"digits": 7}, "streams": {"digits": {"tries": 1}}}
    assert carry_stream(memory, 13, before, dataclasses.replace(before, task=new)) == {"others": 13}
    boxed = [dataclasses.replace(task, extractor="boxed") for task in (letters, digits)]
    judged = carry_stream(memory, 13, before, dataclasses.replace(before, task=Mixture(boxed)))
    assert judged["asked"] == memory["asked"] and judged["streams"] == {"letters": {}, "digits": {}}


def of_task(task, curriculum):
    """The settings of a phase."""
    collect = dataclasses.replace(RUN.rollout.collect, curriculum=curriculum)
    return dataclasses.replace(RUN, task=task, rollout=dataclasses.replace(RUN.rollout, collect=collect))


class Asking:
    """Prompts of phases one after the other, as a run asks them; each answer is half right.

    The task of the name ``a``, whatever it is called later, has 40 problems of levels 0 to 39.
    """

    def __init__(self, run):
        self.run, self.cursor, self.memory = run, 0, {}

    def phase(self, following):
        written = json.dumps(codec.to_json(carry_stream(self.memory, self.cursor, self.run, following)))
        self.run, self.memory = following, codec.from_json(json.loads(written))

    @property
    def stream(self):
        sizes = [10 if task.holdout else 40 for task in tasks_in(self.run.task)]
        labels = [task.label for task in tasks_in(self.run.task)]
        prompt = ({"role": "user", "content": "?"},)
        rows = [
            [Problem(str(i), prompt, "1", label, metadata={"level": i}) for i in range(size)]
            for label, size in zip(labels, sizes, strict=True)
        ]
        return prompt_stream(self.run, rows)

    def ask(self, count):
        """The problems of the larger task among so many prompts."""
        found, stream = [], self.stream
        large = {task.label for task in tasks_in(self.run.task) if not task.holdout}
        for _ in range(count):
            problem, self.memory = stream.next(self.cursor, self.memory)
            self.cursor += 1
            answers = Group(problem, np.zeros(1, np.int32), (), np.zeros(2), np.array([0.0, 1.0]))
            self.memory = stream.observe(self.memory, [answers])
            found += [int(problem.id)] * (problem.task in large)
        return found


LARGE, SMALL = dataclasses.replace(RUN.task, name="a"), dataclasses.replace(RUN.task, name="b", holdout=0.5)
CALLED, BOXED = dataclasses.replace(LARGE, name="c"), dataclasses.replace(LARGE, extractor="boxed")
PLAIN, COUNTS = None, Curriculum()
WAYS = {
    "into a mixture and back": ((LARGE, PLAIN), (Mixture((LARGE, SMALL)), PLAIN), (LARGE, PLAIN)),
    "after another one": ((SMALL, PLAIN), (LARGE, PLAIN), (Mixture((SMALL, LARGE)), PLAIN)),
    "counted after another one": ((SMALL, COUNTS), (LARGE, COUNTS), (Mixture((SMALL, LARGE)), COUNTS)),
    "by another name": ((LARGE, COUNTS), (Mixture((CALLED, SMALL)), COUNTS), (LARGE, COUNTS)),
    "judged otherwise": ((LARGE, COUNTS), (BOXED, COUNTS), (Mixture((BOXED, SMALL)), COUNTS)),
    "with a curriculum in between": ((LARGE, PLAIN), (LARGE, COUNTS), (LARGE, PLAIN)),
    "without one in between": ((Mixture((LARGE, SMALL)), COUNTS), (LARGE, PLAIN), (LARGE, COUNTS)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_problem_comes_twice_before_all_of_its_task_have_come(way):
    first, *others = (of_task(task, curriculum) for task, curriculum in WAYS[way])
    asking = Asking(first)
    found = asking.ask(20)
    for one in others:
        asking.phase(one)
        found += asking.ask(26)
    found += asking.ask(30)
    assert len(found) > 40 and sorted(found[:40]) == list(range(40)), found


def counted(memory):
    """The answers that a stream has counted of its larger task."""
    own = [one for one in (memory, *memory.get("streams", {}).values()) if len(one.get("tries", ())) == 40]
    return sum(one["tries"].sum() for one in own)


def test_what_a_curriculum_has_counted_stays_while_answers_are_judged_as_before():
    asking = Asking(of_task(LARGE, COUNTS))
    asking.ask(20)
    for task, curriculum in ((Mixture((CALLED, SMALL)), COUNTS), (LARGE, PLAIN), (Mixture((SMALL, LARGE)), COUNTS)):
        before = counted(asking.memory)
        asking.phase(of_task(task, curriculum))
        assert counted(asking.memory) == before >= 40
        asked = len(asking.ask(10))
        assert counted(asking.memory) == before + 2 * asked > before
    asking.phase(of_task(BOXED, COUNTS))
    asked = len(asking.ask(10))
    assert counted(asking.memory) == 2 * asked == 20


def test_problems_open_from_the_easiest_on_where_that_is_new_and_go_on_opening_where_it_is_not():
    easy = Curriculum(easy_to_hard=EasyToHard("level", over=60, start=0.1))
    opened = lambda: asking.stream.metrics({}, asking.memory).get("curriculum/active")
    for before in (PLAIN, COUNTS, Curriculum(easy_to_hard=EasyToHard("level", over=10, start=0.5))):
        asking = Asking(of_task(LARGE, before))
        asking.ask(20)
        asking.phase(of_task(LARGE, easy))
        assert opened() == 4
        asking.ask(20)
        assert opened() == 16
        asking.phase(of_task(Mixture((LARGE, SMALL)), easy))
        assert asking.stream.metrics({}, asking.memory)["task/a/curriculum/active"] == 16
        asking.phase(of_task(LARGE, easy))
        asking.ask(20)
        assert opened() == 28


def test_the_order_of_problems_is_the_same_in_all_phases():
    run = phased(Phase("a", 1), Phase("b", 1), Phase("c"), seed=MAX_SEED - 1)
    assert {in_phase(run, number).seed % SHIFT for number in range(3)} == {(MAX_SEED - 1) % (1 << 16)}
    asked = [Problem(str(i), ({"role": "user", "content": str(i)},), "1", "digits") for i in range(9)]
    streams = [prompt_stream(in_phase(run, number), [asked]) for number in range(3)]
    orders = [[stream.next(number, {})[0].id for number in range(9)] for stream in streams]
    assert orders[0] == orders[1] == orders[2] and len(set(orders[0])) == 9


def test_a_phase_whose_problems_are_solved_gives_way_to_the_next():
    run = phased(Phase("easy", 9), Phase("hard", reset=True, changes={"recipe": GRPO}))
    stage = Stage(run=run, training=(), forward=None, label="sums", rules=guards_of(in_phase(run, 0)))
    row = {"step": 3, "updates": 0.0, "reward/accuracy": 1.0, "dynamic_sampling/kept_fraction": 0.0}
    row |= {"reward/zero_std_fraction": 1.0, "completions": 0, "completions/mean_length": 3.0}
    memory = {"teaches_nothing": {"empty": 2, "solved": 2}}
    last, _ = decide(add_phase_rule(stage, run, 1).rules, row, memory)
    assert last.stop == DONE and last.reason.startswith("solved: ")
    goes_on, after = decide(add_phase_rule(stage, run, 0).rules, row, memory)
    assert goes_on.stop is None and goes_on.next_phase and goes_on.snapshot
    assert goes_on.events["event/phase"].startswith("hard (easy ended since it is solved: ")
    assert goes_on.events["event/reference_reset"] and after["teaches_nothing"] == {"empty": 0}
    row["reward/accuracy"] = 0.5
    alone = dataclasses.replace(run, rules=Rules(until=Reaches("reward/accuracy", above=0.4)))
    ended, _ = decide(add_phase_rule(stage, alone, 0).rules, row, {})
    assert ended.stop == DONE and add_phase_rule(stage, run, 1) is stage
