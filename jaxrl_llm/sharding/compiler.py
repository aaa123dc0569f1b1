"""Options of XLA's compiler by chip, in one place: programs for real devices and for described ones get the same."""

import contextlib
import functools
import logging
from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from jaxrl_llm.sharding.chips import chip_of

log = logging.getLogger(__name__)

Options = tuple[tuple[str, bool | int], ...]
"""Compiler options and their values, as ``jax.jit(..., compiler_options=dict(options))`` takes them."""

_GATHERING: Options = (
    ("xla_tpu_enable_async_collective_fusion", True),
    ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True),
    ("xla_tpu_enable_async_collective_fusion_multiple_steps", True),
    ("xla_tpu_overlap_compute_collective_tc", True),
    ("xla_enable_async_all_gather", True),
    ("xla_tpu_data_parallel_opt_different_sized_ops", True),
)
"""Weights are gathered while matrix products run; a v5e's compiler does so by default."""
_TILES: Options = (("xla_tpu_scoped_vmem_limit_kib", 24576),)
"""On-chip memory that a kernel may use. The compiler's cycles of an update of 1.5B on v5e:4x4: 4.171e9 by its own
limit of 16 MiB, 4.041e9 with 24 MiB, 4.048e9 with 28, 4.398e9 with 64, which leaves less for results between kernels.
"""
OPTIONS: dict[str, Options] = dict.fromkeys(("v4", "v5p", "v6e"), _GATHERING) | {"v5e": _TILES}
"""Options of the learner's programs by ``Chip.name``; other TPUs, and CPUs, have none."""
REPEATABLE: Options = (("xla_gpu_exclude_nondeterministic_ops", True),)
"""Options of the learner's programs on every GPU: sums of a scatter are added in one order, so that a run resumes bit
for bit. On an H100 two undisturbed runs differed from their third step on without it. It costs 7 % of an update.
"""


def compiler_options(mesh: Mesh | AbstractMesh) -> Options:
    """Return the options of the mesh's platform and chip that its compiler knows; none for a mesh without devices.

    An option that the installed compiler does not know would stop every program: it is left out with a warning.
    """
    if isinstance(mesh, AbstractMesh):
        return ()
    first = mesh.devices.flat[0]
    chip = chip_of(first.device_kind)
    # A process compiles nothing for devices of another process alone.
    device = next((one for one in jax.local_devices() if one.platform == first.platform), first)
    wanted = OPTIONS.get(chip.name, ()) if chip else ()
    return known_options(REPEATABLE if first.platform == "gpu" else wanted, device)


@functools.cache
def known_options(options: Options, device: jax.Device) -> Options:
    """Return the options that a device's compiler takes, found by compiling a tiny program."""
    if not options or _takes(options, device):
        return options
    known = tuple(one for one in options if _takes((one,), device))
    left_out = ", ".join(name for name, _ in options if name not in dict(known))
    log.warning("the compiler of %s does not know %s: left out", device.device_kind, left_out)
    return known


def _takes(options: Options, device: jax.Device) -> bool:
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        with without_compilation_cache():
            jax.jit(lambda x: x + 1, compiler_options=dict(options)).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            return False
        raise
    return True


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """Switch off JAX's compilation cache: a cached program of an absent device cannot be loaded."""
    on = jax.config.jax_enable_compilation_cache  # ty: ignore[missing-attribute]  made at run time
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
