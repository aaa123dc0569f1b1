"""One contestant's process: work comes as a line of JSON on standard input, answers go out as lines on standard output.

The first line is the work: ``model`` (a Hugging Face directory), ``prompts``, ``limits`` (the length of each
completion), ``slots``, ``prompt``, ``completion``, ``chunk``, ``mode``. The worker loads the model, decodes the first
prompt greedily, does the whole work once, and answers with what it found. Each further line is answered with the
seconds that the work took, and with its tokens. What is printed by the libraries goes to standard error. Imports
nothing but Python's own library, so that it runs in any environment.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """A sampler that is ready to work.

    Attributes:
      greedy: () -> the first prompt's completion at temperature 0, as long as the longest one.
      generate: (seed) -> (completions, each with at least its limit's tokens; how many decode steps of how many rows).
      packages: whose versions are reported.
      settings: what was chosen, in words.
    """

    greedy: Callable[[], Sequence[int]]
    generate: Callable[[int], tuple[list[Sequence[int]], int]]
    packages: tuple[str, ...]
    settings: str


def batches(work: dict[str, Any]) -> Iterator[tuple[list[list[int]], list[int]]]:
    """The requests in order, ``slots`` at a time, for samplers that keep a batch until its longest row ends."""
    for start in range(0, len(work["prompts"]), work["slots"]):
        rows = slice(start, start + work["slots"])
        yield work["prompts"][rows], work["limits"][rows]


def busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine began; None where the system does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, interrupts, soft, stolen = (int(x) for x in file.readline().split()[1:9])
    except OSError:
        return None
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def timed(contestant: Contestant, work: dict[str, Any], seed: int) -> dict[str, Any]:
    """The work done once: seconds from the first request's submission to the last completion's tokens in Python.

    ``others``: the share of the machine's cores that other processes used meanwhile.
    """
    busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
    completions, computed = contestant.generate(seed)
    seconds, own = time.perf_counter() - began, time.process_time() - own
    others = None if busy is None else max(0.0, busy_seconds() - busy - own) / (seconds * os.cpu_count())
    pairs = zip(completions, work["limits"], strict=True)
    completions = [[int(token) for token in tokens[:limit]] for tokens, limit in pairs]
    counts = {"computed": computed, "others": others, "completions": completions}
    return {"seconds": seconds, "cpu_s": own} | counts


def serve(make: Callable[[dict[str, Any]], Contestant]) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    contestant = make(work)
    ready = {"greedy": [int(token) for token in contestant.greedy()]} | timed(contestant, work, 0)
    ready |= {"warmup_s": time.perf_counter() - began, "settings": contestant.settings}
    ready |= {"versions": {name: version(name) for name in contestant.packages}}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(contestant, work, json.loads(line)["seed"])), file=answers, flush=True)
