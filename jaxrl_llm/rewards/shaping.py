"""Rewards as values: each is called with a problem and a completion, and weighted by the scorer."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Sequence

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.bounds import Bound, Hinge, Threshold, check_bound
from jaxrl_llm.rewards.by_task import OfTasks
from jaxrl_llm.rewards.forms import form_of
from jaxrl_llm.rewards.functions import Function, Local, Lost
from jaxrl_llm.rewards.models import ModelReward, StepReward, check_model
from jaxrl_llm.rewards.refusals import Refusals, check_refusals
from jaxrl_llm.rewards.steps import StepFunction
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.types import Completion, Problem


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The verifier's score: 1 for a right answer."""

    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "accuracy"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return accuracy(problem, completion)


@dataclasses.dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to the accuracy.

    0 up to ``max_length - cache`` tokens, then falling in a line to -1 at ``max_length``, and -1 beyond. The stop
    token counts. The defaults are the paper's: the fall begins at its "expected maximum length" of 16384.
    """

    max_length: int = 20480
    cache: int = 4096
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "soft_overlong"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        left = self.max_length - self.cache - len(completion.tokens)
        return max(-self.cache, min(0, left)) / self.cache


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
    """``-per_token`` for each token of the completion, the stop token included."""

    per_token: float
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "length_penalty"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return -self.per_token * len(completion.tokens)


@dataclasses.dataclass(frozen=True)
class CosineLength:
    """ProRL v2's cosine of the length: ``low + (high - low) / 2 * (1 + cos(pi * min(t, T) / T))``.

    t is the completion's length and T = ``max_length``, in tokens: ``high`` at t = 0, ``low`` from t = T on. The paper
    switches it on for some updates only, which is the recipe's part.
    """

    max_length: int
    low: float = -1.0
    high: float = 0.0
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "cosine_length"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        share = min(len(completion.tokens), self.max_length) / self.max_length
        return self.low + 0.5 * (self.high - self.low) * (1.0 + math.cos(math.pi * share))


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """-1 where the completion was ended since it only repeated itself, else 0.

    ``rollout.repetition`` says when that is.
    """

    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "repetition_penalty"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return -1.0 if completion.finish_reason == "repetition" else 0.0


@dataclasses.dataclass(frozen=True)
class Format:
    """1 where the regular expression matches the whole text, else 0; ``.`` matches line breaks too.

    It runs in the trainer's own process: a pattern of nested repetitions, ``(a+)+``, can take for ever.
    """

    pattern: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "format"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return float(_compiled(self.pattern).fullmatch(completion.text) is not None)


BUILT_IN = (SoftOverlong, LengthPenalty, CosineLength, RepetitionPenalty, Format, Refusals)
"""Rewards that neither hang nor raise: the scorer calls them where it is."""

Reward = (
    Accuracy
    | SoftOverlong
    | LengthPenalty
    | CosineLength
    | RepetitionPenalty
    | Format
    | Refusals
    | Hinge
    | Threshold
    | Function
    | Local
    | StepFunction
    | ModelReward
    | StepReward
    | Lost
)

TAKEN = ("mean", "std", "zero_std_fraction", "errors", "timeouts")
"""``reward/<name>`` that is the sum's; no part is called so."""


def named(rewards: Sequence[Reward]) -> dict[str, Reward]:
    """The rewards by the names of their columns, in order; the second of a name is called ``name_2``.

    ``accuracy`` is the verifier's: another reward that is called so gets a number too.
    """
    found: dict[str, Reward] = {}
    for reward in rewards:
        verifier = () if isinstance(reward, Accuracy) else ("accuracy",)
        found[free_name(reward.name, {*TAKEN, *verifier, *found})] = reward
    return found


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number where it is taken."""
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number = number + 1
    return free


def check(reward: Reward) -> None:
    """Refuses a reward that cannot work.

    Raises:
      InputError: a weight or a time that is no finite number, a length below 1, a bad pattern or none, a path that
        names no function, a function that cannot take a problem and a completion, one that a config.json could not
        hold, or a bound that cannot work.
    """
    if not isinstance(reward.weight, (int, float)) or not math.isfinite(reward.weight):
        raise InputError(f"reward {reward.name} has the weight {reward.weight}; give a finite number")
    match reward:
        case SoftOverlong() if not 0 < reward.cache <= reward.max_length:
            raise InputError(
                f"soft_overlong has cache {reward.cache} and max_length {reward.max_length}; "
                f"it needs 0 < cache <= max_length"
            )
        case CosineLength() if reward.max_length < 1:
            raise InputError(f"cosine_length has max_length {reward.max_length}; give 1 or more")
        case Format():
            _compiled(reward.pattern)
        case Refusals():
            check_refusals(reward)
        case Bound():
            check_bound(reward, check)
        case OfTasks():
            check(reward.of)
        case ModelReward() | StepReward():
            check_model(reward)
        case Function() | Local() | StepFunction():
            _check_function(reward)
        case Lost():
            raise InputError(
                f"reward {reward.name} is not in config.json, since {reward.reason}: train from the Python file "
                f"or notebook that has it, or move it into a module of its own"
            )


def _check_function(reward: Function | Local | StepFunction) -> None:
    if reward.timeout_s is not None and not 0 < reward.timeout_s < math.inf:
        raise InputError(f"reward {reward.name} has timeout_s {reward.timeout_s}; give more than 0 seconds, or None")
    if isinstance(reward, StepFunction) and reward.positions not in ("characters", "tokens"):
        raise InputError(f"reward {reward.name} has positions {reward.positions!r}; give characters or tokens")
    if not isinstance(reward.name, str) or not reward.name or "/" in reward.name:
        raise InputError(f"a reward has the name {reward.name!r}; give a text without a slash")
    if not isinstance(reward, Local) and str(reward.path).startswith("__main__:"):
        raise InputError(
            f"{reward.path}: the notebook or script that runs has no {reward.name}; define it before the run"
        )
    form_of(reward.function, reward.batch)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(f"format pattern {pattern!r} is no regular expression ({error}); correct it") from error
