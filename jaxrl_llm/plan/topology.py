"""The devices of a TPU or of GPUs that are not there, as their compilers describe them."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Generator
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.plan.gpus import target_config
from jaxrl_llm.plan.machines import Machine

NO_COMPILER = {
    "tpu": "planning for a TPU needs its compiler: pip install -e '.[tpu]' in the checkout (no TPU is needed)",
    "gpu": "by formula alone: for the compiler's word pip install -e '.[gpu-plan]' in the checkout (no GPU is needed)",
}
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
PTX = ("nvidia/cu13/nvvm", "nvidia/cuda_nvcc/nvvm")
"""Where the wheels of CUDA 13 and 12 keep what turns XLA's code into a GPU's, among a Python's packages."""
CUDNN = "nvidia.cudnn"


def describe(machine: Machine) -> list[Any]:
    """The machine's devices, for meshes and ahead-of-time compilation only.

    Raises:
      InputError: the compiler is not installed, is in use by a process that will not share it, or knows no such shape.
    """
    prepare_compilers()
    if machine.chip.platform == "gpu" and not compiles_for_gpus():
        raise InputError(NO_COMPILER["gpu"])
    import jax
    from jax.experimental import topologies

    platform, name, options = _tpu(machine) if machine.chip.platform == "tpu" else _gpu(machine)
    try:
        with _quiet():
            return list(topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        raise InputError(_reason(machine, str(error))) from None


def prepare_compilers() -> None:
    """Before JAX has looked for devices: it looks for none, asks no metadata server, and claims no TPU.

    Other processes may compile at the same time.
    """
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    if "jax" in sys.modules:  # it has read its environment already
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def compiles_for_gpus() -> bool:
    """Whether JAX's CUDA plugin is installed, and what it needs to make a GPU's code."""
    return any(_has(name) for name in PLUGINS) and any(_holds(folder) for folder in PTX)


def compiles_cudnn() -> bool:
    """Whether cuDNN's attention can be compiled."""
    return _has(CUDNN)


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _holds(folder: str) -> bool:
    return any(os.path.isdir(os.path.join(root, folder)) for root in sys.path)


def _tpu(machine: Machine) -> tuple[str, str, dict[str, Any]]:
    """Hosts hold 2x2 chips; a smaller slice is one host. Both cores of a v4 chip work as one."""
    options: dict[str, Any] = {"chips_per_host_bounds": (*(min(size, 2) for size in machine.shape[:2]), 1)}
    if machine.slices > 1:
        options["num_slices"] = machine.slices
    if machine.chip.name == "v4":
        options["chip_config_name"] = "megacore"
    return "tpu", f"{machine.chip.name}:{'x'.join(map(str, machine.shape))}", options


def _gpu(machine: Machine) -> tuple[str, str, dict[str, Any]]:
    hosts, each = machine.shape
    return "cuda", "", {"target_config": target_config(machine.chip), "topology": f"1x{hosts}x{each}"}


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Compilers write past Python that they have found no device."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reason(machine: Machine, text: str) -> str:
    line = next(iter(text.splitlines()), "")
    if "lockfile" in text or "libtpu_lock" in text:
        return (
            "libtpu is in use by another process that does not share it: wait for it to end, then run the same "
            "command again"
        )
    if "TPU support not installed" in text or "No module" in text:
        return NO_COMPILER[machine.chip.platform]
    remedy = "; sizes of 1, 2 or multiples of 4 are known" if machine.chip.platform == "tpu" else ""
    return f"topology {machine.name}: the compiler refuses it ({line}){remedy}"


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """A cached program of a device that is not there cannot be loaded, so none is kept."""
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
