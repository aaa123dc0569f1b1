"""The mesh and the layout of every array on it."""

from jaxrl_llm.sharding.arrays import Part, abstract, from_parts, held_parts, laid_out
from jaxrl_llm.sharding.mesh import (
    BATCH,
    MeshShape,
    batch_parts,
    constrain,
    fitting,
    make_mesh,
    memory_of,
    platform_of,
    replicated,
    rollout_mesh,
)
from jaxrl_llm.sharding.rules import activation, layout_of, sampling_shardings, shardings

__all__ = [
    "BATCH",
    "MeshShape",
    "Part",
    "abstract",
    "activation",
    "batch_parts",
    "constrain",
    "fitting",
    "from_parts",
    "held_parts",
    "laid_out",
    "layout_of",
    "make_mesh",
    "memory_of",
    "platform_of",
    "replicated",
    "rollout_mesh",
    "sampling_shardings",
    "shardings",
]
