"""The mesh and the layout of every array on it."""

from jaxrl_llm.sharding.mesh import BATCH, MeshShape, batch_parts, constrain, fitting, make_mesh, replicated, rollout_mesh
from jaxrl_llm.sharding.rules import sampling_shardings, shardings

__all__ = ["BATCH", "MeshShape", "batch_parts", "constrain", "fitting", "make_mesh", "replicated", "rollout_mesh", "sampling_shardings", "shardings"]
