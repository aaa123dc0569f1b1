"""Today's answers against those of the first policy: how often a judge finds them better."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import JUDGED, Run
from jaxrl_llm.engine import Sampling
from jaxrl_llm.evaluate import Evaluated
from jaxrl_llm.folders import new_file
from jaxrl_llm.models.fingerprint import digest
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.telemetry.rows import append_rows, read_rows
from jaxrl_llm.types import Completion, Problem

FIRST_ANSWERS = "first_answers.jsonl"
"""In the run's directory: what the first policy answered to the problems that are tested on."""


@dataclasses.dataclass(frozen=True)
class Contest:
    """A judge, and where the first policy's answers are.

    Attributes:
      path: of the file that holds them.
      scorer: asks the judge.
      peers: the run's processes; the first one writes and reads.
      made_from: says of the answers to a problem what they are made from, the weights apart.
    """

    path: Path
    scorer: Scorer
    peers: Peers
    made_from: Callable[[Problem], str]

    def begin(self, found: Sequence[Evaluated]) -> None:
        """Keep the answers of the first policy to each task; those of an attempt before give way."""
        if not self.peers.leads:
            return
        kept = ("task", "problem", "sample", "completion", "finish_reason")
        told = []
        for one in found:
            asked = {problem.id: self.made_from(problem) for problem in one.problems}
            rows = zip(one.rows(), (answer for row in one.completions for answer in row), strict=True)
            for row, answer in rows:
                own = {"tokens": answer.tokens, "made_from": asked[row["problem"]]}
                told.append({name: row[name] for name in kept} | own)
        with new_file(self.path) as part, part.open("wb") as file:
            append_rows(file, told)

    def judged(self, found: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
        """The evaluation of each task with ``won``; see ``against``."""
        first = {(row["task"], row["problem"], row["sample"]): row for row in self.peers.first(self._read)}
        return tuple(self.against(first, one) for one in found)

    def against(self, known: Mapping[tuple[str, str, int], dict[str, Any]], found: Evaluated) -> Evaluated:
        """One task's evaluation with ``won``: of each answer against the first policy's of the same number.

        A tie where both have the same tokens, which nobody is asked about; NaN where there is no first answer (the
        problems, their prompts or the sampling were others then, or the file is gone), or one of the two could not be
        scored.
        """
        first = [
            [known.get((found.task, problem.id, number)) for number in range(len(row))]
            for problem, row in zip(found.problems, found.completions, strict=True)
        ]
        won = np.full((len(first), len(first[0])), np.nan)
        places = []
        items: list[tuple[Problem, Completion]] = []
        for at, row in np.ndenumerate(np.asarray(first, object)):
            answer = found.completions[at[0]][at[1]]
            made_from = self.made_from(found.problems[at[0]])
            if row is None or row.get("made_from", made_from) != made_from:
                continue
            if row["tokens"] == answer.tokens.tolist():
                won[at] = 0.5
                continue
            places.append(at)
            items += [(found.problems[at[0]], as_completion(row)), (found.problems[at[0]], answer)]
        scores = self.scorer.only(items, (JUDGED,)).parts[JUDGED].reshape(-1, 2) if items else ()
        for at, (before, now) in zip(places, scores, strict=True):
            won[at] = np.nan if np.isnan(before + now) else (np.sign(now - before) + 1) / 2
        return dataclasses.replace(found, won=won)

    def _read(self) -> Sequence[dict[str, Any]]:
        return list(read_rows(self.path))


def contest_of(run: Run, scorer: Scorer, prompts: Prompts, sampling: Sampling, peers: Peers) -> Contest | None:
    """The run's contest; None for a run without a judge.

    Args:
      run: with its settings resolved.
      scorer: asks the judge.
      prompts: of the problems that are tested on.
      sampling: of the answers to them.
      peers: the run's processes.
    """

    def made_from(problem: Problem) -> str:
        how = np.asarray([sampling.temperature, sampling.top_p], np.float64)  # the length may grow from phase to phase
        return digest([np.asarray(prompts[problem], np.int32), how])

    return None if run.evaluation.judge is None else Contest(scorer.folder / FIRST_ANSWERS, scorer, peers, made_from)


def as_completion(row: dict[str, Any]) -> Completion:
    """An answer as a judge reads it: its tokens and its text; who sampled it with what probability is not kept."""
    tokens = np.asarray(row["tokens"], np.int32)
    size = len(tokens)
    return Completion(
        tokens, np.zeros(size, np.float32), row["finish_reason"], np.ones(size, bool), np.zeros(size, np.int32),
        text=row["completion"],
    )  # fmt: skip
