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
from jaxrl_llm.rollout.episodes import EpisodeSpec, environment_seed
from jaxrl_llm.rollout.generation import Answerer, OpenRequests, SeedSpace, Status, Watch, generate_all, request_seed
from jaxrl_llm.rollout.groups import informative
from jaxrl_llm.tasks import Prompts, answer_of
from jaxrl_llm.types import MEAN_OF_TASKS, Completion, Episode, Group, Problem, shown_message

LOGGED_ANSWERS = 200
"""Most answers of an evaluation that are written to samples.jsonl; its tasks share them."""


@dataclasses.dataclass(frozen=True)
class TaskEvaluation:
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
      won: float64[n, k], 1 where a judge prefers the answer to the first policy's, 0.5 for a tie, else 0, NaN where one
        is missing; None without a judge, or for the first policy's own answers.
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
        metrics = {}
        if self.correct is None:
            metrics["reward"] = math.nan if self.rewards is None else ignoring_nan(np.nanmean, self.rewards)
        else:
            k = self.correct.shape[1]
            metrics["pass@1"] = ignoring_nan(np.nanmean, np.where(self.failed, np.nan, self.correct))
            if k > 1:
                for j in sorted({2**i for i in range(1, k.bit_length())} | {k}):
                    metrics[f"pass@{j}"] = ignoring_nan(np.nanmean, pass_at(self.correct, j, self.failed))
                majority_votes = np.where(self.failed.all(axis=1), np.nan, self.maj)
                metrics[f"maj@{k}"] = ignoring_nan(np.nanmean, majority_votes)
            if self.best is not None:
                metrics |= {f"rerank@{k}": float(self.best.mean()), f"weighted_maj@{k}": float(self.weighted.mean())}
        if self.failed.any():
            metrics[FAILED] = float(self.failed.mean())
        if self.given_up is not None:
            metrics["given_up"] = self.given_up
        for name, shares in {"refusals": self.refused, "win_rate": self.won}.items():
            if shares is not None:
                metrics[name] = ignoring_nan(np.nanmean, shares)
        metrics["problems"] = float(len(self.problems))
        metrics["mean_length"] = float(np.mean([c.length for row in self.completions for c in row]))
        return {f"eval/{self.task}/{name}": number for name, number in metrics.items()}

    def correct_or_reward(self, problem: int, sample: int) -> dict[str, bool | float]:
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
                **self.correct_or_reward(i, j),
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
            }
            for i, (problem, completions) in enumerate(zip(self.problems, self.completions, strict=True))
            for j, completion in enumerate(completions)
        ]


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """Result of a test: ``numbers``, metrics of another kind by name, and the evaluation of each task, if any."""

    numbers: Mapping[str, float]
    tasks: tuple[TaskEvaluation, ...] = ()

    def metrics(self) -> dict[str, Any]:
        """Return all metrics; with several tasks their averages come first."""
        metrics = {} if len(self.tasks) < 2 else average_tasks(self.tasks)
        for task in self.tasks:
            metrics |= task.metrics()
        failures = [failure_line(task) for task in self.tasks if task.failure]
        return dict(self.numbers) | metrics | ({EVENT_FAILED: "; ".join(failures)} if failures else {})

    def check(self) -> None:
        """Refuse (InputError) the evaluation of a task of which no answer could be scored, and say why."""
        for task in self.tasks:
            require(not task.failed.all(), f"nothing of an evaluation could be scored: {failure_line(task)}")

    def lines(self) -> list[dict[str, Any]]:
        """Return lines for samples.jsonl: the first answers to the first problems of each task, with their scores."""
        limit = LOGGED_ANSWERS // max(len(self.tasks), 1)
        return [
            {
                "kind": "evaluation",
                "task": task.task,
                "prompt": problem.prompt[-1]["content"],
                "completion": completions[0].transcript,
                **completions[0].played,
                **task.correct_or_reward(i, 0),
            }
            for task in self.tasks
            for i, (problem, completions) in enumerate(
                zip(task.problems[:limit], task.completions[:limit], strict=True)
            )
        ]


FAILED = "failed_fraction"
"""Name, after a task's, of the share of answers that could not be scored; it is measured where there are any."""
EVENT_FAILED = "event/evaluation_failed"


def failure_line(evaluation: TaskEvaluation) -> str:
    """Return a line on the answers that could not be scored."""
    failed, task = evaluation.failed, evaluation.task
    return f"{task}: {failed.sum()} of {failed.size} answers could not be scored: {evaluation.failure}"


def average_tasks(evaluations: Sequence[TaskEvaluation]) -> dict[str, float]:
    """Average each metric, except the number of problems, over the tasks that have it, each counting once."""
    by_name: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for name, number in evaluation.metrics().items():
            by_name.setdefault(name.removeprefix(f"eval/{evaluation.task}/"), []).append(number)
    by_name.pop("problems")
    if FAILED in by_name:
        by_name[FAILED] += [0.0] * (len(evaluations) - len(by_name[FAILED]))
    return {
        f"eval/{MEAN_OF_TASKS}/{name}": ignoring_nan(np.nanmean, np.asarray(values)) for name, values in by_name.items()
    }


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Problems and sampling limits of one evaluation.

    Attributes:
      prompts: of the tasks, as token ids.
      problems: at least one; those of one task are adjacent.
      samples: answers to each.
      limits: maximum number of tokens of an answer, by the label of its task; other tasks use the sampling's.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    samples: int
    seed: int
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


def evaluate(
    answerer: Answerer,
    questions: EvaluationSet,
    sampling: Sampling,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> tuple[TaskEvaluation, ...]:
    """Answer every problem and check the answers, task by task; score them in full if nothing is verified. All tasks
    are sampled together. A completion that ``watch`` aborts is wrong, whatever its text says.
    """
    samples = questions.samples
    problems = [problem for problem in questions.problems for _ in range(samples)]
    seeds = [request_seed(questions.seed, SeedSpace.EVALUATION + n) for n in range(len(problems))]
    keys = range(len(problems))
    prompts, partials = start_prompts(answerer, questions.prompts, problems, seeds, samples, keys)
    requests = OpenRequests(answerer.engine, sampling, answerer.episodes)
    limits = [questions.limits.get(problem.task, sampling.max_new_tokens) for problem in problems]
    requests.submit(keys, prompts, seeds, limits, partials)
    completions = generate_all(
        requests, answerer.model, answerer.tokenizer, lambda text: status(f"evaluating: {text}"), watch
    )
    if answerer.episodes is not None:
        answerer.episodes.retain(())
    answers = tuple(completions[key] for key in keys)
    rows = [answers[i : i + samples] for i in range(0, len(answers), samples)]
    labels = [problem.task for problem in questions.problems]
    if len(questions.prompts.tasks) == 1:
        labels = [questions.prompts.tasks[0].label] * len(labels)
    evaluations = []
    for label in dict.fromkeys(labels):
        members = [i for i, other in enumerate(labels) if other == label]
        task_problems = tuple(questions.problems[i] for i in members)
        task_rows = tuple(rows[i] for i in members)
        evaluations.append(score_answers(label, task_problems, task_rows, answerer.scorer, watch is not None))
    return tuple(evaluations)


def start_prompts(
    answerer: Answerer,
    prompts: Prompts,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    samples: int,
    keys: Sequence[Hashable],
) -> tuple[list[Any], list[Completion | None]]:
    """Return each completion's prompt, and the completion of an episode that is over at once. The ``samples`` of a
    problem are adjacent, and their episodes begin with the same seed.
    """
    episodes = answerer.episodes
    token_ids = [None if episodes and episodes.plays(problem) else prompts[problem] for problem in problems]
    partials: list[Completion | None] = [None] * len(problems)
    played = [i for i, prompt in enumerate(token_ids) if prompt is None]
    specs = [EpisodeSpec(keys[i], problems[i], environment_seed(seeds[i // samples * samples])) for i in played]
    for i, ready in zip(played, episodes.begin(specs) if specs else (), strict=True):
        token_ids[i], partials[i] = ready.prompt, ready.partial
    return token_ids, partials


def score_answers(
    task: str,
    problems: tuple[Problem, ...],
    rows: tuple[tuple[Completion, ...], ...],
    scorer: Scorer,
    watched: bool = False,
) -> TaskEvaluation:
    """Verify or score the k answers to each of one task's problems. If ``watched``, some may be aborted: no answers."""
    items = [(problem, c) for problem, row in zip(problems, rows, strict=True) for c in row]
    unverified = problems[0].verifier == "none"
    scores = scorer.score(items, only=None if unverified else (REFUSED,))
    finished = np.asarray([[c.finish_reason != "aborted" for c in row] for row in rows])
    refused = scores.parts[REFUSED].reshape(finished.shape) if REFUSED in scores.parts else None
    failed = scores.failed.reshape(finished.shape)
    failure = scores.failures.message if failed.any() else ""
    options: dict[str, Any] = {"refused": refused, "failed": failed, "failure": failure}
    if unverified:
        rewards = np.where(failed, np.nan, scores.reward.reshape(finished.shape))
        return TaskEvaluation(task, problems, rows, None, None, rewards, **options)
    correct = (scores.accuracy.reshape(finished.shape) >= 1) & finished & ~failed
    answers = zip(problems, rows, correct, ~failed, strict=True)
    maj = np.asarray([majority(p, row, right, scorable.astype(float)) for p, row, right, scorable in answers])
    given_up = 1.0 - float(finished.mean()) if watched else None
    return TaskEvaluation(task, problems, rows, correct, maj, given_up=given_up, **options)


def pass_at(correct: np.ndarray, k: int, failed: np.ndarray | bool = False) -> np.ndarray:
    """Estimate for each problem the chance that one of k completions drawn from the n is correct: bool[P, n] -> [P].

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of arXiv 2107.03374, eq. 1, without those that ``failed``; NaN
    for a problem with fewer than k others.
    """
    scorable = np.broadcast_to(~np.asarray(failed), correct.shape)
    counts = zip(scorable.sum(axis=1), (correct & scorable).sum(axis=1), strict=True)
    return np.asarray([1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan for n, c in counts])


def majority(
    problem: Problem, completions: Sequence[Completion], correct: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Return 1 if the most frequent extracted answer is correct, else 0; ties go to the answer given first. With
    ``weights``, float[k], the answer with the largest sum of weights counts. Aborted completions have no answer.
    """
    answers = [None if c.finish_reason == "aborted" else answer_of(c.text, problem.extractor) for c in completions]
    sums: dict[str, float] = collections.defaultdict(float)
    for answer, weight in zip(answers, np.ones(len(answers)) if weights is None else weights, strict=True):
        if answer is not None:
            sums[answer] += float(weight)
    if not sums:
        return 0.0
    return float(correct[answers.index(max(sums, key=sums.__getitem__))])


def reranked(evaluation: TaskEvaluation, scores: np.ndarray, weights: np.ndarray) -> TaskEvaluation:
    """Return a verified evaluation with a reward model's results: the best of k by ``scores``, float64[n, k], and the
    majority by ``weights``, float64[n, k], at least 0. Ties go to the first; aborted completions come last.
    """
    finished = np.asarray([[c.finish_reason != "aborted" for c in row] for row in evaluation.completions])
    first = np.argmax(np.where(finished & ~evaluation.failed, scores, -np.inf), axis=1)
    best = np.take_along_axis(evaluation.correct, first[:, None], axis=1)[:, 0].astype(np.float64)
    rows = zip(evaluation.problems, evaluation.completions, evaluation.correct, weights, strict=True)
    return dataclasses.replace(evaluation, best=best, weighted=np.asarray([majority(*row) for row in rows]))


MAX_PERIOD = 128
"""Length of the longest run of tokens that is checked for repetition."""
MAX_LINE_CHARS = 300
"""Most characters of a line about a call."""
MIN_REPEATS = 4
"""Minimum number of repetitions of a loop."""
MIN_LOOP_TOKENS = 16
"""Minimum number of tokens in a loop: three equal signs or full stops do not count."""


def end_in_loops(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row of tokens ends in a loop, bool[B]: its last n tokens, for some n up to ``MAX_PERIOD``, repeat
    ``MIN_REPEATS`` times in a row, with ``MIN_LOOP_TOKENS`` tokens or more in all.
    """
    width = MIN_REPEATS * MAX_PERIOD
    # Where a row has no token, nothing equals anything.
    tails = np.repeat(-1 - np.arange(width)[None], len(rows), axis=0)
    for i, tokens in enumerate(rows):
        last = tokens[-width:]
        if len(last):
            tails[i, -len(last) :] = last
    looping = np.zeros(len(rows), bool)
    for period in range(1, MAX_PERIOD + 1):
        same = max((MIN_REPEATS - 1) * period, MIN_LOOP_TOKENS - period)
        looping |= (tails[:, -same:] == tails[:, -same - period : -period]).all(axis=1)
    return looping


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of rewards and lengths, by the suffix of their metrics' names."""
GROUP_METRICS = (
    "reward/mean", "reward/std", "reward/zero_std_fraction", "reward/accuracy",
    "completions/mean_length", "completions/truncated_fraction", "completions/repetition_fraction",
    "completions/distinct_fraction",
    *(f"reward/{name}" for name in QUANTILES), *(f"completions/length_{name}" for name in QUANTILES),
)  # fmt: skip
"""Metrics that ``group_metrics`` returns for any groups; NaN without groups."""


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the groups finished in a step, before any filter."""
    if not groups:
        return dict.fromkeys(GROUP_METRICS, math.nan)
    scores = np.stack([g.rewards for g in groups])
    accuracy = np.stack([g.accuracy for g in groups])
    completions = [c for g in groups for c in g.completions]
    finish_reasons = [c.finish_reason for c in completions]
    lengths = np.array([c.length for c in completions])
    sampled = [c.sampled for c in completions]
    written = [
        tokens[:-1] if reason == "stop" else tokens for tokens, reason in zip(sampled, finish_reasons, strict=True)
    ]
    looping = end_in_loops(written) | (np.array(finish_reasons) == "repetition")
    metrics = {}
    for name in groups[0].parts:
        if all(name in g.parts for g in groups):  # older ones may lack some
            metric = name if name.startswith("constraint/") else f"reward/{name}"
            metric = f"{name}_fraction" if name in (REJECTED, REFUSED) else metric
            metrics[metric] = ignoring_nan(np.nanmean, np.stack([g.parts[name] for g in groups]))
    # One completion of each prompt is like no other, and no reward is no equal reward.
    comparable = [g for g in groups if len(groups[0].completions) != 1 and not np.isnan(g.rewards).all()]
    equal = float(np.mean([not informative(g, "reward") for g in comparable])) if comparable else math.nan
    distinct = []  # different answers of each group, by its completions; all without an answer count as one
    for group in groups:
        extractor = "whole" if group.problem.verifier == "none" else group.problem.extractor
        answers = [answer_of(completion.text, extractor) for completion in group.completions]
        distinct.append(len(set(answers)) / len(answers) if len(answers) > 1 else math.nan)
    metrics |= {
        "reward/mean": ignoring_nan(np.nanmean, scores),
        "reward/std": ignoring_nan(np.nanstd, scores),
        "reward/zero_std_fraction": equal,
        "reward/accuracy": ignoring_nan(np.nanmean, np.where(np.isnan(accuracy), np.nan, accuracy >= 1)),
        "completions/mean_length": float(lengths.mean()),
        "completions/truncated_fraction": finish_reasons.count("length") / len(finish_reasons),
        "completions/repetition_fraction": float(looping.mean()),
        "completions/distinct_fraction": ignoring_nan(np.nanmean, np.array(distinct)),
    }
    shares = list(QUANTILES.values())
    for prefix, scores_or_lengths in {"reward/": scores[~np.isnan(scores)], "completions/length_": lengths}.items():
        quantiles = np.quantile(scores_or_lengths, shares) if scores_or_lengths.size else [math.nan] * len(shares)
        metrics |= {prefix + name: float(quantile) for name, quantile in zip(QUANTILES, quantiles, strict=True)}
    return metrics


TASK_METRICS = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "zero_std_fraction": "reward/zero_std_fraction",
    "mean_length": "completions/mean_length",
    "truncated_fraction": "completions/truncated_fraction",
}
"""Metrics of each task of a mixture, ``task/<label>/<name>``, and the metric of all groups that each one repeats."""


def task_metrics(labels: Sequence[str], sampled: Sequence[Group], learned: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of each task of a mixture: its groups finished in the step, and how many the step learns from."""
    metrics = {}
    for label in labels:
        of_task = group_metrics([group for group in sampled if group.problem.task == label])
        metrics |= {f"task/{label}/{name}": of_task[metric] for name, metric in TASK_METRICS.items()}
        metrics[f"task/{label}/groups"] = sum(group.problem.task == label for group in learned)
    return metrics


def episode_metrics(groups: Sequence[Group], branching: bool = False) -> dict[str, float]:
    """Compute metrics of the groups' episodes; {} without any. ``branching``: also of their branches."""
    episodes = [c.episode for group in groups for c in group.completions if c.episode is not None]
    if not episodes:
        return {}
    calls = [sum(turn.calls for turn in episode.turns) for episode in episodes]
    errors = [sum(turn.errors for turn in episode.turns) for episode in episodes]
    ends = [episode.end for episode in episodes]
    numbers = [episode.metrics for episode in episodes]
    names = sorted({name for metrics in numbers for name in metrics})
    branches = branch_metrics(groups) if branching else {}
    return branches | {
        "episode/turns": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode/tools": float(np.mean([episode.tools for episode in episodes])),
        "episode/tool_calls": float(np.mean(calls)),
        "episode/tool_errors": float(np.mean(errors)),
        "episode/forks": float(np.mean([sum(bool(turn.fork) for turn in episode.turns) for episode in episodes])),
        "episode/restarts": float(sum(episode.restarts for episode in episodes)),
        **{f"episode/ends/{end}": ends.count(end) / len(ends) for end in ENDS},
        **{f"environment/{name}": float(np.mean([metrics.get(name, 0.0) for metrics in numbers])) for name in names},
    }


def failed_call(groups: Sequence[Group]) -> str:
    """Return the first call of a tool that failed, with its arguments and what the model was told; empty without."""
    for turn in (turn for group in groups for c in group.completions for turn in (c.episode or Episode()).turns):
        calls = turn.reply.get("tool_calls") or ()
        for call, answer in zip(calls, turn.messages, strict=False) if turn.errors else ():
            if answer["content"].startswith("{'error'"):
                return f"{shown_message({'tool_calls': [call]})}: {answer['content']}"[:MAX_LINE_CHARS]
        if turn.errors and turn.messages:
            return turn.messages[0]["content"][:MAX_LINE_CHARS]
    return ""


def branch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the branches of the groups' episodes: number, tokens saved, and the rise of the entropy."""
    played = [[c for c in group.completions if c.episode is not None] for group in groups]
    members = [(c, c.episode) for group in played for c in group]
    tokens = sum(c.length for c, _ in members)
    rises = [turn.entropy_rise for _, episode in members for turn in episode.turns[1:] if turn.end > episode.shared]
    return {
        "episode/branches": sum(episode.parent is not None for _, episode in members) / max(sum(map(bool, played)), 1),
        "episode/shared_fraction": sum(int(c.mask[: episode.shared].sum()) for c, episode in members) / max(tokens, 1),
        "episode/entropy_rise": float(np.mean(rises)) if rises else math.nan,
    }


def ignoring_nan(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """Compute a statistic of the values that are not NaN; NaN if all are, where NumPy would warn."""
    return math.nan if np.isnan(values).all() else float(statistic(values))
