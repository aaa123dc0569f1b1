"""avg@k, pass@k and maj@k of a model on problems with checkable answers; its mean reward on problems without."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.refusals import REFUSED
from jaxrl_llm.rollout.completions import Status, Watch, drain
from jaxrl_llm.rollout.groups import request_seed
from jaxrl_llm.tasks import Prompts, answer_of
from jaxrl_llm.types import MEAN_OF_TASKS, Completion, Problem

SEED_SPACE = 1 << 39
"""Evaluation draws its request numbers from here on, training from 0: they never share a random number."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What one evaluation found.

    Attributes:
      task: its label.
      problems: the problems, n of them.
      completions: n rows of k.
      correct: bool[n, k]; None where nothing is verified.
      maj: float64[n], whether the most frequent extracted answer is correct; None where nothing is verified.
      rewards: float64[n, k], NaN where unscorable; None where the answers are verified.
      given_up: the share of completions that were ended before their end; None where none could be. They are wrong.
      best: float64[n], whether the answer that a reward model likes best is correct; None where none was asked.
      weighted: float64[n], whether the answer with most of its scores is; None where none was asked.
      refused: float64[n, k], 1 where the model refuses to answer, NaN where that could not be told; None where it is
        not measured.
      won: float64[n, k], 1 where a judge finds the answer better than the first policy's, 0.5 where neither is, else 0,
        and NaN where there are no two to compare; None where there is no judge, or these are the first ones.
    """

    task: str
    problems: tuple[Problem, ...]
    completions: tuple[tuple[Completion, ...], ...]
    correct: np.ndarray | None
    maj: np.ndarray | None
    rewards: np.ndarray | None = None
    given_up: float | None = None
    best: np.ndarray | None = None
    weighted: np.ndarray | None = None
    refused: np.ndarray | None = None
    won: np.ndarray | None = None

    @property
    def answers(self) -> tuple["Evaluated", ...]:
        """Itself; see ``Tested``."""
        return (self,)

    @property
    def accuracy(self) -> float:
        """avg@k: the share of correct completions; NaN where nothing is verified."""
        return math.nan if self.correct is None else float(self.correct.mean())

    @property
    def reward(self) -> float:
        """The mean reward of the completions that could be scored; NaN where the answers are verified."""
        return math.nan if self.rewards is None else known_mean(self.rewards)

    def metrics(self) -> dict[str, float]:
        """``eval/<task>/...`` by the pinned names."""
        name = f"eval/{self.task}"
        found = {f"{name}/reward": self.reward} if self.correct is None else self._verified(name)
        if self.given_up is not None:
            found[f"{name}/given_up"] = self.given_up
        for metric, shares in {"refusals": self.refused, "win_rate": self.won}.items():
            if shares is not None:
                found[f"{name}/{metric}"] = known_mean(shares)
        found[f"{name}/problems"] = float(len(self.problems))
        found[f"{name}/mean_length"] = float(np.mean([len(c.tokens) for row in self.completions for c in row]))
        return found

    def worth(self, problem: int, sample: int) -> dict[str, bool | float]:
        """Whether an answer is ``correct``, or its ``reward`` where nothing is verified."""
        if self.correct is None:
            return {"reward": float(self.rewards[problem, sample])}
        return {"correct": bool(self.correct[problem, sample])}

    def rows(self) -> list[dict[str, Any]]:
        """One for each completion, for a file: what was asked, what was said, and what it is worth."""
        found = []
        for i, (problem, completions) in enumerate(zip(self.problems, self.completions, strict=True)):
            for j, completion in enumerate(completions):
                found.append(
                    {
                        "task": self.task,
                        "problem": problem.id,
                        "sample": j,
                        "messages": list(problem.prompt),
                        "answer": problem.answer,
                        "completion": completion.text,
                        **self.worth(i, j),
                        "finish_reason": completion.finish_reason,
                        "tokens": len(completion.tokens),
                    }
                )
        return found

    def _verified(self, name: str) -> dict[str, float]:
        k = self.correct.shape[1]
        found = {f"{name}/pass@1": self.accuracy}
        if k > 1:
            found |= {f"{name}/pass@{j}": float(pass_at(self.correct, j).mean()) for j in _powers(k)}
            found[f"{name}/maj@{k}"] = float(self.maj.mean())
        if self.best is not None:
            found[f"{name}/rerank@{k}"] = float(self.best.mean())
            found[f"{name}/weighted_maj@{k}"] = float(self.weighted.mean())
        return found


@dataclasses.dataclass(frozen=True)
class Tested:
    """What a test found: numbers of another kind, and the answers to each task that was asked.

    Attributes:
      numbers: metrics by name.
      answers: to the problems of each task; none where there is no task.
    """

    numbers: Mapping[str, float]
    answers: tuple[Evaluated, ...] = ()

    def metrics(self) -> dict[str, float]:
        """All of them; of several tasks their averages come first."""
        found = {} if len(self.answers) < 2 else averages(self.answers)
        for one in self.answers:
            found |= one.metrics()
        return dict(self.numbers) | found


AVERAGE = f"eval/{MEAN_OF_TASKS}"
"""What the names of metrics begin with that are means over several tasks, each counting once."""


def averages(found: Sequence[Evaluated]) -> dict[str, float]:
    """The mean over tasks of each of their metrics but the number of problems, of the tasks that have it."""
    by_name: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.metrics().items():
            by_name.setdefault(name.removeprefix(f"eval/{one.task}/"), []).append(value)
    by_name.pop("problems")
    return {f"{AVERAGE}/{name}": known_mean(np.asarray(values)) for name, values in by_name.items()}


@dataclasses.dataclass(frozen=True)
class Questions:
    """What is asked in one evaluation.

    Attributes:
      prompts: of the tasks, as token ids.
      problems: at least one; those of one task stand together.
      samples: answers to each.
      seed: decides every random number.
      limits: tokens of an answer at most, by the label of its task; of others as many as the sampling allows.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    samples: int
    seed: int
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


def evaluate(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    asked: Questions,
    scorer: Scorer,
    sampling: Sampling,
    status: Status = lambda text: None,
    watch: Watch | None = None,
) -> Evaluated:
    """Answer every problem of one task and check the answers; score them in full where nothing is verified.

    What ``watch`` ends early is no answer: it is wrong, whatever it has said.
    """
    done = answered(engine, model, tokenizer, asked, sampling, status, watch)
    return checked(asked.prompts.tasks[0].label, asked.problems, asked.samples, done, scorer, watch is not None)


def evaluate_tasks(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    asked: Questions,
    scorer: Scorer,
    sampling: Sampling,
    status: Status = lambda text: None,
) -> tuple[Evaluated, ...]:
    """As ``evaluate``, of several tasks that are sampled together."""
    done = answered(engine, model, tokenizer, asked, sampling, status)
    if len(asked.prompts.tasks) == 1:
        return (checked(asked.prompts.tasks[0].label, asked.problems, asked.samples, done, scorer),)
    found = []
    begin = 0
    for label in dict.fromkeys(problem.task for problem in asked.problems):
        problems = [problem for problem in asked.problems if problem.task == label]
        end = begin + len(problems) * asked.samples
        found.append(checked(label, problems, asked.samples, done[begin:end], scorer))
        begin = end
    return tuple(found)


def answered(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    asked: Questions,
    sampling: Sampling,
    status: Status,
    watch: Watch | None = None,
) -> list[Completion]:
    """``samples`` answers to each problem, one after the other."""
    prompts = [asked.prompts[problem] for problem in asked.problems for _ in range(asked.samples)]
    limits = [
        asked.limits.get(problem.task, sampling.max_new_tokens)
        for problem in asked.problems
        for _ in range(asked.samples)
    ]
    seeds = [request_seed(asked.seed, SEED_SPACE + n) for n in range(len(prompts))]
    engine.start(sampling)
    handles = engine.submit(prompts, seeds, limits)
    return drain(engine, model, tokenizer, handles, status=lambda text: status(f"evaluating: {text}"), watch=watch)


def checked(
    task: str,
    problems: Sequence[Problem],
    samples: int,
    done: Sequence[Completion],
    scorer: Scorer,
    watched: bool = False,
) -> Evaluated:
    """What the answers to one task's problems are worth; ``watched``: whether some could be ended early."""
    items = [(problems[i // samples], c) for i, c in enumerate(done)]
    rows = tuple(tuple(done[i * samples : (i + 1) * samples]) for i in range(len(problems)))
    unverified = problems[0].verifier == "none"
    scores = scorer.score(items) if unverified else scorer.only(items, (REFUSED,))
    refused = scores.parts[REFUSED].reshape(len(problems), samples) if REFUSED in scores.parts else None
    if unverified:
        rewards = scores.reward.reshape(len(problems), samples)
        return Evaluated(task, tuple(problems), rows, None, None, rewards, refused=refused)
    whole = np.asarray([is_whole(c) for c in done])
    correct = ((scores.accuracy >= 1) & whole).reshape(len(problems), samples)
    maj = np.asarray([majority(p, row, right) for p, row, right in zip(problems, rows, correct, strict=True)])
    given_up = 1.0 - float(whole.mean()) if watched else None
    return Evaluated(task, tuple(problems), rows, correct, maj, given_up=given_up, refused=refused)


def known_mean(values: np.ndarray) -> float:
    """The mean of the numbers that are there; NaN where none is."""
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


def is_whole(completion: Completion) -> bool:
    """Whether it went on to its own end, or to its limit; what was ended before is no answer."""
    return completion.finish_reason != "aborted"


def pass_at(correct: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of k completions drawn from the n given is correct, for each problem: bool[P, n] -> [P].

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of arXiv 2107.03374, eq. 1.
    """
    n = correct.shape[1]
    wrong = n - correct.sum(axis=1)
    return np.asarray([1 - math.comb(int(w), k) / math.comb(n, k) for w in wrong])


def majority(
    problem: Problem, completions: Sequence[Completion], correct: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """1 if the most frequent extracted answer is correct, else 0; ties go to the answer given first.

    With ``weights``, float[k], the one for which they add up to most. What was ended early has no answer.
    """
    answers = [answer_of(c.text, problem.extractor) if is_whole(c) else None for c in completions]
    sums: dict[str, float] = collections.defaultdict(float)
    for answer, weight in zip(answers, np.ones(len(answers)) if weights is None else weights, strict=True):
        if answer is not None:
            sums[answer] += float(weight)
    if not sums:
        return 0.0
    return float(correct[answers.index(max(sums, key=sums.__getitem__))])


def reranked(found: Evaluated, scores: np.ndarray, weights: np.ndarray) -> Evaluated:
    """The evaluation, with what a reward model makes of its answers: the best of k, and a weighted majority.

    Args:
      found: of a task whose answers are verified.
      scores: float64[n, k], the higher the better; of equal ones the first counts. What was ended early is the last.
      weights: float64[n, k], at least 0: of each answer's vote.
    """
    whole = np.asarray([[is_whole(c) for c in row] for row in found.completions])
    first = np.argmax(np.where(whole, scores, -np.inf), axis=1)
    best = np.take_along_axis(found.correct, first[:, None], axis=1)[:, 0]
    rows = zip(found.problems, found.completions, found.correct, weights, strict=True)
    return dataclasses.replace(
        found, best=best.astype(np.float64), weighted=np.asarray([majority(*row) for row in rows])
    )


def _powers(k: int) -> list[int]:
    return sorted({2**i for i in range(1, k.bit_length()) if 2**i <= k} | {k})
