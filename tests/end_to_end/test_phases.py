"""Runs of several phases: what their settings are, what is refused, and runs that are stopped in and between them."""

import dataclasses
import json
import posixpath
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import commands, forked
from commands import rows_but_for_the_clock as rows
from learner.rollouts import one_device

from jaxrl_llm import codec
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.checkpoints.store import Checkpoints, flatten
from jaxrl_llm.config import (
    Evaluation,
    Scoring,
    as_read,
    from_json,
    in_phase,
    load_config,
    resolved,
    to_json,
    unreached,
    validate,
)
from jaxrl_llm.config.run import MAX_SEED
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Moments, Optimiser
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.config import Lora
from jaxrl_llm.recipes import DR_GRPO, GRPO, PRORL_V1, Overlong
from jaxrl_llm.rewards import Accuracy, Format, Function
from jaxrl_llm.rollout.groups import GROUP_RECORDS
from jaxrl_llm.rules import Phase, Reaches, Rules, Stalls
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.trainer.state import LoopState, next_phase, policy_base
from jaxrl_llm.types import TrainState

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "runs" / "phased.py"
RUN = load_config(str(CONFIG))[1]
STATELESS = Optimiser("adafactor", moments=Moments(b1=0.0))
COOLER = dataclasses.replace(RUN.rollout, temperature=0.5)
PARTS = (2, 3, 4, 6)
"""Steps after which the broken run was stopped: at a phase's end, in the middle of one, at the end of one after which
other problems come, at another's end."""
LINES = {
    "whole": f"train {CONFIG} --run_dir whole",
    **{f"to {step}": f"train {CONFIG} --run_dir broken --steps {step}" for step in PARTS},
    "rest": f"train {CONFIG} --run_dir broken",
    "eval": "eval whole@4 --json --limit 3",
    "eval last": "eval whole --json --limit 3",
    "from": f"train {CONFIG} --run_dir from --from whole@6 --steps 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("phased")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def saved(folder, step, number, reference):
    """Arrays and host values of a checkpoint in a phase."""
    run = in_phase(resolved(RUN), number)
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), reference)
    with Checkpoints(folder / "checkpoints") as store:
        state, host = store.restore(step, like, one_device())
    return {name: np.asarray(array) for name, array in jax.device_get(flatten(state)).items()}, host


def test_each_phase_begins_where_it_should(folder, answers):
    assert answers["whole"].code == 0, answers["whole"].err
    events = {row["step"]: row["event/phase"] for row in rows(folder / "whole") if "event/phase" in row}
    assert events == {
        2: "slower (short ended after 2 steps)",
        4: "both tasks, anchored (slower ended after 2 steps)",
        6: "reset (both tasks, anchored ended since kl was above -1 in 2 measured steps in a row)",
    }
    assert sorted(path.name for path in (folder / "whole" / "snapshots").iterdir()) == ["2", "4", "6"]
    assert all(
        text in answers["whole"].out for text in ("after step 2", "both tasks, anchored (slower", "after step 6")
    )


def test_the_settings_of_a_phase_hold_from_its_first_step(folder, answers):
    found = rows(folder / "whole")
    assert [round(row["lr"], 6) for row in found[1:]] == [0.01, 0.01, *[0.001] * 6]
    assert ["kl" in row and row["kl"] is not None for row in found[1:]] == [False] * 4 + [True] * 4
    assert ["task/letters/groups" in row for row in found[1:]] == [False] * 4 + [True] * 4
    assert "event/reference_reset" in found[6] and "event/optimiser_reset" in found[6]
    assert found[7]["kl"] < found[6]["kl"], "the reference is nearer than before its reset"


def test_a_run_that_was_stopped_in_and_between_phases_is_the_same_bit_for_bit(folder, answers):
    assert [answers[name].code for name in LINES if name.startswith(("to", "rest"))] == [0] * 5
    assert rows(folder / "broken") == rows(folder / "whole")
    (arrays, host), (others, other) = (saved(folder / name, 8, 3, True) for name in ("whole", "broken"))
    assert arrays.keys() == others.keys() and "phase both tasks" not in host
    for name, array in arrays.items():
        assert array.tobytes() == others[name].tobytes(), name
    assert json.dumps(codec.to_json(host)) == json.dumps(codec.to_json(other)) and host["phase"] == 3


def test_a_checkpoint_at_a_phases_end_is_of_the_next_one(folder, answers):
    before, host = saved(folder / "whole", 3, 1, False)
    assert host["phase"] == 1 and not any(name.startswith("reference") for name in before)
    after, host = saved(folder / "whole", 4, 2, True)
    assert host["phase"] == 2
    left = LoopState.from_json(host, GROUP_RECORDS).carry
    assert left.stream_memory["asked"] == {"digits": left.cursor} and left.cursor >= 16, "it goes on where it was alone"
    for name in [name for name in after if name.startswith("reference/")]:
        np.testing.assert_array_equal(after[name], after[name.replace("reference/", "policy/")])
    reset, _ = saved(folder / "whole", 6, 3, True)
    moments = [array for name, array in reset.items() if name.startswith("opt_state") and array.ndim > 1]
    assert moments and not any(array.any() for array in moments)


WATCHED = """
import dataclasses, gc, json, pathlib, signal
from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.trainer import loop

said, stages = [], []

def count(row):
    stages.append(sum(isinstance(one, Stage) for one in gc.get_objects()))
    if row["step"] == 2:
        signal.raise_signal(signal.SIGTERM)

run = dataclasses.replace(load_config("smoke")[1], steps=2, rules=Rules((Phase("a", 1), Phase("b"))))
code = loop.train(resolved(run), pathlib.Path("run"), said.append, voice=Verbosity(rows=count))
print(json.dumps([code, said, stages]))
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run of two phases and two steps that is told to stop in its last one: its directory, its exit code, what it
    said, and how many stages there were when each step was recorded. One device is enough, and compiles sooner."""
    folder = tmp_path_factory.mktemp("watched")
    answer = forked(WATCHED, "", folder)
    assert answer.code == 0, answer.err
    return folder / "run", *json.loads(answer.out.splitlines()[-1])


def test_what_made_the_steps_of_a_phase_is_gone_in_the_next(watched):
    """The sampler's cache is most of a device: two do not fit."""
    *_, stages = watched
    assert len(stages) == 3 and stages[2] == stages[1] > 0, stages


def test_a_run_that_is_told_to_stop_in_its_last_step_is_done(watched):
    folder, code, said, _ = watched
    assert code == 0 and not any("run the same command again" in line for line in said)
    assert (folder / "checkpoints" / "2").is_dir()


def test_a_run_is_tested_as_the_phase_of_its_checkpoint_is(answers):
    assert "eval/letters/mean_length" in json.loads(answers["eval"].out), answers["eval"]
    assert "eval/letters/mean_length" in json.loads(answers["eval last"].out)


def test_another_run_begins_with_a_snapshot(folder, answers):
    assert answers["from"].code == 0, answers["from"].err
    assert "phase slower does not begin in 1 steps" in answers["from"].err


def changed(*phases, **changes):
    run = resolved(dataclasses.replace(RUN, rules=Rules(phases), **changes))
    validate(run)
    return run


def held_out():
    return dataclasses.replace(RUN.task, holdout=0.2)


def test_changes_stay_until_another_phase_changes_them():
    run = changed(
        Phase("a", 1, changes={"rollout.group": 2}),
        Phase("b", 1, changes={"rollout.prompts": 3}),
        Phase("c", changes={"rollout.group": 5}),
    )
    settings = [in_phase(run, number) for number in range(3)]
    assert [(one.rollout.group, one.rollout.prompts) for one in settings] == [(2, 4), (2, 3), (5, 3)]
    assert len({one.seed for one in settings}) == 3 and settings[0].seed == run.seed
    assert not any(one.rules.phases for one in settings)


def test_what_was_filled_in_follows_what_it_was_filled_in_from():
    run = changed(
        Phase("a", 1),
        Phase("b", 1, changes={"rollout.max_new_tokens": 6}),
        Phase("c", changes={"recipe": PRORL_V1}),
        recipe=DR_GRPO,
        evaluation=Evaluation(every=1),
        task=held_out(),
    )
    a, b, c = (in_phase(run, number) for number in range(3))
    assert a.recipe.algorithm.reduce == ConstantLength(8) and b.recipe.algorithm.reduce == ConstantLength(6)
    assert (a.rollout.temperature, c.rollout.temperature) == (1.0, PRORL_V1.temperature)
    own = changed(Phase("a", 1), Phase("b", changes={"recipe": GRPO, "rollout.temperature": 0.5}))
    assert in_phase(own, 1).rollout.temperature == 0.5
    tested = {"evaluation": Evaluation(every=1), "task": held_out()}
    kept = changed(Phase("a", 1), Phase("b", changes={"recipe": PRORL_V1}), rollout=COOLER, **tested)
    assert in_phase(kept, 1).rollout.temperature == 0.5, "it was not the recipe's before"


def test_what_rules_have_moved_stays_where_the_recipe_does():
    same = Phase("b", 1, changes={"rollout.group": 2})
    run = changed(Phase("a", 1), same, Phase("c", changes={"recipe.overlong.drop": True}))
    stage = Stage(run=run, training=(), forward=None, label="sums")
    moved = {"lr_scale": 0.5, "entropy_coef": 0.0}
    memory = {"last": {"event/reference_reset": 3}, "by_hand": {"id": "a"}, "guard": {"times": 1}}
    controlled = {"entropy": {"moved": 0.02}}
    host = LoopState(coefficients=moved, memory=memory | controlled | {"stall": {"stalled": 1}, "phase": {"steps": 1}})
    state = next_phase(run, stage, TrainState({}, {}), host)
    assert (host.phase, host.coefficients, host.memory) == (1, moved, memory | controlled)
    next_phase(run, stage, state, host)
    assert (host.phase, host.coefficients, host.memory) == (2, {"lr_scale": 0.5}, memory)


@pytest.mark.parametrize(("said", "becomes"), [(None, 2.0), (0.25, 0.25)])
def test_an_overlong_punishment_follows_the_rewards_that_its_weight_was_made_of(said, becomes):
    heavier = Phase("b", 1, changes={"scoring.rewards": (Accuracy(weight=4.0),)})
    recipe = dataclasses.replace(GRPO, overlong=Overlong(share=0.5, weight=said))
    run = changed(Phase("a", 1), heavier, Phase("c"), recipe=recipe, scoring=Scoring(rewards=(Accuracy(),)))
    assert [in_phase(run, number).recipe.overlong.weight for number in (0, 1)] == [said or 0.5, becomes]
    own = Phase("c", changes={"recipe.overlong.weight": 0.5})
    run = changed(Phase("a", 1), heavier, own, recipe=recipe, scoring=Scoring(rewards=(Accuracy(),)))
    assert in_phase(run, 2).recipe.overlong.weight == 0.5
    nothing = dataclasses.replace(recipe, overlong=Overlong(share=0.5, weight=0.0))
    run = changed(Phase("a", 1), heavier, Phase("c"), recipe=nothing, scoring=RUN.scoring)
    assert in_phase(run, 1).recipe.overlong.weight == 0.0, "nothing was filled in"


@pytest.mark.parametrize("rewards", [posixpath.join, (lambda completion: 1.0, Function(len))])
def test_a_function_among_changes_is_saved_as_that_of_a_whole_run(rewards):
    run = dataclasses.replace(RUN, rules=Rules((Phase("a", 1), Phase("b", changes={"scoring.rewards": rewards}))))
    whole = as_read(dataclasses.replace(RUN, scoring=dataclasses.replace(RUN.scoring, rewards=rewards)))
    assert in_phase(as_read(run), 1).scoring == whole.scoring


def test_it_is_saved_and_read_again():
    run = dataclasses.replace(RUN, rules=Rules((Phase("a", 2, Reaches("kl", 1.0), {"task": RUN.task}), Phase("b"))))
    assert from_json(json.loads(json.dumps(to_json(run)))) == run
    assert unreached(run) == [] and len(unreached(dataclasses.replace(run, steps=2))) == 1


WRONG = {
    "name is empty": [Phase("", 1), Phase("b")],
    "is another phase's too": [Phase("a", 1), Phase("a")],
    "is the last phase": [Phase("a", 1), Phase("b", 2)],
    "rules.phases[1].until waits for evaluations": [Phase("a", 1), Phase("b", until=Stalls(1))],
    "never ends, and others come after it": [Phase("a"), Phase("b")],
    "steps must be at least 1, got 0": [Phase("a", 0), Phase("b")],
    "needs one finite bound": [Phase("a", until=Reaches("kl")), Phase("b")],
    "needs one finite bound,": [Phase("a", until=Reaches("kl", 1.0, 2.0)), Phase("b")],
    "times must be at least 1": [Phase("a", until=Reaches("kl", 1.0, times=0)), Phase("b")],
    "waits for evaluations: set evaluation.every": [Phase("a", until=Stalls(1)), Phase("b")],
    "there is no groups in Rollout: did you mean group": [Phase("a", 1), Phase("b", changes={"rollout.groups": 2})],
    "there is no x in int": [Phase("a", 1), Phase("b", changes={"rollout.group.x": 2})],
    "changes model, which is the same in all phases": [Phase("a", 1), Phase("b", changes={"model": "other"})],
    "changes output.keep, which is the same": [Phase("a", 1), Phase("b", changes={"output.keep": 2})],
    "changes learner.lora.rank, which is the same": [Phase("a", 1), Phase("b", changes={"learner.lora.rank": 4})],
    "changes learner.dtype": [
        Phase("a", 1), Phase("b", changes={"learner": dataclasses.replace(RUN.learner, dtype="bfloat16")})
    ],
    "changes 3: give a setting by its dotted name": [Phase("a", 1), Phase("b", changes={3: 1})],
    "phase 'b': recipe is 'dapo': give Recipe(...)": [Phase("a", 1), Phase("b", changes={"recipe": "dapo"})],
    "phase 'b': learner is None": [Phase("a", 1), Phase("b", changes={"learner": None})],
    "recipe.temperature must be finite, got -inf": [
        Phase("a", 1), Phase("b", changes={"recipe.temperature": float("-inf"), "rollout.temperature": 1.0})
    ],
    "which counts the updates of the whole run": [Phase("a", 1), Phase("b", changes={"learner.optimiser.warmup": 5})],
    "changes learner.optimiser.moments.b1, which decides": [
        Phase("a", 1, changes={"learner.optimiser": STATELESS}, reset_optimiser=True),
        Phase("b", changes={"learner.optimiser.moments.b1": 0.9}),
    ],
    "set its reset_optimiser True": [Phase("a", 1), Phase("b", changes={"learner.optimiser.name": "muon"})],
    "has no reference to reset": [Phase("a", 1), Phase("b", reset=True)],
    "phase 'b': rollout.group must be at least 1": [Phase("a", 1), Phase("b", changes={"rollout.group": 0})],
    "phase 'b': rollout.group is 'x'": [Phase("a", 1), Phase("b", changes={"rollout.group": "x"})],
}  # fmt: skip


def test_a_judge_of_answers_wants_the_same_problems_in_all_phases():
    judged = Evaluation(every=1, judge=Format("[0-9]+"))
    others = dataclasses.replace(RUN.task, name="others", holdout=0.3)
    with pytest.raises(InputError, match=r"changes task, and evaluation.judge compares answers to the problems"):
        changed(Phase("a", 1), Phase("b", changes={"task": others}), evaluation=judged, task=held_out())
    changed(Phase("a", 1), Phase("b", changes={"rollout.group": 2}), evaluation=judged, task=held_out())


def test_a_reference_that_is_only_measured_from_can_be_reset():
    watched = dataclasses.replace(RUN.output, monitor_kl=True)
    changed(Phase("a", 1), Phase("b", reset=True), output=watched)


def test_a_phase_has_a_seed_that_a_run_may_have():
    run = changed(Phase("a", 1), Phase("b", 1), Phase("c"), seed=MAX_SEED - 1)
    assert all(0 <= in_phase(run, number).seed < MAX_SEED for number in range(3))


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_work_is_refused_before_the_first_phase(words):
    with pytest.raises(InputError) as refused:
        changed(*WRONG[words])
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_phase_of_an_adapter_is_made_of_what_lies_beside_it():
    model, _ = load_pretrained("tiny-random")
    for lora in (Lora(), Lora(rank=2)):
        state = abstract_state(model, build(RUN.learner.optimiser), True, lora)
        assert jax.tree.structure(policy_base(state)) == jax.tree.structure(model)
