"""A model to test, talk to or export: the policy of a run's checkpoint, or any model that ``load_pretrained`` knows."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.trained import Trained


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model with what it takes to use it.

    Attributes:
      name: as it was given.
      run: the run it comes from; None for a model.
      step: the run's checkpoint; None for a model.
      model: the decoder, or a reward model, laid out on ``mesh``.
      tokenizer: None where there is none.
      mesh: over all devices.
    """

    name: str
    run: configs.Configuration | None
    step: int | None
    model: Any
    tokenizer: Any
    mesh: Any


def load_policy(name: str, trained: "Trained | None", writes: bool = False) -> Policy:
    """Load a run's policy, or the model of this name; the weights are float32 for a model. An adapter is merged.

    ``writes``: whether it must be a language model; if not it may be a reward model.

    Raises:
      InputError: whatever cannot be found, read or obeyed.
    """
    from jaxrl_llm.models.heads import ScalarModel
    from jaxrl_llm.models.pretrained import load_either
    from jaxrl_llm.sharding import MeshShape, make_mesh
    from jaxrl_llm.trained import load_trained

    if trained is None:
        mesh = make_mesh(MeshShape())
        model, tokenizer = load_either(name, "float32", mesh)
    else:
        mesh = make_mesh(trained.run.mesh)
        model, tokenizer = load_trained(trained, mesh)
    if writes and isinstance(model, ScalarModel):
        raise InputError(f"{name} is a reward model, which scores text and writes none: give a language model")
    run = None if trained is None else trained.run
    return Policy(name, run, None if trained is None else trained.step, model, tokenizer, mesh)
