"""Groups for one step, as a stream: the engine's slots stay full, each group is scored once its last completion is there."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.demand import Counts, Demand, remember, share_of
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.groups import Backlog, Collected, Source, Unfinished, describe, informative, tokens_in, whole
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.types import Completion, Group

Status = Callable[[str], None]


def complete(
    engine: Engine, model: Any, tokenizer: Any, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling,
    version: int = 0, status: Status = lambda text: None,
) -> list[Completion]:
    """One completion with its text for each prompt (token ids) and seed, in order; ``status`` hears how far it is."""
    engine.start(sampling)
    handles = engine.submit(prompts, seeds)
    done: dict[int, Completion] = {}
    tokens = 0
    while engine.busy:
        status(f"sampling {len(done)}/{len(handles)} completions, {tokens} tokens")
        tokens += engine.step(model, version)
        done |= dict(engine.collect())
    texts = tokenizer.batch_decode([done[h].tokens for h in handles], skip_special_tokens=True)
    return [dataclasses.replace(done[h], text=text) for h, text in zip(handles, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What it takes to fill a step with groups.

    Attributes:
      engine: the sampler of tokens.
      source: prompts and scores.
      sampling: rules.
      demand: what every step wants.
      status: hears what is going on.
    """

    engine: Engine
    source: Source
    sampling: Sampling
    demand: Demand
    status: Status


class Requests:
    """Owner of the engine's requests in one step: which belongs to which group, and what has come back.

    Attributes:
      tokens: sampled in this step, of what has come back.
    """

    def __init__(self, sampler: Sampler):
        self.tokens = 0
        self._sampler, self._engine = sampler, sampler.engine
        self._begun: dict[int, Unfinished] = {}
        self._groups: dict[int, list[Completion | None]] = {}
        self._asked: dict[int, int] = {}
        self._owner: dict[int, tuple[int, int]] = {}  # by handle, in the order of the engine's queue
        self._engine.start(sampler.sampling)

    @property
    def groups(self) -> int:
        """Groups with a completion that is not back."""
        return len(self._groups)

    @property
    def completions(self) -> int:
        """Completions that are not back."""
        return len(self._owner)

    def begin(self, group: Unfinished) -> None:
        """Ask for what the group lacks."""
        source = self._sampler.source
        if group.prompt is None:
            problem, prompt, _ = source.ask(group.place)
            group = dataclasses.replace(group, problem=problem, prompt=prompt)
        seeds = source.seeds(group.place)
        demand = self._sampler.demand
        lacking = [i for i, c in enumerate(group.completions) if not whole(c, demand.longest)]
        begun = [group.completions[i] for i in lacking]
        limits = [demand.limit(len(c.tokens) if c else 0) for c in begun]
        handles = self._engine.submit([group.prompt] * len(lacking), [seeds[i] for i in lacking], limits, begun)
        self._begun[group.place] = group
        self._groups[group.place], self._asked[group.place] = list(group.completions), len(lacking)
        self._owner |= {handle: (group.place, i) for handle, i in zip(handles, lacking, strict=True)}

    def take(self) -> list[Unfinished]:
        """Groups whose last completion has come back, by place, whole or not."""
        touched = set()
        for handle, completion in self._engine.collect():
            place, index = self._owner.pop(handle)
            before = self._groups[place][index]
            self.tokens += len(completion.tokens) - (len(before.tokens) if before else 0)
            if len(completion.tokens):  # what never began keeps no trace
                self._groups[place][index] = completion
            touched.add(place)
        back = sorted(touched - {place for place, _ in self._owner.values()})
        return [dataclasses.replace(self._begun.pop(place), completions=tuple(self._groups.pop(place))) for place in back]

    def stop(self, running: bool) -> list[Unfinished]:
        """End all groups, or only those of which nothing has run yet; the groups that have come back."""
        ending = list(self._owner)
        if not running:
            queued = list(self._owner.items())[len(self._owner) - self._engine.queued :]
            waiting = collections.Counter(place for _, (place, _) in queued)
            ending = [handle for handle, (place, _) in queued if waiting[place] == self._asked[place]]
        if ending:
            self._engine.abort(ending)
        return self.take()


@dataclasses.dataclass
class Tally:
    """What one step has found so far, by place in the stream."""

    good: float
    seen: float
    kept: dict[int, Group] = dataclasses.field(default_factory=dict)
    sampled: dict[int, Group] = dataclasses.field(default_factory=dict)
    held: list[Unfinished] = dataclasses.field(default_factory=list)
    failures: Failures = Failures()
    seconds: float = 0.0

    def add(self, sampler: Sampler, back: list[Unfinished], version: int) -> None:
        """Score the groups that are whole and keep what can teach; hold the others for the next step."""
        demand = sampler.demand
        ended = [all(whole(c, demand.longest) for c in g.completions) for g in back]
        done = [g for g, end in zip(back, ended, strict=True) if end]
        self.held += [g for g, end in zip(back, ended, strict=True) if not end]
        if not done:
            return
        began = time.perf_counter()
        groups, failures = sampler.source.finish(done, version, demand.longest)
        self.seconds += time.perf_counter() - began
        self.failures += failures
        found = {u.place: group for u, group in zip(done, groups, strict=True)}
        reads = demand.filter_groups
        good = {place: group for place, group in found.items() if not reads or informative(group, reads)}
        self.sampled |= found
        self.kept |= good
        self.good, self.seen = remember(self.good, self.seen, len(good), len(found))

    def split(self, demand: Demand) -> tuple[list[Unfinished], list[Unfinished]]:
        """The groups to go on with in the next step, by place and a step older; and those that have grown too old for it."""
        older = [dataclasses.replace(g, age=g.age + 1 if g.begun else 0) for g in sorted(self.held, key=lambda g: g.place)]
        return [g for g in older if g.age <= demand.oldest], [g for g in older if g.age > demand.oldest]


def collect(sampler: Sampler, model: Any, version: int, backlog: Backlog) -> Collected:
    """Fill a step with groups.

    What earlier steps left comes first: surplus groups, then those under way. New prompts are begun as ``Demand`` says,
    with the filter (DAPO's dynamic sampling, arXiv 2503.14476 section 3.2) until enough informative groups are there.
    What still runs then is finished, or stopped for the next step to go on with, up to ``Collect.max_age`` times. Groups are
    learned from in the order of their prompts; surplus is carried to the next step, and dropped after that. Groups that still
    wait for a slot are left to the next step in either case. Where ``max_rounds`` is used up the step learns from the groups
    it has.

    Args:
      sampler: engine, prompts, scores.
      model: weights to sample from.
      version: theirs; every token sampled here is marked with it.
      backlog: what the step before left.
    """
    start, demand, engine = time.perf_counter(), sampler.demand, sampler.engine
    first, tokens, cursor = list(backlog.carried[: demand.needed]), 0, backlog.cursor
    requests, tally = Requests(sampler), Tally(backlog.good, backlog.seen)
    for group in backlog.unfinished:
        requests.begin(group)
    counts = lambda: Counts(len(first) + len(tally.kept), requests.groups, len(tally.held), requests.completions, cursor - backlog.cursor)
    while True:
        while demand.wants(counts(), share_of(tally.good, tally.seen) if demand.filter_groups else 1.0):
            requests.begin(Unfinished(cursor, (None,) * sampler.source.group))
            cursor += 1
        if requests.completions and counts().kept >= demand.needed:
            tally.add(sampler, requests.stop(demand.collect.interrupt), version)
        if not requests.completions:
            break
        sampler.status(f"sampling: {min(counts().kept, demand.needed)}/{demand.needed} groups, {tokens} tokens")
        tokens += engine.step(model, version)
        tally.add(sampler, requests.take(), version)
    seconds = {"time/rollout_s": time.perf_counter() - start - tally.seconds, "time/reward_s": tally.seconds}
    collected = _collected(sampler, version, backlog, first, tally, cursor, requests.tokens, seconds)
    engine.start(sampler.sampling)  # nothing runs any more: learning needs the memory of the cache
    return collected


def _collected(
    sampler: Sampler, version: int, before: Backlog, first: list[Group], tally: Tally, cursor: int, tokens: int,
    seconds: dict[str, float],
) -> Collected:
    """The step's groups in order, what the next one finds, and what became of the tokens."""
    demand, engine = sampler.demand, sampler.engine
    found = first + [tally.kept[place] for place in sorted(tally.kept)]
    groups, spare = found[: demand.needed], found[demand.needed :]
    # A surplus group would have no token of the next step's policy.
    carried, dropped = (spare, []) if demand.collect.learn_earlier else ([], spare)
    dropped += before.carried[demand.needed :]
    unfinished, expired = tally.split(demand)
    after = Backlog(cursor, tuple(carried), tuple(unfinished), tally.good, tally.seen)
    learned = tokens_in(groups)
    thrown = tokens_in([*dropped, *expired, *(g for place, g in tally.sampled.items() if place not in tally.kept)])
    sampled = [tally.sampled[place] for place in sorted(tally.sampled)]
    repetition = bool(sampler.sampling.repetition and sampler.sampling.repetition.on)
    failed = tally.failures.metrics() if tally.sampled else {}
    metrics = seconds | failed | describe(sampled or groups, repetition) | {
        "prompts": float(cursor),
        "throughput/sampled_tokens_per_s": tokens / max(seconds["time/rollout_s"], 1e-9) if tokens else math.nan,
        "rollout/useful_fraction": learned / (learned + thrown) if learned + thrown else math.nan,
        "rollout/utilisation": tokens / engine.slot_steps if engine.slot_steps else math.nan,
        "rollout/resumed": sum(g.begun for g in before.unfinished) if len(first) < demand.needed else 0,
        "rollout/interrupted": sum(g.begun for g in unfinished),
        "rollout/expired": len(expired),
    }
    if demand.filter_groups:
        metrics["dynamic_sampling/kept_fraction"] = len(tally.kept) / len(tally.sampled) if tally.sampled else math.nan
    if demand.filter_groups or demand.partial:
        metrics |= {
            "dynamic_sampling/rounds": (cursor - before.cursor) / demand.needed,
            "dynamic_sampling/carried_in": len(first),
            "dynamic_sampling/carried_out": len(carried),
            "dynamic_sampling/expired": len(dropped),
            "dynamic_sampling/missing": max(demand.needed - len(groups), 0),
        }
    return Collected(groups, sampled, after, tokens, version, metrics)
