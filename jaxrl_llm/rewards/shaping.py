"""Rewards as values: each is called with a problem and a completion, and weighted by the scorer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar

import regex

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.bounds import Bound, Constraint, Hinge, TaskReward, Threshold, base_of
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.functions import OF_STEPS, Function, Local, Lost, ModelReward, StepFunction, StepReward, form_of
from jaxrl_llm.rewards.rubric import OF_JUDGES, Pairwise, Rubric
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.system.setting import Range, check_fields
from jaxrl_llm.types import Completion, Problem

REFUSED = "completions/refusal"
"""Name of the part of a group that marks the completions that refuse."""
REFUSES_FROM = 0.5
"""Minimum value, of the reward that detects refusals, at which a completion counts as a refusal."""
ENGLISH = (
    r"\bsorry,? but (?:i|we|that)\b",
    r"\b(?:i|we) (?:can't|cannot|can not|could not|couldn't|won't|will not|would rather not) "
    r"(?:\w+ )?(?:help|assist|comply|do|provide|answer|fulfil|fulfill|write|create|share|give|support|engage|continue|"
    r"discuss|generate|participate|complete|offer|recommend)\b",
    r"\b(?:i'm|i am|we're|we are) (?:unable|not (?:able|allowed|permitted|comfortable|willing)) (?:to|with)\b",
    r"\bi (?:must|have to|need to|will have to|respectfully) (?:respectfully )?(?:decline|refuse)\b",
    r"\bas an? (?:ai|artificial intelligence|language model)\b.{0,60}\bi (?:can't|cannot|don't|do not|am not|won't)\b",
    r"\b(?:against|violates?) (?:my|our) (?:guidelines|policy|policies|programming|principles)\b",
)
"""Patterns of common refusals by assistants in English; the list is incomplete and covers no other language."""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The verifier's score: 1 for a right answer."""

    weight: float = 1.0
    name: ClassVar[str] = "accuracy"

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
    name: ClassVar[str] = "soft_overlong"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        left = self.max_length - self.cache - completion.length
        return max(-self.cache, min(0, left)) / self.cache


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
    """``-per_token`` for each token of the completion, the stop token included."""

    per_token: float
    weight: float = 1.0
    name: ClassVar[str] = "length_penalty"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return -self.per_token * completion.length


@dataclasses.dataclass(frozen=True)
class CosineLength:
    """ProRL v2's cosine of the length: ``low + (high - low) / 2 * (1 + cos(pi * min(t, T) / T))``.

    t is the completion's length and T = ``max_length``, in tokens: ``high`` at t = 0, ``low`` from t = T on. The paper
    switches it on for some updates only, which is the recipe's part.
    """

    max_length: Annotated[int, Range("[1, inf]")]
    low: float = -1.0
    high: float = 0.0
    weight: float = 1.0
    name: ClassVar[str] = "cosine_length"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        share = min(completion.length, self.max_length) / self.max_length
        return self.low + 0.5 * (self.high - self.low) * (1.0 + math.cos(math.pi * share))


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """-1 if the completion was ended because it only repeated itself, else 0.

    ``rollout.repetition`` sets when that happens.
    """

    weight: float = 1.0
    name: ClassVar[str] = "repetition_penalty"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return -1.0 if completion.finish_reason == "repetition" else 0.0


@dataclasses.dataclass(frozen=True)
class Format:
    """1 if the regular expression matches the whole text, else 0; ``.`` matches line breaks too.

    A text for which it takes more than ``PATTERN_S`` does not match: nested repetitions, ``(a+)+``, can take forever.
    """

    pattern: str
    weight: float = 1.0
    name: ClassVar[str] = "format"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        pattern = _compiled("format", self.pattern)
        return float(_in_time(lambda: pattern.fullmatch(completion.text, timeout=PATTERN_S)))


@dataclasses.dataclass(frozen=True)
class Refusals:
    """1 if a regular expression is found near the beginning of the text, else 0.

    Case is ignored, typographic apostrophes count as plain ones, and ``.`` matches line breaks too.

    Attributes:
      patterns: regular expressions, for any language; the default is a short list for English.
      within: characters at the beginning that are searched: later words may quote, or be about something else.
      weight: in the sum of the rewards, if it is one of them.
    """

    patterns: tuple[str, ...] = ENGLISH
    within: Annotated[int, Range("[1, inf]", words="at least 1 character")] = 300
    weight: float = 1.0
    name: ClassVar[str] = "refusal"

    def __post_init__(self):
        given = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        object.__setattr__(self, "patterns", given)

    def __call__(self, problem: Problem, completion: Completion) -> float:
        text = completion.text[: self.within].replace("\u2019", "'")
        patterns = (_compiled("Refusals", pattern, regex.IGNORECASE) for pattern in self.patterns)
        return float(any(_in_time(lambda one=one: one.search(text, timeout=PATTERN_S)) for one in patterns))


PATTERN_S = 1.0
"""Seconds that a regular expression may take for one text."""
BUILT_IN = (SoftOverlong, LengthPenalty, CosineLength, RepetitionPenalty, Format, Refusals)
"""Rewards that neither hang nor raise: the scorer calls them in its own process."""

Reward = (
    Accuracy
    | SoftOverlong
    | LengthPenalty
    | CosineLength
    | RepetitionPenalty
    | Format
    | Refusals
    | CodeTests
    | Hinge
    | Threshold
    | Function
    | Local
    | StepFunction
    | ModelReward
    | StepReward
    | Rubric
    | Pairwise
    | TaskReward
    | Lost
)

TAKEN = ("mean", "std", "zero_std_fraction", "errors", "timeouts")
"""Names that ``reward/<name>`` uses for the sum; no part may have them."""


def named(rewards: Sequence[Reward]) -> dict[str, Reward]:
    """Return the rewards by the names of their columns, in order; the second of a name becomes ``name_2``.

    ``accuracy`` is the verifier's: another reward of that name gets a number too.
    """
    found: dict[str, Reward] = {}
    for reward in rewards:
        verifier = () if isinstance(reward, Accuracy) else ("accuracy",)
        found[free_name(reward.name, {*TAKEN, *verifier, *found})] = reward
    return found


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number if it is taken."""
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number = number + 1
    return free


def check(reward: Any) -> None:
    """Refuse a reward, a constraint or a gate that cannot work.

    Raises:
      InputError: a number out of its range, a bad or missing pattern, a path that does not name a function, a function
        that cannot take a problem and a completion, one that a config.json could not hold, a name that metrics cannot
        have, or an inner reward that is of steps, has a weight of its own, or cannot work.
    """
    weight = getattr(reward, "weight", 1.0)  # a gate and a constraint have none
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise InputError(f"reward {reward.name} has the weight {weight}; give a finite number")
    check_fields(reward, f"{type(reward).__name__}.")
    if isinstance(reward, OF_JUDGES):
        reward.check()
    match reward:
        case SoftOverlong() if not 0 < reward.cache <= reward.max_length:
            raise InputError(
                f"soft_overlong has cache {reward.cache} and max_length {reward.max_length}; "
                f"it needs 0 < cache <= max_length"
            )
        case Format():
            _compiled("format", reward.pattern)
        case Refusals() if not reward.patterns or not all(reward.patterns):
            raise InputError(
                "Refusals has no pattern, or an empty one, which is found in every text: give regular expressions"
            )
        case Refusals():
            for pattern in reward.patterns:
                _compiled("Refusals", pattern, regex.IGNORECASE)
        case TaskReward():
            check(reward.of)
        case Bound() | Constraint():
            _check_bound(reward)
        case StepReward() if not reward.separator:
            raise InputError(f"reward {reward.name} has an empty separator; give what ends a step, such as a line end")
        case ModelReward() if not reward.paths:
            raise InputError(f"reward {reward.name} names no model; give RUN, or a directory")
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


def _check_bound(bound: Bound | Constraint) -> None:
    kind = type(bound).__name__
    for field in ("limit", "at", "rate", "multiplier"):
        value = getattr(bound, field, 0.0)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"{kind}.{field} must be a finite number, got {value!r}")
    inner = bound.cost if isinstance(bound, Constraint) else bound.of
    if isinstance(bound, Constraint) and (bound.rate <= 0 or bound.multiplier < 0):
        raise InputError(
            f"{kind} of {inner.name} has rate {bound.rate:g} and multiplier {bound.multiplier:g}; give a rate above 0 "
            "and a multiplier of at least 0"
        )
    if isinstance(bound, Constraint) and (not bound.label or "/" in bound.label):
        raise InputError(f"{kind} of {inner.name} has the name {bound.label!r}: give one without a slash")
    if isinstance(base_of(inner), OF_STEPS):
        raise InputError(f"{kind} holds the step reward {inner.name}: give a reward with one value a completion")
    check(inner)
    if inner.weight != 1:
        raise InputError(f"{inner.name} in {kind} has the weight {inner.weight:g}, which nothing reads: leave it out")


@functools.lru_cache(maxsize=256)
def _compiled(what: str, pattern: str, flags: int = 0) -> Any:
    try:
        return regex.compile(pattern, regex.DOTALL | flags)
    except regex.error as error:
        raise InputError(f"{what} pattern {pattern!r} is not a regular expression ({error}); correct it") from error


def _in_time(match: Callable[[], Any]) -> bool:
    """Whether a regular expression matches, and in its time."""
    try:
        return match() is not None
    except TimeoutError:
        return False
