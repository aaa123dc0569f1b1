"""Engine: samples in slots that are refilled between compiled chunks of decode steps. A completion is a function of
(weights, prompt, seed, sampling) only: its columns in the cache are its own positions, its random numbers are folded
from (seed, position), and chunks begin where it begins, whoever shares the batch.
"""

import collections
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.scheduler import EngineSpec, Scheduler
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decode_kernels import ByLength, form_for
from jaxrl_llm.models.decoder import Decoder, cast, to_parameters, unstack_layers
from jaxrl_llm.models.lora import attach_adapter, merge, without_adapter
from jaxrl_llm.sharding import platform_of, sampling_shardings
from jaxrl_llm.types import Completion, Prompt

log = logging.getLogger(__name__)


class Engine:
    """Sampler of completions and owner of its state on the device; it does not keep weights. A chunk is sent before the
    one before it is read, unless requests wait: then finished slots are refilled first. Once no request waits, the
    batch shrinks with the number of requests that still run.

    Args:
      model: gives shapes, dtypes and config; ``jax.eval_shape`` of a model suffices.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call; finished slots are refilled between calls.
      mesh: where the weights are; slots are divided over data and fsdp, heads over tensor. None for one device.
      strict: always compute all slots and the whole cache, so that no bit of a completion depends on how many and how
        long its neighbours are. If not, chunks have the slots and columns they need, in buckets; rounding may differ.
      group: maximum number of requests that share one stored prompt; a strict engine stores it for each.
      form: kernels of decoding, or None for the plain form; "auto" chooses by platform and model (``form_for``).
      kv_cache_dtype: see ``cache_dtype``.

    Attributes:
      shapes: descriptions of all that was compiled for this engine; each is logged once, when first needed.
      prompts_prefilled: number of distinct sequences computed since ``start``.
      decode_steps: since ``start``.
      slot_steps: those steps times the slots of each.
    """

    def __init__(
        self,
        model: Decoder,
        slots: int = 16,
        max_length: int = 512,
        chunk: int = 16,
        mesh: Mesh | None = None,
        strict: bool = False,
        group: int = 1,
        form: ByLength | str | None = "auto",
        kv_cache_dtype: str = "auto",
    ):
        if slots < 1 or max_length < 2 or group < 1:
            raise InputError(f"slots must be at least 1 and max_length at least 2, got {slots} and {max_length}")
        self.slots = slots
        self.max_length = max_length
        dtype = cache_dtype(kv_cache_dtype, model.weights.final_norm.dtype)
        sharing = 1 if strict else min(group, slots)
        self.form = form_for(model.config.widest_attention, slots, mesh) if isinstance(form, str) else form
        self._spec = EngineSpec(model.config, dtype, slots, max_length, chunk, mesh, strict, sharing, self.form)
        self._structure = structure_of(model)
        self._leaves: list[weakref.ref] = []
        self.shapes: list[str] = []
        self.start(Sampling())

    def start(self, sampling: Sampling) -> None:
        """Drop all requests and sample by these rules from now on."""
        self._sampling = sampling
        self._scheduler = Scheduler(self._spec, sampling)
        # The chunk that was given to the device and not read yet: what it samples, the requests in it, its weights'.
        self._flight: tuple[Any, dict[int, Request], int] | None = None
        self._queue: collections.deque[Request] = collections.deque()
        self._finished: list[tuple[int, Completion]] = []
        self._handles = 0
        self.decode_steps = self.slot_steps = self.prompts_prefilled = 0

    def submit(
        self,
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        partials: Sequence[Completion | None] | None = None,
        keep: bool = False,
        keep_prompt: bool = False,
    ) -> list[int]:
        """Queue requests; return a handle for each. InputError: a request does not fit.

        Args:
          prompts: token ids, or ``Prompt``s.
          seeds: one int each.
          limits: most tokens of each completion, those of ``partials`` included; None for ``max_new_tokens``.
          partials: completions to resume, whatever ended them; None for a new one. Their tokens stay as they are, and
            the random draws are those of a completion that was never interrupted.
          keep: keep the keys and values of these requests when they end, for requests that resume them (or any of their
            first tokens), until the weights change, or ``start``.
          keep_prompt: keep the keys and values of these prompts, and compute partial completions from there: for
            episodes of several turns. Their bits then do not depend on what was kept.
        """
        sampling = self._sampling
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        partials = [None] * len(prompts) if partials is None else partials
        for name, column in {"seed": seeds, "limit": limits, "partial completion": partials}.items():
            if len(column) != len(prompts):
                raise InputError(f"every prompt needs one {name}: got {len(prompts)} prompts and {len(column)} {name}s")
        room = self.max_length - sampling.max_new_tokens
        new = []
        for prompt, seed, limit, partial in zip(prompts, seeds, limits, partials, strict=True):
            prompt = prompt if isinstance(prompt, Prompt) else Prompt(np.asarray(prompt, np.int32).reshape(-1))
            partial = partial if partial is not None and len(partial.tokens) else None
            request = Request(self._handles + len(new), prompt, int(seed), int(limit), partial, keep, keep_prompt)
            if not 1 <= len(prompt) <= room:
                raise InputError(
                    f"a prompt of {len(prompt)} tokens and max_new_tokens {sampling.max_new_tokens} do not fit "
                    f"max_length {self.max_length}: prompts must have 1 to {room} tokens"
                )
            if not request.num_partial < limit <= sampling.max_new_tokens:
                least, most = request.num_partial + 1, sampling.max_new_tokens
                raise InputError(f"a limit must be from {least} to max_new_tokens {most}, got {limit}")
            new.append(request)
        self._queue.extend(new)
        self._handles += len(new)
        return [request.handle for request in new]

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._queue or self._scheduler.running)

    @property
    def running(self) -> list[tuple[int, Completion]]:
        """Tokens so far of the requests in slots, by handle, without the chunk that the device computes now."""
        return [(request.handle, request.completion("aborted")) for request in self._scheduler.running.values()]

    def step(self, model: Decoder, version: int = 0) -> int:
        """Send one chunk with these weights to the device; return the number of tokens read meanwhile. The chunk's
        tokens are read by the next call, or before it if free slots have to be found.
        """
        with use_mesh(self._spec.mesh):
            self._check_weights(model)
            count = self._read() if self._queue else 0
            self._scheduler.refill(model, self._queue, self._flight is not None)
            self.prompts_prefilled = self._scheduler.prefixes.count
            for shape in (*map(str, self._scheduler.prefixes.shapes), str(self._scheduler)):
                if shape not in self.shapes:
                    self.shapes.append(shape)
                    log.info("compiling %s", shape)
            return count + self._read((self._scheduler.run(model), dict(self._scheduler.running), version))

    def abort(self, handles: Sequence[int]) -> None:
        """Abort these requests: ``collect`` returns their tokens so far, if any, with the reason "aborted"."""
        aborted = set(handles)
        with use_mesh(self._spec.mesh):
            self._read()
            removed = self._scheduler.stop(aborted)
        removed += [request for request in self._queue if request.handle in aborted]
        self._finished += [(request.handle, request.completion("aborted")) for request in removed]
        self._queue = collections.deque(request for request in self._queue if request.handle not in aborted)

    def collect(self) -> list[tuple[int, Completion]]:
        """Return the completions finished since the last call, by handle."""
        finished = self._finished
        self._finished = []
        return finished

    def generate(
        self, model: Decoder, prompts: Sequence[Any], seeds: Sequence[int], sampling: Sampling, version: int = 0
    ) -> list[Completion]:
        """Sample one completion for each prompt (token ids) and seed, in order. InputError: a prompt does not fit, or
        the model has another structure.
        """
        self.start(sampling)
        handles = self.submit(prompts, seeds)
        while self.busy:
            self.step(model, version)
        completions = dict(self.collect())
        return [completions[handle] for handle in handles]

    def _check_weights(self, model: Decoder) -> None:
        """Drop everything computed with other weights than these. InputError: another structure, shape or dtype."""
        if structure_of(model) != self._structure:
            raise InputError(
                "the engine was built for a model of another structure, shape or dtype: build a new Engine"
            )
        leaves = jax.tree.leaves(model)
        # An array that is gone is like no other, whatever took its place.
        same_count = len(self._leaves) == len(leaves)
        if not same_count or any(ref() is not leaf for ref, leaf in zip(self._leaves, leaves, strict=True)):
            # A NumPy array may change in place: with one among them, weights are never known again.
            self._leaves = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
            self._scheduler.prefixes.clear()
            for request in self._scheduler.running.values():
                request.keep = False  # its keys and values so far come from other weights

    def _read(self, after: tuple[Any, dict[int, Request], int] | None = None) -> int:
        """Read the chunk that was sent last, if one is unread; ``after`` takes its place. Its tokens are added to their
        requests, and finished requests end. Returns the number of tokens sampled.
        """
        flight = self._flight
        self._flight = after
        if flight is None:
            return 0
        outputs, running, version = flight
        draws, active = jax.device_get(outputs)
        counts = draws.real.sum(axis=0)
        steps = int(counts.max(initial=0))
        self.decode_steps += steps
        self.slot_steps += steps * len(counts)
        names = [name for name in draws.extras if name != "policy_logp" or self._sampling.alters_policy]
        for slot, request in running.items():
            count = int(counts[slot])
            if not count:  # it had ended in the chunk before, which was not read yet when this one was sent
                continue
            tokens = draws.token[:count, slot]
            logp = draws.logp[:count, slot]
            request.add(tokens, logp, {name: draws.extras[name][:count, slot] for name in names}, version)
            if not active[slot]:
                self._scheduler.release(request)
                # The last token that a limit allows may be a stop or a repetition too.
                reason = "repetition" if draws.repeats[count - 1, slot] else "length"
                reason = "stop" if tokens[-1] in self._sampling.stop_ids else reason
                self._finished.append((request.handle, request.completion(reason)))
        return int(counts.sum())


def cache_dtype(setting: str, dtype: Any) -> Any:
    """Return the dtype of keys and values: the weights' for "auto", or int8, with a scale for each head and column."""
    return dtype if setting == "auto" else jnp.dtype(jnp.int8)


def use_mesh(mesh: Mesh | None) -> AbstractContextManager:
    """Return a context in which the mesh is set; without one nothing is."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def structure_of(model: Decoder) -> tuple:
    """Return the model's tree, with the shapes and dtypes of its leaves: equal for weights that one program takes."""
    leaves, structure = jax.tree.flatten(model)
    return structure, tuple((x.shape, np.dtype(x.dtype)) for x in leaves)


class Backend(Protocol):
    """Protocol of a sampler of completions, tokens in and tokens out. ``Engine`` is one. A completion's random numbers
    follow from its seed and its positions alone, so that one that is interrupted resumes unchanged.

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
        partials: Sequence[Completion | None] | None = None,
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
      model: shapes suffice.
      dtype: to sample in; None samples from the weights as they are.
      learner: the mesh that the model is on.
      sampler: the mesh to sample on.
      keep: whether the weights must outlive the model, since an update takes its buffers.
      kind: makes the backend from the shapes of its weights, the mesh and the sizes, as ``Engine`` does.
      router_bits: see ``for_sampling``.
      sizes: ``slots``, ``max_length``, ``chunk``, ``strict``, ``group``, ``form`` and ``kv_cache_dtype`` of ``Engine``.
    """
    if dtype is None:
        return kind(model, mesh=sampler, **sizes), lambda model: model
    shapes = jax.eval_shape(lambda m: for_sampling(m, platform_of(sampler), router_bits, dtype), model)
    return kind(shapes, mesh=sampler, **sizes), weights_for_sampling(model, dtype, learner, sampler, keep, router_bits)


def for_sampling(model: Decoder, platform: str, router_bits: int = 0, dtype: Any = None) -> Decoder:
    """Return the model in the form that is fastest in an engine on a platform ("cpu", "gpu" or "tpu"), in ``dtype`` if
    that is given. ``router_bits``: by which it chooses experts (``Experts.bits``); InputError: they are above 0, and
    the model is dense.
    """
    if dtype is not None:
        adapter = getattr(model.weights.blocks, "adapter", None)
        model = cast(model, dtype)
        model = merge(model, dtype) if adapter is not None and adapter.merged else model
    if router_bits:
        if model.config.experts is None:
            raise InputError(f"rollout.engine.router_bits {router_bits} needs a model with experts: set it to 0")
        rounding = dataclasses.replace(model.config.experts, bits=router_bits)
        parameters = to_parameters(model) | {"blocks": model.weights.blocks}
        model = Decoder(dataclasses.replace(model.config, experts=rounding), parameters)
    adapted = hasattr(model.weights.blocks, "adapter")  # its base stays in ``frozen_form``
    return unstack_layers(model) if platform == "gpu" and not adapted else model


class AdaptedWeights:
    """The function from a policy with an adapter to weights to sample from, on the mesh ``sampler``. The frozen model
    is the learner's own arrays, or where the layouts differ a copy that is made once for the run; factors are laid out
    at each call, in ``dtype``. ``convert``: as ``for_sampling``.
    """

    def __init__(self, dtype: Any, sampler: Mesh, convert: Callable[[Decoder], Decoder]):
        self._sampler, self._convert = sampler, convert
        # In buffers of their own, since an update takes the policy's.
        self._narrow = jax.jit(lambda adapter: jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), adapter))
        self._source: list[jax.Array] = []
        self._base: Any = None

    def __call__(self, policy: Decoder) -> Decoder:
        """Return the weights to sample from."""
        source = jax.tree.leaves(to_parameters(policy))
        if len(source) != len(self._source) or any(a is not b for a, b in zip(source, self._source, strict=True)):
            self._source, self._base = source, self._laid_out(self._convert(without_adapter(policy)))
        factors = Decoder(policy.config, {"blocks": {"adapter": self._narrow(policy.weights.blocks.adapter)}})
        return attach_adapter(self._base, self._laid_out(factors).weights.blocks.adapter)

    def _laid_out(self, model: Decoder) -> Decoder:
        return jax.device_put(model, sampling_shardings(model, self._sampler))


def weights_for_sampling(
    shapes: Decoder, dtype: Any, learner: Mesh, sampler: Mesh, keep: bool, router_bits: int = 0
) -> Callable[[Decoder], Decoder]:
    """Return a function from the policy to weights to sample from, in one compiled call: in ``dtype``, in the form of
    the platform (``for_sampling``), laid out on the mesh ``sampler``, and moved there if it has devices of its own. For
    adapters see ``AdaptedWeights``.

    Args:
      shapes: of the policy, as ``policy_shapes`` gives them.
      learner: the mesh that the policy is on.
      keep: whether the weights must outlive the policy, since an update takes its buffers.
      router_bits: see ``for_sampling``.
    """
    separate = learner.devices.tolist() != sampler.devices.tolist()
    arrange = functools.partial(for_sampling, platform=platform_of(sampler), router_bits=router_bits, dtype=dtype)
    adapter = getattr(shapes.weights.blocks, "adapter", None)
    if adapter is not None and not adapter.merged:
        return AdaptedWeights(dtype, sampler, arrange)
    layout = sampling_shardings(jax.eval_shape(arrange, shapes), sampler)

    @functools.partial(jax.jit, **({} if separate else {"out_shardings": layout}))
    def convert(policy: Decoder) -> Decoder:
        weights = arrange(policy)
        return jax.tree.map(jnp.copy, weights) if keep else weights

    if separate:
        return lambda policy: jax.device_put(convert(policy), layout)
    return convert  # ty: ignore[invalid-explicit-return]  a compiled function is a function
