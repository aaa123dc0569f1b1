"""A sampler without a model, for what depends on lengths and luck alone: slots, refill, resumption, abort, as the
engine has.
"""

import dataclasses

import numpy as np

from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout import Collect, Sampling
from jaxrl_llm.rollout.collect import Sampler, collect_groups
from jaxrl_llm.rollout.generation import request_seed
from jaxrl_llm.rollout.groups import AdmissionPolicy, Carryover, PartialGroup
from jaxrl_llm.types import Completion, Group, Problem

LONGEST = 128


def drawn(seed, salt, high):
    """A number below ``high`` that depends on seed and salt alone."""
    x = (seed * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 + 1) % 2**64
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ x >> 30) * factor % 2**64
    return (x >> 31) % high


def long_tailed(seed):
    """Lengths of mean 0.3 of the longest: most are short, some reach the limit."""
    return int(np.clip(-38.0 * np.log(1 - drawn(seed, 1, 1 << 20) / (1 << 20)), 1, LONGEST))


@dataclasses.dataclass
class Request:
    prompt: tuple
    seed: int
    limit: int
    tokens: list
    versions: list

    def completion(self, reason):
        tokens, versions = np.asarray(self.tokens, np.int32), np.asarray(self.versions, np.int32)
        count = len(tokens)
        return Completion(tokens, -tokens.astype(np.float32), reason, np.ones(count, bool), versions)


class ToyEngine:
    """A token is a function of (seed, position); a completion's length one of its seed."""

    def __init__(self, slots, chunk=8, length=long_tailed):
        self.slots, self.chunk, self.length = slots, chunk, length

    def start(self, sampling):
        self.sampling, self.waiting, self.seated, self.finished = sampling, {}, {}, []
        self.handles = self.slot_steps = 0

    def submit(self, prompts, seeds, limits=None, begun=None, keep_prompt=False):
        limits = limits or [self.sampling.max_new_tokens] * len(prompts)
        begun = begun or [None] * len(prompts)
        handles = list(range(self.handles, self.handles + len(prompts)))
        self.handles += len(prompts)
        for handle, prompt, seed, limit, old in zip(handles, prompts, seeds, limits, begun, strict=True):
            assert limit <= self.sampling.max_new_tokens and (old is None or len(old.tokens) < limit)
            tokens, versions = ([], []) if old is None else (old.tokens.tolist(), old.version.tolist())
            self.waiting[handle] = Request(tuple(prompt), seed, limit, tokens, versions)
        return handles

    @property
    def busy(self):
        return bool(self.waiting or self.seated)

    @property
    def running(self):
        return [(handle, request.completion("aborted")) for handle, request in self.seated.items()]

    def step(self, model, version=0):
        for handle in list(self.waiting)[: self.slots - len(self.seated)]:
            self.seated[handle] = self.waiting.pop(handle)
        sampled, longest = 0, 0
        for handle, request in list(self.seated.items()):
            done, end = len(request.tokens), min(request.limit, self.length(request.seed))
            new = min(self.chunk, end - done)
            request.tokens += [(request.seed + 7 * position) % 1000 for position in range(done, done + new)]
            request.versions += [version] * new
            sampled, longest = sampled + new, max(longest, new)
            if done + new == end:
                reason = "stop" if end == self.length(request.seed) else "length"
                self.finished.append((handle, self.seated.pop(handle).completion(reason)))
        self.slot_steps += longest * self.slots
        return sampled

    def abort(self, handles):
        for handle in handles:
            request = self.seated.pop(handle, None) or self.waiting.pop(handle)
            self.finished.append((handle, request.completion("aborted")))

    def collect(self):
        done, self.finished = self.finished, []
        return done


class ToyEngineAhead(ToyEngine):
    """A chunk is under way when requests are aborted: some end in it."""

    version = 0

    def step(self, model, version=0):
        self.version = version
        return super().step(model, version)

    def abort(self, handles):
        self.step(None, self.version)
        super().abort([handle for handle in handles if handle in self.seated or handle in self.waiting])


@dataclasses.dataclass(frozen=True)
class ToySource:
    """Prompt n is degenerate with the given chance; an informative group has right and wrong answers.

    Where nothing is ``solved`` they differ in their reward alone.
    """

    group: int
    degenerate: float
    solved: bool = True
    labels: tuple[str, ...] = ()
    episodes: None = None

    def informative(self, number):
        return drawn(number, 7, 1000) >= 1000 * self.degenerate

    def new_group(self, number, memory):
        problem = Problem(str(number), ({"role": "user", "content": "?"},), "1", "toy")
        return PartialGroup(number, (None,) * self.group, problem, np.asarray([1 + number], np.int32)), memory

    def plays(self, problem):
        return False

    def seeds(self, number):
        return [request_seed(1, number * self.group + g) for g in range(self.group)]

    @property
    def stream(self):
        return self

    def observe(self, memory, groups):
        return memory

    def learns(self, memory):
        return False

    def metrics(self, before, after):
        return {}

    def score(self, whole):
        return lambda: self.scores(whole)

    def scores(self, whole):
        found = {}
        for group in whole:
            right = np.ones(self.group)
            right[0] = not self.informative(group.number)
            found[group.number] = Group(group.problem, group.prompt, group.completions, right, right * self.solved)
        return found, Failures(1, 0, {"toy": (len(found), 1)}, {"toy": f"failed after {whole[0].number}"})

    def shape_rewards(self, groups, version, budget):
        return dict(groups)


def sampler(needed, slots, degenerate=0.0, group=4, filter_groups=True, engine=None, **settings):
    """The toys, ready for ``collect``."""
    settings = Collect(**settings)
    admission = AdmissionPolicy(needed, slots, LONGEST, filter_groups, settings)
    rules = Sampling(max_new_tokens=LONGEST)
    return Sampler(engine or ToyEngine(slots), ToySource(group, degenerate), rules, admission, lambda text: None)


def steps(made, count, left=Carryover()):
    """``count`` steps one after the other; the version grows by one with each."""
    out = []
    for version in range(count):
        out.append(collect_groups(made, None, version, left))
        left = out[-1].carryover
    return out


def places(groups):
    """Where the groups stand in the stream."""
    return [int(g.problem.id) for g in groups]
