"""The device mesh, and the layout of every array on it."""

from jaxrl_llm.sharding.mesh import (
    BATCH,
    MeshShape,
    batch_parts,
    compiler_options,
    constrain,
    fitting,
    head_copies,
    make_mesh,
    memory_of,
    platform_of,
    repeated_heads,
    replicated,
    rollout_mesh,
)
from jaxrl_llm.sharding.rules import (
    abstract,
    activation,
    from_parts,
    gathered,
    laid_out,
    layout_of,
    only_shapes,
    sampling_shardings,
    shardings,
)
