"""Damaged and hostile files are refused in a line: each was found by ``campaigns/test_fuzz.py``."""

import json
import zlib

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jaxrl_llm import codec
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.snapshots import phase_of
from jaxrl_llm.checkpoints.step_files import CHECKSUMS, fault, file_sums
from jaxrl_llm.checkpoints.store import read_host, steps_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.models.tokenizer import load_tokenizer
from jaxrl_llm.models.weights import INDEX, open_checkpoint, open_file, read_object
from jaxrl_llm.runs import find_run
from jaxrl_llm.system.json_lines import number, read_rows
from jaxrl_llm.tasks import Table, Task, load
from jaxrl_llm.tasks.tables import clean_row
from jaxrl_llm.telemetry.report import render_page

pytestmark = pytest.mark.slow

DEEP = "[" * 100_000


def test_damaged_files_of_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_object(tmp_path / "config.json")
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "rms_norm_eps": 1e-6}
    with pytest.raises(InputError, match="num_hidden_layers=2000000000; at most 10000 are read"):
        read_config({"model_type": "llama", "num_hidden_layers": 2 * 10**9, "rope_theta": 1e4} | shape)
    for weight_map in (1, {"a": 1}, {"a": "../x"}, {"a": ""}, {"a": None}):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match="names no files of this directory"):
            open_checkpoint(tmp_path)
    with pytest.raises(InputError, match="is not a whole safetensors file"):
        open_file(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("host", ["", DEEP, "[]", "1", '{"phase": "x"}', '{"phase": []}', "9" * 5000, "{"])
def test_damaged_host_states_of_checkpoints_are_refused(tmp_path, host):
    step = tmp_path / "checkpoints" / "3"
    (step / "host").mkdir(parents=True)
    for other in ("²", "٣", "x"):
        (tmp_path / "checkpoints" / other).mkdir()
    assert steps_in(tmp_path / "checkpoints") == [3]
    (step / "host" / "metadata").write_text(host)
    with pytest.raises(InputError, match="remove it"):
        phase_of(step)
    (step / CHECKSUMS).write_text(json.dumps({"host/metadata": ["3", 4]}))
    assert fault(step).endswith("unreadable")
    (step / CHECKSUMS).write_text(json.dumps({"x" * 5000: [3, "ab"]}))
    assert fault(step).endswith("is missing")
    (step / CHECKSUMS).write_text(DEEP)
    assert fault(step).endswith("unreadable")


def test_a_damaged_host_state_is_no_traceback(tmp_path):
    (tmp_path / "host").mkdir()
    for text in ("{", DEEP):
        (tmp_path / "host" / "metadata").write_text(text)
        with pytest.raises(InputError, match="go back to the step before"):
            read_host(tmp_path)


BOMB = codec.pack(__import__("numpy").zeros(10**6)) | {"shape": [4]}


@pytest.mark.parametrize(
    "value",
    [
        {"$date": 1}, {"$set": [{}]}, {"$array": {}}, {"$array": {"dtype": "f4", "shape": "x", "data": ""}},
        {"$datetime": ["x"]}, {"$timestamp": []}, {"$decimal": "x"}, {"$bytes": 1}, {"$tuple": 1}, {"$unknown": 1},
        {"$array": BOMB}, {"$time": None}, {"$uuid": "x"}, {"$dict": [1]}, {"$timedelta": "x"},
    ],
)  # fmt: skip
def test_values_with_wrong_content_are_refused(value):
    with pytest.raises(ValueError, match=r"^\$"):
        codec.from_json(value)


def test_rows_that_are_nested_or_huge_are_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" + zlib.compress(b"x" * 100) + b"\xff\x00\x00\x00PAR1")
    (tmp_path / "rows.jsonl").write_text(DEEP + "\n")
    for name in ("rows.parquet", "rows.jsonl"):
        with pytest.raises(InputError):
            load(Task(Table(str(tmp_path / name))))
    value = []
    for _ in range(300):
        value = [value]
    with pytest.raises(InputError, match="nested too deeply"):
        clean_row("rows[0]", {"a": value})
    assert number(10**400) is None
    with pytest.raises(InputError, match="line 1 is not a JSON object"):
        list(read_rows(tmp_path / "rows.jsonl"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 10**400}) + "\n")
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(InputError, match="is not JSON"):
        render_page([tmp_path])


@pytest.mark.parametrize(
    "change",
    [
        {"type": ["x"]}, {"model": ["a"]}, {"rules": "x"}, {"origin": True}, {"origin": {"folder": 1}}, {"from": 1},
        {"learner": {"type": {}}}, {"task": {"type": "nobody:Task"}, "model": 5}, {"seed": "x"},
    ],
)  # fmt: skip
def test_settings_with_wrong_types_are_refused(tmp_path, change):
    data = configs.to_json(configs.load_config("smoke")[1]) | configs.Origin("").to_json()
    path = tmp_path / "config.json"
    for text in (json.dumps(data | change), DEEP):
        path.write_text(text)
        assert isinstance(configs.is_run(path), bool)
        with pytest.raises(InputError):
            configs.whole(configs.read(path).run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rules": {"type": "no class"}}, "is not a configuration class"),
        (configs.Origin("x" * 5000).to_json(), ""),
        ({"origin": configs.Origin("x").to_json()["origin"] | {"config": False}}, "names no files"),
        ({"origin": {"folder": "x"}}, "does not describe a run of this version"),
    ],
)
def test_a_strangers_run_is_read_or_refused(tmp_path, change, reason):
    host = tmp_path / "checkpoints" / "1" / "host"
    host.mkdir(parents=True)
    (host / "metadata").write_text("{}")
    (host.parent / CHECKSUMS).write_text(json.dumps(file_sums(host.parent, ["host/metadata"])))
    data = configs.to_json(configs.load_config("smoke")[1]) | configs.Origin("").to_json() | change
    (tmp_path / "config.json").write_text(json.dumps(data))
    if reason:
        with pytest.raises(InputError, match=reason):
            find_run(str(tmp_path))
    else:
        assert find_run(str(tmp_path)).step == 1
