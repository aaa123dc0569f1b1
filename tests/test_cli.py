"""The command line before any weight is loaded: help, lists, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import MAIN, ROOT, assert_refused, command, commands, environment

MODELS = ROOT / "tests" / "fixtures" / "models"
TABLE = """
import dataclasses
from jaxrl_llm.config import load_config
from jaxrl_llm.tasks import Table
base = load_config("smoke")[1]
config = dataclasses.replace(base, task=dataclasses.replace(base.task, source=Table("{0}.jsonl")))
"""
ROWS = {
    "good": [
        '{"prompt": "1 + 1 =", "answer": 2}',
        '{"prompt": "1 + 2 =", "answer": 3}',
        '{"prompt": "1 + 3 =", "answer": 4}',
    ],
    "unanswered": ['{"prompt": "1 + 1 =", "answer": 2}', '{"prompt": "1 + 2 ="}'],
    "torn": ['{"prompt": "1 + 1 =", "answer": 2}', '{"prompt": "1 + 2 =", '],
    "long": ['{"prompt": "1 + 1 =", "answer": 2}', json.dumps({"prompt": "1 + " * 50, "answer": 3})],
}
SPOILED = {
    "activation": ("hidden_act", "quux"),
    "shape": ("intermediate_size", 8),
    "experts": ("model_type", "qwen3_moe"),
    "toothless": ("pad_token_id", None),
}

REFUSED = {
    "trian quickstart": ["no command 'trian'", "did you mean train?"],
    "train": ["train needs a configuration", "jaxrl-llm train quickstart"],
    "train smok": ["no configuration 'smok'", "did you mean smoke?"],
    "train nowhere.py": ["no configuration 'nowhere.py'", "or give a .py file"],
    "train smoke --stpes 3": ["no option --stpes", "did you mean --steps?"],
    "train smoke --slots 3": ["no option --slots", "did you mean --rollout.slots?"],
    "train smoke --num_generations 4": ["no option --num_generations: here it is --rollout.group"],
    "train smoke --max-completion-length=9": ["here it is --rollout.max_new_tokens"],
    "train smoke --learning_rate 1e-6": ["here it is --learner.optimiser.learning_rate"],
    "train smoke --learner.lr 1e-6": ["no option --learner.lr: here it is --learner.optimiser.learning_rate"],
    "train smoke --num_train_epochs 1": ["here it is --steps (each of rollout.prompts prompts)"],
    "train smoke --use_vllm True": ["the sampler is built in"],
    "train smoke --recipe.reference_reset 5": ["here it is --recipe.resets.reference_every"],
    "train smoke data.train_batch_size=8": ["no translation of data.train_batch_size: here it is --rollout.prompts"],
    "train smoke actor_rollout_ref.rollout.n=8": ["here it is --rollout.group"],
    "eval tiny-random --max_completion_length 9": ["did you mean --max_new_tokens?"],
    "train smoke --steps x": ["--steps: expected INT, got 'x'"],
    "train smoke --learner.optimiser.learning_rate fast": ["learning-rate: expected FLOAT, got 'fast'"],
    "train smoke --learner.optimiser.learning_rate": ["--learner.optimiser.learning-rate needs a value"],
    "train smoke --learner.optimiser.schedule cosine": ["learner.optimiser.decay must be two counts", "above warmup"],
    "train smoke surplus": ["surplus belongs to no option", "write --option value"],
    "train smoke --recipe gpso": ["no recipe 'gpso'", "did you mean gspo?"],
    "train smoke --recipe": ["--recipe needs a value"],
    "train smoke --rollout.group 1": ["rollout.group 1", "at least 2 completions"],
    "train smoke --model missing/model/here": ["no such model directory: missing/model/here"],
    "train smoke --model missing.gguf": ["no such file: missing.gguf"],
    "train smoke --model smollm2-13m": ["no such model: smollm2-13m", "did you mean smollm2-135m?"],
    "train smoke --model good.jsonl": ["good.jsonl is neither a model directory nor a .gguf file"],
    "train smoke --model truncated": ["truncated/model.safetensors is not a whole safetensors file", "fetch it again"],
    "train smoke --model activation": ["the activation 'quux'", "known are silu"],
    "train smoke --model shape": ["mlp.gate_proj.weight has shape [48, 32] where config.json says [8, 32]"],
    "train smoke --model experts": ["model_type 'qwen3_moe' is not supported"],
    "train smoke --model toothless": ["toothless has no tokenizer", "tokenizer.json"],
    "train smoke --model noise.gguf": ["noise.gguf is not a whole GGUF file", "fetch it again"],
    "train unanswered.py": ["unanswered.jsonl:2 has no answer in field 'answer'"],
    "train torn.py": ["torn.jsonl:2 is no JSON"],
    "train long.py": ["the longest prompt of long has 200 tokens: set --rollout.max_prompt_tokens 200 (now 80)"],
    "train good.py --task.template chatmll": ["template 'chatmll' is unknown; choose tokenizer, chatml, plain"],
    "train smoke --task.source.name chain_sun": ["no data set 'chain_sun'", "did you mean chain_sum?"],
    "train smoke --mesh.data 3": ["mesh data, fsdp, tensor = (3, -1, 1) does not fit 1 devices"],
    "train begun --steps x": ["--steps: expected INT, got 'x'"],
    "train empty": ["no configuration 'empty'", "or a run"],
    "train smoke --from nowhere": ["nowhere is no run"],
    "train smoke --from begun": ["begun has no checkpoint yet", "(tiny-random)"],
    "train smoke --from kept@3": ["kept has no checkpoint of step 3: it keeps 2, 4"],
    "eval kept@5": ["kept has no checkpoint of step 5: it keeps 2, 4"],
    "export nowhere@5 --out out": ["nowhere@5 is no run"],
    "eval own": ["own/config.json: it names os:system, which is no configuration class of this version"],
    "train smoke --run_dir good.jsonl": ["good.jsonl is a file: give a folder with --run_dir"],
    "train smoke --run_dir good.jsonl/run": [
        "good.jsonl/run cannot be written (Not a directory)",
        "give another folder with --run_dir",
    ],
    "train smoke --run_dir /proc/unwritable/run": [
        "/proc/unwritable/run cannot be written (No such file",
        "give another folder with --run_dir",
    ],
    "eval": ["eval needs a run or a model"],
    "eval nowhere": ["no such model: nowhere"],
    "eval begun": ["begun has no checkpoint yet", "(tiny-random)"],
    "eval empty": ["empty holds no config.json"],
    "eval tiny-random --samples 2": ["--samples 2 at temperature 0", "set --temperature above 0"],
    "eval tiny-random --config nowhere": ["no configuration 'nowhere'"],
    "eval tiny-random --config good.py --task.holdout 2": ["holdout is 2.0"],
    "eval toothless --config good.py": ["toothless has no tokenizer"],
    "generate": ["generate needs a model or a run"],
    "generate noise.gguf --prompt hello": ["noise.gguf is not a whole GGUF file"],
    "generate tiny-random --prompt=": ["--prompt is empty"],
    "generate tiny-random --prompt a --top_p 2": ["top_p must be above 0 and at most 1, got 2.0"],
    "generate toothless --prompt a": ["toothless has no tokenizer"],
    f"generate tiny-random --prompt {'x' * 1024}": ["the prompt has 1043 tokens", "made for 1024", "shorten it"],
    "export begun": ["export needs a folder to write: jaxrl-llm export begun --out DIR"],
    "export tiny-random --out out": ["tiny-random is no run"],
    "export begun --out out extra": ["export does not know extra"],
    "list moddels": ["list does not know 'moddels'", "did you mean models?"],
}


def spoil(folder: Path) -> None:
    """Fill the folder with what a command may stumble over."""
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        (folder / f"{name}.py").write_text(TABLE.format(name))
    for name, (attribute, value) in SPOILED.items():
        shutil.copytree(MODELS / "qwen2", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {attribute: value}))
    shutil.copytree(MODELS / "qwen2", folder / "truncated")
    weights = (folder / "truncated" / "model.safetensors").read_bytes()
    (folder / "truncated" / "model.safetensors").write_bytes(weights[:-1000])
    (folder / "noise.gguf").write_bytes(bytes(range(256)) * 20)
    (folder / "empty").mkdir()
    from jaxrl_llm import config as configs

    saved = configs.to_json(configs.load_config("smoke")[1])
    for name, run in {"begun": saved, "kept": saved, "own": saved | {"task": {"type": "os:system"}}}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(run))
    for step in ("kept/checkpoints/2", "kept/checkpoints/4", "own/checkpoints/1"):
        (folder / step).mkdir(parents=True)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """(folder, what was in it before, the answer to each command of ``REFUSED``)."""
    folder = tmp_path_factory.mktemp("refused")
    spoil(folder)
    before = sorted(folder.rglob("*"))
    answers = commands(list(REFUSED), folder)
    return folder, before, dict(zip(REFUSED, answers, strict=True))


@pytest.mark.parametrize("line", REFUSED, ids=[line[:70] for line in REFUSED])
def test_wrong_input_is_one_line_that_names_the_thing_and_the_remedy(refusals, line):
    assert_refused(refusals[2][line], *REFUSED[line])


def test_refused_commands_leave_nothing_behind(refusals):
    folder, before, _ = refusals
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before


def test_the_process_itself_exits_with_code_2_and_one_line(tmp_path):
    assert_refused(command("train", "smoke", "--stpes", "3", folder=tmp_path), "did you mean --steps?")
    assert_refused(command("train", "smoke", "--model", "r.gguf", folder=tmp_path), "no such file: r.gguf")
    assert not list(tmp_path.iterdir())


def test_a_batch_that_the_mesh_does_not_divide_is_refused(tmp_path):
    answer = command("train", "smoke", folder=tmp_path, JAX_NUM_CPU_DEVICES="8")
    assert_refused(
        answer, "learner.microbatch_rows 2 does not divide over mesh data x fsdp = 1 x 8", "make it a multiple of 8"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", ["train smoke --stpes 3", "train smoke --steps x", "train smok", "eval nowhere", "train smoke --help"]
)
def test_a_typo_is_answered_without_the_slow_libraries(tmp_path, line):
    program = (
        "import sys\nfrom jaxrl_llm.cli import run\ntry:\n    run(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('loaded', "
        "*sorted({'flax', 'optax', 'orbax', 'transformers', 'reasoning_gym', 'datasets'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", program, *line.split()]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded"


def test_help_tells_the_commands_and_the_fields(tmp_path):
    top, none, version, *helps = commands(
        ["--help", "", "--version", "train --help", "train smoke --help", "eval --help", "eval tiny-random --help",
         "generate --help", "generate tiny-random --help", "export --help", "list --help"],
        tmp_path,
    )  # fmt: skip
    assert top.code == 0 and all(name in top.out for name in ("train", "eval", "generate", "export", "list"))
    assert none.code == 2 and "no command ''" in none.err
    assert version.out.count(".") == 2
    for answer in helps:
        assert answer.code == 0 and "usage" in answer.out.lower() and not answer.err
    assert "--learner.optimiser.learning-rate" in helps[1].out and "--recipe NAME" in helps[1].out
    assert "--top-p" in helps[5].out and "--samples" in helps[3].out
    assert not list(tmp_path.iterdir())


def test_list_names_what_there_is(tmp_path):
    everything, configurations, tasks, recipes, models = commands(
        ["list", "list configs", "list tasks", "list recipes", "list models"], tmp_path
    )
    assert "smoke       " in configurations.out and "Two random layers" in configurations.out
    assert "chain_sum" in tasks.out and "Table(" in tasks.out
    assert "gspo" in recipes.out and "arXiv 2507.18071" in recipes.out
    assert "tiny-random" in models.out and "qwen3" in models.out
    for answer in (configurations, recipes, models):
        assert answer.code == 0 and answer.out.strip() in everything.out


def test_list_fits_a_narrow_terminal_and_a_pipe(tmp_path):
    lines = ["list", "list configs", "list tasks", "list recipes", "list models"]
    for answer in commands(lines, tmp_path, COLUMNS="80"):
        assert max(len(line) for line in answer.out.splitlines()) <= 80
    bare = {name: value for name, value in environment().items() if name != "COLUMNS"}
    piped = subprocess.run(
        [sys.executable, "-c", MAIN, "list"], cwd=tmp_path, env=bare, capture_output=True, text=True, check=True
    )
    assert max(len(line) for line in piped.stdout.splitlines()) <= 80
