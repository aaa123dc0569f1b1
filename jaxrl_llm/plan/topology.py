"""The devices of a TPU that is not there, as its compiler describes them."""

import contextlib
import os
from collections.abc import Generator
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.plan.machines import Machine

NO_COMPILER = "planning for a TPU needs its compiler: pip install -e '.[tpu]' in the checkout (no TPU is needed)"


def describe(machine: Machine) -> list[Any]:
    """The machine's devices, for meshes and ahead-of-time compilation only.

    Raises:
      InputError: libtpu is not installed, is in use by a process that will not share it, or knows no such shape.
    """
    # No question to a metadata server, and no claim on a TPU: other processes may compile at the same time.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    try:
        with _quiet():
            return list(
                topologies.get_topology_desc(platform="tpu", topology_name=_name(machine), **_options(machine)).devices
            )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        raise InputError(_reason(machine, str(error))) from None


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """libtpu writes past Python that it has found no TPU."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _name(machine: Machine) -> str:
    return f"{machine.chip.name}:{'x'.join(map(str, machine.shape))}"


def _options(machine: Machine) -> dict[str, Any]:
    """Hosts hold 2x2 chips; a smaller slice is one host. Both cores of a v4 chip work as one."""
    bounds = tuple(min(size, 2) for size in machine.shape[:2]) + (1,)
    several = {"num_slices": machine.slices} if machine.slices > 1 else {}
    return (
        {"chips_per_host_bounds": bounds}
        | several
        | ({"chip_config_name": "megacore"} if machine.chip.name == "v4" else {})
    )


def _reason(machine: Machine, text: str) -> str:
    line = next(iter(text.splitlines()), "")
    if "lockfile" in text or "libtpu_lock" in text:
        return (
            "libtpu is in use by another process that does not share it: wait for it to end, then run the same "
            "command again"
        )
    if "TPU support not installed" in text or "No module" in text:
        return NO_COMPILER
    return f"topology {machine.name}: the TPU compiler refuses it ({line}); sizes of 1, 2 or multiples of 4 are known"


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """A cached program of a TPU that is not there cannot be loaded, so none is kept."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    on = jax.config.jax_enable_compilation_cache  # ty: ignore[missing-attribute]  made at run time
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()
