"""A model to test, talk to or export: the policy of a run's checkpoint, or any model that ``load_pretrained`` knows."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.models.pretrained import check_name


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model with what it takes to use it.

    Attributes:
      name: as it was given.
      run: the run it comes from; None for a model.
      step: the run's checkpoint; None for a model.
      model: the decoder, laid out on ``mesh``.
      tokenizer: None where there is none.
      mesh: over all devices.
    """

    name: str
    run: configs.Run | None
    step: int | None
    model: Any
    tokenizer: Any
    mesh: Any


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run and one of its checkpoints.

    Attributes:
      run: with data and model where they are found from the current folder.
      directory: the checkpoint's.
      step: its number.
    """

    run: configs.Run
    directory: Path
    step: int


DECIDE_THE_MODEL = ("model", "learner", "rollout", "mesh", "seed")
"""Fields of ``Run`` without which its policy cannot be had."""


def find_run(name: str, problems: bool = False) -> Trained | None:
    """The run that ``RUN`` or ``RUN@STEP`` names; None where it is something else (a model's directory has a
    config.json too).

    Args:
      name: as it was given.
      problems: whether its task is needed whole, so that the files of a person's own classes are run. Otherwise what is
        not about the model may be ``Unsaveable`` in parts.

    Raises:
      InputError: there is neither a run nor a model of this name; the run has no such checkpoint, is of another
        version, or its config.json does not hold what is needed.
    """
    directory, _ = configs.split_step(name)
    path = directory / "config.json"
    if not path.is_file():
        check_name(name)
        return None
    if not configs.is_run(path):
        return None
    saved = configs.read(path, problems)
    for field in (*DECIDE_THE_MODEL, "task", "evaluation") if problems else DECIDE_THE_MODEL:
        configs.whole(getattr(saved.run, field), str(path))
    start = configs.find_start(name)
    run = configs.located(saved.run, saved.origin, directory)
    return Trained(run, directory / "checkpoints" / str(start.step), start.step)


def load_policy(name: str, trained: Trained | None) -> Policy:
    """Load a run's policy, or the model of this name; the weights are float32 for a model. An adapter is merged.

    Raises:
      InputError: whatever cannot be found, read or obeyed.
    """
    import jax

    from jaxrl_llm.checkpoint import restore_policy
    from jaxrl_llm.models import load_pretrained
    from jaxrl_llm.models.lora import attached, create, merge
    from jaxrl_llm.sharding import MeshShape, make_mesh, shardings

    run = None if trained is None else trained.run
    mesh = make_mesh(run.mesh if run else MeshShape())
    model, tokenizer = load_pretrained(run.model if run else name, run.learner.dtype if run else "float32", mesh)
    if trained is None:
        return Policy(name, None, None, model, tokenizer, mesh)
    if not run.learner.lora.rank:
        like = jax.eval_shape(lambda m: m, model)
        del model  # only its shapes are needed: two copies of the weights might not fit
        return Policy(name, run, trained.step, restore_policy(trained.directory, like, mesh), tokenizer, mesh)
    adapter = jax.eval_shape(lambda: create(model.config, run.learner.lora, jax.random.key(0)))
    policy = restore_policy(trained.directory, adapter, mesh, model)
    model = jax.jit(merge, out_shardings=shardings(model, mesh))(attached(model, policy))
    return Policy(name, run, trained.step, model, tokenizer, mesh)
