"""How many bytes the whole policy loss moves, read off the compiled program: value, gradient and metrics.

    python tools/bench_loss.py [--rows 512] [--tokens 4096] [--topology v5e:1x1] [--presets grpo,gspo]

One JSON line for each preset. ``passes`` is the compiler's count of bytes accessed over the least there is to do:
reading the inputs once and writing the gradient. Without a topology the program is compiled for this machine's default
device, with one for that TPU, which needs ``pip install -e '.[tpu]'`` but no TPU. Goals: 5 on CPU, 2.5 on TPU. The TPU
count holds on-chip copies too, so it is an upper bound on memory traffic.
"""

import dataclasses
import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from jaxrl_llm.algorithms import PRESETS, Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.errors import InputError

GOALS = {"cpu": 5.0, "tpu": 2.5}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled.

    Attributes:
      rows: B, completions.
      tokens: T, tokens of each.
      topology: a TPU's, such as v5e:1x1 or v5p:2x2x1; empty for the default device.
      presets: their keys, separated by commas; empty for all.
    """

    rows: int = 512
    tokens: int = 4096
    topology: str = ""
    presets: str = ""


def device_of(topology: str) -> Any:
    """One device of a TPU that need not be there, or this machine's own."""
    if not topology:
        return jax.devices()[0]
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    from jax.experimental import topologies

    single = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **single).devices[0]
    except Exception as error:  # without libtpu, or with a name that it does not know
        reason = str(error).splitlines()[0]
        raise InputError(
            f"no topology {topology} ({reason}): pip install -e '.[tpu]', and name one such as v5e:1x1"
        ) from error


def inputs(algorithm: Algorithm, options: Options, device: Any) -> tuple[Any, ...]:
    """Abstract arguments: log-probabilities, the batch with what this algorithm reads, and the two counts."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    wide = of(options.rows, options.tokens)
    sampler = (
        algorithm.surrogate.reads_sampler or algorithm.ratio.anchor == "sampler" or algorithm.correction is not None
    )
    batch = PolicyBatch(
        advantages=wide if algorithm.advantage.by_token else of(options.rows),
        mask=of(options.rows, options.tokens, dtype=bool),
        old_logp=wide if algorithm.surrogate.reads_ratio and algorithm.ratio.anchor == "old" else None,
        ref_logp=wide if algorithm.needs_reference and algorithm.kl_in == "loss" else None,
        sampler_logp=wide if sampler else None,
    )
    return wide, batch, of(), of()


def measure(name: str, options: Options, device: Any) -> dict[str, Any]:
    """One preset's row."""
    algorithm = PRESETS[name]
    arguments = inputs(algorithm, options, device)
    loss = lambda logp, batch, tokens, rows: policy_loss(algorithm, logp, batch, tokens, rows)
    began = time.perf_counter()
    program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile()
    least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments)) + arguments[0].size * 4
    moved = program.cost_analysis()["bytes accessed"]
    goal = GOALS.get(device.platform)
    return {
        "preset": name,
        "device": options.topology or device.device_kind,
        "least_mb": round(least / 1e6, 1),
        "moved_mb": round(moved / 1e6, 1),
        "passes": round(moved / least, 2),
        "goal": goal,
        "within_goal": None if goal is None else bool(moved <= goal * least),
        "temporary_mb": round(program.memory_analysis().temp_size_in_bytes / 1e6, 1),
        "compile_s": round(time.perf_counter() - began, 2),
    }


def main() -> int:
    """Prints the rows."""
    options = tyro.cli(Options, description=__doc__)
    names = options.presets.split(",") if options.presets else list(PRESETS)
    try:
        if unknown := [name for name in names if name not in PRESETS]:
            raise InputError(f"no preset {unknown[0]!r}: there are {', '.join(PRESETS)}")
        device = device_of(options.topology)
    except InputError as error:
        raise SystemExit(f"bench_loss: {error}") from None
    for name in names:
        print(json.dumps(measure(name, options, device)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
