"""``jaxrl-llm reset``: a request that is answered once, and that no kill loses."""

import dataclasses
import json
from functools import partial
from pathlib import Path

from jaxrl_llm import cli
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.store import host_file
from jaxrl_llm.data import Texts
from jaxrl_llm.recipes import DAPO, GRPO
from jaxrl_llm.rules import BY_HAND, Phase, Resets, Rules, by_hand, decide, not_a_number
from jaxrl_llm.tasks import Table
from jaxrl_llm.trainer.state import read_reset_request, remove_reset_request, request_reset

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"


def test_a_request_is_answered_once_and_remembered_by_its_id():
    rules, asked = {BY_HAND: partial(by_hand, resets=Resets())}, {"asked/reset": {"id": "a", "with_optimiser": True}}
    decision, memory = decide(rules, {"step": 3} | asked, {})
    assert decision.reset_reference and decision.reset_optimiser and decision.snapshot
    assert decision.events == {"event/reference_reset": "by hand", "event/optimiser_reset": True}
    assert not decide(rules, {"step": 4} | asked, memory)[0].reset_reference
    other = {"asked/reset": {"id": "b", "with_optimiser": False}}
    decision, memory = decide(rules, {"step": 5} | other, memory)
    assert decision.reset_reference and not decision.reset_optimiser
    assert (
        memory[BY_HAND] == {"id": "b", "step": 5, "with_optimiser": False}
        and not decide(rules, {"step": 6}, memory)[0].reset_reference
    )


def test_a_guard_leaves_the_request_for_later():
    asked = {"step": 3, "updates/not_finite": 1.0, "asked/reset": {"id": "a", "with_optimiser": False}}
    decision, memory = decide(
        {BY_HAND: partial(by_hand, resets=Resets()), "guard": partial(not_a_number, learning_rate=1.0)}, asked, {}
    )
    assert decision.stop is not None and not decision.reset_reference and memory[BY_HAND] == {}


def test_a_request_goes_only_when_a_checkpoint_has_what_it_asked_for(tmp_path):
    remove_reset_request(tmp_path, {BY_HAND: {"id": "a", "step": 1}})
    request_reset(tmp_path, False)
    found = read_reset_request(tmp_path)["asked/reset"]
    assert not found["with_optimiser"]
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    for memory, stays in (
        ({}, True),
        ({BY_HAND: {"id": "another", "step": 1}}, True),
        ({BY_HAND: {"id": found["id"], "step": 8}}, True),
        ({BY_HAND: {"id": found["id"], "step": 7}}, False),
    ):
        remove_reset_request(tmp_path, memory)
        assert bool(read_reset_request(tmp_path)) == stays


def test_what_has_nothing_to_reset_is_refused_and_the_rest_is_asked(tmp_path, capsys):
    run = configs.load_config(str(RUNS / "ruled.py"))[1]
    free = configs.with_recipe(run, "dapo")
    watched = dataclasses.replace(free, output=dataclasses.replace(free.output, monitor_kl=True))
    texts = configs.Supervised("tiny-random", Texts(Table(str(RUNS / "digits.jsonl"))))
    for name, settings in {"run": run, "free": free, "watched": watched, "texts": texts}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps(configs.to_json(settings) | configs.Origin("").to_json())
        )
    for line, told in {
        "nowhere": "nowhere is not a run: give the folder that holds its config.json",
        "run --with": "reset does not know --with: jaxrl-llm reset RUN [--with_optimiser]",
        "": "reset needs a run: jaxrl-llm reset runs/quickstart",
        "free": "free keeps no reference, since its recipe.algorithm.kl_coef is 0: begin a run with a KL",
        "texts": "texts is a Supervised run, which keeps no reference that could be reset",
    }.items():
        words = line.split()
        assert cli.run(["reset", *[str(tmp_path / word) for word in words[:1]], *words[1:]]) == 2
        error = capsys.readouterr().err
        assert told in error.replace(f"{tmp_path}/", "") and error.count("\n") == 1
    assert not list(tmp_path.glob("*/reset.json"))
    for name in ("run", "watched"):
        assert cli.run(["reset", str(tmp_path / name), "--with_optimiser"]) == 0
        assert "resets its reference and its optimiser after its current step" in capsys.readouterr().out
        assert read_reset_request(tmp_path / name)["asked/reset"]["with_optimiser"]
    assert cli.run(["reset", "--help"]) == 0 and "usage: jaxrl-llm reset RUN" in capsys.readouterr().out


def test_a_run_in_phases_has_the_reference_of_the_phase_that_it_is_in(tmp_path, capsys):
    run = configs.with_recipe(configs.load_config(str(RUNS / "ruled.py"))[1], "dapo")
    phases = Phase("free", 1), Phase("held", 1, changes={"recipe": GRPO}), Phase("free again", changes={"recipe": DAPO})
    run = dataclasses.replace(run, rules=Rules(phases))
    (tmp_path / "config.json").write_text(json.dumps(configs.to_json(run) | configs.Origin("").to_json()))
    line = ["reset", str(tmp_path)]
    assert cli.run(line) == 2 and "keeps no reference in phase free, since" in capsys.readouterr().err
    for kind, step, phase, code in (("checkpoints", 1, 0, 2), ("snapshots", 2, 1, 0), ("checkpoints", 3, 2, 2)):
        values = host_file(tmp_path / kind / str(step))
        values.parent.mkdir(parents=True)
        values.write_text(json.dumps({"phase": phase}))
        assert cli.run(line) == code
        assert code == 0 or f"in phase {phases[phase].name}" in capsys.readouterr().err
