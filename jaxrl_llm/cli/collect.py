"""usage: jaxrl-llm collect RUN_OR_MODEL --out FILE.jsonl [--config NAME] [--task.* ...] [--samples K]
                         [--kind texts|pairs|unpaired|steps] [--keep first|shortest|all] [--temperature T] [--limit N]
                         [--json]

Samples K answers to each problem that a run trains on, or to those of a configuration (quickstart unless --config names
another), and writes the right ones (texts), a right and a wrong one (pairs), both with their labels (unpaired), or
answers in steps with the share of continuations from each that come out right (steps). Run the same command again to
resume it.
jaxrl-llm collect RUN_OR_MODEL --help shows more.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import find_settings, open_answerer
from jaxrl_llm.cli.flags import first, parse_flags, take
from jaxrl_llm.collection.rejection_sampling import check_free
from jaxrl_llm.data import Collected, check_collected
from jaxrl_llm.data.datasets import KINDS, RowKind
from jaxrl_llm.errors import require
from jaxrl_llm.rollout.settings import USUAL_SLOTS
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.setting import Count, check_fields
from jaxrl_llm.system.signals import answering, quit_now


@dataclasses.dataclass(frozen=True)
class CollectOptions:
    """The data to collect and how to sample it.

    Attributes:
      data: which problems to ask and which answers to keep.
      kind: texts (right answers), pairs (a right and a wrong one), unpaired (right and wrong ones with labels), or
        steps (answers in steps with labels).
      max_new_tokens: longest answer, in tokens.
      slots: answers sampled at one time.
      seed: of the sampling.
      json: print one JSON object instead of a table.
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    data: Annotated[Collected, tyro.conf.arg(name="")]
    kind: RowKind = "texts"
    max_new_tokens: Annotated[int, Count(1)] = 256
    slots: Annotated[int, Count(1)] = 64
    seed: Annotated[int, configs.SEED] = 0
    json: bool = False
    mesh: MeshShape = MeshShape()


def collect_command(arguments: list[str]) -> int:
    """Run ``collect RUN_OR_MODEL --out FILE [--config NAME] [--field value ...]``; return the exit code."""
    name = first(
        arguments, __doc__, "collect needs a run or a model: jaxrl-llm collect runs/quickstart --out answers.jsonl"
    )
    out = take(arguments, "--out", True)
    trained, settings = find_settings(name, take(arguments, "--config", True))
    require(
        not isinstance(settings.task, configs.Mixture),
        f"collect asks one task, and {name} has several: name a configuration of one with --config",
    )
    rollout, task = settings.rollout, configs.tasks_in(settings.task)[0]
    slots = rollout.engine.slots or USUAL_SLOTS
    proposed = CollectOptions(Collected(task), "texts", rollout.max_new_tokens, slots, settings.seed)
    description = "--out FILE.jsonl is the output. --config NAME takes another configuration's task."
    options = parse_flags(CollectOptions, arguments, f"jaxrl-llm collect {name}", description, proposed)
    path = check_output(name, out, options)
    data = configs.dated(options.data, datetime.date.today().isoformat())
    task = data.task
    from jaxrl_llm.collection.rejection_sampling import CollectionPlan, collect_rows
    from jaxrl_llm.tasks import load
    from jaxrl_llm.telemetry.progress import Progress, Schedule

    remedy = "interrupted: run the same command again to resume"
    with answering(lambda number: quit_now(128 + number, remedy)), Progress(Schedule(1)) as progress:
        progress.status(f"reading task {task.label}")
        loaded = load(task)
        problems = loaded.train[: data.limit or None]
        model = open_answerer(name, trained, settings, task, problems, options, progress.status)
        with model as (policy, prompts, answerer):
            for note in loaded.notes:
                progress.note(note)
            episode = rollout.episode if task.plays else None
            longest, seed = options.max_new_tokens, options.seed
            request = CollectionPlan(prompts, problems, data, options.kind, longest, seed, episode=episode)
            collection = collect_rows(answerer, request, path, status=progress.status)
    numbers = {"model": name, "step": policy.step, "kind": options.kind, "out": out, **collection.numbers()}
    table = collection_table(name, policy.step, options, path, collection)
    print(json.dumps(numbers) if options.json else "\n".join(table))
    return 0


def check_output(name: str, out: str | None, options: CollectOptions) -> Path:
    """Return the file to write; wrong options are refused before anything is loaded."""
    require(out is not None, f"collect needs a file to write: jaxrl-llm collect {name} --out answers.jsonl")
    path = Path(str(out))
    require(path.suffix == ".jsonl", f"--out {out} is written as JSON lines: give it the ending .jsonl")
    require(not path.is_dir(), f"--out {out} is a folder: give a file in it")
    check_free(path)
    check_collected(options.data, options.kind, "--")
    check_fields(options, "--")
    return path


def collection_table(name: str, step: int | None, options: CollectOptions, path: Path, collection: Any) -> list[str]:
    """Return the results as lines for people, with the code that reads the file."""
    data = options.data
    where = f"{name}, step {step}" if step is not None else name
    reader = next(kind.__name__ for kind, kind_name in KINDS.items() if kind_name == options.kind)
    worded = {key: getattr(data.task, key) for key in ("template", "system", "suffix")}
    texts = "".join(f", {key}={value!r}" for key, value in worded.items() if value not in (None, ""))
    hint = "ask a better model, for more (--samples) or longer answers (--max_new_tokens)"
    return [
        f"{where} on {data.task.label}: {collection.problems} problems, {data.samples} each, "
        f"temperature {data.temperature:g}, top_p {data.top_p:g}",
        *collection.lines(),
        f"{path} is written: {reader}(Table({str(path)!r}){texts})" if collection.rows else f"{path} is empty: {hint}",
    ]
