"""Runs that released versions wrote are read, tested, exported and resumed by this one."""

import json
import re
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import commands
from learner.rollouts import one_device

from jaxrl_llm.config import Preference, RewardModel, Run, Supervised, is_whole, read
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.runs import load_model

RELEASED = Path(__file__).parents[1] / "fixtures" / "released"
VERSIONS = sorted(path.name for path in RELEASED.iterdir())
KINDS = {"run": Run, "supervised": Supervised, "preference": Preference, "reward_model": RewardModel}
USUAL = ("run", "reward_model")
"""With which the default set tries all commands."""
OF_USUAL = {f"{version}-{kind}" for version in VERSIONS for kind in USUAL}
COMMANDS = {"eval": "eval runs/{} --json", "export": "export runs/{} --out of_{}", "resume": "train runs/{} --steps 3"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=VERSIONS)
def unpacked(request, tmp_path_factory):
    """The runs of a version and the model that they began with, elsewhere than where they were trained."""
    folder = tmp_path_factory.mktemp(request.param)
    for kind in KINDS:
        with tarfile.open(RELEASED / request.param / f"{kind}.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not all of Python 3.11 has it
            archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def before(unpacked):
    """The rows of each run as they were written."""
    return {kind: rows(unpacked / "runs" / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def answers(request, unpacked, before):
    """What each command says about each run that is looked at."""
    whole = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    kinds = [kind for kind in KINDS if whole or kind in USUAL]
    lines = {(kind, name): line.format(kind, kind) for name, line in COMMANDS.items() for kind in kinds}
    return dict(zip(lines, commands(list(lines.values()), unpacked), strict=True))


def test_their_archives_say_nothing_of_the_machine_that_wrote_them(unpacked):
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    found = {str(path) for path in files if re.search(rb"/(tmp|home|root|work|Users)/", path.read_bytes())}
    assert not found


@pytest.mark.parametrize("kind", KINDS)
def test_their_settings_are_read(unpacked, kind):
    run = read(unpacked / "runs" / kind / "config.json").run
    if unpacked.name.startswith("0.1.0") and run.learner.lora.rank:  # it knew no other form
        assert (run.learner.lora.base, run.learner.lora.merged) == ("f32", True)
    assert type(run) is KINDS[kind] and is_whole(run), "classes of its settings are not there any more"
    assert (run.model, run.steps) == ("model", 2) and run.learner.optimiser.learning_rate == 1e-3


@pytest.mark.slow(but=OF_USUAL)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_evaluated_as_they_were_at_their_end(answers, before, kind):
    answer = answers[kind, "eval"]
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)
    last = {name: value for name, value in before[kind][-1].items() if name.startswith("eval/")}
    assert told["step"] == 2 and last
    assert {name: told[name] for name in last} == pytest.approx(last, rel=1e-3)


@pytest.mark.slow(but=OF_USUAL)
@pytest.mark.parametrize("kind", KINDS)
def test_their_exports_have_their_weights(answers, unpacked, kind):
    answer = answers[kind, "export"]
    assert answer.code == 0, answer.err
    begun, run, export = (
        load_model(str(unpacked / name), "float32", one_device())[0]
        for name in ("model", f"runs/{kind}@2", f"of_{kind}")
    )
    assert isinstance(export, ScalarModel) == (kind == "reward_model")
    jax.tree.map(np.testing.assert_array_equal, run, export)
    decoder = export.decoder if kind == "reward_model" else export
    moved = [np.any(a != b) for a, b in zip(jax.tree.leaves(decoder), jax.tree.leaves(begun), strict=True)]
    assert any(moved)


@pytest.mark.slow(but=OF_USUAL)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_resumed_from_their_last_step(answers, unpacked, before, kind):
    answer = answers[kind, "resume"]
    assert answer.code == 0, answer.err
    *old, new = rows(unpacked / "runs" / kind)
    assert old == before[kind] and [row["step"] for row in old] == [0, 1, 2]
    assert new["step"] == 3 and "event/resumed" in new
    # Sampling may choose another token where two are as likely but for rounding.
    names = ("lr", "prompts", "rollout/resumed") if kind == "run" else ("lr", "loss", "grad_norm")
    undisturbed = rows(unpacked / "longer" / kind)[3]
    assert [new[name] for name in names] == pytest.approx([undisturbed[name] for name in names], rel=1e-3)
    assert read(unpacked / "runs" / kind / "config.json").run.steps == 3
