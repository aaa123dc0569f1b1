"""A run that is told to stop within a step goes on there, and checkpoints come by time as well."""

import dataclasses
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import pytest
from golden.differences import differences

from jaxrl_llm import config as configs
from jaxrl_llm import load_pretrained, train
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.config import Output
from jaxrl_llm.models import save_pretrained
from jaxrl_llm.models.decoder import count_parameters
from jaxrl_llm.rules import Reaches, Rules
from jaxrl_llm.sharding.mesh import CHIPS, DEVICE_KINDS
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.trainer.state import STEP_PROGRESS, read_step_progress, write_step_progress

pytestmark = pytest.mark.slow

SMOKE = configs.load_config("smoke")[1]
CLOCK = ("time/", "throughput/", "rollout/utilisation", "event/")


def plain(folder):
    """Rows without what the clock decides, and samples."""
    rows = [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in read_rows(folder / "metrics.jsonl")]
    return rows, (folder / "samples.jsonl").read_text()


def run_in(folder, stopping, **output):
    """Three steps of the smoke test with that reward, in a folder."""
    settings = Output(run_dir=str(folder), trackers=(), **output)
    scoring = dataclasses.replace(SMOKE.scoring, rewards=(stopping.reward,))
    return dataclasses.replace(SMOKE, steps=3, scoring=scoring, output=settings)


class Stopping:
    """A reward that tells the run to stop while it scores in the given calls, counted over all starts."""

    def __init__(self, *calls):
        self.calls, self.count = calls, 0

    def reward(self, prompts, completions):
        self.count += 1
        if self.count in self.calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return [len(text) % 3 for text in completions]


@pytest.fixture
def known():
    """These devices have a peak of 1 GFLOP/s."""
    CHIPS["known"], DEVICE_KINDS["cpu"] = dataclasses.replace(CHIPS["v5e"], name="known", flops=1e9), "known"
    yield
    del CHIPS["known"], DEVICE_KINDS["cpu"]


def check_utilisation(rows):
    """It is between what the completions alone need, and thrice that of completions with prompts."""
    *_, layers = count_parameters(load_pretrained(SMOKE.model)[0].config)
    completions = SMOKE.rollout.prompts * SMOKE.rollout.group
    for row in rows:
        flops = row["throughput/mfu"] * row["time/update_s"] * jax.device_count() * 1e9
        sampled = completions * row["completions/mean_length"]
        epochs = row["updates"] / SMOKE.learner.minibatches
        assert 6 * layers * sampled < flops / epochs < 3 * 6 * layers * (sampled + completions * 64)


@pytest.mark.parametrize("every, grace_s, ends", [(1, 0.01, ("within", "within")), (100, 1000.0, ("within", "after"))])
def test_a_run_that_is_stopped_while_it_scores_goes_on_as_if_nobody_had_stopped_it(
    tmp_path, capsys, known, every, grace_s, ends
):
    """Before the first checkpoint, and where the step before has one: then the samples lie beside it. The first update
    is not begun, since how long it takes is not known; a later one is, where there is time."""
    whole, seen = tmp_path / "whole", []
    run = run_in(whole, Stopping(), checkpoint_every=100)
    assert train(run, on_step=lambda row: seen.append(steps_in(whole / "checkpoints"))) == 0 and not any(seen)
    check_utilisation(list(read_rows(whole / "metrics.jsonl"))[1:])
    stopping = Stopping(2, 4)  # the first call tries the reward
    run = run_in(tmp_path / "stopped", stopping, checkpoint_every=every, grace_s=grace_s)
    codes, beside = [], []
    for _ in range(3):
        codes.append(int(train(run)))
        beside.append((tmp_path / "stopped" / STEP_PROGRESS).exists())
    assert codes == [75, 75, 0] and beside == [False, every == 1, False]
    assert tuple(re.findall("stopped (within|after) step ", capsys.readouterr().err)) == ends
    assert plain(tmp_path / "stopped") == plain(whole)


def test_samples_of_a_stopped_step_belong_to_one_checkpoint(tmp_path):
    for step, files in ((3, "one"), (4, "other")):
        place = tmp_path / "checkpoints" / str(step)
        place.mkdir(parents=True)
        (place / "checksums.json").write_text(f'{{"{files}": [1, 2]}}')
    write_step_progress(tmp_path, 3, {"left": None})
    assert read_step_progress(tmp_path, 3) == {"left": None} and read_step_progress(tmp_path, 4) is None
    (tmp_path / "checkpoints/3/checksums.json").write_text('{"one": [1, 3]}')  # saved anew, with other weights
    assert read_step_progress(tmp_path, 3) is None


def test_a_checkpoint_is_written_when_the_last_one_is_too_old(tmp_path):
    seen = []
    run = run_in(tmp_path, Stopping(), checkpoint_every=100, checkpoint_minutes=1e-9)
    assert train(run, on_step=lambda row: seen.append(steps_in(tmp_path / "checkpoints"))) == 0 and any(seen)


def test_a_resumed_run_reads_nothing_of_the_model_that_it_began_with(tmp_path):
    """Otherwise it would refuse weights that have changed."""
    model, tokenizer = load_pretrained("tiny-random")
    found = []
    for after in (model, jax.tree.map(jnp.zeros_like, model)):
        place = tmp_path / str(len(found))
        save_pretrained(model, tokenizer, place / "model")
        run = run_in(place / "run", Stopping(), checkpoint_every=1)
        run = dataclasses.replace(run, model=str(place / "model"))
        assert train(dataclasses.replace(run, steps=1)) == 0
        shutil.rmtree(place / "model")
        save_pretrained(after, tokenizer, place / "model")
        assert train(run) == 0
        found.append(plain(place / "run"))
    assert found[0] == found[1]


def files(folder):
    """The bytes of all files of a run, with their times."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """The process ends here."""


def test_a_run_that_its_rule_has_ended_stays_so_even_if_it_was_killed_before_its_last_checkpoint(tmp_path, capsys):
    """The rewards are the same in each folder. It goes on where asked to, as a run of that rule would have."""

    def until(folder, times, **output):
        ends = Rules(until=Reaches("reward/mean", above=-1.0, times=times))
        return dataclasses.replace(run_in(tmp_path / folder, Stopping(), **output), rules=ends, steps=5)

    def killed(row):
        if "event/ended" in row:
            raise Killed

    ended = until("one", 2, checkpoint_every=1)
    with pytest.raises(Killed):
        train(ended, on_step=killed)
    assert steps_in(tmp_path / "one/checkpoints") == [1] and train(ended) == 0
    told = capsys.readouterr().out
    why = "the run ends since reward/mean was above -1 in 2 measured steps in a row"
    assert f"ended at step 2 of 5: {why}" in told
    assert "\n  train again with --rules.until None from the file" in told
    rows = list(read_rows(tmp_path / "one/metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["event/ended"] == why
    before = files(tmp_path / "one")
    for again in (ended, dataclasses.replace(ended, steps=9)):
        assert train(again) == 0 and files(tmp_path / "one") == before
        assert (
            f"is finished: it ended at step 2 of {again.steps}: {why}. Continue with --rules" in capsys.readouterr().out
        )
    longer = until("one", 4, checkpoint_every=1)
    assert train(longer) == 0 and train(until("whole", 4, checkpoint_every=1)) == 0
    assert plain(tmp_path / "one") == plain(tmp_path / "whole")
    apart = differences(tmp_path / "whole", tmp_path / "one")
    assert [line.split(":")[0] for line in apart] == [
        f"metrics.jsonl, step {n}, event/{x}" for n, x in ((2, "ended"), (3, "settings"))
    ]
    assert train(dataclasses.replace(longer, rules=Rules())) == 0
    assert steps_in(tmp_path / "one/checkpoints")[-1] == 5
