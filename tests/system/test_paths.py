"""Places that are no folder of one's own: addresses, folders that another person has made, runs that begin as each
other."""

import json

import pytest
from commands import assert_refused, commands
from jax._src.hardware_utils import _TPU_PCI_DEVICE_IDS

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import cut_after
from jaxrl_llm.system.paths import TPUS, hint_accelerator, new_file, open_nofollow

REFUSED = {
    "train smoke --run_dir az://bucket/x": [
        "run_dir az://bucket/x is an address",
        "gs://BUCKET/FOLDER and s3://BUCKET",
    ],
    "train smoke --output.run_dir=s3://bucket": ["run_dir s3://bucket names no folder of a bucket"],
    "train smoke --model hdfs://a/model": ["hdfs://a/model is an address", "or a folder (a model may be OWNER/MODEL"],
    "train smoke --from az://bucket/x@3": ["az://bucket/x is an address"],
    "train az://bucket/run.py": ["az://bucket/run.py is an address"],
    "eval az://bucket/x": ["az://bucket/x is an address"],
    "eval tiny-random --kl_to az://bucket/x": ["az://bucket/x is an address"],
    "eval tiny-random --out gs://bucket/a.jsonl": [
        "--out gs://bucket/a.jsonl is an address",
        "a local or mounted folder",
    ],
    "collect tiny-random --out gs://bucket/a.jsonl": ["--out gs://bucket/a.jsonl is an address"],
    "generate az://bucket/x": ["az://bucket/x is an address"],
    "export itself --out gs://bucket/x": ["--out gs://bucket/x is an address"],
    "report itself az://bucket/x": ["az://bucket/x is an address"],
    "train smoke --model itself": ["itself starts from itself, directly or by way of other runs: set model in"],
    "eval itself": ["itself starts from itself"],
    "generate hen --prompt a": ["hen starts from itself"],
    "export egg@4 --out x": ["egg starts from itself"],
    "train smoke --model chick": ["egg starts from itself"],
    "train smoke --run_dir linked": ["linked/lock is a symbolic link, and nothing is written through one: remove it"],
}
LINKS = (".report.html.part", ".config.json.part", "lock", "samples.jsonl", "log.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs that begin as each other, and one with links to a file that matters."""
    folder = tmp_path_factory.mktemp("foreign")
    saved = configs.to_json(configs.load_config("smoke")[1]) | configs.Origin("").to_json()
    for name, model in {"itself": "itself", "hen": "egg", "egg": "hen@2", "chick": "egg"}.items():
        (folder / name / "checkpoints/4").mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(saved | {"model": model}))
    (folder / "mine").write_text("precious")
    (folder / "linked").mkdir()
    for name in LINKS:
        (folder / "linked" / name).symlink_to(folder / "mine")
    (folder / "linked/metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n')
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    """What was there before, and the answers: of the report and of what is refused."""
    before = sorted(folder.rglob("*"))
    return before, *commands(["report linked", *REFUSED], folder)


@pytest.mark.slow
def test_each_is_one_line_that_names_the_place_and_leaves_nothing_behind(folder, answers):
    before, _, *refused = answers
    for answer, words in zip(refused, REFUSED.values(), strict=True):
        assert_refused(answer, *words)
    made, gone = set(folder.rglob("*")) - set(before), set(before) - set(folder.rglob("*"))
    assert made == {folder / "linked/report.html"} and gone == {folder / "linked/.report.html.part"}


def test_nothing_is_written_through_a_link(folder, answers):
    linked = folder / "linked"
    assert answers[1].code == 0 and not (linked / "report.html").is_symlink()
    assert "<html" in (linked / "report.html").read_text()
    with new_file(linked / "config.json") as part:
        part.write_text("whole")
    for name in ("samples.jsonl", "log.txt"):
        with pytest.raises(InputError, match=f"{name} is a symbolic link"):
            open_nofollow(linked / name)
        with pytest.raises(InputError, match=f"{name} is a symbolic link"):
            cut_after(linked / name, -1)
    assert (linked / "config.json").read_text() == "whole" and (folder / "mine").read_text() == "precious"


def test_what_a_killed_process_left_behind_is_in_nobodys_way(tmp_path):
    (tmp_path / ".config.json.part").write_text("half of it, and more")
    with new_file(tmp_path / "config.json") as part:
        part.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "whole"
    with open_nofollow(tmp_path / "rows") as file:
        file.write(b"a")
    with open_nofollow(tmp_path / "rows") as file:
        file.write(b"b")
    assert (tmp_path / "rows").read_bytes() == b"ab"


def on_the_bus(root, **devices):
    """Folders of the PCI bus under a root, as Linux has them: ``address="VENDOR DEVICE"``."""
    for address, numbers in devices.items():
        folder = root / "sys" / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        for name, number in zip(("vendor", "device"), numbers.split(), strict=True):
            (folder / name).write_text(f"{number}\n")


def test_a_tpu_that_this_jax_cannot_use_is_named_with_the_remedy(tmp_path, capsys):
    assert set(TPUS) == set(_TPU_PCI_DEVICE_IDS), "JAX knows other TPUs"
    on_the_bus(tmp_path, card="0x1ae0 0x0042", disk="0x8086 0x0063")  # Google's network card, another maker's device
    hint_accelerator(tmp_path)
    assert capsys.readouterr().err == ""
    on_the_bus(tmp_path, chip="0x1ae0 0x0063")
    hint_accelerator(tmp_path)
    assert (
        "this machine has a TPU, but this JAX runs on the CPU only: pip install -e '.[tpu]'" in capsys.readouterr().err
    )
    driver = tmp_path / "proc" / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("")
    hint_accelerator(tmp_path)
    assert "an NVIDIA GPU" in capsys.readouterr().err
