"""Dynamic sampling: a step's groups come as a stream; slots stay full, and a group is scored once it has ended."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.engine.engine import Backend
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Failures
from jaxrl_llm.rollout.evaluate import episode_metrics, failed_call, group_metrics, task_metrics
from jaxrl_llm.rollout.generation import OpenRequests, Status, generate_stream
from jaxrl_llm.rollout.groups import (
    REPLACED_MEMBER,
    AdmissionPolicy,
    Carryover,
    GroupSource,
    PartialGroup,
    RolloutBatch,
    count_sampled_tokens,
    informative,
    is_finished,
    replay_successes,
)
from jaxrl_llm.types import Completion, Group

SHARE_WINDOW = 256
"""Number of groups over which the share of informative ones is estimated."""
SCORES_STATE = (
    *("recent_informative", "recent_scored", "stream_memory", "successes", "pending"),
    *("kept", "sampled", "replaced", "failures", "seconds"),
)
"""The attributes of ``PendingScores`` that change while a step is filled; checkpoints hold them."""


class PendingScores:
    """A step's groups after their completions ended: awaits their scores, and keeps the groups to learn from.

    Scores are taken in the order in which groups ended, whenever they arrive: no decision depends on the clock. Of
    ``carryover``, from the step before, it takes this step's progress if the run was stopped within it.

    Attributes:
      recent_informative, recent_scored, stream_memory, successes: as in ``Carryover``, after the scores taken so far.
      pending: groups that ended together and whose scores are not taken yet, in the order in which they ended.
      kept: groups to learn from, by number.
      sampled: groups scored, by number.
      replaced: numbers of the groups with a replayed success.
      failures: of rewards.
      seconds: in which nothing was sampled, since the sampler waited for scores or a reward ran on the device.
    """

    def __init__(self, source: GroupSource, admission: AdmissionPolicy, version: int, carryover: Carryover):
        self._source = source
        self._admission = admission
        self._version = version
        self.recent_informative, self.recent_scored = carryover.recent_informative, carryover.recent_scored
        self.stream_memory = carryover.stream_memory
        self.successes = carryover.successes
        self.pending: list[list[PartialGroup]] = []
        self.kept: dict[int, Group] = {}
        self.sampled: dict[int, Group] = {}
        self.replaced: list[int] = []
        self.failures = Failures()
        self.seconds = 0.0
        progress = carryover.step_progress
        vars(self).update({name: progress[name] for name in SCORES_STATE if name in progress})
        self.pending = [list(groups) for groups in self.pending]
        self._wait_for_scores = [source.score(groups) for groups in self.pending]

    def start(self, groups: list[PartialGroup]) -> None:
        """Start to score groups that ended together."""
        started_at = time.perf_counter()
        self.pending.append(groups)
        self._wait_for_scores.append(self._source.score(groups))
        self.seconds += time.perf_counter() - started_at

    def decide(self, predicate: Callable[[int, float], bool]) -> bool:
        """Return ``predicate(kept, share)``, monotone in both, of the groups kept among all that ended, and the share
        that is informative. Waits for scores only while the answer depends on whether pending groups are informative.
        """
        while True:
            pessimistic, optimistic = (predicate(*self.bound(optimistic)) for optimistic in (False, True))
            if pessimistic == optimistic:
                return pessimistic
            self.wait()

    def bound(self, optimistic: bool) -> tuple[int, float]:
        """Return (kept, informative share) if no pending group is informative, or each one if ``optimistic``."""
        count, informative_groups, scored = len(self.kept), self.recent_informative, self.recent_scored
        for groups in self.pending:
            played = sum(any(not completion.unplayed for completion in group.completions) for group in groups)
            new = played if optimistic or not self._admission.filter_groups else 0
            count += new
            informative_groups, scored = fade_counts(informative_groups, scored, new, len(groups))
        return count, informative_share(informative_groups, scored) if self._admission.filter_groups else 1.0

    def wait(self, batches: int = 1) -> None:
        """Wait for the oldest pending scores, up to so many batches of groups that ended together."""
        for _ in range(min(batches, len(self.pending))):
            started_at = time.perf_counter()
            groups, failures = self._wait_for_scores[0]()
            self.seconds += time.perf_counter() - started_at
            del self.pending[0], self._wait_for_scores[0]
            self.failures += failures
            self._filter(groups)

    def next_memory(self) -> dict[str, Any]:
        """Return the memory of the stream of prompts, after all scores that the next prompt depends on."""
        if self._source.stream.learns(self.stream_memory):
            self.wait(len(self.pending))
        return self.stream_memory

    def _filter(self, groups: dict[int, Group]) -> None:
        """Replay successes in groups that failed; keep the informative groups of which anything was sampled."""
        admission, source = self._admission, self._source
        sampled = source.shape_rewards(groups, self._version, admission.longest_of)
        replaced: dict[int, Group] = {}
        if admission.collect.replay is not None:
            self.successes, replaced = replay_successes(
                admission.collect.replay, self.successes, groups, source.seed, admission.left_out
            )
            self.replaced += replaced
        candidates = sampled | source.shape_rewards(replaced, self._version, admission.longest_of)
        learned = {
            number: group
            for number, group in candidates.items()
            if not all(completion.unplayed for completion in group.completions)
            and (not admission.filter_groups or informative(group, admission.filter_groups))
        }
        self.stream_memory = source.stream.observe(self.stream_memory, list(sampled.values()))
        self.sampled |= sampled
        self.kept |= learned
        self.recent_informative, self.recent_scored = fade_counts(
            self.recent_informative, self.recent_scored, len(learned), len(sampled)
        )


def informative_share(informative_groups: float, scored: float) -> float:
    """Estimate the share of informative groups; the prior is four of five, with the weight of two groups. A lower one
    would oversample in the first step, and learn from the surplus when the policy has moved furthest from its sampler.
    """
    return (informative_groups + 1.6) / (scored + 2)


def fade_counts(informative_groups: float, scored: float, new_informative: int, new: int) -> tuple[float, float]:
    """Return the counts with ``new`` groups added; old ones fade once there are more than ``SHARE_WINDOW``."""
    informative_groups += new_informative
    scored += new
    fade = min(1.0, SHARE_WINDOW / max(scored, 1.0))
    return informative_groups * fade, scored * fade


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Parts that fill a step with groups: ``source`` has prompts and scores, ``admission`` decides which start."""

    engine: Backend
    source: GroupSource
    sampling: Sampling
    admission: AdmissionPolicy
    status: Status


MAX_STALLED_STOPS = 2
"""Stops in a row, without anything that ended between them, after which a step keeps what is being sampled."""
COLLECTOR_STATE = (
    *("cursor", "open_groups", "target_lengths", "sampled_numbers"),
    *("unfinished", "tokens", "stalled_stops"),
)
"""The attributes of a ``StepCollector`` that change while it is filled; checkpoints hold them."""


class StepCollector:
    """Owner of the requests and groups of one step, by a group's number in the stream of prompts. Unfinished groups of
    ``carryover`` are requested at once; if the run was stopped within this step, it goes on there.

    Attributes:
      surplus: groups to learn from that an earlier step sampled.
      scores: of the groups whose completions have all ended.
      open_groups: groups with open requests, and the completions that the backend has returned.
      target_lengths: of those groups, by number: the length at which this step ends each completion that it samples.
      sampled_numbers: of the groups with tokens that this step has sampled, and the backend has returned.
      unfinished: groups that used up their token budget in this step, or were interrupted.
      tokens: sampled in this step, in completions that the backend has returned.
      stalled_stops: times in a row that the run was stopped within this step before anything ended.
    """

    def __init__(self, sampler: Sampler, version: int, carryover: Carryover):
        self.sampler = sampler
        self.version = version
        self.surplus = list(carryover.surplus[: sampler.admission.needed])
        self.scores = PendingScores(sampler.source, sampler.admission, version, carryover)
        self.cursor = self.first_cursor = carryover.cursor
        self.requests = OpenRequests(sampler.engine, sampler.sampling, sampler.source.episodes)
        self.open_groups: dict[int, PartialGroup] = {}
        self.target_lengths: dict[int, dict[int, int]] = {}
        self.sampled_numbers: set[int] = set()
        self.unfinished: list[PartialGroup] = []
        self.tokens = self.stalled_stops = 0
        progress = carryover.step_progress
        vars(self).update({name: progress[name] for name in COLLECTOR_STATE if name in progress})
        for number, lengths in self.target_lengths.items():
            completions = self.open_groups[number].completions
            self.request(number, [i for i, end in lengths.items() if not is_finished(completions[i], end)])
        self.request_branches()
        self.score_or_pause(set(self.open_groups))
        if not progress:
            for group in carryover.unfinished:
                self.open(group)

    def needs_groups(self) -> bool:
        """Whether groups are missing, once all that ended are scored."""
        needed = self.sampler.admission.needed - len(self.surplus)
        return self.scores.decide(lambda count, share: count < needed)

    def start_groups(self) -> None:
        """Request as many more groups as the admission policy asks for."""
        admission = self.sampler.admission

        def should_start(count: int, share: float) -> bool:
            running, started, unfinished = len(self.open_groups), self.cursor - self.first_cursor, len(self.unfinished)
            return admission.should_start(
                len(self.surplus) + count, running, unfinished, len(self.requests), started, share
            )

        while self.scores.decide(should_start):
            group, self.scores.stream_memory = self.sampler.source.new_group(self.cursor, self.scores.next_memory())
            self.open(group)
            self.cursor += 1

    def open(self, group: PartialGroup) -> None:
        """Request the completions that a group lacks and that may begin; a group that lacks none is scored at once."""
        longest = self.sampler.admission.longest_of(group.problem.task)
        partial = [i for i, c in enumerate(group.completions) if c is not None and not is_finished(c, longest)]
        self.open_groups[group.number] = group
        self.target_lengths[group.number] = {}
        members = sorted([*partial, *self.members_to_request(group.number, {})])
        self.request(group.number, members)
        if not members:
            self.score_or_pause({group.number})

    def members_to_request(self, number: int, running: Mapping[Any, Completion]) -> list[int]:
        """Return the members of a group that may begin now and have not been requested; ``running``: episodes."""
        episodes, group = self.sampler.source.episodes, self.open_groups[number]
        missing = [i for i, c in enumerate(group.completions) if c is None and i not in self.target_lengths[number]]
        if not missing or episodes is None or not episodes.plays(group.problem):
            return missing
        completions = [running.get((number, i), c) for i, c in enumerate(group.completions)]
        starts = episodes.members_to_request(number, completions, missing)
        self.open_groups[number] = group.with_completions(starts)
        return list(starts)

    def request_branches(self) -> None:
        """Request the members of groups whose branch point has been decided meanwhile."""
        episodes = self.sampler.source.episodes
        if episodes and episodes.branching:  # else all members of a group begin together
            running = self.requests.episodes
            for number in self.open_groups:
                if members := self.members_to_request(number, running):
                    self.request(number, members)

    def request(self, number: int, members: list[int]) -> None:
        """Request these completions of a group, episodes once their environments are ready."""
        source, admission, lengths = self.sampler.source, self.sampler.admission, self.target_lengths[number]
        group = self.open_groups[number]
        partials = [group.completions[i] for i in members]
        for i, partial in zip(members, partials, strict=True):
            lengths.setdefault(i, admission.limit(length(partial), group.problem.task))
        if members and source.plays(group.problem):
            source.episodes.prepare(source.episode_specs(group, members), partials, group.prompt)
        else:
            self.submit(number, members)

    def submit_ready_episodes(self) -> None:
        """Submit the episodes whose environments have become ready."""
        episodes = self.sampler.source.episodes
        for ready in [] if episodes is None else episodes.pop_ready():
            number, members = ready[0].key[0], {episode.key[1]: episode.partial for episode in ready}
            group = self.open_groups[number].with_completions(members)
            prompt = ready[0].prompt if group.prompt is None else group.prompt
            self.open_groups[number] = dataclasses.replace(group, prompt=prompt)
            self.submit(number, [*members])

    def submit(self, number: int, members: list[int]) -> None:
        """Submit these completions of a group to the backend."""
        group, lengths = self.open_groups[number], self.target_lengths[number]
        seeds = self.sampler.source.seeds(number)
        partials = [group.completions[i] for i in members]
        keys = [(number, i) for i in members]
        prompts = [group.prompt] * len(members)
        self.requests.submit(keys, prompts, [seeds[i] for i in members], [lengths[i] for i in members], partials)

    def abort_surplus(self) -> None:
        """Abort requests once there are enough groups: all with ``interrupt``, else of groups that have not run yet."""
        keys = self.requests.keys
        if not self.sampler.admission.collect.interrupt:
            ran = self.sampled_numbers | {number for number, _ in self.requests.running}
            keys = [key for key in keys if key[0] not in ran]
        self.requests.abort(keys)

    def record(self, completions: dict[Any, Completion]) -> None:
        """Put returned completions into their groups."""
        for (number, index), completion in completions.items():
            group = self.open_groups[number]
            before = group.completions[index]
            # What never began keeps no trace; an episode may end without a new token.
            episode = None if before is None else before.episode
            if length(completion) > length(before) or completion.episode != episode:
                self.tokens += completion.length - (0 if before is None else before.length)
                self.open_groups[number] = group.with_completions({index: completion})
                self.sampled_numbers.add(number)

    def suspend(self) -> dict[str, Any]:
        """Abort all requests, and return the progress, from which another ``StepCollector`` goes on.

        Running turns are then sampled again, since decoding and prefill round differently. They are kept where what
        ends first decides which groups begin, and after ``MAX_STALLED_STOPS`` stops without an end, to move on.
        """
        admission = self.sampler.admission
        order_matters = admission.collect.interrupt or admission.collect.token_budget
        order_matters = order_matters or (admission.filter_groups and self.sampler.source.episodes is None)
        self.stalled_stops = 0 if self.requests.num_ended else self.stalled_stops + 1
        undo = self.stalled_stops <= MAX_STALLED_STOPS and not order_matters
        self.requests.abort(self.requests.keys, undo=undo)
        self.record(self.requests.pop_finished())
        states = (self.scores, SCORES_STATE), (self, COLLECTOR_STATE)
        return {name: getattr(owner, name) for owner, names in states for name in names}

    def score_or_pause(self, numbers: set[int]) -> None:
        """Of groups without open requests, start to score the finished ones, and pause the others."""
        admission = self.sampler.admission
        finished = []
        for number in sorted(numbers - {number for number, _ in self.requests.keys}):
            group = self.open_groups.pop(number)
            del self.target_lengths[number]
            longest = admission.longest_of(group.problem.task)
            (finished if all(is_finished(c, longest) for c in group.completions) else self.unfinished).append(group)
        if finished:
            self.scores.start(finished)


def length(completion: Completion | None) -> int:
    """Return the number of tokens of a completion, which may not have begun."""
    return 0 if completion is None else len(completion.tokens)


def collect_groups(
    sampler: Sampler, weights: Any, version: int, carryover: Carryover, must_stop: Callable[[], bool] = lambda: False
) -> RolloutBatch | Carryover:
    """Fill a step with groups and return them; the carryover with its progress if ``must_stop`` ends it before.

    Surplus of earlier steps comes first, then unfinished groups. New prompts are begun as ``AdmissionPolicy`` decides,
    with the filter (DAPO's dynamic sampling, arXiv 2503.14476 section 3.2) until enough groups are informative, or
    ``max_rounds`` is used up. Groups that still run then are finished, or interrupted and resumed by the next step, up
    to ``Collect.max_age`` times; those that wait for a slot are left to it in either case. Groups are learned from in
    the order of their prompts; surplus is carried to the next step, and dropped after that.

    Args:
      version: of the weights; every token sampled here is marked with it.
      must_stop: called after each chunk: whether to stop within the step.
    """
    start = time.perf_counter()
    needed = sampler.admission.needed
    step = StepCollector(sampler, version, carryover)
    for finished in generate_stream(step.requests, weights, version):
        step.record(finished)
        step.submit_ready_episodes()
        step.request_branches()
        step.score_or_pause({number for number, _ in finished})
        if (step.requests or step.needs_groups()) and must_stop():
            return dataclasses.replace(carryover, step_progress=step.suspend())
        step.start_groups()
        if not step.needs_groups():
            step.abort_surplus()
        num_groups = min(len(step.surplus) + step.scores.bound(optimistic=False)[0], needed)
        sampler.status(f"sampling: {num_groups}/{needed} groups, {step.requests.tokens} tokens")
    scores = step.scores
    scores.wait(len(scores.pending))
    seconds = {"time/rollout_s": time.perf_counter() - start - scores.seconds, "time/reward_s": scores.seconds}
    if sampler.source.episodes is not None:
        seconds["time/environment_s"] = step.requests.environment_wait_s
        sampler.source.episodes.retain(
            [(group.number, i) for group in step.unfinished for i in range(len(group.completions))]
        )
        seconds |= sampler.source.episodes.close_metrics()
    batch = finish_step(step, carryover, seconds)
    sampler.engine.start(sampler.sampling)  # nothing runs any more: learning needs the memory of the cache
    return batch


def finish_step(step: StepCollector, before: Carryover, seconds: dict[str, float]) -> RolloutBatch:
    """Return the step's groups in order, the carryover for the next step, and metrics."""
    admission, scores = step.sampler.admission, step.scores
    candidates = step.surplus + [scores.kept[number] for number in sorted(scores.kept)]
    groups = candidates[: admission.needed]
    surplus, dropped = candidates[admission.needed :], list(before.surplus[admission.needed :])
    if not admission.collect.learn_earlier:  # a surplus group would have no token of the next step's policy
        surplus, dropped = [], surplus + dropped
    aged = [
        dataclasses.replace(group, age=group.age + 1 if group.has_tokens else 0)
        for group in sorted(step.unfinished, key=lambda group: group.number)
    ]
    unfinished = tuple(group for group in aged if group.age <= admission.max_age)
    expired = [group for group in aged if group.age > admission.max_age]
    sampled = [scores.sampled[number] for number in sorted(scores.sampled)]
    failed = "" if before.tool_failed else failed_call(sampled)
    after = Carryover(
        step.cursor,
        tuple(surplus),
        unfinished,
        scores.recent_informative,
        scores.recent_scored,
        scores.stream_memory,
        successes=scores.successes,
        critic=before.critic,
        tool_failed=before.tool_failed or bool(failed),
    )
    wasted = [group for number, group in scores.sampled.items() if number not in scores.kept]
    wasted_tokens = count_sampled_tokens([*dropped, *expired, *wasted])
    wasted_tokens += sum(
        scores.sampled[number].completions[REPLACED_MEMBER].length
        for number in scores.replaced
        if number in scores.kept
    )
    resumed = before.unfinished if len(step.surplus) < admission.needed else ()
    metrics: dict[str, Any] = step_metrics(step, before, sampled, groups, wasted_tokens, seconds) | {
        "rollout/resumed": sum(group.has_tokens for group in resumed),
        "rollout/interrupted": sum(group.has_tokens for group in unfinished),
        "rollout/expired": len(expired),
    }
    if failed:
        metrics["event/tool_failed"] = failed
    if admission.collect.replay is not None:
        metrics |= {
            "replay/replaced": len(scores.replaced),
            "replay/stored": sum(len(stored.successes) for stored in scores.successes.values()),
            "replay/prompts": len(scores.successes),
        }
    if admission.filter_groups:
        metrics["dynamic_sampling/finished"] = len(sampled)
        metrics["dynamic_sampling/kept_fraction"] = len(scores.kept) / len(sampled) if sampled else math.nan
    if admission.filter_groups or admission.collect.interrupt or admission.collect.token_budget:
        metrics |= {
            "dynamic_sampling/rounds": (step.cursor - before.cursor) / admission.needed,
            "dynamic_sampling/carried_in": len(step.surplus),
            "dynamic_sampling/carried_out": len(surplus),
            "dynamic_sampling/expired": len(dropped),
            "dynamic_sampling/missing": max(admission.needed - len(groups), 0),
        }
    return RolloutBatch(groups, sampled, after, step.tokens, step.version, metrics)


def step_metrics(
    step: StepCollector,
    before: Carryover,
    sampled: list[Group],
    groups: list[Group],
    wasted_tokens: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    """Compute a step's metrics: its groups, durations, and the share of the sampled tokens that is learned from."""
    source, scores = step.sampler.source, step.scores
    useful_tokens = count_sampled_tokens(groups)
    slot_steps = step.sampler.engine.slot_steps
    metrics = seconds | (scores.failures.metrics() if sampled else {}) | group_metrics(sampled or groups)
    metrics |= episode_metrics(sampled or groups, bool(source.episodes and source.episodes.branching))
    metrics |= task_metrics(source.labels, sampled or groups, groups)
    metrics |= source.stream.metrics(before.stream_memory, scores.stream_memory)
    rate = step.tokens / max(seconds["time/rollout_s"], 1e-9) if step.tokens else math.nan
    total = useful_tokens + wasted_tokens
    return metrics | {
        "prompts": float(step.cursor),
        "throughput/sampled_tokens_per_s": rate,
        "rollout/useful_fraction": useful_tokens / total if total else math.nan,
        "rollout/utilisation": step.tokens / slot_steps if slot_steps else math.nan,
    }
