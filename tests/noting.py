"""Rewards for runs of several processes: one writes down what it is given, one fails where it is told to."""

import json
import os
import signal
from pathlib import Path

from jaxrl_llm.types import Completion, Problem


def noted(problem: Problem, completion: Completion) -> float:
    """0, and a line in a file of this worker's own: the policy's version, the problem, the tokens."""
    line = json.dumps([int(completion.version[0]), problem.id, completion.tokens.tolist()])
    with (Path(os.environ["NOTES"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(f"{line}\n")
    return 0.0


def judged(problem: Problem, completion: Completion) -> float:
    """1, unless the text says otherwise."""
    if completion.text == "hang":
        signal.pause()
    return 1 / (completion.text != "raise")
