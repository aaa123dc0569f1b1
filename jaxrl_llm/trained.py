"""Models by name, those of runs among them: what another run's training has made is where the next one begins."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config.origin import SAVED_RUNS
from jaxrl_llm.config.run import Configuration
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.architecture import architecture
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.pretrained import check_name
from jaxrl_llm.pins import check_read
from jaxrl_llm.recovery import check_whole
from jaxrl_llm.snapshots import kept, phase_of


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run and one of its checkpoints, or of its snapshots.

    Attributes:
      run: with data and model where they are found from the current folder.
      directory: the checkpoint's.
      step: its number.
    """

    run: Configuration
    directory: Path
    step: int


DECIDE_THE_MODEL = ("model", "learner", "mesh", "seed")
"""Fields of a configuration without which its model cannot be had."""


TESTED_ON = ("task", "data", "rollout", "answering", "batch", "evaluation")
"""And without which it cannot be tested; no kind of run has all of them."""


def find_run(name: str, tests: bool = False) -> Trained | None:
    """The run that ``RUN`` or ``RUN@STEP`` names; None where it is something else (a model's directory has a
    config.json too).

    Args:
      name: as it was given.
      tests: whether what it is tested on is needed whole, so that the files of a person's own classes are run.
        Otherwise what is not about the model may be ``Unsaveable`` in parts.

    Raises:
      InputError: there is neither a run nor a model of this name; the run has no such checkpoint, is of another
        version, or its config.json does not hold what is needed.
    """
    directory, _ = configs.split_step(name)
    path = directory / "config.json"
    if not path.is_file():
        _check_name(name, directory)
        return None
    if not configs.is_run(path):
        return None
    saved = configs.read(path, tests)
    for field in (*DECIDE_THE_MODEL, *(TESTED_ON if tests else ())):
        configs.whole(getattr(saved.run, field, None), str(path))
    start = configs.find_start(name)
    place = kept(directory)[start.step]
    run = configs.located(configs.pinned(saved.run, saved.origin), saved.origin, directory)
    _check_ancestors(run.model, directory)
    if configs.rules_of_run(run).phases:
        run = configs.in_phase(run, phase_of(place))
    return Trained(run, place, start.step)


def _check_ancestors(name: str, directory: Path) -> None:
    """Refuse a run that begins as itself, by way of others perhaps; ``name``: the model that it begins as."""
    seen = [directory.resolve()]
    while configs.is_run((place := configs.split_step(name)[0]) / "config.json"):
        configs.require(
            place.resolve() not in seen,
            f"{place} begins as its own model, at once or by way of other runs: set model in its config.json to what "
            "it was trained from",
        )
        seen.append(place.resolve())
        saved = configs.read(place / "config.json", own=False)
        name = configs.whole(configs.located(saved.run, saved.origin, place).model, f"{place}/config.json")


def _check_name(name: str, directory: Path) -> None:
    """Refuse what is no model; of a run that is not there yet, the command that makes it is named.

    Where there is no folder of runs yet, its name would read as a hub id.
    """
    config = directory.name
    if directory.parent.name == SAVED_RUNS and not directory.exists() and config in configs.config_names():
        raise InputError(f"{directory} is not there yet: jaxrl-llm train {config} makes it")
    check_name(name)


def load_model(name: str, dtype: str, mesh: Any) -> tuple[Any, Any | None]:
    """(model, tokenizer or None) of whatever ``load_pretrained`` knows, or of a run: ``RUN`` or ``RUN@STEP``; a
    ``ScalarModel`` of a reward model.

    Raises:
      InputError: whatever cannot be found, read or obeyed; weights that are not those that the run which trains began
        with.
    """
    from jaxrl_llm.models.pretrained import load_either

    trained = find_run(name)
    if trained is not None:
        return load_trained(trained, mesh, dtype)
    model, tokenizer = load_either(name, dtype, mesh)
    check_read(name, dtype, model)
    return model, tokenizer


def as_trained(run: Configuration, model: Any) -> Any:
    """What the run trains of the model that it names: a reward model has a scalar head, which is drawn by the
    run's seed where the model has none.

    Raises:
      InputError: another kind of run names a reward model.
    """
    from jaxrl_llm.models.heads import ScalarModel, drawn_head, with_scalar_head

    scores = isinstance(model, ScalarModel)
    if isinstance(run, configs.RewardModel):
        return model if scores else with_scalar_head(model, drawn_head(model, run.seed))
    if scores:
        raise InputError(f"{run.model} is a reward model, which scores text and writes none: give a language model")
    return model


def config_of(name: str) -> ModelConfig:
    """The architecture of what ``load_model`` loads by this name; no weights are read.

    Raises:
      InputError: nothing of that name, or an architecture that is not known here.
    """
    trained = find_run(configs.without_step(name))  # a role that goes on needs its step no more
    return architecture(name)[0] if trained is None else config_of(trained.run.model)


def load_trained(trained: Trained, mesh: Any, dtype: str | None = None) -> tuple[Any, Any | None]:
    """(model, tokenizer or None) of a run's checkpoint; an adapter is merged.

    ``dtype``: of the weights; None leaves them as they were trained.
    """
    import jax

    from jaxrl_llm.checkpoint import restore_policy
    from jaxrl_llm.models.lora import attached, merge
    from jaxrl_llm.sharding import shardings

    check_whole(trained.directory)
    run = trained.run
    model, tokenizer = load_base(trained, mesh, bool(run.learner.lora.rank))
    model = as_trained(run, model)
    if run.learner.lora.rank:
        base, policy = _with_adapter(trained, model, mesh)
        found = jax.jit(merge, out_shardings=shardings(model, mesh))(attached(base, policy))
    else:
        like = jax.eval_shape(lambda m: m, model)
        del model  # only its shapes are needed: two copies of the weights might not fit
        found = restore_policy(trained.directory, like, mesh)
    if dtype is None:
        return found, tokenizer
    return jax.tree.map(lambda x: x.astype(dtype), found), tokenizer


def load_adapter(trained: Trained, mesh: Any) -> tuple[Any, Any]:
    """(base, adapter) of a run's checkpoint, which has one."""
    check_whole(trained.directory)
    model, _ = load_base(trained, mesh, True)
    return _with_adapter(trained, as_trained(trained.run, model), mesh)


def load_base(trained: Trained, mesh: Any, exact: bool) -> tuple[Any, Any | None]:
    """(model, tokenizer or None) of what the run was trained from.

    ``exact``: with just those weights; else of a run those of any step will do, for their shapes.

    Raises:
      InputError: it is not there any more; the line names the run.
    """
    name = trained.run.model if exact else configs.without_step(trained.run.model)
    try:
        return load_model(name, trained.run.learner.dtype, mesh)
    except InputError as error:
        raise InputError(f"the model that {trained.directory.parents[1]} was trained from: {error}") from None


def _with_adapter(trained: Trained, model: Any, mesh: Any) -> tuple[Any, Any]:
    """(base, adapter) of a run that trains an adapter beside this model."""
    import jax

    from jaxrl_llm.checkpoint import restore_policy
    from jaxrl_llm.models.heads import split
    from jaxrl_llm.models.lora import create

    base, head = split(model)
    adapter = jax.eval_shape(lambda: create(base.config, trained.run.learner.lora, jax.random.key(0), head))
    return base, restore_policy(trained.directory, adapter, mesh, base)
