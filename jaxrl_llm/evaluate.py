"""avg@k, pass@k and maj@k of a model on problems with checkable answers."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.collect import Status, complete
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.groups import request_seed
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.tasks import Task, encode, extract
from jaxrl_llm.types import Completion, Problem

SEED_SPACE = 1 << 39
"""Evaluation draws its request numbers from here on, training from 0: they never share a random number."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What one evaluation found.

    Attributes:
      task: its label.
      problems: the problems, n of them.
      completions: n rows of k.
      correct: bool[n, k].
      maj: float64[n], whether the most frequent extracted answer is correct.
    """

    task: str
    problems: tuple[Problem, ...]
    completions: tuple[tuple[Completion, ...], ...]
    correct: np.ndarray
    maj: np.ndarray

    @property
    def accuracy(self) -> float:
        """avg@k: the share of correct completions."""
        return float(self.correct.mean())

    def metrics(self) -> dict[str, float]:
        """``eval/<task>/...`` by the pinned names."""
        k, name = self.correct.shape[1], f"eval/{self.task}"
        found = {f"{name}/pass@1": self.accuracy, f"{name}/problems": float(len(self.problems))}
        found[f"{name}/mean_length"] = float(np.mean([len(c.tokens) for row in self.completions for c in row]))
        if k > 1:
            found |= {f"{name}/pass@{j}": float(pass_at(self.correct, j).mean()) for j in _powers(k)}
            found[f"{name}/maj@{k}"] = float(self.maj.mean())
        return found


def evaluate(
    engine: Engine, model: Any, tokenizer: Any, task: Task, problems: Sequence[Problem], scorer: Scorer, sampling: Sampling,
    samples: int, seed: int, status: Status = lambda text: None,
) -> Evaluated:
    """Answer every problem ``samples`` times and check the answers."""
    prompts = [encode(problem, task, tokenizer) for problem in problems for _ in range(samples)]
    seeds = [request_seed(seed, SEED_SPACE + n) for n in range(len(prompts))]
    done = complete(engine, model, tokenizer, prompts, seeds, sampling, status=lambda text: status(f"evaluating: {text}"))
    accuracy = scorer.verify([(problems[i // samples], c) for i, c in enumerate(done)])
    correct = (accuracy >= 1).reshape(len(problems), samples)
    rows = tuple(tuple(done[i * samples : (i + 1) * samples]) for i in range(len(problems)))
    maj = np.asarray([majority(p, row, right) for p, row, right in zip(problems, rows, correct, strict=True)])
    return Evaluated(task.label, tuple(problems), rows, correct, maj)


def pass_at(correct: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of k completions drawn from the n given is correct, for each problem: bool[P, n] -> [P].

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of arXiv 2107.03374, eq. 1.
    """
    n = correct.shape[1]
    wrong = n - correct.sum(axis=1)
    return np.asarray([1 - math.comb(int(w), k) / math.comb(n, k) for w in wrong])


def majority(problem: Problem, completions: Sequence[Completion], correct: np.ndarray) -> float:
    """1 if the most frequent extracted answer is correct, else 0; ties go to the answer given first."""
    answers = [extract(c.text, problem.extractor) for c in completions]
    counts = collections.Counter(a for a in answers if a is not None)
    if not counts:
        return 0.0
    return float(correct[answers.index(counts.most_common(1)[0][0])])


def _powers(k: int) -> list[int]:
    return sorted({2**i for i in range(1, k.bit_length()) if 2**i <= k} | {k})
