"""The sampler: slots that are refilled between compiled chunks of decode steps.

A completion is a function of (weights, prompt, seed, sampling) only: its columns in the cache are its own positions,
its random numbers are folded from (seed, position), and chunks begin where it begins, whoever shares the batch.
"""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.prefix_cache import PrefixCache
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.scheduler import Build, Scheduler
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import Emitted
from jaxrl_llm.engine.weight_transfer import KnownWeights
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.types import Completion

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A chunk that was given to the device and not read yet.

    Attributes:
      told: what it samples, and which slots go on after it.
      running: the request of each slot when it was sent.
      version: of the weights.
    """

    told: tuple[Emitted, jax.Array]
    running: dict[int, Request]
    version: int


class Engine:
    """Owner of the sampler's device state; it keeps no weights.

    A chunk is sent before the one before it is read, unless requests wait: then finished slots are refilled first.
    Where nothing waits any more, the batch shrinks with the number of requests that still run.

    Args:
      model: gives shapes, dtypes and config; ``jax.eval_shape`` of a model will do.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call; finished slots are refilled between calls.
      mesh: where the weights are; slots are divided over data and fsdp, heads over tensor. None for one device.
      strict: always compute all slots and the whole cache, so that no bit of a completion depends on how many and how
        long its neighbours are. If not, a chunk has as many slots and columns as it needs, in buckets; rounding may
        then differ.
      group: requests of one prompt whose prompt is stored and read once, at most; a strict engine stores it for each.

    Attributes:
      shapes: of all that was compiled for this engine, in words; each is logged once, when it is first needed.
      prompts_prefilled: distinct sequences whose keys and values were computed since ``start``.
      decode_steps: since ``start``.
      slot_steps: those steps times the slots of each.
    """

    def __init__(
        self, model: Decoder, slots: int = 16, max_length: int = 512, chunk: int = 16, mesh: Mesh | None = None,
        strict: bool = False, group: int = 1,
    ):  # fmt: skip
        if slots < 1 or max_length < 2 or group < 1:
            raise InputError(f"slots must be at least 1 and max_length at least 2, got {slots} and {max_length}")
        self.slots = slots
        self.max_length = max_length
        self.chunk = chunk
        dtype = jax.tree.leaves(model)[0].dtype
        sharing = 1 if strict else min(group, slots)
        self._build = Build(model.config, dtype, slots, max_length, chunk, mesh, strict, sharing)
        self._weights = KnownWeights(model)
        self.shapes: list[str] = []
        self.start(Sampling())

    def start(self, sampling: Sampling) -> None:
        """Forget all requests and sample by these rules from now on."""
        self._sampling = sampling
        self._scheduler = Scheduler(self._build, sampling)
        self._flight: Flight | None = None
        self._prefix_cache = PrefixCache(self.max_length, self._build.mesh)
        self._queue: collections.deque[Request] = collections.deque()
        self._finished: list[tuple[int, Completion]] = []
        self._handles = 0
        self.decode_steps = self.slot_steps = self.prompts_prefilled = 0

    def submit(
        self,
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion | None] | None = None,
        keep: bool = False,
    ) -> list[int]:
        """Queue requests; returns a handle for each.

        Args:
          prompts: token ids.
          seeds: one int each.
          limits: tokens of each completion at most, those begun with included; ``max_new_tokens`` if not given.
          begun: completions to go on from, whatever ended them; None for a new one. What they hold stays as it is, and
            the random draws are those of a completion that was never interrupted.
          keep: hold the keys and values of these requests when they end, so that requests begun with them (or with any
            of their first tokens) go on from there; until other weights come, or ``start``.

        Raises:
          InputError: a request that does not fit.
        """
        sampling = self._sampling
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        begun = [None] * len(prompts) if begun is None else begun
        for name, given in {"seed": seeds, "limit": limits, "begun completion": begun}.items():
            if len(given) != len(prompts):
                raise InputError(f"every prompt needs one {name}: got {len(prompts)} prompts and {len(given)} {name}s")
        room = self.max_length - sampling.max_new_tokens
        new = []
        for prompt, seed, limit, earlier in zip(prompts, seeds, limits, begun, strict=True):
            ids = np.asarray(prompt, np.int32).reshape(-1)
            count = 0 if earlier is None else len(earlier.tokens)
            if not 1 <= len(ids) <= room:
                raise InputError(
                    f"a prompt of {len(ids)} tokens and max_new_tokens {sampling.max_new_tokens} do not fit "
                    f"max_length {self.max_length}: prompts must have 1 to {room} tokens"
                )
            if not count < limit <= sampling.max_new_tokens:
                raise InputError(
                    f"a limit must be from {count + 1} to max_new_tokens {sampling.max_new_tokens}, got {limit}"
                )
            new.append(Request(self._handles + len(new), ids, int(seed), int(limit), earlier if count else None, keep))
        self._queue.extend(new)
        self._handles += len(new)
        return [request.handle for request in new]

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._queue or self._scheduler.running)

    @property
    def running(self) -> list[tuple[int, Completion]]:
        """What requests in slots have so far, by handle; the chunk that the device computes now is not in it."""
        return [(request.handle, request.completion("aborted")) for request in self._scheduler.running.values()]

    def step(self, model: Decoder, version: int = 0) -> int:
        """Send one chunk with these weights to the device; returns how many tokens were read meanwhile.

        What the chunk samples is read by the next call, or before it where free slots have to be found.
        """
        with _on(self._build.mesh):
            if self._weights.changed(model):
                self._prefix_cache.clear()
                self._scheduler.keep_none()
            count = self._read() if self._queue else 0
            self._scheduler.refill(model, self._queue, self._prefix_cache, self._flight is not None)
            self.prompts_prefilled = self._prefix_cache.count
            _tell(self.shapes, [*(str(shape) for shape in self._prefix_cache.shapes), str(self._scheduler)])
            return count + self._read(Flight(self._scheduler.run(model), dict(self._scheduler.running), version))

    def abort(self, handles: Sequence[int]) -> None:
        """End these requests now: ``collect`` returns what they have, if anything, with the reason "aborted"."""
        ending = set(handles)
        with _on(self._build.mesh):
            self._read()
            for request in self._scheduler.stop(ending, self._prefix_cache):
                self._finished.append((request.handle, request.completion("aborted")))
        waiting = [request for request in self._queue if request.handle in ending]
        self._finished += [(request.handle, request.completion("aborted")) for request in waiting]
        self._queue = collections.deque(request for request in self._queue if request.handle not in ending)

    def collect(self) -> list[tuple[int, Completion]]:
        """Finished completions since the last call, by handle."""
        done = self._finished
        self._finished = []
        return done

    def generate(
        self, model: Decoder, prompts: Sequence[Any], seeds: Sequence[int], sampling: Sampling, version: int = 0
    ) -> list[Completion]:
        """One completion for each prompt (token ids) and seed, in order.

        Raises:
          InputError: a prompt that does not fit, or a model of another structure.
        """
        self.start(sampling)
        handles = self.submit(prompts, seeds)
        while self.busy:
            self.step(model, version)
        done = dict(self.collect())
        return [done[handle] for handle in handles]

    def _read(self, after: Flight | None = None) -> int:
        """Read the chunk that was sent last, if one is unread; ``after`` takes its place.

        Its tokens are given to their requests, and those that are done end. Returns the tokens sampled.
        """
        flight = self._flight
        self._flight = after
        if flight is None:
            return 0
        out, active = jax.device_get(flight.told)
        counts = out.real.sum(axis=0)
        steps = int(counts.max(initial=0))
        self.decode_steps += steps
        self.slot_steps += steps * len(counts)
        names = [name for name in out.extras if name != "policy_logp" or self._sampling.alters_policy]
        for slot, request in flight.running.items():
            count = int(counts[slot])
            if not count:  # it had ended in the chunk before, which was not read yet when this one was sent
                continue
            tokens = out.token[:count, slot]
            logp = out.logp[:count, slot]
            request.add(tokens, logp, {name: out.extras[name][:count, slot] for name in names}, flight.version)
            if not active[slot]:
                self._scheduler.release(request, self._prefix_cache)
                reason = _reason(tokens[-1], self._sampling.stop_ids, out.repeats[count - 1, slot])
                self._finished.append((request.handle, request.completion(reason)))
        return int(counts.sum())


def _on(mesh: Mesh | None) -> AbstractContextManager:
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def _reason(last: int, stop_ids: Sequence[int], repeats: bool) -> str:
    """Why a request has ended with this token; the last one that its limit allows may be a stop or a repetition too."""
    if last in stop_ids:
        return "stop"
    return "repetition" if repeats else "length"


def _tell(known: list[str], shapes: Sequence[str]) -> None:
    """Log each shape that is not known yet, and know it."""
    for text in shapes:
        if text not in known:
            known.append(text)
            log.info("compiling %s", text)
