"""The calls that scoring completions takes: of the verifier, and of each function among the rewards."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards.calls import Call, Outcome, defined
from jaxrl_llm.rewards.forms import Form, Item, form_of
from jaxrl_llm.rewards.functions import Function, Local
from jaxrl_llm.rewards.models import ON_DEVICE
from jaxrl_llm.rewards.shaping import BUILT_IN, Accuracy, Reward
from jaxrl_llm.rewards.steps import StepFunction
from jaxrl_llm.rewards.verify import Pooled, verdict

BATCH_TIMES = 60
"""A call of a whole batch may take so many times what one completion may."""
VERIFIED = ""
"""The verifier's own column, which is there without an ``Accuracy`` reward too; no reward has this name."""


class Job(NamedTuple):
    """A call, the column and the places in it that it fills, and the function where no other process has it."""

    column: str
    places: Sequence[int]
    call: Call
    function: Callable[..., Any] | None = None


def form_of_reward(reward: Reward) -> Form | None:
    """How it is called; None where that is known."""
    if isinstance(reward, (Function, Local, StepFunction)):
        return reward.form
    return None if isinstance(reward, (Accuracy, *BUILT_IN, *ON_DEVICE)) else form_of(reward)


def jobs_of(
    name: str, reward: Any, form: Form, items: Sequence[Item], timeout_s: float, places: Sequence[int] | None = None
) -> list[Job]:
    """The calls of a function, of one completion each or of all; ``timeout_s`` is for one completion.

    ``places``: of the completions that it scores; None for all.
    """
    named = isinstance(reward, Function) or (isinstance(reward, StepFunction) and isinstance(reward.path, str))
    function = None if named else _callable(reward)
    seconds = getattr(reward, "timeout_s", None) or timeout_s * (BATCH_TIMES if form.batch else 1)
    path = reward.path if named else name
    positions = reward.positions if isinstance(reward, StepFunction) else ""
    bare = [(problem, dataclasses.replace(completion, extras={})) for problem, completion in items]
    every = range(len(items)) if places is None else places
    shares = [every] if every and (form.batch or form.waits) else [[place] for place in every]
    return [
        Job(name, share, Call(path, [bare[at] for at in share], form, seconds, positions), function) for share in shares
    ]


def verified(items: Sequence[Item], timeout_s: float) -> tuple[dict[str, np.ndarray], list[Job]]:
    """The verifier's column, float64[n], as far as it can be computed here, and the calls that fill the rest."""
    column = np.zeros(len(items))
    jobs = []
    for place, (problem, completion) in enumerate(items):
        found = verdict(problem, completion)
        if isinstance(found, Pooled):
            jobs.append(Job(VERIFIED, [place], Call(found.path, [(found.answer, problem)], timeout_s=timeout_s)))
        else:
            column[place] = found
    return {VERIFIED: column}, jobs


def told(job: Job, reward: Any, outcome: Outcome) -> str:
    """What is said of a failure: ``my_rewards.py:7: ZeroDivisionError: division by zero``.

    ``reward``: None for the verifier.
    """
    place = outcome.place or (defined(_callable(reward)) if reward is not None else "") or job.call.path
    return f"{place}: {outcome.message}"


def _callable(reward: Any) -> Callable[..., Any]:
    return reward.function if isinstance(reward, (Function, Local, StepFunction)) else reward
