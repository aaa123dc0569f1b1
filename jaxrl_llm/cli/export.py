"""usage: jaxrl-llm export RUN[@STEP] --out DIR [--adapter] [--push USER/NAME] [--mesh.* N]
       jaxrl-llm export RUN[@STEP] --out FILE.gguf [--gguf_type f32|f16|bf16|q8_0]

Writes a run's policy, the newest one unless STEP names another checkpoint: config.json, safetensors, tokenizer, and a
README.md with the training and its evaluations. --adapter writes a run's adapter alone, as PEFT loads it. DIR
must not exist, or be empty. --push uploads DIR to the hub, with the token in HF_TOKEN or that of `hf auth login`; a new
repository is private. FILE.gguf is what llama.cpp runs: matrices as --gguf_type says (f32 unless it does), with
tokenizer and chat template. --mesh.data, --mesh.fsdp and the like divide it otherwise over the devices.
"""

import contextlib
import copy
import dataclasses
import re
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, parse_flags, status, take
from jaxrl_llm.data import Steps
from jaxrl_llm.errors import InputError, as_input_error, require
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.peft import base_model_name, is_adapter
from jaxrl_llm.models.pretrained import BUILTIN, generation_of, hf_attributes, looks_like_hub_id
from jaxrl_llm.runs import Trained, find_run, load_adapter, load_trained, mesh_here
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import check_file, writable
from jaxrl_llm.system.text import shown

GENERATE = '  jaxrl-llm generate {} --prompt "What is 3 + 5?"'
HEAD = """---
{metadata}library_name: {library}
tags: [{tags}]
---

# {title}

{method} from {origin}, with jaxrl_llm {version}: step {step} of {steps}, learned from `{data}`{over}.

{evaluations}{scoring}## Commands

```
{commands}
```

`config.json` of the run has every setting.
"""
SCORING = """## How to score

```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({out!r})
model = AutoModelForSequenceClassification.from_pretrained({out!r})
{ids}
score = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
```

{place}

"""


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Where the model is loaded.

    Attributes:
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    mesh: MeshShape = MeshShape()


def export_command(arguments: list[str]) -> int:
    """Run ``export RUN[@STEP] --out DIR [--adapter] [--push USER/NAME]``, or ``--out FILE.gguf [--gguf_type T]``."""
    name = first(arguments, __doc__, "export needs a run: jaxrl-llm export runs/quickstart --out model", True)
    out = take(arguments, "--out", True)
    adapter = take(arguments, "--adapter", False)
    gguf_type = take(arguments, "--gguf_type", True)
    push = take(arguments, "--push", True)
    sizes = {axis: take(arguments, f"--mesh.{axis}", True) for axis in MeshShape.__dataclass_fields__}
    mesh_flags = [f"--mesh.{axis}={size}" for axis, size in sizes.items() if size is not None]
    place = parse_flags(ExportOptions, mesh_flags, f"jaxrl-llm export {name}", str(__doc__))
    require(not arguments, f"export does not know {' '.join(arguments)}: jaxrl-llm export RUN[@STEP] --out DIR")
    require(out is not None, f"export needs a folder to write: jaxrl-llm export {shlex.quote(name)} --out DIR")
    trained = find_run(name) if configs.split_step(name)[0].is_dir() else None
    if trained is None:
        raise InputError(f"{name} is not a run: give the folder that holds its config.json and checkpoints")
    trained = dataclasses.replace(trained, run=dataclasses.replace(trained.run, mesh=place.mesh))
    target = Path(out)
    if target.suffix == ".gguf":
        require(push is None, f"--push uploads a folder, and --out {out} is a file: give a folder")
        export_gguf(name, trained, target, gguf_type or "f32", adapter)
        return 0
    require(gguf_type is None, f"--gguf_type {gguf_type} needs a file: give --out FILE.gguf, or leave it out")
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    require(is_free, f"{out} exists and is not empty; give a new directory, or remove it first")
    if adapter:
        check_adapter(name, trained)
    card = model_card(name, trained, out, adapter)
    if push is not None:
        check_push(push)
    (export_adapter if adapter else export_model)(name, trained, target, card)
    if push is not None:
        push_to_hub(target, push, f"{trained.directory.parents[1].name}, step {trained.step}")
    return 0


def export_gguf(name: str, trained: Trained, target: Path, kind: str, adapter: bool) -> None:
    """Write the whole model as one GGUF file."""
    from jaxrl_llm.models.gguf import FILE_TYPES, save_gguf

    scores = isinstance(trained.run, configs.RewardModel)
    require(kind in FILE_TYPES, f"--gguf_type {kind} is not supported: use one of {', '.join(FILE_TYPES)}")
    require(not adapter, f"--adapter writes a folder for PEFT, and --out {target} is a file: give a folder")
    require(not scores, f"{name} is a reward model, which a GGUF file cannot hold: give a folder with --out")
    require(not target.exists(), f"{target} exists: give a new file, or remove it first")
    check_file(target, "--out")
    with load_for_export(name, trained, target, load_trained) as (model, tokenizer):
        save_gguf(model, tokenizer, target, kind)
    print(f"{name}, step {trained.step}, is written to {target} ({kind}), for llama.cpp and its like. Try next:")
    print(GENERATE.format(shlex.quote(str(target))))


def export_model(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the whole model as a directory; an adapter is merged, and how to sample is as the base's files say. A
    reward model's directory describes its training, and its tokenizer has the chat template of that training.
    """
    from jaxrl_llm.models import save_pretrained
    from jaxrl_llm.stages.taught import format_of_run
    from jaxrl_llm.tasks.template import template_text

    run: Any = trained.run
    scores = isinstance(run, configs.RewardModel)
    reward_format = None
    with load_for_export(name, trained, target, load_trained) as (model, tokenizer):
        if scores:
            reward_format = format_of_run(run, tokenizer).to_json()
            wording: Any = configs.wording(run)
            if wording.template not in ("tokenizer", "plain"):
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.chat_template = template_text(wording, tokenizer)
        save_pretrained(model, tokenizer, target, card, reward_format, generation_of(public_base(run.model)))
    use = f". Try next:\n{GENERATE.format(shlex.quote(str(target)))}"
    use = " as AutoModelForSequenceClassification." if scores else use
    print(f"{name}, step {trained.step}, is written to {target}; transformers loads it{use}")


def check_adapter(name: str, trained: Trained) -> None:
    """Refuse to export the adapter of a run that has none of use to PEFT: the run trains the whole model; the adapter
    is a reward model's; or what it is added to was itself trained, and exists nowhere by a name that PEFT knows.
    """
    run = trained.run
    full = not run.learner.lora.rank
    require(not full, f"{name} trained the whole model (learner.lora.rank is 0): export it without --adapter")
    scores = isinstance(run, configs.RewardModel)
    require(not scores, f"{name} is a reward model; its head is not an adapter: export it whole, without --adapter")
    inner = configs.split_step(run.model)[0]
    lacks = f"the adapter of {name} belongs to {run.model}, and PEFT would add it to {public_base(run.model)}, without "
    remedy = ": export the whole model, without --adapter"
    if configs.is_run(inner / "config.json"):
        learned = method_of(configs.read(inner / "config.json", own=False).run)
        raise InputError(f"{lacks}what that run learned ({learned}){remedy}")
    require(not is_adapter(inner), f"{lacks}that adapter{remedy}")


def public_base(model: str) -> str:
    """Return the name by which other programs find the model that a run's model was made from. It is the hub id of a
    built-in model if it has one, and the base of a run or an adapter.
    """
    path = configs.split_step(model)[0]
    if configs.is_run(path / "config.json"):
        return public_base(configs.read(path / "config.json", own=False).pinned.model)
    if is_adapter(path):
        return public_base(base_model_name(path))
    return (BUILTIN[model].hub or model) if model in BUILTIN and not path.is_dir() else model


def export_adapter(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the adapter alone."""
    from jaxrl_llm.models.peft import save_adapter

    run = trained.run
    base = public_base(run.model)

    with load_for_export(name, trained, target, load_adapter) as (model, adapter, _):
        below = FAMILIES[model.config.family].below if "text_config" in hf_attributes(run.model) else ""
        save_adapter(adapter, model.config, run.learner.lora, base, target, card, below)
    loadable = looks_like_hub_id(base) or Path(base).is_dir()
    use = f"PEFT loads it over {base}." if loadable else f"PEFT finds no base by the name {base}."
    print(f"the adapter of {name}, step {trained.step}, is written to {target}; {use} Try next:")
    print(GENERATE.format(shlex.quote(str(target))))


def check_push(repository: str) -> None:
    """Refuse a repository's name or a token with which nothing can be uploaded, before anything is computed."""
    from huggingface_hub import HfApi, get_token

    valid = re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    require(valid is not None, f"--push {repository} is not a repository of the hub: give USER/NAME")
    require(
        bool(get_token()), f"--push {repository} needs a token that may write there: set HF_TOKEN, or hf auth login"
    )
    with as_input_error(f"--push {repository}: the hub did not accept the token", "check HF_TOKEN and the network"):
        HfApi().whoami()


def push_to_hub(folder: Path, repository: str, message: str) -> None:
    """Upload a folder to the hub; a repository that does not exist is created, private."""
    from huggingface_hub import HfApi

    status(f"uploading {folder}")
    remedy = f"{folder} is whole; try again with: hf upload {repository} {shlex.quote(str(folder))} --private"
    with as_input_error(f"cannot push to {repository}", remedy):
        url = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    status("")
    print(f"pushed to {url}")


@contextlib.contextmanager
def load_for_export(name: str, trained: Trained, target: Path, load: Callable[..., Any]) -> Generator[Any]:
    """Load the run on its mesh here and yield the result, to be saved to ``target``, with a status line for each."""
    status(f"loading {name}")
    loaded = load(trained, mesh_here(trained.run.mesh))
    status(f"writing {target}")
    with writable(target, "--out"):
        yield loaded
    status("")


def model_card(name: str, trained: Trained, out: str, adapter: bool) -> str:
    """Return a model card for the folder ``out``: Markdown with the metadata that model hubs read."""
    run = trained.run
    rows = [row for row in read_rows(trained.directory.parent.parent / "metrics.jsonl") if row["step"] <= trained.step]
    scores = isinstance(run, configs.RewardModel)
    answers = [] if scores else [f'jaxrl-llm generate {shlex.quote(out)} --prompt "..."']
    base = public_base(run.model)
    evaluations = [{k: v for k, v in row.items() if k.startswith("eval/") and v is not None} for row in rows]
    lines = []
    if evaluations := list(filter(None, evaluations)):
        before = evaluations[0]
        lines = [f"| {name} | {shown(before.get(name))} | {shown(after)} |" for name, after in evaluations[-1].items()]
        lines = ["| held out | before | after |", "|---|---|---|", *lines, "", ""]
    return HEAD.format(
        metadata=f"base_model: {base}\n" if looks_like_hub_id(base) else "",
        origin=f"`{base}`" if base == run.model or run.model in BUILTIN else f"`{run.model}` (from `{base}`)",
        library="peft" if adapter else "transformers",
        tags=", ".join(["jaxrl_llm", "reward-model" if scores else "text-generation"]), title=Path(out).name,
        method=method_of(run), version=jaxrl_llm.__version__, step=trained.step, steps=run.steps,
        data=(run.task if isinstance(run, configs.Run) else run.data).label, evaluations="\n".join(lines),
        over=f", as low-rank adapters over the base in {run.learner.lora.base}" if run.learner.lora.rank else "",
        scoring=how_to_score(run, out) if scores else "",
        commands="\n".join([f"jaxrl-llm eval {shlex.quote(name)}", *answers]),
    )  # fmt: skip


def method_of(run: configs.Configuration) -> str:
    """Return the training method of a run, for people."""
    match run:
        case configs.Run():
            return f"Reinforcement learning by the recipe {run.recipe.name}"
        case configs.Preference():
            return f"Preference learning by {type(run.loss).__name__}"
        case configs.Supervised():
            return "Supervised fine-tuning"
        case _:
            return "A reward model"


def how_to_score(run: configs.RewardModel, out: str) -> str:
    """Return Markdown with code that scores an answer to a prompt as in training; ``out`` is the model's folder."""
    wording = configs.wording(run)
    plain = wording.template == "plain"
    steps = isinstance(run.data, Steps)
    by_template = not (plain or steps or run.score_at == "stop")
    prompt = f'"..."{f" + {wording.suffix!r}" if wording.suffix else ""}'
    system = [] if wording.system is None else [str({"role": "system", "content": wording.system})]
    messages = ", ".join([*system, f'{{"role": "user", "content": {prompt}}}'])
    lines = [f"prompt = {prompt if plain else f'[{messages}]'}"]
    if by_template:
        lines.append('answer = {"role": "assistant", "content": "..."}')
        lines.append("ids = tokenizer.apply_chat_template([*prompt, answer], return_dict=False)")
    else:
        chat = "ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)"
        text = "answer" if steps else "answer + tokenizer.eos_token"
        lines += ['answer = "..."', "ids = tokenizer(prompt)['input_ids']" if plain else chat]
        lines.append(f"ids += tokenizer({text}, add_special_tokens=False)['input_ids']")
    note = "The score is read at the token that ends the answer; of one that was cut off, at its last token."
    if steps:
        note = "An answer that goes up to the end of a step gets that step's score, which `sigmoid` makes a probability"
        note += f"; steps end with {run.data.separator!r}."
    elif by_template:
        note = "The score is read at the last token that the chat template writes; of an answer that was cut off, at "
        note += "its own last token."
    return SCORING.format(out=out, ids="\n".join(lines), place=note)
