"""Groups for one step, as a stream: slots stay full, a group is scored once its last completion is there."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.admission import AdmissionPolicy, Underway, remember, share_of
from jaxrl_llm.rollout.groups import (
    Carryover,
    GroupSource,
    PartialGroup,
    RolloutBatch,
    describe,
    informative,
    tokens_in,
    whole,
)
from jaxrl_llm.tasks.stream import Memory
from jaxrl_llm.types import Completion, Group

Status = Callable[[str], None]
Watch = Callable[[Mapping[int, Completion]], Mapping[int, int]]
"""From completions with their texts, by number, to how many first tokens are enough of those that should not go on."""


def complete(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    sampling: Sampling,
    version: int = 0,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> list[Completion]:
    """One completion with its text for each prompt (token ids) and seed, in order.

    ``status`` hears how far it is. ``watch`` is asked after each chunk about all that run, numbered as the prompts are,
    and at the end about all: what it ends has the reason "aborted".
    """
    engine.start(sampling)
    return drain(engine, model, tokenizer, engine.submit(prompts, seeds), version, status, watch)


def drain(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    handles: Sequence[int],
    version: int = 0,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> list[Completion]:
    """The completions of all requests that the engine has, with their texts, in the order of their handles."""
    done: dict[int, Completion] = {}
    tokens = 0
    while engine.busy:
        status(f"sampling {len(done)}/{len(handles)} completions, {tokens} tokens")
        tokens += engine.step(model, version)
        if watch is not None:
            end_early(engine, tokenizer, handles, watch)
        done |= dict(engine.collect())
    found = with_texts([done[handle] for handle in handles], tokenizer)
    if watch is None:
        return found
    ends = watch(dict(enumerate(found)))
    cut = with_texts([first_tokens(found[number], end) for number, end in ends.items()], tokenizer)
    for number, completion in zip(ends, cut, strict=True):
        found[number] = completion
    return found


def end_early(engine: Engine, tokenizer: Any, handles: Sequence[int], watch: Watch) -> None:
    """Abort those of the running requests that should not go on."""
    numbers = {handle: number for number, handle in enumerate(handles)}
    running = engine.running
    made = with_texts([completion for _, completion in running], tokenizer)
    ended = watch({numbers[handle]: c for (handle, _), c in zip(running, made, strict=True)})
    if ended:  # the chunk that is being computed has to be waited for
        engine.abort([handles[number] for number in ended])


def with_texts(completions: Sequence[Completion], tokenizer: Any) -> list[Completion]:
    """The completions with what their tokens say."""
    if not completions:  # of no text at all tokenizers make one that is empty
        return []
    texts = tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
    return [dataclasses.replace(c, text=text) for c, text in zip(completions, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What it takes to fill a step with groups.

    Attributes:
      engine: the sampler of tokens.
      source: prompts and scores.
      sampling: rules.
      admission: what every step wants.
      status: hears what is going on.
    """

    engine: Engine
    source: GroupSource
    sampling: Sampling
    admission: AdmissionPolicy
    status: Status


class GroupTracker:
    """Owner of the engine's requests in one step: which belongs to which group, and what has come back.

    Attributes:
      tokens: sampled in this step, of what has come back.
    """

    def __init__(self, sampler: Sampler):
        self.tokens = 0
        self._sampler = sampler
        self._engine = sampler.engine
        self._begun: dict[int, PartialGroup] = {}
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

    def begin(self, group: PartialGroup) -> None:
        """Ask for what the group lacks."""
        source = self._sampler.source
        if group.prompt is None:  # of a checkpoint from before prompts were kept
            asked, _ = source.ask(group.number, {})
            group = dataclasses.replace(group, problem=asked.problem, prompt=asked.prompt)
        seeds = source.seeds(group.number)
        admission = self._sampler.admission
        lacking = [i for i, c in enumerate(group.completions) if not whole(c, admission.longest)]
        begun = [group.completions[i] for i in lacking]
        limits = [admission.limit(len(c.tokens) if c else 0) for c in begun]
        handles = self._engine.submit([group.prompt] * len(lacking), [seeds[i] for i in lacking], limits, begun)
        self._begun[group.number] = group
        self._groups[group.number] = list(group.completions)
        self._asked[group.number] = len(lacking)
        self._owner |= {handle: (group.number, i) for handle, i in zip(handles, lacking, strict=True)}

    def take(self) -> list[PartialGroup]:
        """Groups whose last completion has come back, by number, whole or not."""
        touched = set()
        for handle, completion in self._engine.collect():
            number, index = self._owner.pop(handle)
            before = self._groups[number][index]
            self.tokens += len(completion.tokens) - (len(before.tokens) if before else 0)
            if len(completion.tokens):  # what never began keeps no trace
                self._groups[number][index] = completion
            touched.add(number)
        back = sorted(touched - {number for number, _ in self._owner.values()})
        return [
            dataclasses.replace(self._begun.pop(number), completions=tuple(self._groups.pop(number))) for number in back
        ]

    def stop(self, running: bool) -> list[PartialGroup]:
        """End all groups, or only those of which nothing has run yet; the groups that have come back."""
        ending = list(self._owner)
        if not running:
            seated = {handle for handle, _ in self._engine.running}
            queued = [(handle, owner) for handle, owner in self._owner.items() if handle not in seated]
            waiting = collections.Counter(number for _, (number, _) in queued)
            ending = [handle for handle, (number, _) in queued if waiting[number] == self._asked[number]]
        if ending:
            self._engine.abort(ending)
        return self.take()


@dataclasses.dataclass
class Tally:
    """What one step has found so far, by number in the stream."""

    good: float
    seen: float
    stream: Memory
    kept: dict[int, Group] = dataclasses.field(default_factory=dict)
    sampled: dict[int, Group] = dataclasses.field(default_factory=dict)
    held: list[PartialGroup] = dataclasses.field(default_factory=list)
    failures: Failures = Failures()
    seconds: float = 0.0

    def add(self, sampler: Sampler, back: list[PartialGroup], version: int) -> None:
        """Score the groups that are whole and keep what can teach; hold the others for the next step."""
        admission = sampler.admission
        ended = [all(whole(c, admission.longest) for c in g.completions) for g in back]
        done = [g for g, end in zip(back, ended, strict=True) if end]
        self.held += [g for g, end in zip(back, ended, strict=True) if not end]
        if not done:
            return
        began = time.perf_counter()
        groups, failures = sampler.source.finish(done, version, admission.longest)
        self.seconds += time.perf_counter() - began
        self.failures += failures
        found = {u.number: group for u, group in zip(done, groups, strict=True)}
        reads = admission.filter_groups
        good = {number: group for number, group in found.items() if not reads or informative(group, reads)}
        self.stream = sampler.source.told(self.stream, groups)
        self.sampled |= found
        self.kept |= good
        self.good, self.seen = remember(self.good, self.seen, len(good), len(found))

    def split(self, admission: AdmissionPolicy) -> tuple[list[PartialGroup], list[PartialGroup]]:
        """The groups to go on with in the next step, by number and a step older.

        And those that have grown too old for it.
        """
        older = [
            dataclasses.replace(g, age=g.age + 1 if g.begun else 0) for g in sorted(self.held, key=lambda g: g.number)
        ]
        return [g for g in older if g.age <= admission.oldest], [g for g in older if g.age > admission.oldest]


def collect(sampler: Sampler, model: Any, version: int, left: Carryover) -> RolloutBatch:
    """Fill a step with groups.

    What earlier steps left comes first: surplus groups, then those under way. New prompts are begun as
    ``AdmissionPolicy`` says, with the filter (DAPO's dynamic sampling, arXiv 2503.14476 section 3.2) until enough
    informative groups are there. What still runs then is finished, or stopped for the next step to go on with, up to
    ``Collect.max_age`` times. Groups are learned from in the order of their prompts; surplus is carried to the next
    step, and dropped after that. Groups that still wait for a slot are left to the next step in either case. Where
    ``max_rounds`` is used up the step learns from the groups it has.

    Args:
      sampler: engine, prompts, scores.
      model: weights to sample from.
      version: theirs; every token sampled here is marked with it.
      left: what the step before left.
    """
    start = time.perf_counter()
    admission = sampler.admission
    engine = sampler.engine
    first = list(left.carried[: admission.needed])
    tokens = 0
    cursor = left.cursor
    requests = GroupTracker(sampler)
    tally = Tally(left.good, left.seen, left.stream)
    for group in left.unfinished:
        requests.begin(group)

    def counts() -> Underway:
        return Underway(
            len(first) + len(tally.kept), requests.groups, len(tally.held), requests.completions, cursor - left.cursor
        )

    while True:
        while admission.wants(counts(), share_of(tally.good, tally.seen) if admission.filter_groups else 1.0):
            group, tally.stream = sampler.source.ask(cursor, tally.stream)
            requests.begin(group)
            cursor += 1
        if requests.completions and counts().kept >= admission.needed:
            tally.add(sampler, requests.stop(admission.collect.interrupt), version)
        if not requests.completions:
            break
        sampler.status(f"sampling: {min(counts().kept, admission.needed)}/{admission.needed} groups, {tokens} tokens")
        tokens += engine.step(model, version)
        tally.add(sampler, requests.take(), version)
    seconds = {"time/rollout_s": time.perf_counter() - start - tally.seconds, "time/reward_s": tally.seconds}
    collected = _collected(sampler, version, left, first, tally, cursor, requests.tokens, seconds)
    engine.start(sampler.sampling)  # nothing runs any more: learning needs the memory of the cache
    return collected


def _collected(
    sampler: Sampler,
    version: int,
    before: Carryover,
    first: list[Group],
    tally: Tally,
    cursor: int,
    tokens: int,
    seconds: dict[str, float],
) -> RolloutBatch:
    """The step's groups in order, what the next one finds, and what became of the tokens."""
    admission = sampler.admission
    engine = sampler.engine
    found = first + [tally.kept[number] for number in sorted(tally.kept)]
    groups = found[: admission.needed]
    spare = found[admission.needed :]
    # A surplus group would have no token of the next step's policy.
    carried, dropped = (spare, []) if admission.collect.learn_earlier else ([], spare)
    dropped += before.carried[admission.needed :]
    unfinished, expired = tally.split(admission)
    after = Carryover(cursor, tuple(carried), tuple(unfinished), tally.good, tally.seen, tally.stream)
    learned = tokens_in(groups)
    thrown = tokens_in([*dropped, *expired, *(g for number, g in tally.sampled.items() if number not in tally.kept)])
    sampled = [tally.sampled[number] for number in sorted(tally.sampled)]
    failed = tally.failures.metrics() if tally.sampled else {}
    metrics = (
        seconds
        | failed
        | describe(sampled or groups)
        | sampler.source.measured(before.stream, tally.stream)
        | {
            "prompts": float(cursor),
            "throughput/sampled_tokens_per_s": tokens / max(seconds["time/rollout_s"], 1e-9) if tokens else math.nan,
            "rollout/useful_fraction": learned / (learned + thrown) if learned + thrown else math.nan,
            "rollout/utilisation": tokens / engine.slot_steps if engine.slot_steps else math.nan,
            "rollout/resumed": sum(g.begun for g in before.unfinished) if len(first) < admission.needed else 0,
            "rollout/interrupted": sum(g.begun for g in unfinished),
            "rollout/expired": len(expired),
        }
    )
    if admission.filter_groups:
        metrics["dynamic_sampling/kept_fraction"] = len(tally.kept) / len(tally.sampled) if tally.sampled else math.nan
    if admission.filter_groups or admission.partial:
        metrics |= {
            "dynamic_sampling/rounds": (cursor - before.cursor) / admission.needed,
            "dynamic_sampling/carried_in": len(first),
            "dynamic_sampling/carried_out": len(carried),
            "dynamic_sampling/expired": len(dropped),
            "dynamic_sampling/missing": max(admission.needed - len(groups), 0),
        }
    return RolloutBatch(groups, sampled, after, tokens, version, metrics)
