"""A model to test, talk to or export: the policy of a run's checkpoint, or any model that ``load_pretrained`` knows."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxrl_llm import config as configs

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.trained import Trained


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
    run: configs.Configuration | None
    step: int | None
    model: Any
    tokenizer: Any
    mesh: Any


def load_policy(name: str, trained: "Trained | None") -> Policy:
    """Load a run's policy, or the model of this name; the weights are float32 for a model. An adapter is merged.

    Raises:
      InputError: whatever cannot be found, read or obeyed.
    """
    from jaxrl_llm.models import load_pretrained
    from jaxrl_llm.sharding import MeshShape, make_mesh
    from jaxrl_llm.trained import load_trained

    if trained is None:
        mesh = make_mesh(MeshShape())
        return Policy(name, None, None, *load_pretrained(name, "float32", mesh), mesh)
    mesh = make_mesh(trained.run.mesh)
    return Policy(name, trained.run, trained.step, *load_trained(trained, mesh), mesh)
