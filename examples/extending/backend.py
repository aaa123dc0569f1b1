"""A backend, which samples in the engine's place: this one has no cache, and reads the whole sequence for each token.

A backend is a ``Backend`` (``jaxrl_llm/engine/engine.py``): token ids and seeds in, ``Completion``s out. Training,
evaluation, collection, reranking and chat use it through ``generate_stream`` (``jaxrl_llm/rollout/generation.py``),
which also resumes, aborts and answers turns: a backend only has to continue from ``partials``.
The random numbers of this one are the engine's, so that both draw the same tokens.
"""

# jaxrl_llm/engine/plain.py
import functools

import jax
import numpy as np

from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.sampling import draw, draw_options, to_traced, uniforms
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.models.decoder import logits
from jaxrl_llm.types import Prompt


@functools.partial(jax.jit, static_argnames="computed")
def next_tokens(model, rows, lengths, seeds, rule, computed):
    """One more token for each row, from what its own seed and length decide."""
    scores = logits(model, rows)[np.arange(len(rows)), lengths - 1]
    return draw(scores, uniforms(seeds, lengths), rule, computed)


class Plain:
    """One forward pass over prompt and completion for each token of each request."""

    def __init__(self, model, slots, max_length, **others):
        self.slots, self.max_length = slots, max_length
        self.start(Sampling())

    def start(self, sampling):
        self.sampling, self.slot_steps, self.count = sampling, 0, 0
        self.waiting, self.seated, self.finished = [], [], []

    def submit(self, prompts, seeds, limits=None, begun=None, keep=False):
        limits = limits or [self.sampling.max_new_tokens] * len(prompts)
        begun = begun or [None] * len(prompts)
        for prompt, seed, limit, first in zip(prompts, seeds, limits, begun, strict=True):
            self.waiting.append(Request(self.count, Prompt(np.asarray(prompt, np.int32)), seed, limit, first))
            self.count += 1
        return list(range(self.count - len(prompts), self.count))

    @property
    def running(self):
        return [(request.handle, request.completion("aborted")) for request in self.seated]

    def step(self, model, version=0):
        free = self.slots - len(self.seated)
        self.seated, self.waiting = self.seated + self.waiting[:free], self.waiting[free:]
        rows, lengths = np.zeros((self.slots, self.max_length), np.int32), np.ones(self.slots, np.int32)
        seeds = np.zeros((self.slots, 2), np.uint32)
        for slot, request in enumerate(self.seated):
            tokens = np.concatenate([request.input_tokens, *(piece.tokens for piece in request.chunks)])
            rows[slot, : len(tokens)], lengths[slot] = tokens, len(tokens)
            seeds[slot] = request.seed & 0xFFFFFFFF, request.seed >> 32
        found = jax.device_get(
            next_tokens(model, rows, lengths, seeds, to_traced(self.sampling), draw_options(self.sampling))
        )
        going = []
        for slot, request in enumerate(self.seated):
            at = slice(slot, slot + 1)
            extras = {name: values[at] for name, values in found.extras.items()}
            request.add(found.token[at], found.logp[at], extras, version)
            stops = int(found.token[slot]) in self.sampling.stop_ids
            if stops or request.num_partial + request.num_sampled == request.limit:
                self.finished.append((request.handle, request.completion("stop" if stops else "length")))
            else:
                going.append(request)
        read, self.seated = len(self.seated), going
        self.slot_steps += self.slots
        return read

    def abort(self, handles):
        gone = [request for request in (*self.seated, *self.waiting) if request.handle in handles]
        self.finished += [(request.handle, request.completion("aborted")) for request in gone]
        self.seated = [request for request in self.seated if request.handle not in handles]
        self.waiting = [request for request in self.waiting if request.handle not in handles]

    def collect(self):
        done, self.finished = self.finished, []
        return done


# jaxrl_llm/stages/programs.py, at the top: from jaxrl_llm.engine.plain import Plain
# jaxrl_llm/stages/programs.py, in build_engine, after model, dtype, mesh
build_engine = dict(
    kind=Plain,
)
