"""References that no answer reaches, and reference programs that fail their own tests: each is tried, a sample before
the first step, all behind it.
"""

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from jaxrl_llm import codec
from jaxrl_llm.rewards.calls import Call
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.pool import Pool
from jaxrl_llm.rewards.verify import POOLED
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.tasks.extract import extract, written
from jaxrl_llm.tasks.task import unreachable
from jaxrl_llm.types import Problem

SAMPLE = 256
"""Number of references that are tried before the first step."""
FILE, PROGRAMS_FILE = "references.json", "solutions.json"
"""The files in a run's directory with what all references, and all reference programs, have shown, by a digest of
them.
"""
SOLUTION = "solution"
"""Column of the rows with their reference programs."""
MATH = "math"
_AT_ONCE = 4  # few, since rewards wait behind them
_NAMED = 3  # rows named in a note

Lost = Sequence[tuple[Problem, float]]
"""Problems of references that did not reach their answer, with their scores."""
Notes = tuple[list[str], Callable[[Callable[[str], None]], None]]
"""Notes; and a function that begins to try the rest in the background, which gives notes to its argument."""


def check_references(
    problems: Iterable[Problem], pool: Pool, timeout_s: float, folder: Path | None, needed: bool
) -> Notes:
    """Try the references of the verifier ``math``; those of ``match`` and ``integer`` are tried as they are read.

    Args:
      problems: of which those with this verifier are tried, one for each reference.
      pool: of the verifier's processes.
      timeout_s: for one reference.
      folder: the run's, where the result is kept; None for none.
      needed: whether the run reads which answers are right.

    Raises:
      InputError: it is needed, and most of the sample are not reached.
    """
    distinct = {(one.extractor, one.answer): one for one in problems if one.verifier == MATH}
    tries = {}
    for key, one in distinct.items():
        answer = extract(written(one.answer, one.extractor), one.extractor) or ""
        tries[json.dumps(key)] = one, Call(POOLED[MATH], [(answer, one)], timeout_s=timeout_s)

    def told(lost: Lost, count: int, sample: bool) -> list[str]:
        return unreachable([one for one, _ in lost], count, needed and sample)

    return _try_references(tries, told, pool, None if folder is None else folder / FILE)


def check_programs(judged: Iterable[tuple[CodeTests, Sequence[Problem]]], pool: Pool, folder: Path | None) -> Notes:
    """Run the reference programs of rows through their own tests; rows without one are left out.

    Args:
      judged: tests of programs, and the problems that they judge.
      pool: of the processes of rewards.
      folder: the run's, where the result is kept; None for none.
    """
    tries = {}
    for judge, problems in judged:
        for one in problems:
            program = one.metadata.get(SOLUTION)
            if isinstance(program, str) and program.strip():
                begun = judge.before is not None and one.metadata[judge.before].strip() in program
                whole = dataclasses.replace(judge, all_or_nothing=True, before=None if begun else judge.before)
                tries[repr((whole, program, one.metadata[judge.column]))] = one, whole.call(one, program)
    return _try_references(tries, _unsolved, pool, None if folder is None else folder / PROGRAMS_FILE)


def _unsolved(lost: Lost, count: int, sample: bool) -> list[str]:
    """Return the note about reference programs that fail, or that nobody can judge."""
    told = []
    for ends, said in ((False, "fail their own tests"), (True, "cannot be told by their own tests")):
        rows = [str(one.metadata.get("row", one.id)) for one, score in lost if math.isnan(score) == ends]
        named = ", ".join(rows[:_NAMED]) + (", ..." if len(rows) > _NAMED else "")
        told += [f"{len(rows)} {said}: {named}"] if rows else []
    remedy = "no answer can earn its reward there; correct these tests or leave the rows out (docs/security.md)"
    return [f"of {count} reference programs (column {SOLUTION}), {'; '.join(told)}; {remedy}"] if told else []


def _try_references(
    tries: Mapping[str, tuple[Problem, Call]], told: Callable[[Lost, int, bool], list[str]], pool: Pool,
    path: Path | None,
) -> Notes:  # fmt: skip
    """Try a sample of references; ``told`` makes notes of those that are lost among so many, the sample or all."""
    by_digest = {codec.digest(key, 64): one for key, one in tries.items()}
    ordered = [by_digest[key] for key in sorted(by_digest)]
    digest = codec.digest("".join(sorted(by_digest)))
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if not ordered or digest in known:
        return known.get(digest, []), lambda note: None
    lost = _lost(ordered[:SAMPLE], pool)
    notes = told(lost, len(ordered[:SAMPLE]), True)

    def finish(note: Callable[[str], None]) -> None:
        found = list(lost)
        try:
            for begin in range(SAMPLE, len(ordered), _AT_ONCE):
                found += _lost(ordered[begin : begin + _AT_ONCE], pool)
        except (CancelledError, RuntimeError):  # the run ends; or its rewards cannot be scored, and say so
            return
        all_told = told(found, len(ordered), False)
        for line in all_told if len(found) > len(lost) else ():
            note(line)
        if path is not None:
            with new_file(path) as part:
                part.write_text(json.dumps({digest: all_told}))

    return notes, lambda note: threading.Thread(target=finish, args=[note], name="references", daemon=True).start()


def _lost(tries: Sequence[tuple[Problem, Call]], pool: Pool) -> list[tuple[Problem, float]]:
    outcomes = [future.result()[0] for future in pool.submit([call for _, call in tries])]
    scores = [outcome.value if outcome.status == "ok" else math.nan for outcome in outcomes]
    return [(one, score) for (one, _), score in zip(tries, scores, strict=True) if not score >= 1.0]
