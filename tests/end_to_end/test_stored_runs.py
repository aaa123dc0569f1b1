"""A run in object storage: killed, resumed on another machine, and read; it equals one that nobody touched."""

import json
import signal
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import assert_refused, command, commands, logged
from end_to_end.test_resume import plain
from storages import BUCKET, on_another_machine, storage

from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.system import lease
from jaxrl_llm.system import storage as stored

pytestmark = pytest.mark.slow

FLAGS = (
    "--rollout.prompts 2 --rollout.group 4 --learner.minibatches 1 --steps 5 --evaluation.every 0 "
    "--output.checkpoint_every 1 --output.trackers --run_dir"
)
RUN, WHOLE = f"gs://{BUCKET}/runs/broken", f"gs://{BUCKET}/runs/whole"
LINES = {
    "resume": f"train smoke {FLAGS} {RUN}",
    "whole": f"train smoke {FLAGS} {WHOLE} --quiet",
    "finished": f"train {RUN}",
    "from": f"train smoke --from {RUN}@5 {FLAGS} {RUN}-2 --steps 1 --quiet",
    "report": f"report {RUN} {WHOLE} --out both.html",
    "eval": f"eval {RUN} --limit 2",
    "export": f"export {RUN}@5 --out model",
    "no run": f"eval gs://{BUCKET}/runs/none",
    "no bucket": "train smoke --run_dir gs://no-such-bucket/x",
    "denied": "train smoke --run_dir gs://denied/x",
}


def rows(address):
    return [json.loads(line) for line in stored.system(address).cat_file(f"{address}/metrics.jsonl").splitlines()]


def saved(address):
    """The arrays of the last checkpoint."""
    place = stored.place(stored.mirror(address) / "checkpoints/5/state")
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(place).item_metadata.tree
        plain = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        return reader.restore(place, args=ocp.args.PyTreeRestore(restore_args=plain))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What is said on the second machine, after the first one was killed; and of a start while that one trained."""
    folder = tmp_path_factory.mktemp("stored")
    storage("gs")
    metrics = folder / f"first/storage/gs/{BUCKET}/runs/broken/metrics.jsonl"
    line = LINES["resume"].split()
    process = logged(folder / "first.log", *line, folder=folder, JAXRL_LLM_CACHE=str(folder / "first"))
    try:
        while process.poll() is None and not (metrics.exists() and '"step": 3' in metrics.read_text()):
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)  # it has the run, however long the other one takes
        at_once = command(*line, folder=folder, JAXRL_LLM_CACHE=str(folder / "third"))
    finally:
        process.kill()
        process.wait()
    on_another_machine(folder / "second")
    found = commands(list(LINES.values()), folder)
    return dict(zip(LINES, found, strict=True)), at_once, process.returncode, folder


def test_one_that_was_killed_goes_on_elsewhere_and_equals_one_that_nobody_touched(answers):
    found, _, code, _ = answers
    assert code == -9 and found["resume"].code == 0, found["resume"].err
    assert "which has ended: its lock is taken over" in found["resume"].err
    broken, whole = rows(RUN), rows(WHOLE)
    assert [row["step"] for row in broken] == [row["step"] for row in whole] == list(range(6))
    assert sum("event/resumed" in row for row in broken) == 1
    for one, other in zip(broken, whole, strict=True):
        assert plain(one) == plain(other)
    arrays, others = saved(RUN), saved(WHOLE)
    assert arrays.keys() == others.keys() and len(arrays) > 20
    for name, value in arrays.items():
        assert value.tobytes() == others[name].tobytes(), name
    assert lease.get(f"{RUN}/lock") is None


def test_two_at_once_are_refused(answers):
    assert_refused(answers[1], f"{RUN} is in use by process", "wait until it ends, or take --fresh for a new folder")


def test_commands_read_addresses(answers):
    found, _, _, folder = answers
    assert f"{RUN} is finished: 5 of 5 steps" in found["finished"].out
    for name in ("whole", "from", "report", "eval", "export"):
        assert found[name].code == 0, found[name].err
    assert f"the run is in     {WHOLE}\n" in found["whole"].out
    assert steps_in(stored.mirror(RUN) / "checkpoints") == [4, 5]
    begun = json.loads(stored.system(RUN).cat_file(f"{RUN}-2/config.json"))
    assert begun["from"] == {"run": RUN, "step": 5, "carry": False} and begun["output"]["run_dir"] == f"{RUN}-2"
    assert (folder / "both.html").stat().st_size and (folder / "model/model.safetensors").exists()
    assert found["eval"].out.startswith(f"{RUN}, step 5 on chain_sum: 2 problems")


def test_what_cannot_work_is_one_line(answers):
    found = answers[0]
    assert_refused(found["no run"], f"no model at gs://{BUCKET}/runs/none: give a folder with config.json")
    assert_refused(found["no bucket"], "there is no bucket no-such-bucket, or it is not yours: make it first")
    assert_refused(found["denied"], "gs://denied/x cannot be used", "gcloud auth application-default login")
