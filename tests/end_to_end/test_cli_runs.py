"""A whole run through the command line: train, go on, test, ask, export; and what each leaves behind."""

import base64
import datetime
import gzip
import json
import re
import struct

import pytest
from commands import assert_refused, command, commands
from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.slow

BLOCK, HEADER = 32768, 7
"""Of wandb's files, in bytes: the header is that of each piece of a record."""

PROMPT = "State the final answer to the following arithmetic problem: 9 - 2 ="
LINES = {
    "train": "train smoke",
    "again": "train smoke",
    "other settings": "train smoke --seed 5",
    "go on": "train smoke --steps 8 --learner.compute.microbatch_rows 4 --scoring.timeout_s 9 --output.profile 8",
    "fresh": "train smoke --fresh --recipe gspo --learner.minibatches 1 --steps 1 "
    "--output.trackers tensorboard wandb:tests "
    "--task.template {{messages[0].content}}<think> --task.extractor whole --json",
    "what fresh suggests": "train runs/smoke-2/config.json --run_dir runs/smoke-2 --steps 1",
    "quiet": "train smoke --run_dir runs/told --steps 1 --quiet",
    "quiet json": "train smoke --run_dir runs/told --steps 2 --quiet --json",
    "finished json": "train smoke --run_dir runs/told --steps 2 --quiet --json",
    "eval": "eval runs/smoke --json",
    "eval table": "eval runs/smoke --samples 4 --temperature 1 --limit 10 --out answers.jsonl",
    "generate": "generate runs/smoke --temperature 0 --max_new_tokens 8",
    "generate no text": "generate runs/smoke",
    "seed 1": "generate runs/smoke --temperature 1 --max_new_tokens 32 --seed 1 --prompt hello",
    "seed 2": "generate runs/smoke --temperature 1 --max_new_tokens 32 --seed 2 --prompt hello",
    "seed 1 again": "generate runs/smoke --temperature 1 --max_new_tokens 32 --seed 1 --prompt hello",
    "export": "export runs/smoke --out model",
    "export again": "export runs/smoke --out model",
    "export nowhere": "export runs/smoke --out /proc/nowhere/model",
    "export gguf": "export runs/smoke --out model.gguf",
    "export small": "export runs/smoke --out small.gguf --gguf_type q8_0",
    "export gguf again": "export runs/smoke --out model.gguf",
    "export adapter": "export runs/smoke --out adapter --adapter",
    "eval export": "eval model --config smoke --json",
    "eval gguf": "eval model.gguf --config smoke --json",
    "generate gguf": "generate model.gguf --temperature 0 --max_new_tokens 8 --prompt hello --system Speak",
    "generate export": "generate model --temperature 0 --max_new_tokens 8 --prompt hello --system Speak",
}
TYPED = {"generate": f"{PROMPT}\n\n{PROMPT}\n", "generate no text": "bad \udcff\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def answers(folder):
    found = commands([(line, TYPED.get(name, "")) for name, line in LINES.items()], folder, WANDB_MODE="offline")
    return dict(zip(LINES, found, strict=True))


def wandb_rows(path):
    """What a run logged offline, as {name: value}; the file is a log as LevelDB writes it."""
    data = path.read_bytes()
    at, record = 7, b""  # after the file's own header
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:  # too little for another piece
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # the whole of a record, or its last piece
            found = Record.FromString(record)
            record = b""
            if found.HasField("history"):
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found.history.item
                }


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_smoke_run_learns_what_it_is_rewarded_for(folder, answers):
    assert answers["train"].code == 0, answers["train"].err
    rewards = [row["reward/mean"] for row in rows(folder / "runs/smoke/metrics.jsonl") if row["step"]]
    assert sum(rewards[:2]) / 2 < 0.5 < 0.8 < min(rewards[4:6])
    assert "jaxrl-llm eval runs/smoke" in answers["train"].out


def test_what_was_compiled_is_in_the_log_and_not_on_the_terminal(folder, answers):
    log = (folder / "runs/smoke/log.txt").read_text()
    assert "compiling decode: 64 slots" in log and "64 slots" not in answers["train"].err
    assert "step 7: resumed" in answers["go on"].err and "resumed" not in answers["train"].err


def test_a_row_does_not_wait_for_its_evaluation(folder, answers):
    log = (folder / "runs/smoke/log.txt").read_text()
    row, evaluated = (
        datetime.datetime.fromisoformat(re.search(rf"(.+),(\d+)  {text}", log).expand(r"\1.\2"))
        for text in ("step 6/6", "evaluation at step 6")
    )
    took = rows(folder / "runs/smoke/metrics.jsonl")[6]["time/evaluation_s"]
    # The time of the evaluation begins with the printing of the row.
    assert (evaluated - row).total_seconds() > took / 2 > 0


def test_the_command_that_a_run_suggests_knows_its_flags(answers):
    assert "jaxrl-llm train runs/smoke-2/config.json --run_dir runs/smoke-2 --steps 2" in answers["fresh"].err
    assert answers["what fresh suggests"].code == 0, answers["what fresh suggests"].err
    assert "runs/smoke-2 is finished: 1 of 1 steps" in answers["what fresh suggests"].out


def test_a_finished_run_says_so_and_goes_on_for_more_steps(folder, answers):
    assert answers["again"].code == 0 and "runs/smoke is finished: 6 of 6 steps" in answers["again"].out
    assert answers["go on"].code == 0, answers["go on"].err
    metrics = rows(folder / "runs/smoke/metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(9))
    assert [row["step"] for row in metrics if "event/resumed" in row] == [7]
    assert [row.get("event/settings") for row in metrics[6:]] == [None, "scoring.timeout_s: 5.0 -> 9.0", None]
    assert json.loads((folder / "runs/smoke/config.json").read_text())["steps"] == 8


def test_a_step_is_profiled_and_the_end_says_where(folder, answers):
    assert "xprof runs/smoke/profile" in answers["go on"].out
    (trace,) = (folder / "runs/smoke/profile").rglob("*.xplane.pb")
    assert b"update" in trace.read_bytes()


def test_a_run_is_not_continued_with_other_settings(answers):
    assert_refused(answers["other settings"], "runs/smoke was begun with other settings (seed: 0 -> 5)", "--fresh")


def test_fresh_begins_in_a_folder_of_its_own(folder, answers):
    assert answers["fresh"].code == 0, answers["fresh"].err
    said = "one update a batch: the clip range never binds; --learner.minibatches 4"
    assert said in answers["fresh"].err and said in (folder / "runs/smoke-2/log.txt").read_text()
    saved = json.loads((folder / "runs/smoke-2/config.json").read_text())
    assert (saved["recipe"]["name"], saved["steps"]) == ("gspo", 1)
    assert [row["step"] for row in rows(folder / "runs/smoke-2/metrics.jsonl")] == [0, 1]


def test_a_template_that_opens_a_thought_is_told_of_where_the_whole_text_is_judged(answers):
    said = "the chat template opens a thought, <think>, and extractor whole judges the thoughts of chain_sum too"
    assert answers["fresh"].err.count(said) == 1 and said not in answers["train"].err


def test_wandb_keeps_what_is_written_and_completions_of_each_evaluation(folder, answers):
    (kept,) = (folder / "runs/smoke-2/wandb").glob("offline-run-*/*.wandb")
    logged = list(wandb_rows(kept))
    numbers = [row for row in logged if "samples._type" not in row]
    tables = [row for row in logged if "samples._type" in row]
    written = rows(folder / "runs/smoke-2/metrics.jsonl")
    assert [row["step"] for row in numbers] == [0, 1] and "reward/mean" in written[1]
    for row, ours in zip(numbers, written, strict=True):
        known = {name: value for name, value in ours.items() if value is not None}
        assert {name: value for name, value in row.items() if not name.startswith("_")} == known
    samples = rows(folder / "runs/smoke-2/samples.jsonl")
    for step, told in enumerate(tables):
        table = json.loads((kept.parent / "files" / told["samples.path"]).read_text())
        kinds = ["evaluation"] * 16 + ["training"] * 8 * step
        assert told["step"] == step and told["samples._type"] == "table-file"
        assert table["columns"] == ["step", "kind", "prompt", "completion", "reward"]
        assert [row[:2] for row in table["data"]] == [[step, kind] for kind in kinds]
        ours = [row for kind in dict.fromkeys(kinds) for row in samples if (row["step"], row["kind"]) == (step, kind)]
        worth = [row["reward"] if row["kind"] == "training" else float(row["correct"]) for row in ours]
        said = [[row["prompt"], row["completion"], found] for row, found in zip(ours, worth, strict=True)]
        assert [row[2:] for row in table["data"]] == said[:16] + said[len(said) - 8 * step :]
    assert len(tables) == 2


def test_with_json_stdout_has_the_rows_and_nothing_else(folder, answers):
    printed = {name: [json.loads(line) for line in answers[name].out.splitlines()] for name in ("fresh", "quiet json")}
    whole, told = (rows(folder / "runs" / name / "metrics.jsonl") for name in ("smoke-2", "told"))
    assert [row["step"] for row in told] == [0, 1, 2]
    assert printed == {"fresh": whole, "quiet json": told[2:]}
    assert "step 1/1" in answers["fresh"].err and "accuracy after" in answers["fresh"].err
    assert answers["quiet json"].err == "" and answers["quiet json"].code == 0
    assert answers["finished json"].out == "" and "is finished: 2 of 2 steps" in answers["finished json"].err


def test_a_quiet_run_says_how_it_ended_and_no_more(folder, answers):
    assert (answers["quiet"].code, answers["quiet"].err) == (0, "")
    words = [line.split("  ")[0] for line in answers["quiet"].out.splitlines()]
    assert words == ["finished", "accuracy before", "accuracy after", "of the problems", "the run is in"]
    assert "step 1/1" in (folder / "runs/told/log.txt").read_text()


def test_eval_finds_what_the_run_found_at_its_end(folder, answers):
    found = json.loads(answers["eval"].out)
    last = rows(folder / "runs/smoke/metrics.jsonl")[-1]
    logged = {name: value for name, value in last.items() if name.startswith("eval/")}
    assert logged and {name: found[name] for name in logged} == logged
    assert (found["model"], found["step"], found["samples"]) == ("runs/smoke", 8, 1)


def test_eval_prints_a_table_for_people(answers):
    assert answers["eval table"].code == 0
    lines = answers["eval table"].out.splitlines()
    assert lines[0] == "runs/smoke, step 8 on chain_sum: 10 problems, 4 each, temperature 1, top_p 1"
    assert [line.split()[0] for line in lines[1:]] == ["avg@4", "pass@2", "pass@4", "maj@4", "length"]


def test_eval_writes_every_answer_to_a_file(folder, answers):
    written = rows(folder / "answers.jsonl")
    assert [(row["problem"], row["sample"]) for row in written] == [
        (problem, sample) for problem in dict.fromkeys(row["problem"] for row in written) for sample in range(4)
    ]
    assert len(written) == 40 and all(row["messages"][-1]["role"] == "user" for row in written)
    shown = float(answers["eval table"].out.splitlines()[1].split()[1])
    assert shown == pytest.approx(100 * sum(row["correct"] for row in written) / 40, abs=0.05)
    assert sum(row["tokens"] for row in written) / 40 == pytest.approx(
        float(answers["eval table"].out.splitlines()[-1].split()[1]), abs=0.05
    )
    assert {row["finish_reason"] for row in written} <= {"stop", "length"}
    assert all(row["answer"] and isinstance(row["completion"], str) for row in written)


def test_generate_answers_as_the_run_was_tested(folder, answers):
    samples = rows(folder / "runs/smoke/samples.jsonl")
    tested = {
        row["step"]: row["completion"] for row in samples if row["kind"] == "evaluation" and row["prompt"] == PROMPT
    }
    assert set(tested) == {0, 6, 8} and tested[0] != tested[8]
    assert answers["generate"].out.splitlines() == [tested[8]] * 2


def test_generate_refuses_bytes_that_are_no_text(answers):
    assert_refused(answers["generate no text"], r"holds '\udcff', which is not UTF-8: write it in UTF-8")


def test_a_run_leaves_a_report_of_all_that_it_wrote(folder, answers):
    text = (folder / "runs/smoke/report.html").read_text()
    blobs = re.findall(r'<script type="application/octet-stream" id="[a-z0-9-]+">([^<]*)<', text)
    history, samples = (gzip.decompress(base64.b64decode(blob)).decode() for blob in blobs)
    (run,) = json.loads(history)["runs"]
    assert (run["name"], run["last"]) == ("smoke", 8) and {"reward/mean", "entropy"} <= set(run["curves"])
    assert samples == (folder / "runs/smoke/samples.jsonl").read_text().rstrip("\n")
    told = next(row for row in map(json.loads, samples.splitlines()) if row["kind"] == "training")
    assert len(told["by_token"]["text"]) == told["tokens"] == len(told["by_token"]["entropy"])
    assert isinstance(told["advantage"], float)


def test_an_answer_depends_on_the_seed_alone(answers):
    assert answers["seed 1"].code == 0
    assert answers["seed 1"].out == answers["seed 1 again"].out != answers["seed 2"].out


def test_an_export_is_the_runs_policy(folder, answers):
    assert answers["export"].code == 0 and "model" in answers["export"].out
    assert_refused(answers["export again"], "model exists and is not empty", "give a new directory")
    assert_refused(answers["export nowhere"], "/proc/nowhere/model cannot be written", "give another folder with --out")
    names = {path.name for path in (folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    ours, theirs = (json.loads(answers[name].out) for name in ("eval", "eval export"))
    assert {k: v for k, v in ours.items() if "/" in k} == {k: v for k, v in theirs.items() if "/" in k}


def test_an_exported_model_is_asked_by_its_chat_template(answers):
    assert answers["generate export"].code == 0 and len(answers["generate export"].out.strip()) == 8, answers[
        "generate export"
    ]


def test_a_run_of_one_device_answers_on_eight(folder, answers):
    arguments = ("generate", "runs/smoke", "--temperature", "0", "--max_new_tokens", "8", "--prompt", PROMPT)
    sharded = command(*arguments, folder=folder, JAX_NUM_CPU_DEVICES="8")
    assert sharded.code == 0, sharded.err
    assert sharded.out.splitlines() == answers["generate"].out.splitlines()[:1]


def test_a_gguf_file_is_the_runs_policy_too(folder, answers):
    assert "runs/smoke, step 8, is written to model.gguf (f32)" in answers["export gguf"].out
    assert answers["export small"].code == 0
    assert (folder / "small.gguf").stat().st_size < 0.4 * (folder / "model.gguf").stat().st_size
    ours, theirs = (json.loads(answers[name].out) for name in ("eval export", "eval gguf"))
    assert theirs | {"model": "model"} == ours
    assert answers["generate gguf"].out == answers["generate export"].out
    assert_refused(answers["export gguf again"], "model.gguf exists: give a new file, or remove it first")


def test_what_trained_no_adapter_exports_none(answers):
    refused = "runs/smoke trained the whole model (learner.lora.rank is 0): export it without --adapter"
    assert_refused(answers["export adapter"], refused)


def test_an_export_to_a_full_disk_leaves_nothing(folder, answers):
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    assert_refused(command("export", "runs/smoke", "--out", "full", folder=folder, before=before), "the disk is full")


def test_nothing_unfinished_is_left(folder, answers):
    left = [path for path in folder.rglob("*") if path.name.startswith(".") or "tmp" in path.name]
    assert not [path for path in left if "wandb" not in path.parts]  # wandb keeps an empty tmp of its own
    expected = {"runs", "model", "model.gguf", "small.gguf", "answers.jsonl"}
    assert {path.name for path in folder.iterdir()} == expected
