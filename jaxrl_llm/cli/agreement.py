"""``jaxrl-llm eval CONFIG --pairs FILE``: how often the judges of a configuration agree with labelled pairs."""

import dataclasses
import json
import math
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.errors import naming, require
from jaxrl_llm.rewards.rubric import OF_JUDGES, Pairwise, Rubric, asks_model
from jaxrl_llm.rewards.scorer import Scorer
from jaxrl_llm.rewards.shaping import check_reward, name_rewards
from jaxrl_llm.runs import mesh_here, on_this_machine
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.setting import Range, check_fields
from jaxrl_llm.types import Completion, Problem

Pair = tuple[Problem, str, str]
"""A problem with a better and a worse answer."""


@dataclasses.dataclass(frozen=True)
class AgreementOptions:
    """Options of the comparison of judges with labelled pairs.

    Attributes:
      limit: pairs at most; 0 for all.
      json: print one JSON object instead of lines.
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    limit: Annotated[int, Range("[0, inf]", "0 is all")] = 0
    json: bool = False
    mesh: MeshShape = MeshShape()


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of one judge with labelled pairs. ``won``: float64[n], 1 where the judge prefers the better answer, 0.5
    for a tie, 0, and NaN without a score. ``means``: of the further numbers of each scored text, by name. ``failure``:
    the first call that failed, in one line; empty without one.
    """

    won: np.ndarray
    means: Mapping[str, float]
    failure: str = ""

    def metrics(self) -> dict[str, float | None]:
        """Return the numbers by name: ``agreement`` counts a tie as half, and its ``error`` is the standard error."""
        scored = self.won[~np.isnan(self.won)]
        count = len(scored)
        metrics: dict[str, float | None] = {
            "pairs": len(self.won),
            "scored": count,
            "agreement": float(scored.mean()) if count else None,
            "error": float(scored.std(ddof=1) / count**0.5) if count > 1 else None,
            "ties": float(np.mean(scored == 0.5)) if count else None,
        }
        return metrics | {name: None if math.isnan(mean) else mean for name, mean in self.means.items()}


def agreement_command(name: str, pairs: str, arguments: list[str]) -> int:
    """Ask the judges of a configuration about the pairs of a file, and print their agreement; return the exit code."""
    program = f"jaxrl-llm eval {name} --pairs {pairs}"
    options = parse_flags(AgreementOptions, arguments, program, str(__doc__), AgreementOptions())
    check_fields(options, "--")
    run: Any = on_this_machine(configs.find_config(name).located)
    judges = list(dict.fromkeys(base for base in configs.bases(run) if isinstance(base, OF_JUDGES)))
    require(bool(judges), f"{name} has no judge whose agreement could be measured: give it a Rubric or a Pairwise")
    for judge in judges:
        check_reward(judge)
    rows = read_pairs(Path(pairs), options.limit)
    for judge in judges:
        if isinstance(judge, Rubric):
            judge.check_problems([problem for problem, *_ in rows])
    models: Mapping[Any, Any] = {}
    if any(map(asks_model, judges)):
        from jaxrl_llm.stages.judges import load_judge_engines
        from jaxrl_llm.telemetry.progress import Progress, Schedule

        with Progress(Schedule(1)) as progress:
            models = load_judge_engines(run, mesh_here(options.mesh), progress.status)
    agreements = {label: ask_judge(judge, rows, models) for label, judge in name_rewards(judges).items()}
    for label, judged in agreements.items():
        if judged.failure:
            print(f"... {label}: {judged.failure}", file=sys.stderr)
    if options.json:
        print(json.dumps({"pairs": pairs} | {label: judged.metrics() for label, judged in agreements.items()}))
        return 0
    for label, judged in agreements.items():
        print(f"{label} on {pairs}:")
        for metric, value in judged.metrics().items():
            print(f"  {metric:<12}{'unknown' if value is None else f'{value:10.4g}'}")
    return 0


def read_pairs(path: Path, limit: int) -> list[Pair]:
    """Return the pairs of a file in any form that ``Pairs`` reads; a row's ``answer`` is the reference."""
    from jaxrl_llm.data.datasets import PAIRS, columns_of, ranking_of
    from jaxrl_llm.tasks.tables import read_table

    labelled: list[Pair] = []
    for place, row in read_table(path):
        with naming(place):
            prompt, (best, *_, worst), _ = ranking_of(row, columns_of(row, PAIRS))
        answer = row.get("answer")
        right = "" if answer is None else str(answer)
        problem = Problem(place, tuple(prompt), right, path.stem, verifier="none", metadata=row)
        labelled.append((problem, str(best["content"]), str(worst["content"])))
        if len(labelled) == limit:
            break
    require(
        bool(labelled), f"{path} has no pairs: jaxrl-llm collect RUN_OR_MODEL --kind pairs --out FILE.jsonl makes some"
    )
    return labelled


def ask_judge(judge: Any, pairs: Sequence[Pair], models: Mapping[Any, Any] = types.MappingProxyType({})) -> Agreement:
    """Ask a judge about each pair: a ``Rubric`` scores both answers, a ``Pairwise`` compares them."""
    items: list[tuple[Problem, Completion]] = []
    for problem, best, worst in pairs:
        if isinstance(judge, Pairwise):
            items.append((dataclasses.replace(problem, answer=worst or " "), as_completion(best)))
        else:
            items += [(problem, as_completion(best)), (problem, as_completion(worst))]
    each = len(items) // len(pairs)
    with Scorer((judge,)) as scorer:
        scorer.models = models
        size = 64 * each  # pairs that a judge is asked about in one call
        parts = [scorer.score(items[at : at + size]) for at in range(0, len(items), size)]
    scores = np.concatenate([part.reward / judge.weight for part in parts])
    if each == 2:
        best, worst = scores.reshape(-1, 2).T
        scores = np.where(np.isnan(best + worst), np.nan, (np.sign(best - worst) + 1) / 2)
    columns = {
        name.partition("/")[2]: np.concatenate([part.parts[name] for part in parts])
        for name in parts[0].parts
        if "/" in name
    }
    means = {name: float(np.nanmean(x)) if not np.isnan(x).all() else math.nan for name, x in columns.items()}
    return Agreement(scores, means, next((part.failures.message for part in parts if part.failures.message), ""))


def as_completion(text: str) -> Completion:
    """Return a text as a completion that no policy sampled."""
    zero = np.zeros(1)
    return Completion(zero.astype(np.int32), zero, "stop", zero > 0, zero.astype(np.int32), text=text)
