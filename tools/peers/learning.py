"""Time to accuracy: what every contestant's process is told, and what it tells.

The work comes as one line of JSON on standard input: ``model`` (a Hugging Face directory), ``train`` and ``test``
(problems, each with ``prompt``, the text up to where the answer begins, and ``answer``), ``prompts`` and ``group`` of a
step, ``completion`` and ``prompt`` (tokens at most), ``temperature``, ``learning_rate``, ``clip_norm``, ``clip``
(lower and upper), ``microbatch`` (rows of one pass), ``steps``, ``seed``, ``config`` (ours alone), ``turns`` of an
episode (0: one answer; else ``train`` has chat messages and the environment's columns, and nothing is tested) and
``began`` (the clock when the process was started). After each step a line goes out: ``step``, ``seconds`` since the
start without the seconds of evaluations, ``completions`` sampled, ``accuracy`` on ``test`` by greedy answers, ``calls``
of the environment's tool so far. Whoever reads them ends the process when it has seen enough. What the libraries print
goes to standard error.
"""

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from calculator import Calculator

ROOT = Path(__file__).parents[2]


def answers() -> ModuleType:
    """The module that cuts answers out of texts: a file of ours that needs no other library."""
    sys.path.append(str(ROOT))
    place = importlib.util.spec_from_file_location("answers", ROOT / "jaxrl_llm" / "tasks" / "extract.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def reward_of(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """1 where the last number of a text is the reference's, else 0."""
    cut = answers()
    found = [cut.number(cut.extract(text, "last_number") or "") for text in texts]
    right = [cut.number(reference) for reference in references]
    return [float(value is not None and value == reference) for value, reference in zip(found, right, strict=True)]


def batches_of(problems: Sequence[dict[str, str]], size: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """``size`` problems at a time, in a new order in each epoch; what is left of one begins the next batch."""
    order = random.Random(seed)
    waiting: list[dict[str, str]] = []
    while True:
        while len(waiting) < size:
            waiting += order.sample(list(problems), len(problems))
        yield waiting[:size]
        waiting = waiting[size:]


class Told:
    """Keeps the clock, and tells of each step.

    Args:
      work: as it came.
      answer: the greedy answers to prompts, of the policy as it is.
      clock: seconds, as those of ``began``.
    """

    def __init__(
        self, work: dict[str, Any], answer: Callable[[list[str]], list[str]], clock: Callable[[], float] = time.time
    ):
        self._work = work
        self._answer = answer
        self._clock = clock
        self._tested = 0.0

    def step(self, number: int) -> None:
        """Step ``number`` has learned."""
        began = self._clock()
        tested = self._work["test"]
        texts = self._answer([problem["prompt"] for problem in tested]) if tested else []
        right = reward_of(texts, [problem["answer"] for problem in self._work["test"]])
        line = {
            "step": number,
            "seconds": began - self._work["began"] - self._tested,
            "completions": number * self._work["prompts"] * self._work["group"],
            "accuracy": sum(right) / max(len(right), 1),
            "calls": Calculator.made,
        }
        print(json.dumps(line), file=OUT, flush=True)
        self._tested += self._clock() - began


def work() -> dict[str, Any]:
    """What is to be done."""
    return json.loads(sys.stdin.readline())


OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
