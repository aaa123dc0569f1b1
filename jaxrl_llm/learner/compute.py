"""From a run's settings and the name of a platform to how its forward passes are computed."""

from jax.sharding import Mesh

from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig


def platform_of(mesh: Mesh) -> str:
    """"cpu", "gpu" or "tpu", also where the mesh is of devices that are only described."""
    return mesh.devices.flat[0].platform


def compute_for(settings: Learner, config: ModelConfig, platform: str) -> Compute:
    """The one place that knows what suits a platform ("cpu", "gpu" or "tpu") and a model."""
    return Compute(settings.compute_dtype, settings.remat, "xla", unroll=False)
