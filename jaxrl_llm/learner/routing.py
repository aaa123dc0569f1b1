"""Routing replay: the learner's passes take the experts of an earlier pass, so that no gap between the two is due to
the router (arXiv 2507.18071, 2512.01374; DeepSeek-V3.2's Keep Routing, 2512.02556).

The sampler records the experts of each token and layer; they travel in ``Packed.by_column``, next to the tokens. The
weights of experts are those of the live router in any case, so that it learns.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.learner.batch import Packed, Sample
from jaxrl_llm.models.config import ComputeOptions, Experts, ModelConfig
from jaxrl_llm.models.decoder import cast, routed
from jaxrl_llm.models.experts import EXPERTS, routes_shape
from jaxrl_llm.sharding import BATCH, constrain
from jaxrl_llm.types import Completion

KNOWN = "experts_known"
"""Name of the array in ``Packed.by_column`` that is True where ``EXPERTS`` holds a token's experts."""
REPLAYED = "experts_replayed"
"""Name of the array in ``Packed.by_column`` with the experts to take, int16[R, S, L, k]; -1: the router's own."""
NAMES = (EXPERTS, KNOWN, REPLAYED)


def recorded(completion: Completion) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a sample's ``arrays`` and ``prompt_arrays`` of the experts that its completion took; {} without any.

    A completion's row t is of the pass that predicted token t; a sample's is of the pass that reads it. Nothing reads
    the last token.
    """
    rows = completion.extras.get(EXPERTS)
    if rows is None or EXPERTS not in completion.prompt_extras or not len(rows):
        return {}, {}
    prompt = np.concatenate([completion.prompt_extras[EXPERTS][1:], rows[:1]])
    own = np.concatenate([rows[1:], np.zeros_like(rows[:1])])
    known = np.arange(len(own)) < len(own) - 1
    return {EXPERTS: own, KNOWN: known}, {EXPERTS: prompt, KNOWN: np.ones(len(prompt), bool)}


def planned_routes(
    config: ModelConfig, tokens: int, prompt: int, mode: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the shapes, as zeros, of a sample's arrays of experts and of its prompt's; {} for a dense model."""

    def zeros(count: int) -> dict[str, np.ndarray]:
        shape = routes_shape(config, count)
        if shape is None:
            return {}
        arrays = {EXPERTS: np.broadcast_to(shape.dtype.type(0), shape.shape), KNOWN: np.zeros(count, bool)}
        return arrays | ({} if mode == "off" else {REPLAYED: np.broadcast_to(np.int16(0), shape.shape)})

    return zeros(tokens), zeros(prompt)


def replaying(packed: Packed, mode: str, model: Any, compute: ComputeOptions) -> Packed:
    """Return the data with the experts to take: "R3" the sampler's, "R2" those of ``model``; unchanged with "off"."""
    if mode == "off" or EXPERTS not in packed.by_column:
        return packed
    given = packed.by_column
    taken = _sampled(given[EXPERTS], given[KNOWN]) if mode == "R3" else _chosen(model, packed.rows, compute)
    return packed._replace(by_column=given | {REPLAYED: taken})


@jax.jit
def _sampled(experts: jax.Array, known: jax.Array) -> jax.Array:
    return jnp.where(known[..., None, None], experts.astype(jnp.int16), jnp.int16(-1))


@functools.partial(jax.jit, static_argnames="compute")
def _chosen(model: Any, rows: Any, compute: ComputeOptions) -> jax.Array:
    """Return the experts that a model chooses, int16[M, R, S, L, k]."""
    model = cast(model, compute.dtype)
    chosen = jax.lax.map(lambda one: routed(model, one, compute)[1].astype(jnp.int16), rows)
    return constrain(chosen, None, BATCH)


def rerouted(chosen: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    """Return 1 where a token's experts are not those that the sampler took, in any layer; 0 elsewhere, float32[R, S].

    ``chosen``: by the live router, [R, S, L, k]. ``given``: ``Packed.by_column``.
    """
    differ = jnp.sort(chosen, axis=-1) != jnp.sort(given[EXPERTS], axis=-1)
    return (jnp.any(differ, axis=(2, 3)) & given[KNOWN]).astype(jnp.float32)


def without_routes(packed: Packed) -> Packed:
    """Return the data without any experts, for models other than the one that they are of."""
    return packed._replace(by_column={name: x for name, x in packed.by_column.items() if name not in NAMES})


def load_by_expert(samples: Sequence[Sample], experts: Experts | None) -> dict[str, float]:
    """Return how evenly the sampler's tokens were divided among the experts, a mean over layers; {} without any.

    ``experts/load_entropy`` is relative to that of equal loads, so 1 at best; ``experts/busiest_share`` is that of the
    busiest expert, 1 / E at best; ``experts/dead_fraction`` is the share of experts without a token;
    ``experts/bytes_per_token`` is what the record of a token takes.
    """
    rows = [sample.arrays[EXPERTS][sample.arrays[KNOWN]] for sample in samples if EXPERTS in sample.arrays]
    if experts is None or not sum(map(len, rows)):
        return {}
    count = experts.count
    taken = np.concatenate(rows)
    counts = np.stack([np.bincount(taken[:, i].ravel(), minlength=count) for i in range(taken.shape[1])])
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-30)), axis=1)
    return {
        "experts/load_entropy": float(np.mean(entropy) / max(np.log(count), 1e-30)),
        "experts/busiest_share": float(np.mean(shares.max(axis=1))),
        "experts/dead_fraction": float(np.mean(counts == 0)),
        "experts/bytes_per_token": float(taken[0].nbytes),
    }
