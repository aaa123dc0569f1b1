"""The device mesh, and the layout of every array on it."""

from jaxrl_llm.sharding.mesh import (
    BATCH,
    MeshShape,
    batch_parts,
    compiler_options,
    constrain,
    fit_spec,
    head_copies,
    make_mesh,
    memory_limit,
    platform_of,
    repeated_heads,
    replicated,
    rollout_mesh,
)
from jaxrl_llm.sharding.rules import (
    activation,
    as_shapes,
    bytes_per_device,
    from_parts,
    gather_layer,
    lay_out,
    layout_of,
    only_shapes,
    sampling_shardings,
    shardings,
)
