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
from jaxrl_llm.sharding.compiler import Options

Output = Any
"""A name in ``Outputs``; or a hashable function that makes an output, [P, N, ...] or several such, of ``(model, hidden
states [P, N, D] of predictions, microbatch, temperature)``, and is its name.
"""
Outputs = dict[Output, Any]
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

    def score(self, model: Any, packed: Packed, output: Output = "logp") -> Any:
        """Compute one output [M, B, T, ...] of a whole step's completions, without a gradient."""
        return score(model, packed, jnp.float32(self.temperature), self.compute, output)

    def by_sample(self, model: Any, samples: Sequence[Sample], output: Output = "logp") -> list[Any]:
        """Compute one output without a gradient, [t, ...] for each sample, on every process."""
        packed = self.packed(samples, POLICY)
        # A process can read what its own devices hold, no more.
        everywhere = jax.device_put(self.score(model, packed, output), replicated(self.mesh))
        values = jax.tree.map(np.asarray, jax.device_get(everywhere))
        places = zip(samples, rows_of(samples, self.layout), strict=True)
        return [jax.tree.map(lambda x, s=s, at=at: x[at][: len(s.tokens)], values) for s, at in places]


def outputs_of(
    model: Any,
    batch: Packed,
    names: Collection[Output],
    temperature: jax.Array,
    compute: ComputeOptions,
    entropy_gradient: bool = False,
) -> Outputs:
    """Compute the named outputs of one microbatch by one forward pass; ``batch`` has no microbatch axis here.

    ``entropy_gradient``: whether the entropy is differentiated; if not, its gradient is 0 and costs nothing.
    """
    scalar = isinstance(model, ScalarModel)
    replayed = batch.by_column.get(routing.REPLAYED)
    hidden, experts = predicting(model.decoder if scalar else model, batch, compute, replayed)
    found: Outputs = {}
    if experts is not None and routing.KNOWN in batch.by_column:
        found["rerouted"] = to_rows(_predicted(routing.rerouted(experts, batch.by_column), batch), batch)
    if "values" in names:
        found["values"] = to_rows(scalars(model, hidden), batch)
    if "logp" in names or "entropy" in names:
        kept = batch.by_prediction.get("kept")
        logp, entropy = token_logprobs(
            model,
            hidden,
            batch.predictions.target,
            temperature,
            compute.head_chunk,
            kept=kept,
            count=count_of(batch),
            entropy_gradient=entropy_gradient,
        )
        found |= {"logp": to_rows(logp, batch), "entropy": to_rows(entropy, batch)}
    for make in names:
        if callable(make):
            made = make(model, hidden, batch, temperature)
            found[make] = jax.tree.map(lambda x: to_rows(x, batch), made)
    return found


def predicting(
    model: Any, batch: Packed, compute: ComputeOptions, replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the final hidden states [P, N, D] of the positions that predict completion tokens, and the experts that
    the routers chose; the arguments and the experts are those of ``routed``.
    """
    rows = jax.tree.map(lambda x: constrain(x, BATCH), batch.rows)
    hidden, experts = routed(model, rows, compute, replayed)
    return constrain(_predicted(hidden, batch), BATCH), experts


def _predicted(values: jax.Array, batch: Packed) -> jax.Array:
    """Take from values [R, S, ...] of packed rows those of the predictions, [P, N, ...]."""
    parts = values.reshape(len(batch.predictions.source), -1, *values.shape[2:])
    return jax.vmap(lambda part, at: part[at])(parts, batch.predictions.source)


def count_of(batch: Packed) -> jax.Array:
    """Return the most predictions of any part: those behind them are padding."""
    return jnp.max(jnp.sum(batch.predictions.scatter < batch.mask.size, axis=1))


def to_rows(values: jax.Array, batch: Packed) -> jax.Array:
    """Scatter predictions [P, N, ...] to completions [B, T, ...], 0 at padding."""
    rest = values.shape[2:]
    dtype = jnp.float32 if jnp.issubdtype(values.dtype, jnp.floating) else values.dtype
    flat = jnp.zeros((batch.mask.size, *rest), dtype)
    return flat.at[batch.predictions.scatter].set(values, mode="drop").reshape(*batch.mask.shape, *rest)


def microbatch(packed: Packed, index: jax.Array) -> Packed:
    """Return microbatch ``index``, without the leading axis; the models in it are the same for all."""
    take = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    taken = jax.tree.map(take, packed._replace(microbatches=None, counts=None, teachers=None))
    return taken._replace(teachers=packed.teachers)


def score(model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: Output = "logp") -> Any:
    """Compute one output [M, B, T, ...] of a whole step's completions, without a gradient.

    What objectives alone read is left out, so that this is one program whatever they are. Experts are replayed if
    ``packed`` has those to take.
    """
    replayed = {name: x for name, x in packed.by_column.items() if name == routing.REPLAYED}
    packed = packed._replace(counted={}, by_sequence={}, by_token={}, by_column=replayed, counts=None)
    return scoring(compute.compiler)(model, packed, temperature, compute, output)


@cache
def scoring(compiler: Options) -> Any:
    """Return the jitted function behind ``score``, compiled with these options."""
    return jax.jit(_score, static_argnames=("compute", "output"), compiler_options=dict(compiler))


def _score(model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: Output) -> Any:
    model = cast(model, compute.dtype)

    def one(index: jax.Array) -> Any:
        return outputs_of(model, microbatch(packed, index), (output,), temperature, compute)[output]

    def body(index: jax.Array, out: Any) -> Any:
        return jax.tree.map(lambda x, new: x.at[index].set(new), out, one(index))

    # Tracing the model to learn the shapes of a named output would take as long as tracing the loop.
    first: Any = jax.ShapeDtypeStruct(packed.mask.shape[1:], jnp.float32)
    first = jax.eval_shape(one, jnp.int32(0)) if callable(output) else first
    blank = jax.tree.map(lambda x: jnp.zeros((len(packed.mask), *x.shape), x.dtype), first)
    return jax.lax.fori_loop(0, packed.microbatches, body, blank)


def on_mesh(packed: Packed, mesh: Mesh) -> Packed:
    """Put a step's data on the mesh."""
    return laid_out(packed, batch_shardings(packed, mesh))


def batch_shardings(packed: Packed, mesh: Any) -> Packed:
    """Return shardings: rows and predictions divided over data and fsdp, small per-completion arrays replicated."""
    names = ("rows", "predictions", "by_prediction", "by_column")

    def lay(name: str, x: Any) -> NamedSharding:
        return NamedSharding(mesh, fitting(x.shape, (None, BATCH), mesh)) if name in names else replicated(mesh)

    return Packed(**{name: jax.tree.map(partial(lay, name), part) for name, part in packed._asdict().items()})
