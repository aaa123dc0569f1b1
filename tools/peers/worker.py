"""One contestant's process: work comes as a line of JSON on standard input, answers go out as lines on standard output.

The first line is the work: ``what`` (rollout, update, or step: both), ``model`` (a Hugging Face directory),
``prompts``, ``limits`` (the length of each completion), ``completions`` and ``advantages`` to learn from,
``learning_rate``, ``slots``, ``prompt``, ``completion``, ``chunk``, ``group``, ``mode``. The worker loads the model,
does what is checked (the first prompt decoded greedily; updates by the completions given) and all of the work once, and
answers with what it found. Each further line is answered with the seconds that the work took. A step learns from what
it sampled, with the advantages given. What is printed by the libraries goes to standard error. Imports nothing but
Python's own library, so that it runs in any environment.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

CHECKED_UPDATES = 2
"""The second shows whether the first changed the weights in the same way."""


class Contestant(NamedTuple):
    """A library that is ready to work.

    Attributes:
      greedy: () -> the first prompt's completion at temperature 0, as long as the longest one.
      generate: (seed) -> (completions, each with at least its limit's tokens; how many decode steps of how many rows).
      update: (completions) -> (loss; the gradient's norm; positions computed): one optimiser step of GRPO by all of
        them.
      packages: whose versions are reported.
      settings: what was chosen, in words.
    """

    greedy: Callable[[], Sequence[int]]
    generate: Callable[[int], tuple[list[Sequence[int]], int]]
    update: Callable[[list[list[int]]], tuple[float, float, int]]
    packages: tuple[str, ...]
    settings: str


def batches(work: dict[str, Any]) -> Iterator[tuple[list[list[int]], list[int]]]:
    """The requests in order, ``slots`` at a time, for samplers that keep a batch until its longest row ends."""
    for start in range(0, len(work["prompts"]), work["slots"]):
        rows = slice(start, start + work["slots"])
        yield work["prompts"][rows], work["limits"][rows]


def padded(rows: list[list[int]], width: int, filler: int) -> list[list[int]]:
    """The rows, filled on the right."""
    return [[*row, *[filler] * (width - len(row))] for row in rows]


def busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine began; None where the system does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, interrupts, soft, stolen = (int(x) for x in file.readline().split()[1:9])
    except OSError:
        return None
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Begin the count of the largest memory anew, where the system lets us; if not, it holds loading and compiling
    too.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_mb() -> int:
    """The largest memory of this process since ``forget_peak``."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def done(contestant: Contestant, work: dict[str, Any], seed: int) -> dict[str, Any]:
    """What the work gives: completions of the right lengths where it samples, and how much was computed."""
    completions, computed, found = work["completions"], 0, {}
    if work["what"] != "update":
        sampled, computed = contestant.generate(seed)
        pairs = zip(sampled, work["limits"], strict=True)
        completions = [[int(token) for token in tokens[:limit]] for tokens, limit in pairs]
        found = {"completions": completions}
    if work["what"] != "rollout":
        computed += contestant.update(completions)[2]
    return found | {"computed": computed}


def timed(contestant: Contestant, work: dict[str, Any], seed: int) -> dict[str, Any]:
    """The work done once: its seconds, from Python's lists of tokens to such lists or a finished optimiser step.

    ``others``: the share of the machine's cores that other processes used meanwhile.
    """
    forget_peak()
    busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
    found = done(contestant, work, seed)
    seconds, own = time.perf_counter() - began, time.process_time() - own
    others = None if busy is None else max(0.0, busy_seconds() - busy - own) / (seconds * os.cpu_count())
    return {"seconds": seconds, "cpu_s": own, "others": others, "peak_mb": peak_mb()} | found


def checks(contestant: Contestant, work: dict[str, Any]) -> dict[str, Any]:
    """What others' answers are held against; the weights are those given until the first update."""
    found: dict[str, Any] = {}
    if work["what"] != "update":
        found["greedy"] = [int(token) for token in contestant.greedy()]
        found |= done(contestant, work | {"what": "rollout"}, 0)
    if work["what"] != "rollout":
        found["updates"] = [contestant.update(work["completions"])[:2] for _ in range(CHECKED_UPDATES)]
    return found


def serve(make: Callable[[dict[str, Any]], Contestant]) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    contestant = make(work)
    ready = checks(contestant, work) | {"settings": contestant.settings}
    ready |= {"warmup_s": time.perf_counter() - began}
    ready |= {"versions": {name: version(name) for name in contestant.packages}}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(contestant, work, json.loads(line)["seed"])), file=answers, flush=True)
