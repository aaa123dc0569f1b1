"""Rewards of steps, constraints and a gate: what advantages are made of, and whole runs that go on bit for bit."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from commands import assert_refused, commands
from learner.rollouts import forward_on, one_device
from oracles import number
from tiny import rules_in

from jaxrl_llm import codec
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GDPO, GroupMean, ProcessSupervised
from jaxrl_llm.checkpoints.store import Checkpoints, steps_in
from jaxrl_llm.config import Run, Scoring, load_config, notes, resolved, validate, verifies
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import Accuracy, Constraint, Format, Gate, LengthPenalty, StepFunction, Threshold
from jaxrl_llm.rewards.shaping import REJECTED
from jaxrl_llm.rollout.evaluate import group_metrics
from jaxrl_llm.rollout.groups import GROUP_RECORDS, Carryover, RolloutBatch
from jaxrl_llm.stages.ingredients import Constraints
from jaxrl_llm.stages.programs import coefficients_of, ingredients_of
from jaxrl_llm.stages.rl import Reinforcement, advantage_metrics
from jaxrl_llm.tasks import Task
from jaxrl_llm.trainer.state import LoopState
from jaxrl_llm.types import Completion, Group, Problem, TrainState

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "bounded.py"
PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
HELD = "constraint/length/multiplier"
NAN = math.nan
HARM = Constraint(LengthPenalty(-1.0), number("MULTI/eps").item(), 1.0, number("MULTI/lam").item(), "harm")
STEPS = StepFunction("rewards.sample_steps:words")


def completion(size, steps=()):
    """Of so many tokens, with rewards of steps by the tokens in which they end."""
    values = np.full(size, np.nan, np.float32)
    for at, value in steps:
        values[at] = value
    tokens, nothing = np.ones(size, np.int32), np.zeros(size, np.float32)
    return Completion(tokens, nothing, "stop", np.ones(size, bool), np.zeros(size, np.int32), {"step_rewards": values})


def group_of(completions, rewards, **parts):
    columns = {name: np.asarray(part, float) for name, part in parts.items()}
    return Group(PROBLEM, np.array([1], np.int32), tuple(completions), np.asarray(rewards, float), None, columns)


def run_of(algorithm=PRESETS["grpo"], rewards=(Format("a"),), **scoring):
    """A run that needs no answers."""
    recipe = dataclasses.replace(RECIPES["grpo"], algorithm=dataclasses.replace(algorithm, kl_coef=0.0))
    return Run("tiny-random", Task([{"prompt": "a"}]), Scoring(rewards, **scoring), recipe)


def learned(run, groups, coefficients=None):
    """Advantages of each completion, as the stage makes them, and what it measured."""
    run = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, group=len(groups[0].completions)))
    forward = forward_on(one_device(), Layout(2, 40, 10))
    stage = Reinforcement(
        run=run,
        training=(),
        forward=forward,
        ingredients=ingredients_of(run),
        label="?",
        tokenizer=None,
        sampler=None,
        transfer=None,
        evaluate_tasks=None,
    )
    batch = RolloutBatch(groups, [], Carryover(), 4, 0, {})
    rewards = stage.net_rewards(groups, coefficients or {})
    samples, _ = stage.advantages(TrainState({}, {}), batch, rewards, None)
    for ingredient in stage.ingredients:
        samples = ingredient.samples(samples, batch)
    measured = advantage_metrics(samples)
    return [advantage_of(sample) for members in samples for sample in members], measured


ENDS = [(2, [(1, 1.0)]), (3, [(0, 0.2), (2, 0.0)]), (4, [(1, 0.8), (3, 0.6)])]


def test_process_supervision_is_the_published_example():
    groups = [group_of([completion(*one) for one in ENDS], [1.0, 1.0, 1.0])] * 2
    algorithm = dataclasses.replace(PRESETS["grpo"], advantage=ProcessSupervised(eps=0.0))
    found, measured = learned(run_of(algorithm, (Format("a"), STEPS)), groups)
    for advantages, wanted in zip(found, [*number("GRPO_process/A_ddof1")] * 2, strict=True):
        np.testing.assert_allclose(advantages, wanted[: len(advantages)], rtol=2e-6)
    assert measured["advantage/nonzero_fraction"] == 1.0
    flat, measured = learned(run_of(rewards=(Format("a"), STEPS)), groups)
    assert flat == [0.0] * 6 and measured["advantage/nonzero_fraction"] == 0.0


def test_estimators_that_may_read_steps_do():
    groups = [group_of([completion(*one) for one in ENDS], [1.0, 0.0, 2.0])]
    found, _ = learned(run_of(PRESETS["reinforce_pp"], (Format("a"), STEPS)), groups)
    returns = np.array([2.0, 2.0, 0.2, 0.0, 0.0, 3.4, 3.4, 2.6, 2.6])
    wanted = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-5)


def test_a_constraint_is_the_published_lagrangian():
    group = group_of([completion(2)] * 3, number("MULTI/help"), **{HARM.part: number("MULTI/harm")})
    found = Constraints((HARM,)).rewards(group.rewards[None], [group], {HARM.coefficient: number("MULTI/lam").item()})
    np.testing.assert_allclose(found, [number("MULTI/linear")], atol=1e-12)
    none = Constraints((HARM,)).rewards(group.rewards[None], [group], {HARM.coefficient: 0.0})
    np.testing.assert_array_equal(none, [number("MULTI/help")])
    unknown = dataclasses.replace(group, parts={HARM.part: np.array([0.1, NAN, 0.3])})
    assert np.isnan(
        Constraints((HARM,)).rewards(unknown.rewards[None], [unknown], {HARM.coefficient: 2.0})
    ).tolist() == [[False, True, False]]
    algorithm = dataclasses.replace(PRESETS["dr_grpo"], advantage=GroupMean())
    advantages, _ = learned(run_of(algorithm, constraints=(HARM,)), [group], {HARM.coefficient: 2.0})
    np.testing.assert_allclose(advantages, number("MULTI/linear") - number("MULTI/linear").mean(), rtol=1e-5)


def test_the_multiplier_moves_as_written_by_hand_and_is_never_negative():
    run = run_of(constraints=(HARM, Constraint(Accuracy(), 0.5, 0.1)))
    rule, lam = rules_in(resolved(run))[HARM.coefficient], HARM.multiplier
    assert rule.keywords == {"constraint": HARM}
    assert coefficients_of(run, ingredients_of(run)) == {HARM.coefficient: 2.0, "constraint/accuracy/multiplier": 0.0}
    costs, by_hand, found = [0.3, NAN, 0.1, -3.0, 0.1, 0.7, 1.0], number("MULTI/lam").item(), []
    for cost in costs:
        if not math.isnan(cost):
            by_hand = max(0.0, by_hand + HARM.rate * (cost - HARM.limit))
        decision, own = rule({"step": 1, HARM.part: cost, HARM.coefficient: lam}, {})
        lam = decision.coefficients.get(HARM.coefficient, lam)
        found.append(lam)
        assert own == {} and lam == by_hand >= 0
    assert found[0] == pytest.approx(number("MULTI/lam_next_eta1").item()) and found[1] == found[0] and 0.0 in found
    assert not rule({"step": 0}, {})[0].coefficients


@pytest.mark.parametrize("estimator", [GroupMean(), ProcessSupervised()])
def test_what_a_gate_rejects_gains_nothing_and_still_loses(estimator):
    rewards, rejected = [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]
    ends = [completion(3, [(0, reward), (2, reward)]) for reward in rewards]
    group = group_of(ends, rewards, **{REJECTED: rejected})
    algorithm = dataclasses.replace(PRESETS["dr_grpo"], advantage=estimator)
    plain, _ = learned(run_of(algorithm, (Format("a"), STEPS)), [group])
    found, measured = learned(run_of(algorithm, (Format("a"), STEPS), gate=Gate(Format("b"))), [group])
    for one, before, out in zip(found, plain, rejected, strict=True):
        np.testing.assert_array_equal(one, np.minimum(before, 0) if out else before)
    assert np.all(np.asarray(plain[1]) > 0) and not np.any(found[1]) and np.all(np.asarray(found[3]) < 0)
    assert measured["advantage/nonzero_fraction"] == 0.75


def test_costs_gates_and_steps_have_metrics_of_their_own():
    one = group_of([completion(2)] * 2, [1.0, 0.0], steps=[0.5, NAN], **{HARM.part: [2.0, NAN], REJECTED: [1.0, 0.0]})
    one = dataclasses.replace(one, accuracy=np.array([NAN, NAN]))
    found = group_metrics([one, one])
    assert (found["reward/steps"], found[HARM.part], found["gate/rejected_fraction"]) == (0.5, 2.0, 0.5)
    assert not any(name.startswith("reward/") and ("constraint" in name or "gate" in name) for name in found)


def test_processes_compare_the_rewards_of_steps():
    batch = RolloutBatch([group_of([completion(2, [(1, 3.0)])], [1.0])], [], Carryover(), 4, 0, {})
    assert [array.tolist() for array in batch.common] == [[1.0], [1, 1], [pytest.approx(NAN, nan_ok=True), 3.0]]


def test_a_group_that_is_carried_over_keeps_the_rewards_of_its_steps():
    group = group_of([completion(3, [(1, 0.1)])], [1.0], steps=[0.1], **{REJECTED: [0.0]})
    left = Carryover(7, (group,))
    host = LoopState(left, coefficients={HELD: 0.1 + 0.2})
    data = json.loads(json.dumps(codec.to_json(vars(host), GROUP_RECORDS)))
    found = LoopState.from_json(data, GROUP_RECORDS)
    before, after = group.completions[0].extras["step_rewards"], found.carry.surplus[0].completions[0].extras
    assert after["step_rewards"].tobytes() == before.tobytes() and after["step_rewards"].dtype == before.dtype
    assert found.coefficients == {HELD: 0.1 + 0.2} and found.carry.surplus[0].parts.keys() == {"steps", REJECTED}


PROCESS = dataclasses.replace(PRESETS["grpo"], advantage=ProcessSupervised())
REFUSED = {
    "advantage ProcessSupervised needs step_rewards, and no reward values steps: add StepFunction": run_of(PROCESS),
    "ProcessSupervised looks at the rewards of steps alone: set scoring.constraints ()": run_of(
        PROCESS, (STEPS,), constraints=(HARM,)
    ),
    "GDPO looks at each reward alone: set scoring.constraints ()": run_of(
        dataclasses.replace(PRESETS["grpo"], advantage=GDPO()), constraints=(HARM,)
    ),
    "GDPO looks at rewards of whole completions, and scoring.rewards has none": run_of(
        dataclasses.replace(PRESETS["grpo"], advantage=GDPO()), (STEPS,)
    ),
    "advantage.weights has 2 entries for 1 rewards": run_of(
        dataclasses.replace(PRESETS["grpo"], advantage=GDPO((1.0, 1.0))), (Format("a"), STEPS)
    ),
    "scoring.constraints has two of the name 'harm'": run_of(constraints=(HARM, HARM)),
    "scoring.constraints holds Accuracy(weight=1.0): give Constraint(...)": run_of(constraints=(Accuracy(),)),
    "scoring.gate holds 0.5: give Gate(...)": run_of(gate=0.5),
    "Gate.at must be a finite number": run_of(gate=Gate(Format("a"), NAN)),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_loaded(told):
    with pytest.raises(InputError) as raised:
        validate(REFUSED[told])
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_what_compares_answers_anywhere_needs_them():
    assert not verifies(run_of())
    assert verifies(run_of(gate=Gate(Accuracy()))) and verifies(run_of(rewards=(Threshold(Accuracy(), 1.0),)))
    assert verifies(run_of(constraints=(Constraint(Accuracy(), 0.5, 1.0),)))


def test_rewards_that_nothing_reads_are_told_of():
    def said(run):
        return [line for line in notes(run) if "reads" in line]

    assert not said(run_of()) and not said(run_of(PRESETS["reinforce_pp"], (Format("a"), STEPS)))
    assert said(run_of(rewards=(Format("a"), STEPS)))[0].startswith("GroupZScore reads outcome rewards: steps is ")
    assert said(run_of(PROCESS, (Format("a"), STEPS))) == [
        "ProcessSupervised reads the rewards of steps alone: format is measured only"
    ]
    filtered = run_of(PROCESS, (STEPS,))
    filtered = dataclasses.replace(filtered, recipe=dataclasses.replace(filtered.recipe, filter_groups="reward"))
    assert "groups are filtered by reward" in said(filtered)[0]


LINES = {
    "whole": f"train {CONFIG} --run_dir whole",
    "begun": f"train {CONFIG} --run_dir parted --steps 2",
    "parted": f"train {CONFIG} --run_dir parted",
    "moved": f"train {CONFIG} --run_dir whole --scoring.constraints.0.limit 5 --steps 4",
    "refused": f"train {CONFIG} --run_dir refused --scoring.constraints.0.rate -1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bounded")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def host_of(folder):
    """What the run's last checkpoint holds beside the state."""
    model, _ = load_pretrained("tiny-random")
    like = abstract_state(model, build(load_config(str(CONFIG))[1].learner.optimiser), False)
    with Checkpoints(folder / "checkpoints") as store:
        return store.restore(max(steps_in(folder / "checkpoints")), like, one_device())[1]


def test_a_run_moves_its_multiplier_by_what_its_rows_say(folder, answers):
    assert answers["whole"].code == 0, answers["whole"].err
    finished = [row for row in rows(folder / "whole") if "constraint/length/cost" in row]
    lam = 0.0
    for row in finished:
        assert row[HELD] == lam
        lam = max(0.0, lam + 0.125 * (row["constraint/length/cost"] - 4.0))
        assert row["constraint/length/cost"] == row["completions/mean_length"]
        assert 0 <= row["reward/steps"] <= 1 and 0 <= row["gate/rejected_fraction"] <= 1
    assert len(finished) > 1 and any(row["gate/rejected_fraction"] for row in finished)
    assert host_of(folder / "whole")["coefficients"] == {HELD: lam} and lam > 1


def test_a_run_that_was_parted_goes_on_bit_for_bit(folder, answers):
    assert answers["begun"].code == 0 and answers["parted"].code == 0, answers["parted"].err
    left_out = ("time/", "throughput/", "event/", "eval/")  # a run is tested at its end, wherever that is
    plain = [
        [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows(folder / name)]
        for name in ("whole", "parted")
    ]
    assert plain[0] == plain[1] and len(plain[0]) == 4
    tests = [rows(folder / name)[-1] for name in ("whole", "parted")]
    assert tests[0]["eval/text/loss"] == tests[1]["eval/text/loss"] > 0
    assert all(row["text/loss"] > 0 for row in plain[0][1:] if row["updates"])
    ends = [host_of(folder / name) for name in ("whole", "parted")]
    assert json.dumps(codec.to_json(ends[0])) == json.dumps(codec.to_json(ends[1]))
    assert "unfinished" in json.dumps(codec.to_json(ends[0]["carry"])) and ends[0]["coefficients"][HELD] > 0


def test_other_bounds_are_another_run_and_bad_ones_none(answers):
    assert_refused(answers["moved"], "scoring.constraints.0.limit: 4.0 -> 5.0")
    assert_refused(answers["refused"], "rate -1 and multiplier 0; give a rate above 0")
