"""Runs of eight devices are exported, evaluated, asked, collected from and read as models and judges on one."""

import json

import pytest
from commands import commands

pytestmark = pytest.mark.slow

FIXED = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --learner.compute.microbatch_rows 8"
THERE = {
    "fixed": f"train smoke --steps 1 --run_dir fixed {FIXED} --evaluation.limit 4",
    "apart": "train smoke --steps 1 --run_dir apart --mesh.data 2 --mesh.fsdp 2 --mesh.rollout 4 "
    "--rollout.collect.staleness 1 --evaluation.limit 4",
    "lora": f"train smoke --steps 1 --run_dir lora {FIXED} --learner.lora.rank 2 --evaluation.limit 4",
    "rm": f"train rm.py --run_dir rm {FIXED} --batch.rows 8",
    "sft": f"train sft.py --run_dir sft {FIXED} --batch.rows 8",
}
ASKED = "--limit 2 --max_new_tokens 8 --slots 4"
HERE = {
    **{f"export {run}": f"export {run} --out of_{run}" for run in THERE},
    "export adapter": "export lora --out adapter --adapter",
    "export gguf": "export fixed --out fixed.gguf",
    **{f"eval {run}": f"eval {run} {ASKED} --json" for run in ("fixed", "apart", "lora", "of_fixed")},
    "eval sft": "eval sft --json",
    "eval chosen": f"eval of_apart --config fixed.py {ASKED} --rerank rm --samples 2 --temperature 1 --json",
    "eval distance": f"eval fixed --kl_to apart --temperature 1 {ASKED} --json",
    **{f"generate {run}": f"generate {run} --prompt 3 --max_new_tokens 4" for run in ("fixed", "apart", "sft")},
    **{f"collect {run}": f"collect {run} --out {run}.jsonl {ASKED}" for run in ("fixed", "apart")},
    "judge": "train judged.py --run_dir judged",
    "model": "train smoke --steps 1 --run_dir next --model apart --evaluation.limit 4",
    "agreement": "eval fixed.py --pairs rm.jsonl --json",
    "report": "report fixed apart --out report.html",
}
HEAD = """
import dataclasses
from jaxrl_llm.config import *
from jaxrl_llm.data import *
from jaxrl_llm.rewards import *
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.tasks import *
smoke = load_config("smoke")[1]
"""
FILES = {
    "rm.py": "config = RewardModel('tiny-random', Pairs(Table('rm.jsonl'), template='plain'), steps=1)",
    "sft.py": "config = Supervised('tiny-random', Texts([{'text': f'{n} + 1'} for n in range(40)], holdout=0.2), "
    "steps=1)",
    "judged.py": "from jaxrl_llm.rewards import rubric\n"
    "rubric.parse_verdicts = lambda text, code, count: (True,) * count  # a random judge writes none\n"
    "config = dataclasses.replace(smoke, steps=1, scoring=Scoring((ModelReward('rm'), Rubric((('right', "
    "1.0),), JudgeModel('fixed', slots=2, max_prompt_tokens=900, max_new_tokens=4)))))",
    "fixed.py": "config = dataclasses.replace(smoke, mesh=MeshShape(2, 2, 2), scoring=Scoring((Rubric((('right', 1.0),"
    "), JudgeModel('apart', slots=2, max_prompt_tokens=900, max_new_tokens=4)),)))",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each command says, those that train on eight devices first."""
    folder = tmp_path_factory.mktemp("home")
    for name, text in FILES.items():
        (folder / name).write_text(HEAD + text)
    rows = [{"prompt": f"Say {n}", "chosen": "one", "rejected": "two"} for n in range(8)]
    (folder / "rm.jsonl").write_text("\n".join(map(json.dumps, rows)))
    there = commands(list(THERE.values()), folder, JAX_NUM_CPU_DEVICES="8")
    here = commands(list(HERE.values()), folder, JAX_NUM_CPU_DEVICES="1")
    return dict(zip([*THERE, *HERE], there + here, strict=True))


@pytest.mark.parametrize("name", [*THERE, *HERE])
def test_a_command_does_its_work_on_the_devices_that_are_there(answers, name):
    assert answers[name].code == 0, answers[name].err


def test_an_export_answers_as_its_run(answers):
    run, export = (json.loads(answers[f"eval {name}"].out) for name in ("fixed", "of_fixed"))
    told = [{name: x for name, x in one.items() if name not in ("model", "step")} for one in (run, export)]
    assert told[0] == told[1]
