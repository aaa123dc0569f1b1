"""A model to test, talk to or export: a run's newest policy, or any model that ``load_pretrained`` knows."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.errors import InputError
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


def find_run(name: str) -> configs.Run | None:
    """The run whose directory this is; None where it is something else (a model's directory has a config.json too).

    Raises:
      InputError: there is neither a run nor a model of this name; the run has no checkpoint yet, or is of another
        version.
    """
    path = Path(name) / "config.json"
    if not path.is_file():
        check_name(name)
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(data, dict) or data.get("type") != f"{configs.Run.__module__}:{configs.Run.__qualname__}":
        return None
    if not steps_in(Path(name) / "checkpoints"):
        raise InputError(
            f"{name} has no checkpoint yet: go on with its training first, or give the model itself "
            f"({data.get('model')})"
        )
    return configs.load_json(path)


def load_policy(name: str, run: configs.Run | None) -> Policy:
    """Load a run's newest policy, or the model of this name; the weights are float32 for a model. An adapter is merged.

    Raises:
      InputError: whatever cannot be found, read or obeyed.
    """
    import jax

    from jaxrl_llm.checkpoint import restore_policy
    from jaxrl_llm.models import load_pretrained
    from jaxrl_llm.models.lora import attached, create, merge
    from jaxrl_llm.sharding import MeshShape, make_mesh, shardings

    mesh = make_mesh(run.mesh if run else MeshShape())
    model, tokenizer = load_pretrained(run.model if run else name, run.learner.dtype if run else "float32", mesh)
    if run is None:
        return Policy(name, None, None, model, tokenizer, mesh)
    step = steps_in(Path(name) / "checkpoints")[-1]
    newest = Path(name) / "checkpoints" / str(step)
    if not run.learner.lora.rank:
        like = jax.eval_shape(lambda m: m, model)
        del model  # only its shapes are needed: two copies of the weights might not fit
        return Policy(name, run, step, restore_policy(newest, like, mesh), tokenizer, mesh)
    adapter = jax.eval_shape(lambda: create(model.config, run.learner.lora, jax.random.key(0)))
    policy = restore_policy(newest, adapter, mesh, model)
    model = jax.jit(merge, out_shardings=shardings(model, mesh))(attached(model, policy))
    return Policy(name, run, step, model, tokenizer, mesh)
