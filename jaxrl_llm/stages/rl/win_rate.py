"""The win rate: how often a judge prefers the current policy's answers to the first policy's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrl_llm.codec import digest_of_parts
from jaxrl_llm.config import JUDGED, Run
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rewards.rubric import Pairwise
from jaxrl_llm.rollout.evaluate import Evaluated, Tested
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.system.json_lines import append_rows, read_rows
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.types import Completion, Problem

FIRST_ANSWERS = "first_answers.jsonl"
"""A file in the run's directory: the first policy's answers to the evaluation problems."""


@dataclasses.dataclass(frozen=True)
class WinRate(Ingredient):
    """A judge of evaluations and the file of the first policy's answers. Fields are set once it is prepared.

    Attributes:
      path: of the file that holds them.
      scorer: asks the judge.
      peers: the run's processes; the first one writes and reads.
      made_from: maps a problem to a digest of its answers' inputs except the weights.
      pairwise: the judge sees both answers at once.
    """

    path: Path = Path(FIRST_ANSWERS)
    scorer: Any = None
    peers: Peers = ALONE
    made_from: Callable[[Problem], str] = str
    pairwise: bool = False
    name = "win_rate"

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        judge = run.evaluation.judge
        return None if judge is None else cls(pairwise=isinstance(judge, Pairwise))

    def prepared(self, around: Around) -> Self:
        """See ``Ingredient``."""
        prompts = around.test_prompts
        # The length of answers may grow from phase to phase.
        how = np.asarray([around.answers.temperature, around.answers.top_p], np.float64)
        return dataclasses.replace(
            self,
            path=around.scorer.folder / FIRST_ANSWERS,
            scorer=around.scorer,
            peers=around.peers,
            made_from=lambda problem: digest_of_parts([np.asarray(prompts[problem], np.int32), how]),
        )

    def tested(self, found: Tested, policy: Decoder, first: bool) -> Tested:
        """Add ``won`` to the evaluation; the first evaluation stores its answers instead."""
        if first:
            self.begin(found.answers)
            return found
        rows = self.peers.first(lambda: list(read_rows(self.path)))
        known = {(row["task"], row["problem"], row["sample"]): row for row in rows}
        return dataclasses.replace(found, answers=tuple(self.against(known, one) for one in found.answers))

    def begin(self, found: Sequence[Evaluated]) -> None:
        """Store the first policy's answers to each task; they replace those of an earlier attempt."""
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

    def against(self, known: Mapping[tuple[str, str, int], dict[str, Any]], found: Evaluated) -> Evaluated:
        """Add ``won`` to one task's evaluation: each answer against the first policy's of the same number.

        Equal tokens are a tie, without asking the judge. NaN if the first answer is missing (the problems, their
        prompts or the sampling were others then, or the file is gone), or if one of the two could not be scored.
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
            if row is None or row["made_from"] != made_from:
                continue
            if row["tokens"] == answer.tokens.tolist():
                won[at] = 0.5
                continue
            places.append(at)
            problem = found.problems[at[0]]
            if self.pairwise:  # it prefers an answer to the reference: here to the first policy's
                before = dataclasses.replace(problem, answer=row["completion"] or " ", verifier="none")
                items.append((before, answer))
                continue
            # As a judge reads it: sampling probabilities and versions are not kept.
            size = len(row["tokens"])
            before = Completion(
                np.asarray(row["tokens"], np.int32), np.zeros(size, np.float32), row["finish_reason"],
                np.ones(size, bool), np.zeros(size, np.int32), text=row["completion"],
            )  # fmt: skip
            items += [(problem, before), (problem, answer)]
        scores = self.scorer.score(items, only=(JUDGED,)).parts[JUDGED] if items else np.zeros(0)
        if not self.pairwise:
            old, new = scores.reshape(-1, 2).T
            scores = np.where(np.isnan(old + new), np.nan, (np.sign(new - old) + 1) / 2)
        for at, score in zip(places, scores, strict=True):
            won[at] = score
        return dataclasses.replace(found, won=won)
