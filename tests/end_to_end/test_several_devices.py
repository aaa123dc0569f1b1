"""The shipped configurations on 8 devices, with a tiny model in place of theirs."""

import dataclasses
import json

import jax
import pytest
from learner.rollouts import one_device
from tiny import KINDS

from jaxrl_llm import train
from jaxrl_llm.config import config_names, load_config, resolved, validate_on_devices
from jaxrl_llm.data import Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.plan.programs import abstract_model, architecture_finder, planned_stage, run_meshes
from jaxrl_llm.sharding import batch_parts

pytestmark = pytest.mark.slow


def kind_of(run):
    """The tiny model in place of the run's: one with experts where the run replays their routes."""
    return KINDS["plain" if run.learner.routing_replay == "off" else "experts"]


@pytest.mark.parametrize("name", config_names())
def test_a_shipped_configuration_is_divided_over_eight_devices(name):
    run = resolved(load_config(name)[1])
    validate_on_devices(run, jax.device_count())
    mesh, where = run_meshes(run, jax.devices())
    kind = kind_of(run)
    model = abstract_model(kind, run.learner.dtype)
    found, _ = architecture_finder(kind)
    outline = planned_stage(run).outline(run, model, mesh, where, found)
    layouts = [one.layout for one in outline.forwards.values()] + [one.forward.layout for one in outline.passes]
    for layout in layouts:
        assert layout.parts == batch_parts(mesh) and layout.rows >= layout.parts
        assert layout.rows % layout.parts == 0 == layout.row_tokens % mesh.shape["tensor"]


@pytest.mark.parametrize("name", [name for name in config_names() if name.endswith("quickstart")])
def test_on_one_cpu_a_microbatch_of_a_quickstart_is_a_row(name):
    run = resolved(load_config(name)[1])
    model = abstract_model(kind_of(run), run.learner.dtype)
    found, _ = architecture_finder(kind_of(run))
    outline = planned_stage(run).outline(run, model, one_device(), one_device(), found)
    assert {one.layout.rows for one in outline.forwards.values()} == {1}


def run_in(folder, name, **changes):
    """A shipped configuration, changed, in a folder of its own."""
    shipped = load_config(name)[1]
    output = dataclasses.replace(shipped.output, run_dir=str(folder / "run"), trackers=())
    return dataclasses.replace(shipped, model="tiny-random", output=output, **changes)


def test_a_run_from_data_makes_its_step_on_eight_devices_and_saves_no_choice(tmp_path):
    """``smoke`` does in test_phases.py."""
    texts = Texts([{"text": f"{number} + 1 = {number + 1}"} for number in range(40)], holdout=0.2)
    told = []
    result = train(run_in(tmp_path, "sft_quickstart", data=texts, steps=1), on_step=told.append)
    assert jax.device_count() == 8 and result == 0 and result.directory == tmp_path / "run"
    assert result.history == told and [row["step"] for row in told] == [0, 1]
    losses = [row["eval/text/loss"] for row in told]
    assert result.last == told[-1] and result.best == told[losses.index(min(losses))]
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 1 and row["grad_norm"] > 0
    assert json.loads((tmp_path / "run/config.json").read_text())["learner"]["compute"]["microbatch_rows"] == 0


def test_a_number_that_the_mesh_does_not_divide_is_refused_and_leaves_nothing(tmp_path):
    learner = load_config("smoke")[1].learner.computing(microbatch_rows=2)
    with pytest.raises(InputError, match=r"rows 2 does not divide over .* = 1 x 8: make it a multiple of 8, or 0 to"):
        train(run_in(tmp_path, "smoke", learner=learner))
    assert not list(tmp_path.iterdir())
