"""Samplers: the protocol of every backend, and the factory of ours with the weights that it samples from."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import Decoder, by_layer, cast, to_parameters
from jaxrl_llm.models.lora import merge
from jaxrl_llm.sharding import platform_of, sampling_shardings
from jaxrl_llm.types import Completion


class Backend(Protocol):
    """Protocol of a sampler of completions, tokens in and tokens out. ``Engine`` is one.

    A completion's random numbers follow from its seed and its positions alone, so that one that is interrupted resumes
    unchanged.

    Attributes:
      max_length: prompt and completion together, in tokens.
      slots: completions sampled at one time.
      slot_steps: decode steps since ``start``, times the slots of each.
    """

    max_length: int
    slots: int
    slot_steps: int

    def start(self, sampling: Sampling) -> None:
        """Drop all requests and sample by these rules from now on."""

    def submit(
        self,
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion | None] | None = None,
        keep: bool = False,
        keep_prompt: bool = False,
    ) -> list[int]:
        """Queue requests; return a handle for each. The arguments are those of ``Engine.submit``."""
        ...

    @property
    def running(self) -> list[tuple[int, Completion]]:
        """Tokens so far of the requests that are being sampled, by handle."""
        ...

    def step(self, model: Any, version: int = 0) -> int:
        """Sample some tokens with these weights, each marked with their version; return the number of tokens read."""
        ...

    def abort(self, handles: Sequence[int]) -> None:
        """Abort these requests: ``collect`` returns their tokens so far, with the reason "aborted"."""

    def collect(self) -> list[tuple[int, Completion]]:
        """Return the completions that have ended since the last call, by handle."""
        ...


def backend_for(
    model: Decoder,
    dtype: Any,
    learner: Mesh,
    sampler: Mesh,
    keep: bool = False,
    kind: Callable[..., Backend] = Engine,
    router_bits: int = 0,
    **sizes: Any,
) -> tuple[Backend, Callable[[Decoder], Any]]:
    """Return a backend for models like this one, and the function from the learner's weights to the sampler's.

    Args:
      model: shapes suffice, without an adapter.
      dtype: to sample in; None samples from the weights as they are.
      learner: the mesh that the model is on.
      sampler: the mesh to sample on.
      keep: whether the weights must outlive the model, since an update takes its buffers.
      kind: makes the backend from the shapes of its weights, the mesh and the sizes, as ``Engine`` does.
      router_bits: see ``for_sampling``.
      sizes: ``slots``, ``max_length``, ``chunk``, ``strict``, ``group`` and ``form`` of ``Engine``.
    """
    if dtype is None:
        return kind(model, mesh=sampler, **sizes), lambda model: model
    shapes = jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform_of(sampler), router_bits), model)
    return kind(shapes, mesh=sampler, **sizes), weights_for_sampling(model, dtype, learner, sampler, keep, router_bits)


def for_sampling(model: Decoder, platform: str, router_bits: int = 0) -> Decoder:
    """Return the model in the form that is fastest in an engine on a platform ("cpu", "gpu" or "tpu").

    ``router_bits``: by which it chooses experts (``Experts.bits``).

    Raises:
      InputError: they are above 0, and the model is dense.
    """
    if router_bits:
        if model.config.experts is None:
            raise InputError(f"rollout.engine.router_bits {router_bits} needs a model with experts: set it to 0")
        rounding = dataclasses.replace(model.config.experts, bits=router_bits)
        model = Decoder(dataclasses.replace(model.config, experts=rounding), to_parameters(model))
    return by_layer(model) if platform == "gpu" else model


def weights_for_sampling(
    shapes: Decoder, dtype: Any, learner: Mesh, sampler: Mesh, keep: bool, router_bits: int = 0
) -> Callable[[Decoder], Decoder]:
    """Return a function from the policy to weights to sample from.

    One compiled call casts them, adds an attached adapter as the learner's layers do, gives them the form that the
    platform wants (``for_sampling``), and lays them out; if the sampler has devices of its own, they are then moved
    there.

    Args:
      shapes: of the policy, without an adapter.
      dtype: to sample in.
      learner: the mesh that the policy is on.
      sampler: the mesh to sample on.
      keep: whether the weights must outlive the policy, since an update takes its buffers.
      router_bits: see ``for_sampling``.
    """
    apart = learner.devices.tolist() != sampler.devices.tolist()
    platform = platform_of(sampler)
    arrange = functools.partial(for_sampling, platform=platform, router_bits=router_bits)
    layout = sampling_shardings(jax.eval_shape(arrange, shapes), sampler)

    @functools.partial(jax.jit, **({} if apart else {"out_shardings": layout}))
    def arranged(policy: Decoder) -> Decoder:
        narrow = arrange(merge(cast(policy, dtype)))
        return jax.tree.map(jnp.copy, narrow) if keep else narrow

    if apart:
        return lambda policy: jax.device_put(arranged(policy), layout)
    return arranged  # ty: ignore[invalid-explicit-return]  a compiled function is a function
