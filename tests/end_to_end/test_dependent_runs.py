"""Runs over steps of another run, which goes on, trains a step anew, moves and goes; then they go themselves."""

import shutil

import pytest
from commands import ROOT, commands
from safetensors.numpy import load_file

from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.models import load_pretrained, save_pretrained

pytestmark = pytest.mark.slow

SFT = """
from jaxrl_llm.config import BatchSize, Supervised
from jaxrl_llm.data import Texts
rows = [{"prompt": f"Say {digit}: ", "completion": str(digit)} for digit in range(40)]
config = Supervised(model="base", data=Texts(rows), batch=BatchSize(rows=8, max_tokens=32), steps=1)
"""
TAUGHT = ROOT / "tests/fixtures/runs/taught.py"
KEPT = "--evaluation.every 0 --output.checkpoint_every 1 --output.keep 1 --output.trackers"
FLAGS = f"{KEPT} --learner.optimiser.learning_rate 0.01"
LORA = f"{FLAGS} --learner.lora.rank 2 --learner.lora.targets attn/q"
WHOLE = f"train sft.py {FLAGS} --steps 2 --run_dir a"
DEPENDENTS = {
    "over": f"train sft.py {LORA} --model a --run_dir over",
    "from": f"train sft.py {FLAGS} --run_dir from --from a@2",
    "plain": f"train sft.py {FLAGS} --model a --run_dir plain",
    "taught": f"train {TAUGHT} {KEPT} --scoring.distillation.teacher a@2 --steps 1 --run_dir taught",
    "third": f"train sft.py {LORA} --model over --run_dir third",
    "fourth": f"train sft.py {LORA} --model a --run_dir fourth --from over@1",
}
RUNS = tuple(DEPENDENTS)
ZERO = ("plain@0", "over@0", "from@0", "third@0", "fourth@0")


def weights(folder):
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


def exported(folder, when):
    """What each run's model, and the model that it began with, is now."""
    names = (*RUNS, *ZERO)
    lines = [f"export {name} --out out/{when}/{name}" for name in names]
    for name, answer in zip(names, commands(lines, folder), strict=True):
        assert answer.code == 0, (when, name, answer.err)
    return {name: weights(folder / "out" / when / name) for name in names}


def done(folder, *lines):
    answers = commands(list(lines), folder)
    for line, answer in zip(lines, answers, strict=True):
        assert answer.code == 0, (line, answer.err)
    return answers


def test_what_a_run_depends_on_stays(tmp_path):
    save_pretrained(*load_pretrained("tiny-random"), tmp_path / "base")
    (tmp_path / "sft.py").write_text(SFT)
    done(tmp_path, WHOLE, *DEPENDENTS.values())
    a, there = tmp_path / "a", tmp_path / "a/checkpoints/2"
    for name in RUNS:
        (copy,) = (tmp_path / name / "needs").glob("a-*")
        files = [path.relative_to(there) for path in there.rglob("*") if path.is_file()]
        assert files and all((there / x).stat().st_ino == (copy / "checkpoints/2" / x).stat().st_ino for x in files)
    assert [path.name[:4] for path in sorted((tmp_path / "third/needs").iterdir())] == ["a-" + copy.name[2:4], "over"]
    before = exported(tmp_path, "before")
    shutil.copytree(a, tmp_path / "as it was")

    done(tmp_path, WHOLE.replace("steps 2", "steps 4"))
    assert steps_in(a / "checkpoints") == [2, 4], "needed by others, and the newest"
    assert exported(tmp_path, "gone_on") == before

    shutil.rmtree(a / "checkpoints/2")
    shutil.rmtree(a / "checkpoints/4")
    done(tmp_path, f"{WHOLE} --learner.optimiser.learning_rate 0.02", "export a@2 --out out/a")
    assert weights(tmp_path / "out/a") != weights(tmp_path / "out/before/plain@0")
    assert exported(tmp_path, "anew") == before

    shutil.rmtree(a)
    assert exported(tmp_path, "gone") == before
    again = [f"{line} --steps 2" for line in DEPENDENTS.values()]
    done(tmp_path, *again, *(f"export {name} --out out/again/{name}" for name in RUNS), "eval taught --limit 2")
    for name in RUNS:
        assert weights(tmp_path / "out/again" / name) != before[name], "it has learned another step"
    done(tmp_path, f"train sft.py {LORA} --model a --run_dir fifth --from over@2", "export fifth@0 --out out/fifth")
    assert weights(tmp_path / "out/fifth") == weights(tmp_path / "out/again/over")
