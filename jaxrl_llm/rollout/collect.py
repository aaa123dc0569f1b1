"""Groups for one step, as a stream: slots stay full, a group is scored once its last completion is there."""

import collections
import dataclasses
import math
import time
from typing import Any

from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.admission import AdmissionPolicy, Underway, remember, share_of
from jaxrl_llm.rollout.completions import Status
from jaxrl_llm.rollout.groups import (
    Carryover,
    GroupSource,
    PartialGroup,
    RolloutBatch,
    describe,
    describe_tasks,
    informative,
    tokens_in,
    whole,
)
from jaxrl_llm.rollout.replay import PLACE, Store, replay, stored
from jaxrl_llm.tasks.stream import Memory
from jaxrl_llm.types import Completion, Group


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
        task = group.problem.task
        lacking = [i for i, c in enumerate(group.completions) if not whole(c, admission.longest_of(task))]
        begun = [group.completions[i] for i in lacking]
        limits = [admission.limit(len(c.tokens) if c else 0, task) for c in begun]
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
    successes: Store = dataclasses.field(default_factory=dict)
    replaced: list[int] = dataclasses.field(default_factory=list)

    def add(self, sampler: Sampler, back: list[PartialGroup], version: int) -> None:
        """Score the groups that are whole and keep what can teach; hold the others for the next step."""
        admission = sampler.admission
        ended = [all(whole(c, admission.longest_of(g.problem.task)) for c in g.completions) for g in back]
        done = [g for g, end in zip(back, ended, strict=True) if end]
        self.held += [g for g, end in zip(back, ended, strict=True) if not end]
        if not done:
            return
        began = time.perf_counter()
        scored, failures = sampler.source.score(done)
        self.seconds += time.perf_counter() - began
        self.failures += failures
        found = sampler.source.shaped(scored, version, admission.longest_of)
        reads = admission.filter_groups
        learned = found | sampler.source.shaped(self.replay(sampler, scored), version, admission.longest_of)
        good = {number: group for number, group in learned.items() if not reads or informative(group, reads)}
        self.stream = sampler.source.told(self.stream, list(found.values()))
        self.sampled |= found
        self.kept |= good
        self.good, self.seen = remember(self.good, self.seen, len(good), len(found))

    def replay(self, sampler: Sampler, scored: dict[int, Group]) -> dict[int, Group]:
        """Those of the groups that failed and of which a success is stored, with it in the place of a member."""
        settings = sampler.admission.collect.replay
        if settings is None:
            return {}
        admission = sampler.admission
        self.successes, replaced = replay(settings, self.successes, scored, sampler.source.seed, admission.left_out)
        self.replaced += replaced
        return replaced

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
    tally = Tally(left.good, left.seen, left.stream, successes=left.successes)
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
    after = Carryover(
        cursor, tuple(carried), tuple(unfinished), tally.good, tally.seen, tally.stream, successes=tally.successes
    )
    learned = tokens_in(groups)
    thrown = tokens_in([*dropped, *expired, *(g for number, g in tally.sampled.items() if number not in tally.kept)])
    thrown += sum(len(tally.sampled[n].completions[PLACE].tokens) for n in tally.replaced if n in tally.kept)
    sampled = [tally.sampled[number] for number in sorted(tally.sampled)]
    failed = tally.failures.metrics() if tally.sampled else {}
    metrics = (
        seconds
        | failed
        | describe(sampled or groups)
        | describe_tasks(sampler.source.labels, sampled or groups, groups)
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
    if admission.collect.replay is not None:
        counts = (len(tally.replaced), stored(tally.successes), len(tally.successes))
        metrics |= dict(zip(("replay/replaced", "replay/stored", "replay/prompts"), counts, strict=True))
    if admission.filter_groups:
        metrics["dynamic_sampling/finished"] = len(tally.sampled)
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
