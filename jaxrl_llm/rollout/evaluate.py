"""Evaluation: avg@k, pass@k and maj@k of a model on problems with checkable answers; mean reward on others."""

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.environments.environment import ENDS
from jaxrl_llm.errors import require
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.shaping import REFUSED, REJECTED
from jaxrl_llm.rollout.episodes import Scene, environment_seed
from jaxrl_llm.rollout.groups import informative
from jaxrl_llm.rollout.respond import Answerer, Requests, SeedSpace, Status, Watch, gather, request_seed
from jaxrl_llm.tasks import Prompts, answer_of
from jaxrl_llm.types import MEAN_OF_TASKS, Completion, Episode, Group, Problem, shown_message

LOGGED_ANSWERS = 200
"""Most answers of an evaluation that are written to samples.jsonl; its tasks share them."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Result of one evaluation on one task.

    Attributes:
      task: its label.
      problems: the problems, n of them.
      completions: n rows of k.
      correct: bool[n, k]; None if nothing is verified.
      maj: float64[n], whether the most frequent extracted answer is correct; None if nothing is verified.
      rewards: float64[n, k], NaN where unscorable; None if the answers are verified.
      given_up: the share of completions that were aborted, which count as wrong; None without early stopping.
      best: float64[n], whether the answer that a reward model scores highest is correct; None without a reward model.
      weighted: float64[n], whether the answer with the largest sum of its scores is correct; None without one.
      refused: float64[n, k], 1 where the model refuses to answer, NaN if unknown; None if it is not measured.
      failed: bool[n, k], where a verifier, a reward or an environment failed: that answer counts nowhere.
      failure: the first of these failures, in one line; empty without one.
      won: float64[n, k], 1 where a judge finds the answer better than the first policy's, 0.5 for a tie, else 0, and
        NaN where one of the two is missing; None without a judge, or if these are the first policy's answers.
    """

    task: str
    problems: tuple[Problem, ...]
    completions: tuple[tuple[Completion, ...], ...]
    correct: Any
    maj: Any
    rewards: np.ndarray | None = None
    given_up: float | None = None
    best: np.ndarray | None = None
    weighted: np.ndarray | None = None
    refused: np.ndarray | None = None
    won: np.ndarray | None = None
    failed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1), bool))
    failure: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the metrics ``eval/<task>/...``."""
        name = f"eval/{self.task}"
        if self.correct is None:
            found = {f"{name}/reward": math.nan if self.rewards is None else over_known(np.nanmean, self.rewards)}
        else:
            k = self.correct.shape[1]
            found = {f"{name}/pass@1": over_known(np.nanmean, np.where(self.failed, np.nan, self.correct))}
            if k > 1:
                powers = {2**i for i in range(1, k.bit_length())} | {k}
                found |= {
                    f"{name}/pass@{j}": over_known(np.nanmean, pass_at(self.correct, j, self.failed))
                    for j in sorted(powers)
                }
                found[f"{name}/maj@{k}"] = over_known(np.nanmean, np.where(self.failed.all(axis=1), np.nan, self.maj))
            if self.best is not None:
                found[f"{name}/rerank@{k}"] = float(self.best.mean())
                found[f"{name}/weighted_maj@{k}"] = float(self.weighted.mean())
        if self.failed.any():
            found[f"{name}/{FAILED}"] = float(self.failed.mean())
        if self.given_up is not None:
            found[f"{name}/given_up"] = self.given_up
        for metric, shares in {"refusals": self.refused, "win_rate": self.won}.items():
            if shares is not None:
                found[f"{name}/{metric}"] = over_known(np.nanmean, shares)
        found[f"{name}/problems"] = float(len(self.problems))
        found[f"{name}/mean_length"] = float(np.mean([c.length for row in self.completions for c in row]))
        return found

    def worth(self, problem: int, sample: int) -> dict[str, bool | float]:
        """Return whether an answer is ``correct``, or its ``reward`` if nothing is verified."""
        if self.correct is None:
            return {"reward": float(self.rewards[problem, sample])}
        return {"correct": bool(self.correct[problem, sample])}

    def rows(self) -> list[dict[str, Any]]:
        """Return a record for each completion, for a file: the messages, the completion, and its score."""
        return [
            {
                "task": self.task,
                "problem": problem.id,
                "sample": j,
                "messages": list(problem.prompt),
                "answer": problem.answer,
                "completion": completion.transcript,
                **completion.played,
                **self.worth(i, j),
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
            }
            for i, (problem, completions) in enumerate(zip(self.problems, self.completions, strict=True))
            for j, completion in enumerate(completions)
        ]


@dataclasses.dataclass(frozen=True)
class Tested:
    """Result of a test: numbers of another kind, and the evaluation of each task.

    Attributes:
      numbers: metrics by name.
      answers: evaluation of each task; empty without tasks.
    """

    numbers: Mapping[str, float]
    answers: tuple[Evaluated, ...] = ()

    def metrics(self) -> dict[str, Any]:
        """Return all metrics; with several tasks their averages come first."""
        found = {} if len(self.answers) < 2 else averages(self.answers)
        for one in self.answers:
            found |= one.metrics()
        told = [failure_of(one) for one in self.answers if one.failure]
        return dict(self.numbers) | found | ({EVENT_FAILED: "; ".join(told)} if told else {})

    def check(self) -> None:
        """Refuse the evaluation of a task of which no answer could be scored.

        Raises:
          InputError: says why.
        """
        for one in self.answers:
            require(not one.failed.all(), f"nothing of an evaluation could be scored: {failure_of(one)}")

    def lines(self) -> list[dict[str, Any]]:
        """Return lines for samples.jsonl: the first answers to the first problems of each task, with their scores."""
        most = LOGGED_ANSWERS // max(len(self.answers), 1)
        return [
            {
                "kind": "evaluation",
                "task": one.task,
                "prompt": problem.prompt[-1]["content"],
                "completion": completions[0].transcript,
                **completions[0].played,
                **one.worth(i, 0),
            }
            for one in self.answers
            for i, (problem, completions) in enumerate(zip(one.problems[:most], one.completions[:most], strict=True))
        ]


FAILED = "failed_fraction"
"""Name, after a task's, of the share of answers that could not be scored; it is measured where there are any."""
EVENT_FAILED = "event/evaluation_failed"


def failure_of(found: Evaluated) -> str:
    """Return a line on the answers that could not be scored."""
    return f"{found.task}: {found.failed.sum()} of {found.failed.size} answers could not be scored: {found.failure}"


AVERAGE = f"eval/{MEAN_OF_TASKS}"
"""Prefix of the names of metrics that are means over several tasks, each counting once."""


def averages(found: Sequence[Evaluated]) -> dict[str, float]:
    """Average each metric, except the number of problems, over the tasks that have it."""
    by_name: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.metrics().items():
            by_name.setdefault(name.removeprefix(f"eval/{one.task}/"), []).append(value)
    by_name.pop("problems")
    if FAILED in by_name:
        by_name[FAILED] += [0.0] * (len(found) - len(by_name[FAILED]))
    return {f"{AVERAGE}/{name}": over_known(np.nanmean, np.asarray(values)) for name, values in by_name.items()}


@dataclasses.dataclass(frozen=True)
class Questions:
    """Problems and sampling limits of one evaluation.

    Attributes:
      prompts: of the tasks, as token ids.
      problems: at least one; those of one task are adjacent.
      samples: answers to each.
      seed: determines every random number.
      limits: maximum number of tokens of an answer, by the label of its task; other tasks use the sampling's.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    samples: int
    seed: int
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


def evaluate(
    by: Answerer,
    asked: Questions,
    sampling: Sampling,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> tuple[Evaluated, ...]:
    """Answer every problem and check the answers, task by task; score them in full if nothing is verified.

    All tasks are sampled together. A completion that ``watch`` aborts is wrong, whatever its text says.
    """
    wanted = [problem for problem in asked.problems for _ in range(asked.samples)]
    seeds = [request_seed(asked.seed, SeedSpace.EVALUATION + n) for n in range(len(wanted))]
    places = range(len(wanted))
    prompts, begun = prompts_for(by, asked.prompts, wanted, seeds, asked.samples, places)
    requests = Requests(by.engine, sampling, by.episodes)
    limits = [asked.limits.get(problem.task, sampling.max_new_tokens) for problem in wanted]
    requests.submit(places, prompts, seeds, limits, begun)
    done = gather(requests, by.model, by.tokenizer, lambda text: status(f"evaluating: {text}"), watch)
    if by.episodes is not None:
        by.episodes.retain(())
    answers = tuple(done[place] for place in places)
    rows = [answers[i : i + asked.samples] for i in range(0, len(answers), asked.samples)]
    labels = [problem.task for problem in asked.problems]
    if len(asked.prompts.tasks) == 1:
        labels = [asked.prompts.tasks[0].label] * len(labels)
    found = []
    for label in dict.fromkeys(labels):
        own = [place for place, other in enumerate(labels) if other == label]
        problems = tuple(asked.problems[place] for place in own)
        found.append(checked(label, problems, tuple(rows[place] for place in own), by.scorer, watch is not None))
    return tuple(found)


def prompts_for(
    by: Answerer,
    prompts: Prompts,
    wanted: Sequence[Problem],
    seeds: Sequence[int],
    samples: int,
    keys: Sequence[Hashable],
) -> tuple[list[Any], list[Completion | None]]:
    """Return the prompt of each completion, with the completion of an episode that is over at once; episodes are begun
    under their keys, all ``samples`` of one problem, which are adjacent, with the same seed.
    """
    found = [None if by.episodes and by.episodes.plays(problem) else prompts[problem] for problem in wanted]
    begun: list[Completion | None] = [None] * len(wanted)
    first = [seeds[place // samples * samples] for place in range(len(wanted))]
    played = [place for place, prompt in enumerate(found) if prompt is None]
    scenes = [Scene(keys[place], wanted[place], environment_seed(first[place])) for place in played]
    for place, one in zip(played, by.episodes.begin(scenes) if scenes else (), strict=True):
        found[place], begun[place] = one.prompt, one.begun
    return found, begun


def checked(
    task: str,
    problems: tuple[Problem, ...],
    rows: tuple[tuple[Completion, ...], ...],
    scorer: Scorer,
    watched: bool = False,
) -> Evaluated:
    """Verify or score the k answers to each of one task's problems; ``watched``: whether they could be stopped early.

    An aborted completion does not count as an answer.
    """
    items = [(problem, c) for problem, row in zip(problems, rows, strict=True) for c in row]
    unverified = problems[0].verifier == "none"
    scores = scorer.score(items, only=None if unverified else (REFUSED,))
    whole = np.asarray([[c.finish_reason != "aborted" for c in row] for row in rows])
    refused = scores.parts[REFUSED].reshape(whole.shape) if REFUSED in scores.parts else None
    told: dict[str, Any] = {"refused": refused, "failed": scores.failed.reshape(whole.shape)}
    told["failure"] = scores.failures.message if told["failed"].any() else ""
    if unverified:
        rewards = np.where(told["failed"], np.nan, scores.reward.reshape(whole.shape))
        return Evaluated(task, problems, rows, None, None, rewards, **told)
    correct = (scores.accuracy.reshape(whole.shape) >= 1) & whole & ~told["failed"]
    voted = zip(problems, rows, correct, ~told["failed"], strict=True)
    maj = np.asarray([majority(p, row, right, known.astype(float)) for p, row, right, known in voted])
    given_up = 1.0 - float(whole.mean()) if watched else None
    return Evaluated(task, problems, rows, correct, maj, given_up=given_up, **told)


def pass_at(correct: np.ndarray, k: int, failed: np.ndarray | bool = False) -> np.ndarray:
    """Estimate for each problem the chance that one of k completions drawn from the n is correct: bool[P, n] -> [P].

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of arXiv 2107.03374, eq. 1. Those that ``failed`` are left
    out; a problem with fewer than k others is NaN.
    """
    known = np.broadcast_to(~np.asarray(failed), correct.shape)
    counts = zip(known.sum(axis=1), (correct & known).sum(axis=1), strict=True)
    return np.asarray([1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan for n, c in counts])


def majority(
    problem: Problem, completions: Sequence[Completion], correct: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Return 1 if the most frequent extracted answer is correct, else 0; ties go to the answer given first.

    With ``weights``, float[k], the answer with the largest sum of weights counts. Aborted completions have no answer.
    """
    answers = [None if c.finish_reason == "aborted" else answer_of(c.text, problem.extractor) for c in completions]
    sums: dict[str, float] = collections.defaultdict(float)
    for answer, weight in zip(answers, np.ones(len(answers)) if weights is None else weights, strict=True):
        if answer is not None:
            sums[answer] += float(weight)
    if not sums:
        return 0.0
    return float(correct[answers.index(max(sums, key=sums.__getitem__))])


def reranked(found: Evaluated, scores: np.ndarray, weights: np.ndarray) -> Evaluated:
    """Return the evaluation with the results of a reward model: the best of k, and a weighted majority.

    Args:
      found: of a task with verified answers.
      scores: float64[n, k], the higher the better; ties go to the first. Aborted completions come last.
      weights: float64[n, k], at least 0: of each answer's vote.
    """
    whole = np.asarray([[c.finish_reason != "aborted" for c in row] for row in found.completions]) & ~found.failed
    first = np.argmax(np.where(whole, scores, -np.inf), axis=1)
    best = np.take_along_axis(found.correct, first[:, None], axis=1)[:, 0]
    rows = zip(found.problems, found.completions, found.correct, weights, strict=True)
    return dataclasses.replace(
        found, best=best.astype(np.float64), weighted=np.asarray([majority(*row) for row in rows])
    )


LONGEST_PERIOD = 128
"""Length of the longest run of tokens that is checked for repetition."""
LONGEST_LINE = 300
"""Most characters of a line about a call."""
TIMES = 4
"""Minimum number of repetitions of a loop."""
FEWEST = 16
"""Minimum number of tokens in a loop: three equal signs or full stops do not count."""


def loops(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row of tokens ends in a loop, bool[B].

    The last n tokens, for some n up to ``LONGEST_PERIOD``, repeat ``TIMES`` times in a row exactly if each of the
    last (``TIMES`` - 1) n tokens equals the one n before it; a loop of less than ``FEWEST`` tokens must last that long.
    """
    width = TIMES * LONGEST_PERIOD
    # Where a row has no token, nothing equals anything.
    tails = np.repeat(-1 - np.arange(width)[None], len(rows), axis=0)
    for i, tokens in enumerate(rows):
        last = tokens[-width:]
        if len(last):
            tails[i, -len(last) :] = last
    found = np.zeros(len(rows), bool)
    for period in range(1, LONGEST_PERIOD + 1):
        same = max((TIMES - 1) * period, FEWEST - period)
        found |= (tails[:, -same:] == tails[:, -same - period : -period]).all(axis=1)
    return found


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of rewards and lengths, by the suffix of their metrics' names."""
MEASURED = (
    "reward/mean", "reward/std", "reward/zero_std_fraction", "reward/accuracy",
    "completions/mean_length", "completions/truncated_fraction", "completions/repetition_fraction",
    "completions/distinct_fraction",
    *(f"reward/{name}" for name in QUANTILES), *(f"completions/length_{name}" for name in QUANTILES),
)  # fmt: skip
"""Metrics that ``describe`` returns for any groups; NaN without groups."""


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the groups finished in a step, before any filter."""
    if not groups:
        return dict.fromkeys(MEASURED, math.nan)
    scores = np.stack([g.rewards for g in groups])
    accuracy = np.stack([g.accuracy for g in groups])
    completions = [c for g in groups for c in g.completions]
    ended = [c.finish_reason for c in completions]
    lengths = np.array([c.length for c in completions])
    sampled = [c.sampled for c in completions]
    written = [tokens[:-1] if why == "stop" else tokens for tokens, why in zip(sampled, ended, strict=True)]
    looping = loops(written) | (np.array(ended) == "repetition")
    found = {}
    for name in groups[0].parts:
        if all(name in g.parts for g in groups):  # older ones may lack some
            metric = name if name.startswith("constraint/") else f"reward/{name}"
            metric = f"{name}_fraction" if name in (REJECTED, REFUSED) else metric
            found[metric] = over_known(np.nanmean, np.stack([g.parts[name] for g in groups]))
    # One completion of each prompt is like no other, and no reward is no equal reward.
    known = [g for g in groups if len(groups[0].completions) != 1 and not np.isnan(g.rewards).all()]
    equal = float(np.mean([not informative(g, "reward") for g in known])) if known else math.nan
    distinct = []  # different answers of each group, by its completions; all without an answer count as one
    for group in groups:
        extractor = "whole" if group.problem.verifier == "none" else group.problem.extractor
        answers = [answer_of(completion.text, extractor) for completion in group.completions]
        distinct.append(len(set(answers)) / len(answers) if len(answers) > 1 else math.nan)
    found |= {
        "reward/mean": over_known(np.nanmean, scores),
        "reward/std": over_known(np.nanstd, scores),
        "reward/zero_std_fraction": equal,
        "reward/accuracy": over_known(np.nanmean, np.where(np.isnan(accuracy), np.nan, accuracy >= 1)),
        "completions/mean_length": float(lengths.mean()),
        "completions/truncated_fraction": ended.count("length") / len(ended),
        "completions/repetition_fraction": float(looping.mean()),
        "completions/distinct_fraction": over_known(np.nanmean, np.array(distinct)),
    }
    shares = list(QUANTILES.values())
    for prefix, values in {"reward/": scores[~np.isnan(scores)], "completions/length_": lengths}.items():
        between = np.quantile(values, shares) if values.size else [math.nan] * len(shares)
        found |= {prefix + name: float(value) for name, value in zip(QUANTILES, between, strict=True)}
    return found


OF_A_TASK = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "zero_std_fraction": "reward/zero_std_fraction",
    "mean_length": "completions/mean_length",
    "truncated_fraction": "completions/truncated_fraction",
}
"""Metrics of each task of a mixture, ``task/<label>/<name>``, and the metric of all groups that each one repeats."""


def describe_tasks(labels: Sequence[str], sampled: Sequence[Group], learned: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of each task of a mixture: of its groups finished in the step, before any filter, and the number
    of its groups that the step learns from.
    """
    found = {}
    for label in labels:
        own = describe([group for group in sampled if group.problem.task == label])
        found |= {f"task/{label}/{name}": own[metric] for name, metric in OF_A_TASK.items()}
        found[f"task/{label}/groups"] = sum(group.problem.task == label for group in learned)
    return found


def describe_episodes(groups: Sequence[Group], branching: bool = False) -> dict[str, float]:
    """Compute metrics of the groups' episodes; {} without any. ``branching``: also of their branches."""
    found = [c.episode for group in groups for c in group.completions if c.episode is not None]
    if not found:
        return {}
    calls = [sum(turn.calls for turn in episode.turns) for episode in found]
    errors = [sum(turn.errors for turn in episode.turns) for episode in found]
    ends = [episode.end for episode in found]
    numbers = [episode.metrics for episode in found]
    names = sorted({name for one in numbers for name in one})
    branches = describe_branches(groups) if branching else {}
    return branches | {
        "episode/turns": float(np.mean([len(episode.turns) for episode in found])),
        "episode/tools": float(np.mean([episode.tools for episode in found])),
        "episode/tool_calls": float(np.mean(calls)),
        "episode/tool_errors": float(np.mean(errors)),
        "episode/forks": float(np.mean([sum(bool(turn.fork) for turn in episode.turns) for episode in found])),
        "episode/restarts": float(sum(episode.restarts for episode in found)),
        **{f"episode/ends/{end}": ends.count(end) / len(ends) for end in ENDS},
        **{f"environment/{name}": float(np.mean([one.get(name, 0.0) for one in numbers])) for name in names},
    }


def failed_call(groups: Sequence[Group]) -> str:
    """Return the first call of a tool that failed, with its arguments and what the model was told; empty without."""
    for turn in (turn for group in groups for c in group.completions for turn in (c.episode or Episode()).turns):
        calls = turn.reply.get("tool_calls") or ()
        for call, said in zip(calls, turn.messages, strict=False) if turn.errors else ():
            if said["content"].startswith("{'error'"):
                return f"{shown_message({'tool_calls': [call]})}: {said['content']}"[:LONGEST_LINE]
        if turn.errors and turn.messages:
            return turn.messages[0]["content"][:LONGEST_LINE]
    return ""


def describe_branches(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the branches of the groups' episodes: how many, what they did not have to sample, and how much
    less certain the model was after the environment's answers.
    """
    played = [[c for c in group.completions if c.episode is not None] for group in groups]
    members = [(c, c.episode) for group in played for c in group]
    tokens = sum(c.length for c, _ in members)
    rises = [turn.entropy_rise for _, episode in members for turn in episode.turns[1:] if turn.end > episode.shared]
    return {
        "episode/branches": sum(one.parent is not None for _, one in members) / max(sum(map(bool, played)), 1),
        "episode/shared_fraction": sum(int(c.mask[: one.shared].sum()) for c, one in members) / max(tokens, 1),
        "episode/entropy_rise": float(np.mean(rises)) if rises else math.nan,
    }


def over_known(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """Compute a statistic of the values that are not NaN; NaN if all are, where NumPy would warn."""
    return math.nan if np.isnan(values).all() else float(statistic(values))
