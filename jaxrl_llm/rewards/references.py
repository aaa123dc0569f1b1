"""References that no answer reaches: each is verified against itself, a sample before the first step, all behind it."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from jaxrl_llm.rewards.calls import Call
from jaxrl_llm.rewards.pool import Pool
from jaxrl_llm.rewards.verify import POOLED
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.tasks.extract import extract, written
from jaxrl_llm.tasks.task import unreachable
from jaxrl_llm.types import Problem

SAMPLE = 256
"""Number of references that are tried before the first step."""
FILE = "references.json"
"""The file in a run's directory with what all references have shown, by a digest of them."""
MATH = "math"
_AT_ONCE = 4  # few, since rewards wait behind them


def check_references(
    problems: Iterable[Problem], pool: Pool, timeout_s: float, folder: Path | None, needed: bool
) -> tuple[list[str], Callable[[Callable[[str], None]], None]]:
    """Try the references of the verifier ``math``; those of ``match`` and ``integer`` are tried as they are read.

    Args:
      problems: of which those with this verifier are tried, one for each reference.
      pool: of the verifier's processes.
      timeout_s: for one reference.
      folder: the run's, where the result is kept; None for none.
      needed: whether the run reads which answers are right.

    Returns:
      notes; and a function that begins to try the rest in the background, which gives notes to its argument.

    Raises:
      InputError: it is needed, and most of the sample are not reached.
    """
    distinct = {(one.extractor, one.answer): one for one in problems if one.verifier == MATH}
    by_digest = {hashlib.sha256(json.dumps(key).encode()).hexdigest(): one for key, one in distinct.items()}
    ordered = [by_digest[key] for key in sorted(by_digest)]
    digest = hashlib.sha256("".join(sorted(by_digest)).encode()).hexdigest()[:16]
    path = None if folder is None else folder / FILE
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if not ordered or digest in known:
        return known.get(digest, []), lambda note: None
    lost = _unreached(ordered[:SAMPLE], pool, timeout_s)
    notes = unreachable(lost, len(ordered[:SAMPLE]), needed)

    def finish(note: Callable[[str], None]) -> None:
        found = list(lost)
        try:
            for begin in range(SAMPLE, len(ordered), _AT_ONCE):
                found += _unreached(ordered[begin : begin + _AT_ONCE], pool, timeout_s)
        except (CancelledError, RuntimeError):  # the run ends; or its rewards cannot be scored, and say so
            return
        told = unreachable(found, len(ordered), needed=False)
        for line in told if len(found) > len(lost) else ():
            note(line)
        if path is not None:
            with new_file(path) as part:
                part.write_text(json.dumps({digest: told}))

    return notes, lambda note: threading.Thread(target=finish, args=[note], name="references", daemon=True).start()


def _unreached(problems: Sequence[Problem], pool: Pool, timeout_s: float) -> list[Problem]:
    answers = [extract(written(one.answer, one.extractor), one.extractor) or "" for one in problems]
    calls = [
        Call(POOLED[MATH], [(answer, one)], timeout_s=timeout_s) for answer, one in zip(answers, problems, strict=True)
    ]
    outcomes = [future.result()[0] for future in pool.submit(calls)]
    return [one for one, outcome in zip(problems, outcomes, strict=True) if not outcome.value >= 1.0]
