"""What each process of ``test_distributed`` runs: what they tell each other, and how one of them ends all."""

import json
import math
import os
import signal
import sys

import numpy as np

from jaxrl_llm.cli.train import linked_processes, take_distributed
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Function, Scorer
from jaxrl_llm.sharding.distributed import Disagreement
from jaxrl_llm.system.signals import Preemption
from jaxrl_llm.trainer.loop import agreed_to_stop
from jaxrl_llm.types import Completion, Group, Problem

ANSWERS = ("4", "hang", "5", "raise", "4")


def items():
    """Completions of which the second hangs and the fourth raises, both process 1's of two."""
    problem = Problem("p", ({"role": "user", "content": "2 + 2"},), "4", "sums")
    return [(problem, Completion([0], [0.0], "stop", [True], [0], text=text)) for text in ANSWERS]


def scored(peers=None):
    """The scores of all, as JSON values but for what a failure says."""
    with Scorer((Accuracy(), Function("noting:judged", weight=0.5)), 1, 1.0, math.nan, peers) as scorer:
        found = scorer.score(items())
    parts = {name: part.tolist() for name, part in found.parts.items()}
    numbers = [repr(found.reward.tolist()), found.accuracy.tolist(), repr(parts)]
    failures = found.failures
    return [*numbers, failures.errors, failures.timeouts, list(failures.of["judged"]), bool(failures.message)]


def fail(error):
    raise error


def told(kind, call):
    """What the call's error says."""
    try:
        return call()
    except kind as error:
        return str(error)


def after_a_step(peers, loss=0.0, reward=0.0, token=0, signal_number=None):
    """What the processes agree on after step 3, in which each saw these numbers."""
    problem, completion = items()[0]
    completion = Completion(np.array([token]), np.zeros(1, np.float32), "stop", np.ones(1, bool), np.zeros(1, np.int32))
    group = Group(problem, np.array([1]), (completion,), np.array([float(reward)]), np.zeros(1))
    with Preemption(lambda line: None) as stop:
        if signal_number:
            os.kill(os.getpid(), signal_number)
        common = [group.rewards, *(completion.tokens for completion in group.completions)]
        return told(Disagreement, lambda: agreed_to_stop(peers, stop, 3, common, {"loss": loss}))


def talk(peers):
    """Print what this process hears."""
    said = {"gathered": repr(peers.gather([peers.index, math.pi, math.nan]))}
    said |= {"long": len(peers.gather("x" * 3_000_000)[1])}
    said |= {"first": peers.first(lambda: peers.index), "scores": scored(peers)}
    said["refused"] = told(InputError, lambda: peers.first(lambda: fail(InputError("no such thing"))))
    said["differs"] = told(Disagreement, lambda: peers.check_same("weather", ("sun", "rain")[peers.index]))
    other = {"loss": float(peers.index), "reward": peers.index, "token": peers.index}
    said["other"] = {name: after_a_step(peers, **{name: value}) for name, value in other.items()}
    said["stop"] = [after_a_step(peers), after_a_step(peers, signal_number=signal.SIGTERM if peers.index else None)]
    print(json.dumps(said))


def end(peers, how):
    """Process 1 refuses or crashes, process 0 is killed; the other one waits."""
    if peers.index == (how != "die"):
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        fail(InputError("this will not do") if how == "refuse" else ZeroDivisionError("by nothing"))
    peers.gather(None)


def main(arguments):
    how = arguments.pop(0)
    with linked_processes(take_distributed(arguments)) as peers:
        talk(peers) if how == "talk" else end(peers, how)


if __name__ == "__main__":
    main(sys.argv[1:])
