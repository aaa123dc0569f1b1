"""Which problems a curriculum asks: the papers' numbers, counts by hand, and an order that seed and results decide."""

import dataclasses
import json
import time

import numpy as np
import pytest
from learner.rollouts import one_device

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.store import Checkpoints, host_file
from jaxrl_llm.config import load_config, located, to_json, validate
from jaxrl_llm.config.origin import Origin
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.settings import Optimiser
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rollout.groups import GROUP_RECORDS, Carryover
from jaxrl_llm.runs import find_start
from jaxrl_llm.stages.problems import load_statistics, task_stream
from jaxrl_llm.tasks import Curriculum, Dropping, EasyToHard, Prioritised, Scheduled, Shuffled
from jaxrl_llm.tasks.stream import Interleaved
from jaxrl_llm.trainer.state import LoopState
from jaxrl_llm.types import Group, Problem


def problems(count, **columns):
    """Problems with a number in each column."""
    rows = [{name: values[i] for name, values in columns.items()} | {"row": f"t:{i + 1}"} for i in range(count)]
    return tuple(
        Problem(f"p{i}", ({"role": "user", "content": str(i)},), "1", "toy", metadata=rows[i]) for i in range(count)
    )


def answered(problem, right, of=4):
    """A group with so many right answers; NaN for none that could be verified."""
    accuracy = np.full(of, np.nan) if right is None else np.arange(of) < right
    return Group(problem, np.zeros(1, np.int32), (), np.zeros(of), accuracy.astype(float))


def played(stream, count, solves, memory=None, start=0):
    """Prompts one after the other, each told at once; the indices that were asked, and what is remembered."""
    memory, asked = memory or {}, []
    for number in range(start, start + count):
        problem, memory = stream.next(number, memory)
        index = int(problem.id[1:])
        asked.append(index)
        memory = stream.observe(memory, [answered(problem, solves(index))])
    return asked, memory


def told(stream, *results, memory=None):
    """What is remembered after these (index, right of 4), in one call."""
    return stream.observe(memory or {}, [answered(stream.problems[i], right) for i, right in results])


def test_without_any_part_all_are_asked_once_then_all_again_and_counted():
    stream = Scheduled(Curriculum(), problems(10), 3)
    asked, memory = played(stream, 30, lambda i: i % 5)
    assert [sorted(asked[at : at + 10]) for at in (0, 10, 20)] == [list(range(10))] * 3
    assert asked[:10] != asked[10:20]
    assert memory["tries"].tolist() == [12] * 10 and memory["solved"].tolist() == [3 * (i % 5) for i in range(10)]
    assert memory["last"].tolist() == [max(n for n in range(30) if asked[n] == i) for i in range(10)]
    assert stream.metrics({}, memory) == {
        "curriculum/active": 10, "curriculum/dropped_solved": 0, "curriculum/dropped_unsolved": 0,
        "curriculum/success": pytest.approx(0.5),
    }  # fmt: skip


def test_prioritised_draws_in_proportion_to_what_is_not_solved():
    weights = Prioritised()(np.array([0.9, 0.5, 0.1]))
    np.testing.assert_allclose(weights / weights.sum(), [0.066667, 0.333333, 0.6], atol=1e-6)  # ALGORITHMS.md, 18
    stream = Scheduled(Curriculum(Prioritised(), strength=0), problems(4), 5)
    groups = [answered(stream.problems[i], right, of=10) for i, right in enumerate((9, 5, 1))]
    memory = stream.observe({}, groups)  # the fourth was never tried: its success is the prior, 0.5
    counts = np.bincount([int(stream.next(n, memory)[0].id[1:]) for n in range(8000)], minlength=4)
    np.testing.assert_allclose(counts / 8000, np.array([0.1, 0.5, 0.9, 0.5]) / 2, atol=0.015)
    harder = np.bincount(
        [int(dataclasses.replace(stream, curriculum=Curriculum(Prioritised(2.0), strength=0)).next(n, memory)[0].id[1:])
         for n in range(8000)], minlength=4,
    )  # fmt: skip
    np.testing.assert_allclose(harder / 8000, np.array([0.01, 0.25, 0.81, 0.25]) / 1.32, atol=0.015)


def test_the_expectation_counts_as_answers_do_and_what_is_always_solved_still_comes():
    stream = Scheduled(Curriculum(Prioritised(), prior=0.25, strength=4), problems(3), 0)
    memory = told(stream, (0, 4), (1, 0))
    assert stream.success(memory).tolist() == [(4 + 1) / 8, (0 + 1) / 8, 0.25]
    sure = Scheduled(Curriculum(Prioritised(), strength=0), problems(3), 0)
    all_solved = told(sure, (0, 4), (1, 4), (2, 4))
    assert {sure.next(n, all_solved)[0].id for n in range(50)} == {"p0", "p1", "p2"}, "where no weight is left"
    fading = Scheduled(Curriculum(fade=0.5), problems(2), 0)
    memory = told(fading, (0, 4), (0, 2), (0, 0))
    assert (memory["tries"][0], memory["solved"][0]) == (4 + 2 + 1, 0 + 1 + 1)


def test_easy_to_hard_opens_the_easiest_share_evenly():
    level = [7, 3, 9, 1, 5, 8, 2, 6, 0, 4]
    easy = EasyToHard("level", over=40, start=0.2)
    stream = Scheduled(Curriculum(easy_to_hard=easy), problems(10, level=level), 1)
    asked, memory = played(stream, 80, lambda i: 2)
    for number, index in enumerate(asked):
        assert level[index] < min(10, 2 - (-number // 5))
    assert {level[i] for i in asked[:6]} == {0, 1, 2} and {level[i] for i in asked[40:]} == set(range(10))
    begun = memory["begun"]
    assert begun >= 70 and np.bincount(asked[begun - 20 : begun]).tolist() == [2] * 10, "two rounds of all"
    turned = dataclasses.replace(easy, rising=False)
    again, _ = played(Scheduled(Curriculum(easy_to_hard=turned), stream.problems, 1), 4, lambda i: 2)
    assert {level[i] for i in again} == {9, 8, 7}
    assert stream.metrics({}, {**memory, "asked": 10})["curriculum/active"] == 4


def test_easy_to_hard_counts_from_the_first_prompt_of_its_task():
    stream = Scheduled(
        Curriculum(easy_to_hard=EasyToHard("level", over=40, start=0.2)), problems(10, level=range(10)), 1
    )
    assert stream.metrics({}, {})["curriculum/active"] == 2
    memory = {}
    for number in range(500, 510):
        _, memory = stream.next(number, memory)
    assert memory["since"] == 500 and stream.metrics({}, memory)["curriculum/active"] == 4
    of_old = {name: value for name, value in memory.items() if name != "since"}
    assert stream.metrics({}, of_old)["curriculum/active"] == 10


def test_easy_to_hard_by_success_begins_with_what_was_solved():
    stream = Scheduled(Curriculum(easy_to_hard=EasyToHard("success", over=10**12, start=0.3)), problems(20), 2)
    memory = told(stream, *((i, i % 5) for i in range(20)))
    wanted = {i for i in range(20) if i % 5 == 4}
    asked, _ = played(stream, 6, lambda i: i % 5, memory)
    assert wanted < set(asked) and {i % 5 for i in asked} == {4, 3}
    blank = [int(stream.next(n, {})[0].id[1:]) for n in range(40)]
    others = dataclasses.replace(stream, seed=3)
    assert len(set(blank)) == 6 and set(blank) != {int(others.next(n, {})[0].id[1:]) for n in range(40)}


def test_what_is_always_or_never_solved_is_dropped_and_visited_again():
    solves = lambda i: (4, 0, 2)[i % 3]
    stream = Scheduled(Curriculum(drop=Dropping(2, 3, again=4)), problems(9), 4)
    asked, memory = played(stream, 200, solves)
    for kind, visits in ((0, 2), (1, 3)):
        for index in range(kind, 9, 3):
            at = [number for number, one in enumerate(asked) if one == index]
            gaps = np.diff(at)
            assert (gaps[: visits - 1] < 4 * 9).all() and (gaps[visits - 1 :] >= 4 * 9).all() and len(at) > visits
    found = stream.metrics({}, memory)
    active = stream.active(200, memory)
    assert found["curriculum/active"] == active.sum() >= 3 and active[2::3].all()
    assert found["curriculum/dropped_solved"] + found["curriculum/dropped_unsolved"] == 9 - active.sum()
    assert 0 < found["curriculum/dropped_solved"] <= 3 >= found["curriculum/dropped_unsolved"] > 0
    mixed = told(stream, (0, 1), memory=memory)
    assert mixed["streak"][0] == 0 and stream.active(200, mixed)[0], "one that is solved in part is back"
    dropped = [Dropping(2, 3, 2)(np.array([2, -3, 1, -2]), np.array([10, 11, 10, 10]), n).sum() for n in (17, 18, 19)]
    assert dropped == [2, 1, 0], "two epochs of four prompts after it was asked"
    never = Scheduled(Curriculum(drop=Dropping(2, 0)), problems(9), 4)
    asked, memory = played(never, 200, solves)
    assert set(asked[60:]) == {1, 2, 4, 5, 7, 8}


def test_all_are_asked_where_all_are_dropped_and_that_is_an_event_once():
    stream = Scheduled(Curriculum(Prioritised(), drop=Dropping(1, 1)), problems(3), 0)
    before = told(stream, (0, 4), (1, 0))
    after = told(stream, (2, 4), memory=before)
    assert "event/curriculum_exhausted" not in stream.metrics({}, before)
    assert stream.metrics({}, before)["curriculum/active"] == 1
    found = stream.metrics(before, after)
    assert (
        found["event/curriculum_exhausted"].startswith("all 3 problems are dropped") and found["curriculum/active"] == 3
    )
    assert "event/curriculum_exhausted" not in stream.metrics(after, after)
    assert {stream.next(n, after)[0].id for n in range(60)} == {"p0", "p1", "p2"}


@pytest.mark.slow
def test_the_parts_go_together():
    level = list(range(10))
    parts = Curriculum(Prioritised(), EasyToHard("level", 100, 0.5), Dropping(1, 1))
    stream = Scheduled(parts, problems(10, level=level), 0)
    memory = told(stream, (0, 4), (1, 0), (2, 4), (3, 3), (4, 1))
    assert stream.active(0, memory).tolist() == [False] * 3 + [True] * 4 + [False] * 3, "half of the seven left"
    counts = np.bincount([int(stream.next(0, memory | {"last": memory["last"]})[0].id[1:])], minlength=10)
    assert counts[3:7].sum() == 1
    drawn = np.bincount([int(dataclasses.replace(stream, seed=s).next(0, memory)[0].id[1:]) for s in range(4000)])
    wanted = 1 - stream.success(memory)[3:7]
    np.testing.assert_allclose(drawn[3:7] / 4000, wanted / wanted.sum(), atol=0.03)


def test_answers_that_nobody_could_verify_are_no_visit():
    stream = Scheduled(Curriculum(drop=Dropping(1, 1)), problems(3), 0)
    memory = told(stream, (0, None))
    assert not memory["tries"].any() and not memory["streak"].any()
    partly = answered(stream.problems[1], 4)
    partly = dataclasses.replace(partly, accuracy=np.array([np.nan, 1, 1, np.nan]))
    memory = stream.observe(memory, [partly, answered(problems(9)[8], 4)])
    assert memory["tries"].tolist() == [0, 2, 0] and memory["streak"].tolist() == [0, 1, 0]
    assert np.isnan(stream.metrics({}, {})["curriculum/success"])


def test_what_is_remembered_is_replaced_and_the_order_depends_on_it_and_the_seed_alone():
    parts = Curriculum(Prioritised(), EasyToHard("success", 60), Dropping(2, 2, 1))
    stream = Scheduled(parts, problems(12), 6)
    whole, end = played(stream, 80, lambda i: i % 5)
    _, half = played(stream, 40, lambda i: i % 5)
    kept = json.dumps(codec.to_json(half))
    rest, again = played(Scheduled(parts, problems(12), 6), 40, lambda i: i % 5, codec.from_json(json.loads(kept)), 40)
    assert rest == whole[40:] and json.dumps(codec.to_json(again)) == json.dumps(codec.to_json(end))
    assert json.dumps(codec.to_json(half)) == kept, "the memory that is handed in stays as it was"
    assert played(dataclasses.replace(stream, seed=7), 80, lambda i: i % 5)[0] != whole
    together = stream.observe(half, [answered(stream.problems[i], i % 5) for i in (1, 2, 1)])
    apart = half
    for i in (1, 2, 1):
        apart = stream.observe(apart, [answered(stream.problems[i], i % 5)])
    assert json.dumps(codec.to_json(together)) == json.dumps(codec.to_json(apart))


def test_what_was_remembered_of_other_problems_is_forgotten():
    parts = Curriculum(drop=Dropping(1, 1))
    _, memory = played(Scheduled(parts, problems(7), 0), 30, lambda i: 4)
    other = Scheduled(parts, problems(5), 0)
    assert played(other, 10, lambda i: 2, memory)[0] == played(other, 10, lambda i: 2)[0]
    assert len(other.observe(memory, [answered(problems(5)[1], 2)])["tries"]) == 5
    assert other.metrics(memory, memory)["curriculum/active"] == 5


def test_many_problems_cost_little():
    level = np.random.default_rng(0).random(17_000)
    parts = Curriculum(Prioritised(), EasyToHard("level", 10**6), Dropping(3, 3, 2))
    stream = Scheduled(parts, problems(17_000, level=level), 0)
    stream.next(0, {})
    began, memory = time.process_time(), {}
    for number in range(64):
        problem, memory = stream.next(number, memory)
    memory = stream.observe(memory, [answered(problem, 2)] * 64)
    stream.metrics({}, memory)
    assert time.process_time() - began < 1.0  # 0.06 s on an idle core


SAVED = to_json(load_config("smoke")[1]) | Origin("").to_json()
REFUSED = {
    "prior must be from 0 to 1, got 1.5": Curriculum(prior=1.5),
    "strength must be at least 0, got -1": Curriculum(strength=-1),
    "fade must be above 0 and at most 1, got 0": Curriculum(fade=0),
    "prioritised.power must be above 0, got 0": Curriculum(Prioritised(0)),
    "easy_to_hard.by must be a column of the rows, or success, got ''": Curriculum(easy_to_hard=EasyToHard("", 1)),
    "easy_to_hard.over must be at least 1 prompt, got 0": Curriculum(easy_to_hard=EasyToHard("level", 0)),
    "easy_to_hard.start must be above 0 and at most 1, got 0": Curriculum(easy_to_hard=EasyToHard("level", 9, 0)),
    "easy_to_hard.rising must be left out": Curriculum(easy_to_hard=EasyToHard("success", 9, rising=False)),
    "drop.again must be at least 0, got -1": Curriculum(drop=Dropping(again=-1)),
    "drop.solved and unsolved must be above 0 in one of them": Curriculum(drop=Dropping(0, 0)),
    "statistics runs/x has nothing to order": Curriculum(statistics="runs/x"),
}  # fmt: skip


def with_curriculum(curriculum):
    run = load_config("smoke")[1]
    rollout = dataclasses.replace(run.rollout, collect=dataclasses.replace(run.rollout.collect, curriculum=curriculum))
    return dataclasses.replace(run, rollout=rollout)


@pytest.mark.parametrize("told", REFUSED)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(told):
    with pytest.raises(InputError) as raised:
        validate(with_curriculum(REFUSED[told]))
    assert f"rollout.collect.curriculum.{told}" in str(raised.value) and "\n" not in str(raised.value)


def test_a_column_must_hold_a_number_for_each_problem():
    nested = [{"terms": n} for n in range(5)]
    rows = problems(5, level=[1, 2, None, 4, 5], size=[1.5] * 5, hard=[True] * 5, entry=nested)
    for by in ("nothing", "level", "hard", "entry"):
        with pytest.raises(InputError) as raised:
            task_stream(Curriculum(easy_to_hard=EasyToHard(by, 9)), rows, 0)
        assert f"easy_to_hard.by '{by}' is" in str(raised.value) and "size, entry.terms" in str(raised.value)
    stream = task_stream(Curriculum(easy_to_hard=EasyToHard("entry.terms", 9)), rows, 0)
    assert stream.next(0, {})[0].id == "p0"
    assert task_stream(None, rows, 3) == Shuffled(rows, 3)


def test_where_nothing_is_verified_only_a_column_can_order():
    rows = tuple(dataclasses.replace(one, verifier="none") for one in problems(4, level=[1, 2, 3, 4]))
    for parts in (
        Curriculum(Prioritised()),
        Curriculum(drop=Dropping()),
        Curriculum(easy_to_hard=EasyToHard("success", 9)),
    ):
        with pytest.raises(InputError, match="task toy has no reference answers: give it answers and a verifier"):
            task_stream(parts, rows, 0)
    assert task_stream(Curriculum(easy_to_hard=EasyToHard("level", 9)), rows, 0).next(0, {})[0].id == "p0"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A folder with a run that has counted, and one that has not."""
    folder = tmp_path_factory.mktemp("others")
    stream = Scheduled(Curriculum(drop=Dropping()), problems(6), 9)
    model, _ = load_pretrained("tiny-random")
    state = create_state(model, build(Optimiser()), False, one_device())
    for name, memory in {"counted": played(stream, 20, lambda i: i % 5)[1], "plain": {}}.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.json").write_text(json.dumps(SAVED))
        with Checkpoints(folder / "runs" / name / "checkpoints") as store:
            for step, left in ((1, {}), (2, memory)):
                store.save(step, state, vars(LoopState(carry=Carryover(step, stream_memory=left))), GROUP_RECORDS)
    return folder


@pytest.mark.slow
def test_a_curriculum_begins_with_what_another_run_has_counted(other):
    name = str(other / "runs" / "counted")
    counted = played(Scheduled(Curriculum(drop=Dropping()), problems(6), 9), 20, lambda i: i % 5)[1]
    stream = task_stream(Curriculum(Prioritised(), statistics=name), problems(6), 0)
    memory = stream.next(0, {})[1]
    for part in ("tries", "solved", "streak"):
        np.testing.assert_array_equal(memory[part], counted[part])
    assert memory["tries"].sum() == 80 and memory["asked"] == 1 and (memory["last"] >= 0).sum() == 1
    for given, rows, wanted in (
        (name, problems(7), "is about other problems than the 7 of toy"),
        (name, problems(6)[::-1], "is about other problems than the 6 of toy"),
        (f"{name}@1", problems(6), "that run had no rollout.collect.curriculum"),
        (str(other / "runs" / "plain"), problems(6), "that run had no rollout.collect.curriculum"),
        (str(other / "runs" / "nobody"), problems(6), "is not a run"),
        (f"{name}@7", problems(6), "has no checkpoint of step 7: it keeps 1, 2"),
    ):
        with pytest.raises(InputError, match=wanted) as raised:
            task_stream(Curriculum(Prioritised(), statistics=given), rows, 0)
        assert "\n" not in str(raised.value)


def test_tasks_that_ask_the_same_begin_with_their_own_counts(tmp_path):
    tasks = {name: tuple(dataclasses.replace(one, task=name) for one in problems(4)) for name in ("loose", "strict")}
    streams = {name: Scheduled(Curriculum(), rows, 9) for name, rows in tasks.items()}
    both = Interleaved(streams, dict.fromkeys(tasks, 1.0))
    groups = [
        answered(tasks[name][i], right) for name, i, right in (("loose", 0, 4), ("strict", 0, 0), ("strict", 1, 0))
    ]
    left = Carryover(stream_memory=both.observe({}, groups))
    counted = host_file(tmp_path / "checkpoints" / "1")
    counted.parent.mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(SAVED))
    counted.write_text(json.dumps(codec.to_json(vars(LoopState(carry=left)), GROUP_RECORDS)))
    for name, tries in {"loose": [4, 0, 0, 0], "strict": [4, 4, 0, 0]}.items():
        assert load_statistics(str(tmp_path), tasks[name])["tries"].tolist() == tries
    with pytest.raises(InputError, match=r"several tasks \(loose, strict\), none of them called toy: give the task"):
        load_statistics(str(tmp_path), problems(4))


def test_another_run_is_found_from_where_this_one_began(other):
    run = with_curriculum(Curriculum(Prioritised(), statistics="runs/counted@1"))
    placed = located(run, Origin(str(other))).rollout.collect.curriculum.statistics
    assert placed == str(other / "runs" / "counted@1") and find_start(placed).step == 1
