"""``jaxrl-llm eval`` of a run that learns from data: its own evaluation, on the held-out data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import parse
from jaxrl_llm.runs.load import Trained, find_run


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Options of the evaluation of a run that learns from data.

    Attributes:
      samples: k, answers to each problem of the run's task, where it has one.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps all.
      limit: rows and problems at most; 0 for all.
      max_new_tokens: longest answer, in tokens.
      slots: answers sampled at one time.
      json: print one JSON object instead of lines.
    """

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    limit: int = 0
    max_new_tokens: int = 256
    slots: int = 64
    json: bool = False


PARTS = {"evaluation": ("samples", "temperature", "top_p", "limit"), "answering": ("max_new_tokens", "slots")}
"""The options that each part of the run's settings has."""


def evaluate_data(name: str, arguments: list[str]) -> int:
    """Evaluate a run on its held-out data and on its task; return the exit code."""
    trained: Any = find_run(name, tests=True)
    directory = configs.split_step(name)[0]
    run: Any = trained.run
    before = {option: getattr(getattr(run, part), option) for part, own in PARTS.items() for option in own}
    about = "Test a run on what it holds out."
    options = parse(DataOptions, arguments, f"jaxrl-llm eval {name}", about, DataOptions(**before))
    for part, own in PARTS.items():
        given = {option: getattr(options, option) for option in own}
        run = dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **given)})
    configs.validate(run)
    found = tested(dataclasses.replace(trained, run=run), directory)
    if options.json:
        print(json.dumps({"model": name, "step": trained.step} | found))
        return 0
    print(f"{name}, step {trained.step}:")
    for metric, value in found.items():
        print(f"  {metric.removeprefix('eval/'):<24}{value:10.4f}")
    return 0


def tested(trained: Trained, directory: Path) -> dict[str, float]:
    """Return ``eval/...`` metrics by their names in metrics.jsonl."""
    import jax

    from jaxrl_llm.errors import InputError
    from jaxrl_llm.runs.load import load_base, load_trained
    from jaxrl_llm.sharding import make_mesh
    from jaxrl_llm.sharding.distributed import ALONE
    from jaxrl_llm.stages import stage_of
    from jaxrl_llm.system.signals import on_exit
    from jaxrl_llm.telemetry.pace import Schedule
    from jaxrl_llm.telemetry.progress import Progress

    run: Any = trained.run
    mesh = make_mesh(run.mesh)
    kind = stage_of(run)
    with (
        jax.set_mesh(mesh),
        Progress(Schedule(1)) as progress,
        kind.resources(run, ALONE, directory) as resources,
        on_exit(lambda *reason: resources.close()),
    ):
        progress.status(f"loading {run.model}")
        compares = isinstance(run, configs.Preference)  # with the model as it was at the start
        model, tokenizer = load_base(trained, mesh, compares or run.learner.lora.rank > 0)
        stage = kind.prepare(run, model, tokenizer, mesh, resources, progress, ALONE)
        del model
        progress.status(f"loading {directory}")
        found = stage.test(load_trained(trained, mesh)[0])
    if found is None:
        raise InputError(f"{directory} holds nothing out to test on, and has no task: give one with --config NAME")
    return found.metrics()
