"""Dynamic sampling: one step's groups are collected as a stream. Slots stay full, and a group is scored once its last
completion ends.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.engine.engine import Backend
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.evaluate import describe, describe_episodes, describe_tasks, failed_call
from jaxrl_llm.rollout.groups import (
    PLACE,
    AdmissionPolicy,
    Carryover,
    GroupSource,
    PartialGroup,
    RolloutBatch,
    informative,
    replay,
    tokens_in,
    whole,
)
from jaxrl_llm.rollout.respond import Requests, Status, respond
from jaxrl_llm.types import Completion, Group

OF_SCORES = (
    *("good", "seen", "stream", "successes", "unscored"),
    *("kept", "sampled", "replaced", "failures", "seconds"),
)
"""The attributes of a ``Judging`` that change while a step is filled."""


MEMORY = 256
"""Number of groups over which the share of informative ones is estimated."""


class Judging:
    """Owner of a step's groups from their end on: their scores, and what is kept of them.

    Scores are taken in the order in which groups ended, whenever they come: no decision depends on the clock.

    Args:
      source: of the scores.
      admission: which groups can teach.
      version: of the weights.
      left: carryover of the step before, with the step's progress if it was stopped.

    Attributes:
      good, seen, stream, successes: as in ``Carryover``, after the scores taken so far.
      unscored: groups that ended together and whose scores are not taken yet, in the order in which they ended.
      kept: groups that can teach, by number.
      sampled: groups scored, by number.
      replaced: numbers of the groups with a replayed success.
      failures: of rewards.
      seconds: in which nothing was sampled, since scores were waited for or measured on the device.
    """

    def __init__(self, source: GroupSource, admission: AdmissionPolicy, version: int, left: Carryover):
        self._source = source
        self._admission = admission
        self._version = version
        self.good, self.seen, self.stream = left.good, left.seen, left.stream
        self.successes = left.successes
        self.unscored: list[list[PartialGroup]] = []
        self.kept: dict[int, Group] = {}
        self.sampled: dict[int, Group] = {}
        self.replaced: list[int] = []
        self.failures = Failures()
        self.seconds = 0.0
        vars(self).update({name: left.underway[name] for name in OF_SCORES if name in left.underway})
        self.unscored = [list(groups) for groups in self.unscored]
        self._coming = [source.score(groups) for groups in self.unscored]

    def progress(self) -> dict[str, Any]:
        """Return the progress, from which another ``Judging`` resumes; it asks for missing scores again."""
        return {name: getattr(self, name) for name in OF_SCORES}

    def begin(self, groups: list[PartialGroup]) -> None:
        """Begin to score groups that ended together."""
        began = time.perf_counter()
        self.unscored.append(groups)
        self._coming.append(self._source.score(groups))
        self.seconds += time.perf_counter() - began

    def decide(self, holds: Callable[[int, float], bool]) -> bool:
        """Return ``holds(kept, share)``: the number of groups kept of all that ended, and the share that can teach.

        Scores are waited for only as long as the result depends on them: while it would differ if no open group or
        every one could teach. ``holds`` must be monotone in both arguments.
        """
        while True:
            found = [holds(*self.expected(many)) for many in (False, True)]
            if found[0] == found[1]:
                return found[0]
            self.take()

    def expected(self, many: bool) -> tuple[int, float]:
        """Return the number kept and the share, if no group whose score is open can teach, or if ``many`` do."""
        kept, good, seen = len(self.kept), self.good, self.seen
        for groups in self.unscored:
            played = sum(any(not one.unplayed for one in group.completions) for group in groups)
            new = played if many or not self._admission.filter_groups else 0
            kept += new
            good, seen = remember(good, seen, new, len(groups))
        return kept, share_of(good, seen) if self._admission.filter_groups else 1.0

    def take(self, most: int = 1) -> None:
        """Wait for the oldest open scores, up to ``most`` batches of them.

        Successes are replayed in groups that failed; groups that can teach and were sampled are kept.
        """
        for _ in range(min(most, len(self.unscored))):
            began = time.perf_counter()
            scored, failures = self._coming[0]()
            self.seconds += time.perf_counter() - began
            del self.unscored[0], self._coming[0]
            self.failures += failures
            self._keep(scored)

    def current(self) -> dict[str, Any]:
        """Return the memory of the stream of prompts, after all scores that the next prompt depends on."""
        if self._source.stream.learns(self.stream):
            self.take(len(self.unscored))
        return self.stream

    def _keep(self, scored: dict[int, Group]) -> None:
        admission, source = self._admission, self._source
        found = source.shaped(scored, self._version, admission.longest_of)
        replaced: dict[int, Group] = {}
        if admission.collect.replay is not None:
            settings = admission.collect.replay
            self.successes, replaced = replay(settings, self.successes, scored, source.seed, admission.left_out)
            self.replaced += replaced
        learned = found | source.shaped(replaced, self._version, admission.longest_of)
        reads = admission.filter_groups
        good = {
            number: group
            for number, group in learned.items()
            if not all(one.unplayed for one in group.completions) and (not reads or informative(group, reads))
        }
        self.stream = source.stream.observe(self.stream, list(found.values()))
        self.sampled |= found
        self.kept |= good
        self.good, self.seen = remember(self.good, self.seen, len(good), len(found))


def share_of(good: float, seen: float) -> float:
    """Estimate the share of informative groups; the prior is four of five, with the weight of two groups.

    A first step that expects less samples more than it needs, and the surplus is learned from in the second, when the
    policy has moved furthest from the one that sampled it.
    """
    return (good + 1.6) / (seen + 2)


def remember(good: float, seen: float, new_good: int, new: int) -> tuple[float, float]:
    """Return the counts with ``new`` groups added; old ones fade once there are more than ``MEMORY``."""
    good = good + new_good
    seen = seen + new
    fade = min(1.0, MEMORY / max(seen, 1.0))
    return good * fade, seen * fade


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Parts that fill a step with groups.

    Attributes:
      engine: the sampler of tokens.
      source: prompts and scores.
      sampling: rules.
      admission: policy that decides which groups to start.
      status: receives progress texts.
    """

    engine: Backend
    source: GroupSource
    sampling: Sampling
    admission: AdmissionPolicy
    status: Status


BORNE = 2
"""Stops in a row, without anything that ended between them, after which a step keeps what is being sampled."""
PROGRESS = ("cursor", "asked", "limits", "returned", "held", "tokens", "idle")
"""The attributes of a ``Step`` that change while it is filled, without those of its ``Judging``."""


class Step:
    """Owner of the requests and results of one step, by a group's number in the stream of prompts.

    Args:
      sampler: engine, prompts, scores.
      version: of the weights.
      left: carryover of the step before; its unfinished groups are requested at once. If the run was stopped within
        this step, it goes on there.

    Attributes:
      first: groups to learn from that an earlier step found.
      judging: of the groups that are whole.
      asked: groups with open requests, and the completions that the backend has returned.
      limits: of those groups, by number: the length at which this step ends each completion that it samples.
      returned: numbers of the groups with tokens that this step has sampled, and the backend has returned.
      tokens: sampled in this step, in completions that the backend has returned.
      idle: times in a row that the run was stopped within this step before anything ended.
    """

    def __init__(self, sampler: Sampler, version: int, left: Carryover):
        self.sampler = sampler
        self.version = version
        self.first = list(left.carried[: sampler.admission.needed])
        self.judging = Judging(sampler.source, sampler.admission, version, left)
        self.cursor = self.begun = left.cursor
        self.requests = Requests(sampler.engine, sampler.sampling, sampler.source.episodes)
        self.asked: dict[int, PartialGroup] = {}
        self.limits: dict[int, dict[int, int]] = {}
        self.returned: set[int] = set()
        self.held: list[PartialGroup] = []
        self.tokens = self.idle = 0
        vars(self).update({name: left.underway[name] for name in PROGRESS if name in left.underway})
        for number, limits in self.limits.items():
            known = self.asked[number].completions
            self.request(number, [i for i, limit in limits.items() if not whole(known[i], limit)])
        self.branch()
        self.close(set(self.asked))
        if not left.underway:
            for group in left.unfinished:
                self.ask(group)

    def short(self) -> bool:
        """Whether groups are missing, once all that ended are scored."""
        needed = self.sampler.admission.needed - len(self.first)
        return self.judging.decide(lambda kept, share: kept < needed)

    def admit(self) -> None:
        """Request as many more groups as the admission policy wants."""
        admission = self.sampler.admission

        def wanted(kept: int, share: float) -> bool:
            running, started = len(self.asked), self.cursor - self.begun
            return admission.wants(len(self.first) + kept, running, len(self.held), len(self.requests), started, share)

        while self.judging.decide(wanted):
            group, self.judging.stream = self.sampler.source.ask(self.cursor, self.judging.current())
            self.ask(group)
            self.cursor += 1

    def ask(self, group: PartialGroup) -> None:
        """Request the completions that a group lacks and that may begin; a group that lacks none is scored at once."""
        longest = self.sampler.admission.longest_of(group.problem.task)
        begun = [i for i, c in enumerate(group.completions) if c is not None and not whole(c, longest)]
        self.asked[group.number] = group
        self.limits[group.number] = {}
        lacking = sorted([*begun, *self.decided(group.number, {})])
        self.request(group.number, lacking)
        if not lacking:
            self.close({group.number})

    def decided(self, number: int, under_way: Mapping[Any, Completion]) -> list[int]:
        """Return the members of a group that may begin now and have not been requested; ``under_way``: episodes."""
        episodes, group = self.sampler.source.episodes, self.asked[number]
        left = [i for i, c in enumerate(group.completions) if c is None and i not in self.limits[number]]
        if not left or episodes is None or not episodes.plays(group.problem):
            return left
        known = [under_way.get((number, i), c) for i, c in enumerate(group.completions)]
        new = episodes.beginnings(number, known, left)
        completions = tuple(new.get(i, c) for i, c in enumerate(group.completions))
        self.asked[number] = dataclasses.replace(group, completions=completions)
        return list(new)

    def branch(self) -> None:
        """Request the members of groups whose beginning has been decided meanwhile."""
        episodes = self.sampler.source.episodes
        if episodes and episodes.branching:  # else all members of a group begin together
            under_way = self.requests.episodes
            for number in self.asked:
                new = self.decided(number, under_way)
                if new:
                    self.request(number, new)

    def request(self, number: int, lacking: list[int]) -> None:
        """Request these completions of a group, episodes once their environments are ready."""
        source, admission, limits = self.sampler.source, self.sampler.admission, self.limits[number]
        group = self.asked[number]
        known = [group.completions[i] for i in lacking]
        for i, begun in zip(lacking, known, strict=True):
            limits.setdefault(i, admission.limit(length(begun), group.problem.task))
        if lacking and source.plays(group.problem):
            source.episodes.prepare(source.scenes(group, lacking), known, group.prompt)
        else:
            self.submit(number, lacking)

    def begin(self) -> None:
        """Request the episodes whose environments have become ready."""
        episodes = self.sampler.source.episodes
        for opened in [] if episodes is None else episodes.ready():
            number, members = opened[0].key[0], {one.key[1]: one.begun for one in opened}
            group = self.asked[number]
            completions = tuple(members.get(i, c) for i, c in enumerate(group.completions))
            prompt = opened[0].prompt if group.prompt is None else group.prompt
            self.asked[number] = dataclasses.replace(group, prompt=prompt, completions=completions)
            self.submit(number, [*members])

    def submit(self, number: int, lacking: list[int]) -> None:
        """Give these completions of a group to the backend."""
        group, limits = self.asked[number], self.limits[number]
        seeds = self.sampler.source.seeds(number)
        begun = [group.completions[i] for i in lacking]
        keys = [(number, i) for i in lacking]
        prompts = [group.prompt] * len(lacking)
        self.requests.submit(keys, prompts, [seeds[i] for i in lacking], [limits[i] for i in lacking], begun)

    def stop(self) -> None:
        """Abort requests once there are enough groups: all with ``interrupt``, else those of groups that have not run
        yet.
        """
        ending = self.requests.keys
        if not self.sampler.admission.collect.interrupt:
            ran = self.returned | {number for number, _ in self.requests.running}
            ending = [key for key in ending if key[0] not in ran]
        self.requests.abort(ending)

    def note(self, over: dict[Any, Completion]) -> None:
        """Put returned completions into their groups."""
        for (number, index), completion in over.items():
            group = self.asked[number]
            before = group.completions[index]
            # What never began keeps no trace; an episode may end without a new token.
            known = None if before is None else before.episode
            if length(completion) > length(before) or completion.episode != known:
                self.tokens += completion.length - (0 if before is None else before.length)
                completions = (*group.completions[:index], completion, *group.completions[index + 1 :])
                self.asked[number] = dataclasses.replace(group, completions=completions)
                self.returned.add(number)

    def progress(self) -> dict[str, Any]:
        """Abort all requests, and return the progress, with which another ``Step`` goes on.

        What is being sampled is sampled again then, so that each token comes by one way: decoding and prefill round
        otherwise. It is kept where what ends first decides which groups are begun, and where nothing has ended between
        ``BORNE`` stops in a row, so that a run that is stopped again and again moves on.
        """
        admission = self.sampler.admission
        raced = admission.collect.interrupt or admission.collect.token_budget
        raced = raced or (admission.filter_groups and self.sampler.source.episodes is None)
        self.idle = 0 if self.requests.ended else self.idle + 1
        self.requests.abort(self.requests.keys, undo=self.idle <= BORNE and not raced)
        self.note(self.requests.take())
        return self.judging.progress() | {name: getattr(self, name) for name in PROGRESS}

    def close(self, numbers: set[int]) -> None:
        """Begin to score those of the groups that are whole, and hold the others; groups with open requests stay."""
        admission = self.sampler.admission
        done = []
        for number in sorted(numbers - {number for number, _ in self.requests.keys}):
            group = self.asked.pop(number)
            del self.limits[number]
            ended = all(whole(c, admission.longest_of(group.problem.task)) for c in group.completions)
            (done if ended else self.held).append(group)
        if done:
            self.judging.begin(done)


def length(completion: Completion | None) -> int:
    """Return the number of tokens of a completion, which may not have begun."""
    return 0 if completion is None else len(completion.tokens)


def collect(
    sampler: Sampler, model: Any, version: int, left: Carryover, late: Callable[[], bool] = lambda: False
) -> RolloutBatch | Carryover:
    """Fill a step with groups.

    The carryover of earlier steps comes first: surplus groups, then unfinished ones. New prompts are begun as
    ``AdmissionPolicy`` decides, with the filter (DAPO's dynamic sampling, arXiv 2503.14476 section 3.2) until there are
    enough informative groups. Groups are scored while others are sampled. Groups that still run once there are enough
    are finished, or interrupted and resumed by the next step, up to ``Collect.max_age`` times. Groups are learned from
    in the order of their prompts; surplus is carried to the next step, and dropped after that. Groups that still wait
    for a slot are left to the next step in either case. Once ``max_rounds`` is used up the step learns from the groups
    it has.

    Args:
      sampler: engine, prompts, scores.
      model: weights to sample from.
      version: of the weights; every token sampled here is marked with it.
      left: carryover of the step before.
      late: asked after each chunk: whether to stop within the step.

    Returns:
      The groups; if ``late`` says so and groups are missing, the carryover with the progress of the step.
    """
    start = time.perf_counter()
    needed = sampler.admission.needed
    step = Step(sampler, version, left)
    for over in respond(step.requests, model, version):
        step.note(over)
        step.begin()
        step.branch()
        step.close({number for number, _ in over})
        if (step.requests or step.short()) and late():
            return dataclasses.replace(left, underway=step.progress())
        step.admit()
        if not step.short():
            step.stop()
        found = min(len(step.first) + step.judging.expected(False)[0], needed)
        sampler.status(f"sampling: {found}/{needed} groups, {step.requests.tokens} tokens")
    judging = step.judging
    judging.take(len(judging.unscored))
    seconds = {"time/rollout_s": time.perf_counter() - start - judging.seconds, "time/reward_s": judging.seconds}
    if sampler.source.episodes is not None:
        seconds["time/environment_s"] = step.requests.waited_s
        sampler.source.episodes.retain(
            [(group.number, i) for group in step.held for i in range(len(group.completions))]
        )
        seconds |= sampler.source.episodes.trouble()
    collected = _collected(step, left, seconds)
    sampler.engine.start(sampler.sampling)  # nothing runs any more: learning needs the memory of the cache
    return collected


def _collected(step: Step, before: Carryover, seconds: dict[str, float]) -> RolloutBatch:
    """Return the step's groups in order, the carryover for the next step, and metrics."""
    admission, judging = step.sampler.admission, step.judging
    found = step.first + [judging.kept[number] for number in sorted(judging.kept)]
    groups = found[: admission.needed]
    spare = found[admission.needed :]
    # A surplus group would have no token of the next step's policy.
    carried, dropped = (spare, []) if admission.collect.learn_earlier else ([], spare)
    dropped += before.carried[admission.needed :]
    held = sorted(step.held, key=lambda group: group.number)
    older = [dataclasses.replace(group, age=group.age + 1 if group.begun else 0) for group in held]
    unfinished = tuple(group for group in older if group.age <= admission.oldest)
    expired = [group for group in older if group.age > admission.oldest]
    sampled = [judging.sampled[number] for number in sorted(judging.sampled)]
    failed = "" if before.tool_failed else failed_call(sampled)
    after = Carryover(
        step.cursor,
        tuple(carried),
        unfinished,
        judging.good,
        judging.seen,
        judging.stream,
        successes=judging.successes,
        critic=before.critic,
        tool_failed=before.tool_failed or bool(failed),
    )
    wasted = [group for number, group in judging.sampled.items() if number not in judging.kept]
    thrown = tokens_in([*dropped, *expired, *wasted])
    thrown += sum(judging.sampled[n].completions[PLACE].length for n in judging.replaced if n in judging.kept)
    resumed = before.unfinished if len(step.first) < admission.needed else ()
    metrics: dict[str, Any] = _measured(step, before, sampled, groups, thrown, seconds) | {
        "rollout/resumed": sum(group.begun for group in resumed),
        "rollout/interrupted": sum(group.begun for group in unfinished),
        "rollout/expired": len(expired),
    }
    if failed:
        metrics["event/tool_failed"] = failed
    if admission.collect.replay is not None:
        metrics |= {
            "replay/replaced": len(judging.replaced),
            "replay/stored": sum(len(solved.successes) for solved in judging.successes.values()),
            "replay/prompts": len(judging.successes),
        }
    if admission.filter_groups:
        metrics["dynamic_sampling/finished"] = len(sampled)
        metrics["dynamic_sampling/kept_fraction"] = len(judging.kept) / len(sampled) if sampled else math.nan
    if admission.filter_groups or admission.collect.interrupt or admission.collect.token_budget:
        metrics |= {
            "dynamic_sampling/rounds": (step.cursor - before.cursor) / admission.needed,
            "dynamic_sampling/carried_in": len(step.first),
            "dynamic_sampling/carried_out": len(carried),
            "dynamic_sampling/expired": len(dropped),
            "dynamic_sampling/missing": max(admission.needed - len(groups), 0),
        }
    return RolloutBatch(groups, sampled, after, step.tokens, step.version, metrics)


def _measured(
    step: Step, before: Carryover, sampled: list[Group], groups: list[Group], thrown: int, seconds: dict[str, float]
) -> dict[str, float]:
    """Compute the metrics of a step: its groups, their durations, and the share of the sampled tokens that is learned
    from.
    """
    source, judging = step.sampler.source, step.judging
    learned = tokens_in(groups)
    tokens = step.tokens
    slot_steps = step.sampler.engine.slot_steps
    found = seconds | (judging.failures.metrics() if sampled else {}) | describe(sampled or groups)
    found |= describe_episodes(sampled or groups, bool(source.episodes and source.episodes.branching))
    found |= describe_tasks(source.labels, sampled or groups, groups) | source.stream.metrics(
        before.stream, judging.stream
    )
    return found | {
        "prompts": float(step.cursor),
        "throughput/sampled_tokens_per_s": tokens / max(seconds["time/rollout_s"], 1e-9) if tokens else math.nan,
        "rollout/useful_fraction": learned / (learned + thrown) if learned + thrown else math.nan,
        "rollout/utilisation": tokens / slot_steps if slot_steps else math.nan,
    }
