"""A tiny model that says digits, spaces and line ends, and stops: some of its answers are right by chance."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.collection.rejection_sampling import CollectionPlan
from jaxrl_llm.data import Collected
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import Decoder, to_parameters
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rollout import Engine
from jaxrl_llm.rollout.generation import Answerer
from jaxrl_llm.tasks import Prompts, Table, Task, load

SAID = {"1": 1.4, "2": 1.4, " ": 1.5, "\n": 1.55, "<|im_end|>": 1.4}
"""What it says, and how gladly."""
LONGEST = 20


def talkative():
    """(model, tokenizer): ``tiny-random``, whose embeddings of what it says point in one direction."""
    model, tokenizer = load_pretrained("tiny-random")
    parameters = to_parameters(model)
    embed = np.array(parameters["embed"])
    for token, gladly in SAID.items():
        embed[tokenizer.convert_tokens_to_ids(tokenizer.tokenize(token)), 1] += gladly
    return Decoder(model.config, parameters | {"embed": jnp.asarray(embed)}), tokenizer


def task_in(folder: Path, count: int = 7, **changes) -> Task:
    """Problems whose answers are 1 or 2; the last prompt is a chat."""
    prompts = [f"Say {n}\n" for n in range(count)]
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Say more\n"}]
    rows = [{"prompt": prompt, "answer": n % 2 + 1} for n, prompt in enumerate(prompts[:-1])]
    rows.append({"prompt": chat, "answer": 2})
    path = folder / "numbers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(Task(Table(str(path)), template="chatml", suffix="!\n"), **changes)


def answerer(slots: int = 8) -> Answerer:
    """Ready to be asked; close its scorer."""
    model, tokenizer = talkative()
    engine = Engine(model, slots, 96, 4)
    return Answerer(engine, model, tokenizer, Scorer((Accuracy(),), 1))


def asked(by: Answerer, task: Task, kind: str, **changes) -> CollectionPlan:
    """All problems of the task."""
    data = dataclasses.replace(Collected(task, samples=12, continuations=4), **changes)
    return CollectionPlan(Prompts(task, by.tokenizer), load(task).train[: data.limit or None], data, kind, LONGEST, 3)
