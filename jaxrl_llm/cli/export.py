"""usage: jaxrl-llm export RUN[@STEP] --out DIR [--adapter]
       jaxrl-llm export RUN[@STEP] --out FILE.gguf [--gguf_type f32|f16|bf16|q8_0]

Writes a run's policy, the newest one unless STEP names another checkpoint: config.json, safetensors, tokenizer, and a
README.md with the training and its evaluations. --adapter writes a run's adapter alone, as PEFT loads it. DIR
must not exist, or be empty. FILE.gguf is what llama.cpp runs: matrices as --gguf_type says (f32 unless it does), with
tokenizer and chat template."""

import contextlib
import copy
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, status, take
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.runs.load import Trained, find_run, load_adapter, load_trained
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import check_file, writable
from jaxrl_llm.system.text import shown
from jaxrl_llm.tasks import Steps

GENERATE = '  jaxrl-llm generate {} --prompt "What is 3 + 5?"'
HEAD = """---
base_model: {base}
library_name: {library}
tags: [{tags}]
---

# {title}

{method} from `{base}`, with jaxrl_llm {version}: step {step} of {steps}, learned from `{data}`.

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
WRITTEN = "ids = tokenizer.apply_chat_template([*prompt, answer], return_dict=False)"
ASKED = "ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)"
FOLLOWS = "ids += tokenizer({text}, add_special_tokens=False)['input_ids']"


def export(arguments: list[str]) -> int:
    """Run ``export RUN[@STEP] --out DIR [--adapter]``, or ``--out FILE.gguf [--gguf_type T]``; return the exit code."""
    name = first(arguments, __doc__, "export needs a run: jaxrl-llm export runs/quickstart --out model", True)
    out = take(arguments, "--out", True)
    adapter = take(arguments, "--adapter", False)
    gguf_type = take(arguments, "--gguf-type", True)
    require(not arguments, f"export does not know {' '.join(arguments)}: jaxrl-llm export RUN[@STEP] --out DIR")
    require(out is not None, f"export needs a folder to write: jaxrl-llm export {shlex.quote(name)} --out DIR")
    trained = find_run(name) if configs.split_step(name)[0].is_dir() else None
    if trained is None:
        raise InputError(f"{name} is not a run: give the folder that holds its config.json and checkpoints")
    target = Path(out)
    if target.suffix == ".gguf":
        export_gguf(name, trained, target, gguf_type or "f32", adapter)
        return 0
    require(gguf_type is None, f"--gguf_type {gguf_type} needs a file: give --out FILE.gguf, or leave it out")
    free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    require(free, f"{out} exists and is not empty; give a new directory, or remove it first")
    card = model_card(name, trained, out, adapter)
    (export_adapter if adapter else export_model)(name, trained, target, card)
    return 0


def export_gguf(name: str, trained: Trained, target: Path, kind: str, adapter: bool) -> None:
    """Write the whole model as one GGUF file.

    Raises:
      InputError: the file exists already, or cannot hold the model.
    """
    from jaxrl_llm.models.gguf_writing import KINDS, save_gguf

    scores = isinstance(trained.run, configs.RewardModel)
    require(kind in KINDS, f"--gguf_type {kind} is not supported: use one of {', '.join(KINDS)}")
    require(not adapter, f"--adapter writes a folder for PEFT, and --out {target} is a file: give a folder")
    require(not scores, f"{name} is a reward model, which a GGUF file cannot hold: give a folder with --out")
    require(not target.exists(), f"{target} exists: give a new file, or remove it first")
    check_file(target, "--out")
    with writing(name, trained, target, load_trained) as (model, tokenizer):
        save_gguf(model, tokenizer, target, kind)
    print(f"{name}, step {trained.step}, is written to {target} ({kind}), for llama.cpp and its like. Try next:")
    print(GENERATE.format(shlex.quote(str(target))))


def export_model(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the whole model as a directory; an adapter is merged.

    A reward model's directory describes its training, and its tokenizer has the chat template of that training.
    """
    from jaxrl_llm.models import save_pretrained
    from jaxrl_llm.stages.taught import taught_by
    from jaxrl_llm.tasks.template import template_text

    run: Any = trained.run
    scores = isinstance(run, configs.RewardModel)
    told = None
    with writing(name, trained, target, load_trained) as (model, tokenizer):
        if scores:
            told = taught_by(run, tokenizer).to_json()
            wording: Any = configs.wording(run)
            if wording.template not in ("tokenizer", "plain"):
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.chat_template = template_text(wording, tokenizer)
        save_pretrained(model, tokenizer, target, card, told)
    use = f". Try next:\n{GENERATE.format(shlex.quote(str(target)))}"
    use = " as AutoModelForSequenceClassification." if scores else use
    print(f"{name}, step {trained.step}, is written to {target}; transformers loads it{use}")


def export_adapter(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the adapter alone.

    Raises:
      InputError: the run trains the whole model, or the adapter is a reward model's.
    """
    run = trained.run
    whole = not run.learner.lora.rank
    require(not whole, f"{name} trained the whole model (learner.lora.rank is 0): export it without --adapter")
    scores = isinstance(run, configs.RewardModel)
    require(not scores, f"{name} is a reward model; its head is not an adapter: export it whole, without --adapter")
    from jaxrl_llm.models.lora import save_adapter

    with writing(name, trained, target, load_adapter) as (base, adapter, _):
        save_adapter(adapter, base.config, run.learner.lora, run.model, target, card)
    print(f"the adapter of {name}, step {trained.step}, is written to {target}; PEFT loads it with {run.model}.")


@contextlib.contextmanager
def writing(name: str, trained: Trained, target: Path, load: Callable[..., Any]) -> Generator[Any]:
    """Load the run on its mesh and yield the result, to be saved to ``target``, with a status line for each."""
    from jaxrl_llm.sharding import make_mesh

    status(f"loading {name}")
    found = load(trained, make_mesh(trained.run.mesh))
    status(f"writing {target}")
    with writable(target, "--out"):
        yield found
    status("")


def model_card(name: str, trained: Trained, out: str, adapter: bool) -> str:
    """Return a model card: Markdown with the metadata that model hubs read.

    Args:
      name: of the run, as it was given.
      trained: the run.
      out: the export's folder.
      adapter: whether it holds the adapter alone.
    """
    run = trained.run
    rows = [row for row in read_rows(trained.directory.parent.parent / "metrics.jsonl") if row["step"] <= trained.step]
    match run:
        case configs.Run():
            method = f"Reinforcement learning by the recipe {run.recipe.name}"
        case configs.Preference():
            method = f"Preference learning by {type(run.loss).__name__}"
        case configs.Supervised():
            method = "Supervised fine-tuning"
        case _:
            method = "A reward model"
    scores = isinstance(run, configs.RewardModel)
    answers = [] if adapter or scores else [f'jaxrl-llm generate {shlex.quote(out)} --prompt "..."']
    return HEAD.format(
        base=run.model,
        library="peft" if adapter else "transformers",
        tags=", ".join(["jaxrl_llm", "reward-model" if scores else "text-generation"]),
        title=Path(out).name,
        method=method,
        version=jaxrl_llm.__version__,
        step=trained.step,
        steps=run.steps,
        data=(run.task if isinstance(run, configs.Run) else run.data).label,
        evaluations=table(rows),
        scoring=how_to_score(run, out) if scores else "",
        commands="\n".join([f"jaxrl-llm eval {shlex.quote(name)}", *answers]),
    )


def how_to_score(run: configs.RewardModel, out: str) -> str:
    """Return Markdown with code that scores an answer to a prompt as in training; ``out`` is the model's folder."""
    wording = configs.wording(run)
    plain = wording.template == "plain"
    steps = isinstance(run.data, Steps)
    whole = not (plain or steps or run.score_at == "stop")
    asked = f'"..."{f" + {wording.suffix!r}" if wording.suffix else ""}'
    system = [] if wording.system is None else [str({"role": "system", "content": wording.system})]
    messages = ", ".join([*system, f'{{"role": "user", "content": {asked}}}'])
    lines = [f"prompt = {asked if plain else f'[{messages}]'}"]
    if whole:
        lines += ['answer = {"role": "assistant", "content": "..."}', WRITTEN]
    else:
        lines += ['answer = "..."', "ids = tokenizer(prompt)['input_ids']" if plain else ASKED]
        lines += [FOLLOWS.format(text="answer" if steps else "answer + tokenizer.eos_token")]
    place = "The score is read at the token that ends the answer; of one that was cut off, at its last token."
    if steps:
        place = (
            "An answer that goes up to the end of a step gets that step's score, which `sigmoid` makes a probability"
        )
        place += f"; steps end with {run.data.separator!r}."
    elif whole:
        place = "The score is read at the last token that the chat template writes; of an answer that was cut off, at "
        place += "its own last token."
    return SCORING.format(out=out, ids="\n".join(lines), place=place)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the first and the last evaluation; empty without evaluations."""
    found = [{k: v for k, v in row.items() if k.startswith("eval/") and v is not None} for row in rows]
    found = list(filter(None, found))
    if not found:
        return ""
    lines = [f"| {name} | {shown(found[0].get(name))} | {shown(value)} |" for name, value in found[-1].items()]
    return "\n".join(["| held out | before | after |", "|---|---|---|", *lines, "", ""])
