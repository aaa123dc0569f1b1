"""What a run is: frozen dataclasses, checked in one place, saved as JSON that loads again."""

import dataclasses
import difflib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.recipes import DAPO, RECIPES, Recipe
from jaxrl_llm.rewards.shaping import Accuracy, Reward
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.sharding.mesh import MeshShape
from jaxrl_llm.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When and how the policy is tested.

    Attributes:
      every: steps between evaluations; 0 for the start and the end only.
      samples: k, completions of each problem.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      limit: problems at most; 0 for all.
      task: None for the part of the training task that is held out.
    """

    every: int = 0
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    limit: int = 0
    task: Task | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """What a run leaves behind.

    Attributes:
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep: checkpoints that stay.
      samples: groups of each step whose completions are written to samples.jsonl.
      tensorboard: write curves for TensorBoard.
      wandb: project on Weights & Biases; None for none.
    """

    checkpoint_every: int = 50
    keep: int = 2
    samples: int = 1
    tensorboard: bool = True
    wandb: str | None = None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How completions are scored.

    Attributes:
      rewards: named parts; the reward is their weighted sum.
      workers: processes for rewards that may hang or crash.
      timeout_s: seconds after which one completion's score is given up and its worker killed.
      on_error: what such a completion, or one whose reward raises, scores.
    """

    rewards: tuple[Reward, ...] = (Accuracy(),)
    workers: int = 2
    timeout_s: float = 5.0
    on_error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides a run.

    Attributes:
      model: a Hugging Face directory, a .gguf file, a built-in name or a hub id.
      task: prompts with checkable answers.
      scoring: rewards.
      recipe: the method.
      rollout: how groups are sampled.
      learner: how they are learned from.
      mesh: how devices are arranged.
      evaluation: when and how the policy is tested.
      output: checkpoints and logs.
      steps: how many; each samples one batch of groups and learns from it.
      seed: decides every random number of the run.
      run_dir: where it lies; None for runs/NAME below the current folder.
    """

    model: str
    task: Task
    scoring: Scoring = Scoring()
    recipe: Recipe = DAPO
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    mesh: MeshShape = MeshShape()
    evaluation: Evaluation = Evaluation()
    output: Output = Output()
    steps: int = 100
    seed: int = 0
    run_dir: str | None = None


def require(fine: bool, message: str) -> None:
    """InputError with this one line unless ``fine``."""
    if not fine:
        raise InputError(message)


def validate(run: Run) -> None:
    """Refuse what cannot work, before anything is loaded; InputError names the field, its value and the remedy."""
    rollout, learner, recipe = run.rollout, run.learner, run.recipe
    for name, value in {
        "steps": run.steps, "rollout.prompts": rollout.prompts, "rollout.group": rollout.group, "rollout.slots": rollout.slots,
        "rollout.chunk": rollout.chunk, "rollout.max_rounds": rollout.max_rounds, "rollout.max_prompt_tokens": rollout.max_prompt_tokens,
        "rollout.max_new_tokens": rollout.max_new_tokens, "learner.epochs": learner.epochs, "learner.minibatches": learner.minibatches,
        "learner.microbatch_rows": learner.microbatch_rows, "evaluation.samples": run.evaluation.samples,
        "output.checkpoint_every": run.output.checkpoint_every, "output.keep": run.output.keep, "scoring.workers": run.scoring.workers,
    }.items():
        require(value >= 1, f"{name} must be at least 1, got {value}")
    require(rollout.temperature > 0, f"rollout.temperature must be above 0 to learn from samples, got {rollout.temperature}")
    require(rollout.group >= 2, f"rollout.group {rollout.group} leaves nothing to compare: {recipe.name} needs at least 2 completions of each prompt")
    require(
        rollout.top_k == 0 and rollout.top_p == 1,
        f"rollout.top_k {rollout.top_k} and top_p {rollout.top_p}: a truncated sampler is another policy than the one that learns; "
        "set rollout.top_k 0 and rollout.top_p 1",
    )
    require(learner.minibatches <= rollout.prompts, f"learner.minibatches {learner.minibatches} exceeds rollout.prompts {rollout.prompts}: groups stay whole")
    require(run.evaluation.temperature >= 0, f"evaluation.temperature must be at least 0, got {run.evaluation.temperature}")
    require(
        run.evaluation.samples == 1 or run.evaluation.temperature > 0,
        f"evaluation.samples {run.evaluation.samples} at temperature 0 would all be the same: set evaluation.temperature above 0",
    )
    require(learner.remat in ("none", "dots", "full"), f"learner.remat {learner.remat!r} is unknown: none, dots or full")
    for name, value in {"learner.dtype": learner.dtype, "learner.compute_dtype": learner.compute_dtype}.items():
        require(value in ("float32", "bfloat16"), f"{name} {value!r} is unknown: float32 or bfloat16")
    optimiser = learner.optimiser
    require(optimiser.learning_rate > 0, f"learner.optimiser.learning_rate must be above 0, got {optimiser.learning_rate}")
    require(optimiser.schedule in ("constant", "cosine"), f"learner.optimiser.schedule {optimiser.schedule!r} is unknown: constant or cosine")
    require(0 <= recipe.overlong_share < 1, f"recipe.overlong_share must be from 0 to below 1, got {recipe.overlong_share}")
    needed = rollout.max_length
    require(
        learner.row_tokens == 0 or learner.row_tokens >= needed,
        f"learner.row_tokens {learner.row_tokens} cannot hold a prompt with its completion: set it to at least {needed}, or 0 to choose",
    )


def validate_on_devices(run: Run, devices: int) -> None:
    """Refuse a mesh that the devices or the batch do not fit; before any weight is loaded."""
    data, fsdp, _ = run.mesh.sizes(devices)
    rows = run.learner.microbatch_rows
    require(
        rows % (data * fsdp) == 0,
        f"learner.microbatch_rows {rows} does not divide over mesh data x fsdp = {data} x {fsdp}: make it a multiple of {data * fsdp}",
    )


def config_folder() -> Path:
    """Where the shipped configurations lie."""
    spec = importlib.util.find_spec("jaxrl_llm.configs")
    return Path(next(iter(spec.submodule_search_locations)))


def config_names() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(p.stem for p in config_folder().glob("*.py") if p.stem != "__init__")


def load_config(name: str) -> tuple[str, Run]:
    """Name and value of a configuration: a Python file that sets ``config``, a run's config.json, or a shipped name."""
    path = Path(name)
    if path.suffix == ".json":
        return path.parent.name, load_json(path)
    if path.suffix != ".py":
        path = config_folder() / f"{name}.py"
    if not path.is_file():
        close = difflib.get_close_matches(name, config_names(), 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(config_names())}, or give a .py file"
        raise InputError(f"no configuration {name!r}: {hint}")
    spec = importlib.util.spec_from_file_location(f"jaxrl_llm_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    require(isinstance(getattr(module, "config", None), Run), f"{path} must set config = Run(...)")
    return path.stem, module.config


def with_recipe(run: Run, name: str) -> Run:
    """The run with another method."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        raise InputError(f"no recipe {name!r}: " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(RECIPES)}"))
    return dataclasses.replace(run, recipe=RECIPES[name])


def to_json(value: Any) -> Any:
    """Nested JSON values; a dataclass becomes an object whose ``type`` names its class."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}"} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return {k: to_json(v) for k, v in value.items()} if isinstance(value, dict) else value


def from_json(data: Any) -> Any:
    """The inverse of ``to_json``; lists come back as tuples. Only dataclasses are ever built."""
    if isinstance(data, list):
        return tuple(from_json(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {k: from_json(v) for k, v in data.items()}
    module, _, name = data["type"].partition(":")
    kind = getattr(importlib.import_module(module), name, None)
    require(dataclasses.is_dataclass(kind), f"config.json names {data['type']}, which is no configuration class of this version")
    return kind(**{k: from_json(v) for k, v in data.items() if k != "type"})


def load_json(path: Path) -> Run:
    """The run that a config.json describes."""
    try:
        run = from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{path} does not describe a run of this version: {error}") from None
    require(isinstance(run, Run), f"{path} does not describe a run")
    return run


def changes(old: Run, new: Run) -> list[str]:
    """Fields that differ, as ``name: old -> new``."""
    before, after = flat(to_json(old)), flat(to_json(new))
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON values by dotted name."""
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        return {prefix: data}
    return {k: v for name, item in items for k, v in flat(item, f"{prefix}.{name}" if prefix else str(name)).items()}
