"""The learner's forward pass: model outputs for objectives, one row for each completion."""

import dataclasses
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner import routing
from jaxrl_llm.learner.batch import POLICY, Layout, Packed, Sample
from jaxrl_llm.learner.packing import pack, rows_of
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import cast, routed
from jaxrl_llm.models.heads import ScalarModel, scalars, token_logprobs
from jaxrl_llm.sharding import BATCH, constrain, fitting, laid_out, replicated

Outputs = dict[str, jax.Array]
"""Outputs of a forward pass by name: float32[B, T] each, 0 at padding.

``logp``, ``entropy``: nats, of the token and of its whole distribution, at the sampling temperature. ``values``: a
scalar model's output where the token is predicted: the value of the state before it. ``rerouted``, wherever the sampler
recorded experts: 1 where the router that predicts the token chooses others.
"""


@dataclasses.dataclass(frozen=True)
class Forward:
    """The settings of the learner's forward passes.

    Attributes:
      layout: shapes of a microbatch.
      compute: how layers are computed.
      temperature: of the sampling, applied to every log-probability.
      mesh: where models and data are.
    """

    layout: Layout
    compute: ComputeOptions
    temperature: float
    mesh: Mesh

    def packed(self, samples: Sequence[Sample], objectives: Sequence[str]) -> Packed:
        """Pack a step's data on the mesh."""
        return on_mesh(pack(samples, self.layout, objectives), self.mesh)

    def score(self, model: Any, packed: Packed, output: str = "logp") -> jax.Array:
        """Compute one output float32[M, B, T] of a whole step's completions, without a gradient."""
        return score(model, packed, jnp.float32(self.temperature), self.compute, output)

    def by_sample(self, model: Any, samples: Sequence[Sample], output: str = "logp") -> list[np.ndarray]:
        """Compute one output without a gradient, float32[t] for each sample, on every process."""
        packed = self.packed(samples, POLICY)
        # A process can read what its own devices hold, no more.
        everywhere = jax.device_put(self.score(model, packed, output), replicated(self.mesh))
        values = np.asarray(jax.device_get(everywhere))
        return [values[at][: len(s.tokens)] for s, at in zip(samples, rows_of(samples, self.layout), strict=True)]


def outputs_of(
    model: Any,
    batch: Packed,
    names: Collection[str],
    temperature: jax.Array,
    compute: ComputeOptions,
    entropy_gradient: bool = False,
) -> Outputs:
    """Compute the named outputs of one microbatch by one forward pass; ``batch`` has no microbatch axis here.

    ``entropy_gradient``: whether the entropy is differentiated; if not, its gradient is 0 and costs nothing.
    """
    scalar = isinstance(model, ScalarModel)
    rows = jax.tree.map(lambda x: constrain(x, BATCH), batch.rows)
    replayed = batch.by_column.get(routing.REPLAYED)
    hidden, experts = routed(model.decoder if scalar else model, rows, compute, replayed)
    hidden = hidden.reshape(len(batch.source), -1, hidden.shape[-1])
    hidden = constrain(jax.vmap(lambda part, at: part[at])(hidden, batch.source), BATCH)
    found = {}
    if experts is not None and routing.KNOWN in batch.by_column:
        moved = routing.rerouted(experts, batch.by_column).reshape(len(batch.source), -1)
        found["rerouted"] = to_rows(jax.vmap(lambda part, at: part[at])(moved, batch.source), batch)
    if "values" in names:
        found["values"] = to_rows(scalars(model, hidden), batch)
    if "logp" in names or "entropy" in names:
        asked = jnp.max(jnp.sum(batch.scatter < batch.mask.size, axis=1))
        kept = batch.by_prediction.get("kept")
        logp, entropy = token_logprobs(
            model, hidden, batch.target, temperature, kept=kept, count=asked, entropy_gradient=entropy_gradient
        )
        found |= {"logp": to_rows(logp, batch), "entropy": to_rows(entropy, batch)}
    return found


def to_rows(values: jax.Array, batch: Packed) -> jax.Array:
    """Scatter predictions [P, N] to completions [B, T], 0 at padding."""
    flat = jnp.zeros(batch.mask.size, jnp.float32)
    return flat.at[batch.scatter].set(values, mode="drop").reshape(batch.mask.shape)


def microbatch(packed: Packed, index: jax.Array) -> Packed:
    """Return microbatch ``index``, without the leading axis."""
    take = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, packed._replace(microbatches=None, counts=None))


def score(
    model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: str = "logp"
) -> jax.Array:
    """Compute one output float32[M, B, T] of a whole step's completions, without a gradient.

    What objectives alone read is left out, so that this is one program whatever they are. Experts are replayed if
    ``packed`` has those to take.
    """
    replayed = {name: x for name, x in packed.by_column.items() if name == routing.REPLAYED}
    packed = packed._replace(counted={}, by_sequence={}, by_token={}, by_column=replayed, counts=None)
    return scoring(compute.compiler)(model, packed, temperature, compute, output)


@cache
def scoring(compiler: tuple[tuple[str, bool], ...]) -> Any:
    """Return the jitted function behind ``score``, compiled with these options."""
    return jax.jit(_score, static_argnames=("compute", "output"), compiler_options=dict(compiler))


def _score(model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: str) -> jax.Array:
    model = cast(model, compute.dtype)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        found = outputs_of(model, microbatch(packed, index), (output,), temperature, compute)
        return out.at[index].set(found[output])

    return jax.lax.fori_loop(0, packed.microbatches, body, jnp.zeros(packed.mask.shape, jnp.float32))


def on_mesh(packed: Packed, mesh: Mesh) -> Packed:
    """Put a step's data on the mesh."""
    return laid_out(packed, batch_shardings(packed, mesh))


def batch_shardings(packed: Packed, mesh: Any) -> Packed:
    """Return shardings: rows and predictions divided over data and fsdp, small per-completion arrays replicated."""
    names = ("rows", "source", "target", "scatter", "by_prediction", "by_column")

    def lay(name: str, x: Any) -> NamedSharding:
        return NamedSharding(mesh, fitting(x.shape, (None, BATCH), mesh)) if name in names else replicated(mesh)

    return Packed(**{name: jax.tree.map(partial(lay, name), part) for name, part in packed._asdict().items()})
