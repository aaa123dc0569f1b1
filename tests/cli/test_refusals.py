"""Wrong uses as strangers make them: each is one line that names the thing and the remedy, and leaves nothing behind.

Those of runs that learn from data stand in ``test_data_errors.py``, others beside their commands.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from commands import ROOT, assert_refused, commands

MODELS = ROOT / "tests/fixtures/models"
HEAD = """
import dataclasses
from jaxrl_llm.config import *
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import *
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
base = load_config("smoke")[1]
def run(**changes): return dataclasses.replace(base, **changes)
def task(**changes): return run(task=dataclasses.replace(base.task, **{"source": Table("good.jsonl")} | changes))
def read(*table, **fields): return task(source=Table(*table, **fields))
def scored(*rewards): return dataclasses.replace(task(), scoring=Scoring(rewards))
def own(name): return scored(Function(f"own_rewards{name}"))
config = """
OWN_REWARDS = """
def greedy(a, b, c, d): return 1.0
def wordy(prompt, completion, **row): return "good"
number = 3
"""
CONFIGS = {
    "unset": ("None", "unset.py must set config = Run(...)"),
    "klass": ("Run", "klass.py must set config = Run(...)"),
    "open": ("Run(", "open.py, line 14: SyntaxError: '(' was never closed"),
    "misnamed": ('Runn("tiny-random")', "misnamed.py, line 14: NameError: name 'Runn' is not defined"),
    "bare": ("Run()", "missing 2 required positional arguments: 'model' and 'task'"),
    "mistyped": ("run(stepss=4)", "unexpected keyword argument 'stepss'; correct the configuration"),
    "absent": ("__import__('nothing_like_it')", "No module named 'nothing_like_it'; correct the configuration"),
    "recipe_key": ('run(recipe=RECIPES["gpro"])', "recipe_key.py, line 14: KeyError: 'gpro'"),
    "recipe_name": ('run(recipe="grpo")', "recipe_name.py: recipe is 'grpo': give Recipe(...)"),
    "task_name": ('run(task="gsm8k")', "task_name.py: task is 'gsm8k': give Task(...)"),
    "rollout_number": ("run(rollout=3)", "rollout is 3: give Rollout(...)"),
    "learner_none": ("run(learner=None)", "learner is None: give Learner(...)"),
    "evaluation_number": ("run(evaluation=10)", "evaluation is 10: give Evaluation(...)"),
    "steps_text": ('run(steps="many")', "steps is 'many': give a whole number"),
    "epochs_half": (
        "run(learner=dataclasses.replace(base.learner, epochs=1.5))",
        "learner.epochs is 1.5: give a whole",
    ),
    "suffix_number": ("task(suffix=3)", "task.suffix is 3: give text"),
    "scoring_reward": ("run(scoring=Accuracy())", "scoring is Accuracy(...): give Scoring(...)"),
    "task_pairs": ('run(task=Pairs(Table("good.jsonl")))', "task is Pairs(...): give Task(...)"),
    "data_task": ('Supervised("tiny-random", base.task)', "data is Task(...): give Texts(...)"),
    "loss_name": (
        'Preference("tiny-random", Pairs(Table("good.jsonl")), "dpo")',
        "loss is 'dpo': give DPO(...) or IPO",
    ),
    "source_path": ('run(task=Task("good.jsonl"))', "a task's source is a str: give a list of dictionaries"),
    "weight_text": ('scored(Accuracy("x"))', "scoring.rewards[0].weight is 'x': give a number"),
    "weight_nan": ('scored(Accuracy(float("nan")))', "reward accuracy has the weight nan; give a finite number"),
    "reward_class": ("scored(Accuracy)", "which is not a reward: give a function, or one such as Accuracy()"),
    "reward_name": ('scored("accuracy")', "scoring.rewards holds 'accuracy', which is not a reward"),
    "reward_short": ("scored(lambda text: 1)", "cannot be a reward: write it as f(problem, completion)"),
    "reward_module": ('scored(Function("nowhere:score"))', "nowhere:score cannot be imported"),
    "reward_typo": ('own(":wrdy")', "own_rewards has no wrdy; did you mean wordy?"),
    "reward_file": ('own(".py")', "names no function; write module:function"),
    "reward_number": ('own(":number")', "own_rewards:number is a int; name a function"),
    "format_open": ('scored(Format("(("))', "format pattern '((' is not a regular expression"),
    "filter_name": ('task(keep="own_rewards:nobody")', "own_rewards has no nobody; check the spelling"),
    "unanswered": ('read("unanswered.jsonl")', "unanswered.jsonl:2 has no answer in field 'answer'"),
    "halved": ('read("halved.jsonl")', "halved.jsonl:2 is not JSON"),
    "long": (
        'read("long.jsonl")',
        "the longest prompt of long has 200 tokens: set --rollout.max_prompt_tokens 200 (now 80)",
    ),
    "greedy": ('own(":greedy")', "own_rewards.py:2: LookupError: it wants", "and the row has only"),
    "wordy": ('own(":wordy")', "own_rewards.py:3: TypeError: returned 'good', which is not a number"),
    "judged": ('scored(ModelReward("nowhere"))', "no such model: nowhere"),
    "unscored": (
        'scored(ModelReward("tiny-random"))',
        "tiny-random is a language model, which gives no score: train a RewardModel",
    ),
    "column": (
        'read("good.jsonl", prompt_field="question")',
        "good.jsonl:1 has no prompt in field 'question' (it has prompt, answer); set prompt_field",
    ),
    "latin": ('read("latin.jsonl")', "latin.jsonl:1 is not JSON", "write one object on each line, in UTF-8"),
    "listed": ('read("listed.jsonl")', "listed.jsonl:2 is a list; a row is an object with fields"),
    "wide_csv": ('read("good.csv")', "good.csv:2 has 3 cells, and the first line names 2 columns"),
    "workbook": ('read("good.xlsx")', "good.xlsx has the suffix '.xlsx'; tables are .jsonl, .json, .csv or .parquet"),
    "parquet": ('read("broken.parquet")', "broken.parquet is not a Parquet file", "write it again"),
    "texts": (
        'Supervised("tiny-random", Texts(Table("good.jsonl"), template="plain"))',
        "good.jsonl:1: the row has the columns prompt, answer; a row has messages",
    ),
}
"""What a configuration of one's own sets ``config`` to, and parts of the answer."""
REFUSED = {
    "trian quickstart": ["no command 'trian'", "did you mean train?"],
    "train": ["train needs a configuration", "jaxrl-llm train quickstart"],
    "train smok": ["no configuration 'smok'", "did you mean smoke?"],
    "train nowhere.py": ["no configuration 'nowhere.py'", "or give a .py file"],
    "train smoke --stpes 3": ["no option --stpes", "did you mean --steps?"],
    "train smoke --quiet=false": ["--quiet=false: --quiet stands alone, without a value"],
    "train smoke --json rows.jsonl": ["rows.jsonl belongs to no option", "a switch stands alone"],
    "train smoke --slots 3": ["no option --slots", "did you mean --rollout.engine.slots?"],
    "train smoke --num_generations 4": ["--num_generations is TRL's name; here it is --rollout.group 4"],
    "train smoke --max-completion-length=9": ["here it is --rollout.max_new_tokens 9"],
    "train smoke --num_train_epochs 1": ["--num_train_epochs (nearest: --steps) is TRL's name", "docs/from_trl.md"],
    "train smoke --batch_size 8": ["no option --batch_size: --rollout.prompts, each with --rollout.group completions"],
    "train dpo_quickstart --max_tokens 64": ["no option --max_tokens: did you mean --batch.max_tokens?"],
    "train smoke --resume": ["no option --resume: the same command resumes"],
    "train smoke --use_vllm": ["--use_vllm (the sampler is built in) is TRL's name"],
    "train smoke trainer.n_gpus_per_node=8": ["all devices are used; CUDA_VISIBLE_DEVICES chooses"],
    "train smoke data.train_batch_size=8": ["data.train_batch_size is verl's name; here it is --rollout.prompts 8"],
    "plan smoke --topology h100:1 --lora_r 8": ["--lora_r is TRL's name; here it is --learner.lora.rank 8"],
    "train smoke --recipe.algorithm.surrogate klip": ["--recipe.algorithm.surrogate: expected one of CISPO", "'klip'"],
    "plan smoke --topology h100:1 --recipe.algorithm.kl K4": ["expected one of K1, K2, K3, K3Plus, UnbiasedK3, None"],
    "eval tiny-random --max_completion_length 9": ["here it is --max_new_tokens 9"],
    "train smoke --steps x": ["--steps: expected INT, got 'x'"],
    "train smoke --learner.optimiser.learning_rate fast": ["learning_rate: expected FLOAT, got 'fast'"],
    "train smoke --learner.optimiser.learning_rate": ["--learner.optimiser.learning_rate needs a value"],
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
    "train smoke --model foreign": ["model_type 'jamba' is not supported"],
    "train smoke --model toothless": ["toothless has no tokenizer", "tokenizer.json"],
    "train smoke --model noise.gguf": ["noise.gguf is not a whole GGUF file", "fetch it again"],
    "train good.py --task.template chatmll": ["template 'chatmll' is unknown; choose tokenizer, chatml, plain"],
    "train smoke --task.source.name chain_sun": ["no data set 'chain_sun'", "did you mean chain_sum?"],
    "train smoke --mesh.data 3": ["mesh data, fsdp, tensor = (3, -1, 1) does not fit 1 devices"],
    "train begun --steps x": ["--steps: expected INT, got 'x'"],
    "train empty": ["no configuration 'empty'", "or give a .py file or a run"],
    "train smoke --from nowhere": ["nowhere is not a run"],
    "train smoke --from begun": ["begun has no checkpoint yet", "(tiny-random)"],
    "train smoke --from hollow@3": ["hollow has no checkpoint of step 3: it keeps 2, 4"],
    "eval hollow@5": ["hollow has no checkpoint of step 5: it keeps 2, 4"],
    "export nowhere@5 --out out": ["nowhere@5 is not a run"],
    "eval own": ["own/config.json: it names os:system, which is not a configuration class of this version"],
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
    "eval begun": ["begun has no checkpoint yet", "(tiny-random)"],
    "eval empty": ["empty holds no config.json"],
    "eval tiny-random --samples 2": ["--samples 2 at temperature 0", "set --temperature above 0"],
    "eval tiny-random --config nowhere": ["no configuration 'nowhere'"],
    "eval tiny-random --config good.py --task.holdout 2": ["holdout is 2.0"],
    "eval toothless --config good.py": ["toothless has no tokenizer"],
    "generate": ["generate needs a model or a run"],
    "generate tiny-random --prompt=": ["--prompt is empty"],
    "generate tiny-random --prompt a --top_p 2": ["top_p must be above 0 and at most 1, got 2.0"],
    "generate toothless --prompt a": ["toothless has no tokenizer"],
    f"generate tiny-random --prompt {'x' * 1024}": ["the prompt has 1043 tokens", "made for 1024", "shorten it"],
    "export begun": ["export needs a folder to write: jaxrl-llm export begun --out DIR"],
    "export begun --out out extra": ["export does not know extra"],
    "list moddels": ["list does not know 'moddels'", "did you mean models?"],
    "Train smoke": ["no command 'Train'", "did you mean train?"],
    "--verbose": ["no command '--verbose': there are train, eval"],
    "train --steps 3 smoke": ["train needs a configuration: jaxrl-llm train quickstart"],
    "train quickstart.yaml": ["no configuration 'quickstart.yaml': did you mean quickstart?"],
    "train smoke -steps 3": ["-steps belongs to no option: write --option value"],
    "train smoke steps=3": ["steps=3 belongs to no option"],
    "train smoke --steps 1.5": ["--steps: expected INT, got '1.5'"],
    "train smoke --output.ratios maybe": ["maybe belongs to no option", "a switch stands alone"],
    "train smoke --seed -1": ["seed must be from 0 to 16777215, got -1"],
    "train smoke --model=": ["model is empty: give a Hugging Face directory"],
    "train smoke --model https://hf.co/a/b": ["https://hf.co/a/b is an address", "OWNER/MODEL of the hub"],
    "train smoke --rollout.repetition.times -1": ["rollout.repetition.times must be at least 2", "got -1"],
    "train smoke --recipe=": ["--recipe needs a value"],
    "train smoke --run_dir=": ["run_dir is empty: give a folder, or leave it out"],
    "train smoke --learner.optimiser.learning_rate inf": ["learning_rate must be above 0, and finite, got inf"],
    "train smoke --learner.optimiser.weight_decay inf": ["weight_decay must be at least 0, and finite, got inf"],
    "train smoke --learner.optimiser.betas 0.9 0.99": ["no option --learner.optimiser.betas"],
    "train smoke --learner.compute.attention flash": ["attention 'flash' is unknown: auto, xla, splash, triton"],
    "train smoke --learner.lora.targets attn/x": ["learner.lora.targets must be some of attn/q"],
    "train smoke --rollout.temperature inf": ["rollout.temperature must be above 0", "and finite, got inf"],
    "train smoke --rollout.top_p 0.9": ["rollout.top_k 0 and top_p 0.9", "set learner.keep_sampling_mask True"],
    "train smoke --evaluation.temperature inf": ["evaluation.temperature must be at least 0", "finite, got inf"],
    "train smoke --recipe.algorithm.kl_coef -1": ["Algorithm.kl_coef must be at least 0, got -1.0"],
    "train smoke --recipe.algorithm.kl_coef inf": ["Algorithm.kl_coef must be finite, got inf"],
    "train smoke --recipe.filter_groups maybe": ["--recipe.filter_groups: expected one of", "got 'maybe'"],
    "train smoke --mesh.data 0": ["mesh sizes must be positive, one of them may be -1"],
    "train smoke --distributed.processes 2": ["--distributed.processes needs --distributed.coordinator"],
    "train smoke --from older": ["older/config.json", "'shiny'", "take the version of jaxrl_llm that wrote it"],
    "train older": ["older/config.json does not describe a run of this version", "or begin a new run"],
    "train torn": ["torn/config.json is not complete JSON", "put the file back as the run wrote it"],
    "train smoke --rollout.engine.router_bits 7": ["router_bits 7 needs a model with experts: set it to 0"],
    "train odd": ["odd/config.json", "steps is 'x': give a whole number"],
    "eval torn": ["torn/config.json is not complete JSON"],
    "eval smoke": ["no such model: smoke", "give a directory, a .gguf file or OWNER/MODEL"],
    "eval runs/smoke": ["runs/smoke not found: jaxrl-llm train smoke makes it"],
    "eval tiny-random --samples 0": ["--samples must be at least 1, got 0"],
    "eval tiny-random --temperature inf": ["temperature must be at least 0 (0 is greedy), and finite, got inf"],
    "eval tiny-random --seed -1": ["--seed must be from 0 to 16777215, got -1"],
    "eval tiny-random --out taken.jsonl": ["--out taken.jsonl is a folder: give a file in it"],
    "eval tiny-random --out a.txt": ["--out a.txt is written as JSON lines: end it in .jsonl"],
    "eval tiny-random --out nowhere/a.jsonl": ["--out nowhere/a.jsonl: there is no folder nowhere; make it first"],
    "eval tiny-random --config sft_quickstart": ["a Supervised run, which has no problems to ask", "with --config"],
    "eval tiny-random --rerank_by best": ["expected one of score, product, minimum, last, got 'best'"],
    "collect tiny-random": ["collect needs a file to write: jaxrl-llm collect tiny-random --out answers.jsonl"],
    "collect tiny-random --out a.txt": ["--out a.txt is written as JSON lines: give it the ending .jsonl"],
    "collect tiny-random --out a.jsonl --kind pair": ["expected one of texts, pairs, unpaired, steps, got 'pair'"],
    "collect tiny-random --out a.jsonl --samples 0": ["--samples must be at least 1 to collect texts, got 0"],
    "generate tiny-random hello": ["hello belongs to no option"],
    "generate tiny-random --promt a": ["no option --promt: did you mean --prompt?"],
    "generate tiny-random --prompt": ["--prompt needs a value"],
    "generate tiny-random --prompt a --seed -1": ["--seed must be from 0 to 16777215, got -1"],
    "export smoke --out x": ["smoke is not a run: give the folder that holds its config.json and checkpoints"],
    "export torn --out x": ["torn/config.json is not complete JSON"],
    "export hollow --out x --step 3": ["export does not know --step 3: jaxrl-llm export RUN[@STEP] --out DIR"],
    "export hollow --out full": ["full exists and is not empty; give a new directory, or remove it first"],
    "export hollow --out nowhere/a.gguf": ["--out nowhere/a.gguf: there is no folder nowhere; make it first"],
    "export hollow --out a.gguf --gguf_type q4": ["--gguf_type q4 is not supported: use one of f32, f16"],
    "export hollow --out a.gguf --adapter": ["--adapter writes a folder for PEFT", "give a folder"],
    "export hollow --out x --gguf_type f16": ["--gguf_type f16 needs a file: give --out FILE.gguf"],
    "plan smoke": ["plan needs a machine: --topology v5e:4x4"],
    "plan smoke --topology v9:2x2": ["no topology 'v9:2x2': there are v4:2x2x4"],
    "plan smoke --topology h100:0": ["topology 'h100:0': h100 takes a number of devices", "as in h100:8"],
    "plan smoke --topology h100:1 --slices two": ["--slices must be a positive number, got two"],
    "plan smoke --topology h100:1 --quick --phase 2": ["--phase 2: this run has 1"],
    "plan smoke --topology h100:1 --json nowhere/a.json": ["--json nowhere/a.json: there is no folder nowhere"],
    "plan smoke --topology h100:1 --plot a.txt": ["--plot a.txt: end it in .svg or .png or .pdf"],
    "report": ["report needs a run: jaxrl-llm report runs/quickstart"],
    "report nowhere": ["nowhere is not a run: give the folder that holds its metrics.jsonl"],
    "report empty": ["empty is not a run"],
    "report hollow --format pdf": ["report does not know --format"],
    "report hollow --out nowhere/a.html": ["--out nowhere/a.html: there is no folder nowhere; make it first"],
    "list runs": ["list does not know 'runs': there are configs, tasks, recipes, models"],
    "train smoke --task.source.name gsm8k": ["no data set 'gsm8k'; jaxrl-llm list tasks names"],
    "train smoke --rollout.max_new_tokens 100000 --learner.compute.row_tokens 0": ["was made for 1024: lower one"],
    "train smoke --model hollow": ["hollow/checkpoints/4 is damaged (its checksums.json is missing"],
    "train smoke --model half.gguf": ["half.gguf is not a whole GGUF file", "fetch it again"],
    "train smoke --model weightless": ["weightless holds no model.safetensors", "fetch the weights"],
    "train smoke --model speechless": ["speechless: the tokenizer cannot be read", "fetch its files again"],
    "generate bert --prompt a": ["model_type 'bert' is not supported; supported are llama"],
    "collect hollow --out a.jsonl --config good.py": ["hollow/checkpoints/4 is damaged (its checksums.json is missing"],
    "generate half.gguf --prompt a": ["half.gguf is not a whole GGUF file"],
} | {f"train {name}.py": words for name, (_, *words) in CONFIGS.items()}  # fmt: skip
"""A command, and parts of the answer."""
ROW = '{"prompt": "1 + 1 =", "answer": 2}\n'
FILES = {
    "good.jsonl": ROW + ROW.replace("1", "3") + ROW.replace("1", "5"),
    "unanswered.jsonl": ROW + '{"prompt": "1 + 2 ="}',
    "halved.jsonl": ROW + '{"prompt": "1 + 2 =", ',
    "long.jsonl": ROW + json.dumps({"prompt": "1 + " * 50, "answer": 3}),
    "listed.jsonl": f"{ROW}[1]\n",
    "good.csv": "prompt,answer\n1, 1,2\n",
    "good.py": f"{HEAD}task()\n",
    "own_rewards.py": OWN_REWARDS,
} | {f"{name}.py": f"{HEAD}{source}\n" for name, (source, *_) in CONFIGS.items()}
SPOILED = {
    "activation": ("hidden_act", "quux"),
    "shape": ("intermediate_size", 8),
    "foreign": ("model_type", "jamba"),
    "toothless": ("pad_token_id", None),
}
"""Models, and what of their config.json is wrong."""


def fill(folder: Path) -> None:
    """Data, configurations, runs and models to stumble over."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes('{"prompt": "é", "answer": 2}\n'.encode("latin-1"))
    (folder / "broken.parquet").write_bytes(b"PAR1")
    for name in ("empty", "taken.jsonl", "full/inside"):
        (folder / name).mkdir(parents=True)
    fill_models(folder)
    fill_runs(folder)


def fill_models(folder: Path) -> None:
    """Models that are not whole, or say something wrong."""
    for name, (attribute, value) in SPOILED.items():
        shutil.copytree(MODELS / "qwen2", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {attribute: value}))
    for name, file in (("truncated", ""), ("weightless", "model.safetensors"), ("speechless", "")):
        shutil.copytree(MODELS / "qwen2", folder / name, ignore=lambda *_, left_out=file: [left_out])
    weights = (folder / "truncated/model.safetensors").read_bytes()
    (folder / "truncated/model.safetensors").write_bytes(weights[:-1000])
    (folder / "speechless/tokenizer.json").write_text("{")
    (folder / "noise.gguf").write_bytes(bytes(range(256)) * 20)
    (folder / "half.gguf").write_bytes((MODELS / "llama.gguf").read_bytes()[:5000])
    (folder / "bert").mkdir()
    (folder / "bert/config.json").write_text('{"model_type": "bert"}')


def fill_runs(folder: Path) -> None:
    """Runs whose config.json, or whose checkpoints, cannot be used."""
    from jaxrl_llm import config as configs

    saved = configs.to_json(configs.load_config("smoke")[1]) | configs.Origin("").to_json()
    runs = {"begun": {}, "hollow": {}, "own": {"task": {"type": "os:system"}}}
    runs |= {"older": {"shiny": 3}, "odd": {"steps": "x"}}
    texts = {name: json.dumps(saved | wrong) for name, wrong in runs.items()}
    for name, text in (texts | {"torn": texts["hollow"][:200]}).items():
        for part in ("",) if name == "begun" else ("checkpoints/2", "checkpoints/4"):
            (folder / name / part).mkdir(parents=True)
        (folder / name / "config.json").write_text(text)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """(folder, what was in it before, the answer to each line)."""
    folder = tmp_path_factory.mktemp("gallery")
    fill(folder)
    before = sorted(folder.rglob("*"))
    return folder, before, dict(zip(REFUSED, commands(list(REFUSED), folder), strict=True))


@pytest.mark.parametrize("line", REFUSED, ids=[line[:70] for line in REFUSED])
def test_wrong_use_is_one_line_that_names_the_thing_and_the_remedy(gallery, line):
    assert_refused(gallery[2][line], *REFUSED[line])


def test_nothing_is_left_behind(gallery):
    folder, before, _ = gallery
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.parametrize("changes", [{"recipe": "grpo"}, {"steps": "many"}, {"rollout": 3}, {"steps": 0}])
def test_from_python_the_same_is_refused(changes, tmp_path, capsys):
    from jaxrl_llm import config as configs
    from jaxrl_llm import train
    from jaxrl_llm.errors import InputError

    run = configs.load_config("smoke")[1]
    run = dataclasses.replace(run, output=configs.Output(run_dir=str(tmp_path / "run")), **changes)
    with pytest.raises(InputError, match=next(iter(changes))):
        train(run)
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")


def test_the_gallery_is_large():
    assert len(REFUSED) >= 60
