"""The README.md of an export: what was trained, on what, what tests found, and the commands that use it."""

import shlex
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm import config as configs
from jaxrl_llm.tasks import Steps
from jaxrl_llm.telemetry.columns import shown
from jaxrl_llm.telemetry.rows import read_rows
from jaxrl_llm.trained import Trained

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


def model_card(name: str, trained: Trained, out: str, adapter: bool) -> str:
    """Markdown with the metadata that model hubs read.

    Args:
      name: of the run, as it was given.
      trained: the run.
      out: the export's folder.
      adapter: whether it holds the adapter alone.
    """
    run = trained.run
    rows = [row for row in read_rows(trained.directory.parent.parent / "metrics.jsonl") if row["step"] <= trained.step]
    method, data = about(run)
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
        data=data,
        evaluations=table(rows),
        scoring=how_to_score(run, out) if isinstance(run, configs.RewardModel) else "",
        commands="\n".join([f"jaxrl-llm eval {shlex.quote(name)}", *answers]),
    )


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


def how_to_score(run: configs.RewardModel, out: str) -> str:
    """Markdown: from a prompt and an answer to the score that the model was taught to give; ``out`` is its folder."""
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
            "An answer that goes up to the end of a step gets that step's score, which `sigmoid` makes a probability; "
        )
        place += f"steps end with {run.data.separator!r}."
    elif whole:
        place = "The score is read at the last token that the chat template writes; of an answer that was cut off, at "
        place += "its own last token."
    return SCORING.format(out=out, ids="\n".join(lines), place=place)


def about(run: configs.Configuration) -> tuple[str, str]:
    """How a run of this kind learns, in words, and the name of what from.

    Raises:
      TypeError: there is no such kind.
    """
    match run:
        case configs.Run():
            return f"Reinforcement learning by the recipe {run.recipe.name}", run.task.label
        case configs.Supervised():
            return "Supervised fine-tuning", run.data.label
        case configs.Preference():
            return f"Preference learning by {type(run.loss).__name__}", run.data.label
        case configs.RewardModel():
            return "A reward model", run.data.label
    raise TypeError(f"no kind of run: {type(run).__name__}")


def table(rows: list[dict[str, Any]]) -> str:
    """What the first and the last evaluation found; nothing where none did."""
    found = [{k: v for k, v in row.items() if k.startswith("eval/") and v is not None} for row in rows]
    found = [numbers for numbers in found if numbers]
    if not found:
        return ""
    first = found[0]
    lines = [f"| {name} | {shown(first.get(name))} | {shown(value)} |" for name, value in found[-1].items()]
    return "\n".join(["| held out | before | after |", "|---|---|---|", *lines, "", ""])
