"""The learner's forward pass: model outputs for objectives, one row for each completion.

Routing replay: the learner's passes take the experts of an earlier pass, so that no gap between the two is due to the
router (arXiv 2507.18071, 2512.01374; DeepSeek-V3.2's Keep Routing, 2512.02556). The sampler records them by token and
layer; they travel in ``Packed.by_column``. Their weights are those of the live router, so that it learns.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.batch import POLICY, Layout, Packed, Sample, pack, sample_rows
from jaxrl_llm.models.config import ComputeOptions, Experts, ModelConfig
from jaxrl_llm.models.decoder import cast, routed
from jaxrl_llm.models.experts import EXPERTS, routes_shape
from jaxrl_llm.models.heads import ScalarModel, scalars, token_logprobs
from jaxrl_llm.sharding import BATCH, constrain, fit_spec, lay_out, replicated
from jaxrl_llm.sharding.mesh import CompilerOptions
from jaxrl_llm.types import Completion

EXPERTS_KNOWN = "experts_known"
"""Name of the array in ``Packed.by_column`` that is True where ``EXPERTS`` holds a token's experts."""
EXPERTS_REPLAYED = "experts_replayed"
"""Name of the array in ``Packed.by_column`` with the experts to take, int16[R, S, L, k]; -1: the router's own."""
ROUTE_ARRAYS = (EXPERTS, EXPERTS_KNOWN, EXPERTS_REPLAYED)


def sampled_routes(completion: Completion) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a sample's ``arrays`` and ``prompt_arrays`` of the experts that its completion took; {} without any. A
    completion's row t is of the pass that predicted token t; a sample's is of the pass that reads it. Nothing reads the
    last token.
    """
    rows = completion.extras.get(EXPERTS)
    if rows is None or EXPERTS not in completion.prompt_extras or not len(rows):
        return {}, {}
    prompt = np.concatenate([completion.prompt_extras[EXPERTS][1:], rows[:1]])
    rows = np.concatenate([rows[1:], np.zeros_like(rows[:1])])
    of_completion = {EXPERTS: rows, EXPERTS_KNOWN: np.arange(len(rows)) < len(rows) - 1}
    return of_completion, {EXPERTS: prompt, EXPERTS_KNOWN: np.ones(len(prompt), bool)}


def planned_routes(
    config: ModelConfig, tokens: int, prompt: int, mode: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the shapes, as zeros, of a sample's arrays of experts and of its prompt's; {} for a dense model."""

    def zeros(count: int) -> dict[str, np.ndarray]:
        shape = routes_shape(config, count)
        if shape is None:
            return {}
        arrays = {EXPERTS: np.broadcast_to(shape.dtype.type(0), shape.shape), EXPERTS_KNOWN: np.zeros(count, bool)}
        return arrays | ({} if mode == "off" else {EXPERTS_REPLAYED: np.broadcast_to(np.int16(0), shape.shape)})

    return zeros(tokens), zeros(prompt)


def with_replayed_routes(packed: Packed, mode: str, model: Any, compute: ComputeOptions) -> Packed:
    """Return the data with the experts to take: "R3" the sampler's, "R2" those of ``model``; unchanged with "off"."""
    if mode == "off" or EXPERTS not in packed.by_column:
        return packed
    if mode == "R3":
        routes = routes_of_sampler(packed.by_column[EXPERTS], packed.by_column[EXPERTS_KNOWN])
    else:
        routes = routes_of_model(model, packed.rows, compute)
    return packed._replace(by_column=packed.by_column | {EXPERTS_REPLAYED: routes})


@jax.jit
def routes_of_sampler(experts: jax.Array, is_known: jax.Array) -> jax.Array:
    """Return the recorded experts, int16[M, R, S, L, k]; -1 where none are known."""
    return jnp.where(is_known[..., None, None], experts.astype(jnp.int16), jnp.int16(-1))


@functools.partial(jax.jit, static_argnames="compute")
def routes_of_model(model: Any, rows: Any, compute: ComputeOptions) -> jax.Array:
    """Return the experts that a model chooses, int16[M, R, S, L, k]."""
    model = cast(model, compute.dtype)
    chosen = jax.lax.map(lambda microbatch_rows: routed(model, microbatch_rows, compute)[1].astype(jnp.int16), rows)
    return constrain(chosen, None, BATCH)


def rerouted(chosen: jax.Array, by_column: dict[str, jax.Array]) -> jax.Array:
    """Return 1 where a token's experts are not those that the sampler took, in any layer; 0 elsewhere, float32[R, S].
    ``chosen``: by the live router, [R, S, L, k]. ``by_column``: ``Packed.by_column``.
    """
    differ = jnp.sort(chosen, axis=-1) != jnp.sort(by_column[EXPERTS], axis=-1)
    return (jnp.any(differ, axis=(2, 3)) & by_column[EXPERTS_KNOWN]).astype(jnp.float32)


def without_routes(packed: Packed) -> Packed:
    """Return the data without any experts, for models other than the one that they are of."""
    by_column = {name: array for name, array in packed.by_column.items() if name not in ROUTE_ARRAYS}
    return packed._replace(by_column=by_column)


def expert_load(samples: Sequence[Sample], experts: Experts | None) -> dict[str, float]:
    """Return how evenly the sampler's tokens were divided among the experts, a mean over layers; {} without any.
    ``experts/load_entropy`` is relative to that of equal loads, so 1 at best; ``experts/busiest_share`` is that of the
    busiest expert, 1 / E at best; ``experts/dead_fraction`` is the share of experts without a token;
    ``experts/bytes_per_token`` is the size of a token's record.
    """
    rows = [sample.arrays[EXPERTS][sample.arrays[EXPERTS_KNOWN]] for sample in samples if EXPERTS in sample.arrays]
    if experts is None or not sum(map(len, rows)):
        return {}
    count = experts.count
    routes = np.concatenate(rows)
    counts = np.stack([np.bincount(routes[:, i].ravel(), minlength=count) for i in range(routes.shape[1])])
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-30)), axis=1)
    return {
        "experts/load_entropy": float(np.mean(entropy) / max(np.log(count), 1e-30)),
        "experts/busiest_share": float(np.mean(shares.max(axis=1))),
        "experts/dead_fraction": float(np.mean(counts == 0)),
        "experts/bytes_per_token": float(routes[0].nbytes),
    }


Output = Any
"""A name in ``Outputs``; or a hashable function that makes an output, [P, N, ...] or several such, of ``(model, hidden
states [P, N, D] of predictions, microbatch, temperature)``, and is its name.
"""
Outputs = dict[Output, Any]
"""Outputs of a forward pass by name: float32[B, T] each, 0 at padding. ``logp``, ``entropy``: nats, of the token and of
its whole distribution, at the sampling temperature. ``values``: a scalar model's output where the token is predicted:
the value of the state before it. ``rerouted``, wherever the sampler recorded experts: 1 where the router that predicts
the token chooses others.
"""


@dataclasses.dataclass(frozen=True)
class Forward:
    """The settings of the learner's forward passes: ``layout`` of a microbatch, ``compute``, how layers are computed,
    the sampling ``temperature``, applied to every log-probability, and the ``mesh`` of models and data.
    """

    layout: Layout
    compute: ComputeOptions
    temperature: float
    mesh: Mesh

    def packed(self, samples: Sequence[Sample], objectives: Sequence[str]) -> Packed:
        """Pack a step's data on the mesh."""
        return put_on_mesh(pack(samples, self.layout, objectives), self.mesh)

    def score(self, model: Any, packed: Packed, output: Output = "logp") -> Any:
        """Compute one output [M, B, T, ...] of a whole step's completions, without a gradient."""
        return score(model, packed, jnp.float32(self.temperature), self.compute, output)

    def lower_score(self, model: Any, packed: Packed, output: Output) -> jax.stages.Lowered:
        """Lower the program of ``score`` for shapes."""
        arguments = model, scored_part(packed), jnp.float32(self.temperature), self.compute, output
        return jitted_score(self.compute.compiler).lower(*arguments)

    def by_sample(self, model: Any, samples: Sequence[Sample], output: Output = "logp") -> list[Any]:
        """Compute one output without a gradient, [t, ...] for each sample, on every process."""
        packed = self.packed(samples, POLICY)
        # A process can read what its own devices hold, no more.
        everywhere = jax.device_put(self.score(model, packed, output), replicated(self.mesh))
        values = jax.tree.map(np.asarray, jax.device_get(everywhere))
        places = zip(samples, sample_rows(samples, self.layout), strict=True)
        return [jax.tree.map(lambda x, s=s, at=at: x[at][: len(s.tokens)], values) for s, at in places]


def compute_outputs(
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
    replayed = batch.by_column.get(EXPERTS_REPLAYED)
    hidden, experts = prediction_states(model.decoder if scalar else model, batch, compute, replayed)
    outputs: Outputs = {}
    if experts is not None and EXPERTS_KNOWN in batch.by_column:
        outputs["rerouted"] = to_rows(take_predictions(rerouted(experts, batch.by_column), batch), batch)
    if "values" in names:
        outputs["values"] = to_rows(scalars(model, hidden), batch)
    if "logp" in names or "entropy" in names:
        kept_tokens = batch.by_prediction.get("kept")
        logp, entropy = token_logprobs(
            model,
            hidden,
            batch.predictions.target,
            temperature,
            compute.head_chunk,
            kept_tokens=kept_tokens,
            count=max_predictions(batch),
            entropy_gradient=entropy_gradient,
        )
        outputs |= {"logp": to_rows(logp, batch), "entropy": to_rows(entropy, batch)}
    for make in names:
        if callable(make):
            output = make(model, hidden, batch, temperature)
            outputs[make] = jax.tree.map(lambda x: to_rows(x, batch), output)
    return outputs


def prediction_states(
    model: Any, batch: Packed, compute: ComputeOptions, replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the final hidden states [P, N, D] of the positions that predict completion tokens, and the experts that
    the routers chose; the arguments and the experts are those of ``routed``.
    """
    rows = jax.tree.map(lambda x: constrain(x, BATCH), batch.rows)
    hidden, experts = routed(model, rows, compute, replayed)
    return constrain(take_predictions(hidden, batch), BATCH), experts


def take_predictions(values: jax.Array, batch: Packed) -> jax.Array:
    """Take from values [R, S, ...] of packed rows those of the predictions, [P, N, ...]."""
    parts = values.reshape(len(batch.predictions.source), -1, *values.shape[2:])
    return jax.vmap(lambda part, at: part[at])(parts, batch.predictions.source)


def max_predictions(batch: Packed) -> jax.Array:
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
    batch = jax.tree.map(take, packed._replace(microbatches=None, counts=None, teachers=None))
    return batch._replace(teachers=packed.teachers)


def score(model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: Output = "logp") -> Any:
    """Compute one output [M, B, T, ...] of a whole step's completions, without a gradient. Experts are replayed if
    ``packed`` has those to take.
    """
    return jitted_score(compute.compiler)(model, scored_part(packed), temperature, compute, output)


def scored_part(packed: Packed) -> Packed:
    """Return the data without what objectives alone read, so that ``score`` is one program whatever they are."""
    replayed = {name: x for name, x in packed.by_column.items() if name == EXPERTS_REPLAYED}
    return packed._replace(counted={}, by_sequence={}, by_token={}, by_column=replayed, counts=None)


@cache
def jitted_score(compiler: CompilerOptions) -> Any:
    """Return the jitted function behind ``score``, compiled with these options."""
    return jax.jit(_score, static_argnames=("compute", "output"), compiler_options=dict(compiler))


def _score(model: Any, packed: Packed, temperature: jax.Array, compute: ComputeOptions, output: Output) -> Any:
    model = cast(model, compute.dtype)

    def one(index: jax.Array) -> Any:
        return compute_outputs(model, microbatch(packed, index), (output,), temperature, compute)[output]

    def body(index: jax.Array, scores: Any) -> Any:
        return jax.tree.map(lambda x, new: x.at[index].set(new), scores, one(index))

    # Tracing the model to learn the shapes of a named output would take as long as tracing the loop.
    first: Any = jax.ShapeDtypeStruct(packed.mask.shape[1:], jnp.float32)
    first = jax.eval_shape(one, jnp.int32(0)) if callable(output) else first
    blank = jax.tree.map(lambda x: jnp.zeros((len(packed.mask), *x.shape), x.dtype), first)
    return jax.lax.fori_loop(0, packed.microbatches, body, blank)


def put_on_mesh(packed: Packed, mesh: Mesh) -> Packed:
    """Put a step's data on the mesh."""
    return lay_out(packed, batch_shardings(packed, mesh))


def batch_shardings(packed: Packed, mesh: Any) -> Packed:
    """Return shardings: rows and predictions divided over data and fsdp, small per-completion arrays replicated."""
    names = ("rows", "predictions", "by_prediction", "by_column")

    def lay(name: str, array: Any) -> NamedSharding:
        return NamedSharding(mesh, fit_spec(array.shape, (None, BATCH), mesh)) if name in names else replicated(mesh)

    return Packed(**{name: jax.tree.map(partial(lay, name), part) for name, part in packed._asdict().items()})
