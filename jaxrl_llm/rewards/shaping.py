"""Rewards as values: each is called with a problem and a completion, and weighted by the scorer.

Rewards made of others: hinges, thresholds, constraints, a gate, and rewards of some of a mixture's tasks.

The inner reward is scored like any other; its values are changed afterwards. Its own weight is 1: the weight belongs to
the value that goes into the sum.

Changes of a group's rewards that need more than one completion: the others of its group, or the run's progress.

Each is a value called as ``shape(group, updates, budget)`` and returns the group with other rewards. ``updates`` is the
number of optimiser updates so far, ``budget`` the run's longest completion in tokens. Accuracy, which group filters
read, stays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import regex

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.functions import (
    OF_STEPS,
    Function,
    Item,
    Local,
    Lost,
    ModelReward,
    StepFunction,
    StepReward,
    as_reward,
    form_of,
)
from jaxrl_llm.rewards.rubric import OF_JUDGES, Pairwise, Rubric
from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.system.setting import Range, check_fields
from jaxrl_llm.types import Completion, Group, Problem

REJECTED = "gate/rejected"
"""Name of the part of a group that marks the completions that its gate rejects."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """Base of rewards made of the value of another reward, or function, ``of``."""

    of: Any

    def __post_init__(self):
        object.__setattr__(self, "of", as_reward(self.of))

    @property
    def name(self) -> str:
        """Name of the inner reward."""
        return self.of.name


@dataclasses.dataclass(frozen=True)
class Hinge(Bound):
    """``-max(0, x - limit)`` of another reward's value x: each completion is punished by its excess over the limit.

    In the sum, ``r_help + weight * hinge = r_help - weight * max(0, x - limit)``. It does not limit the mean;
    ``Constraint`` does.

    Attributes:
      of: a reward, or a function; NaN stays NaN.
      limit: largest x that costs nothing.
      weight: cost of each unit above.
    """

    limit: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Threshold(Bound):
    """1 where another reward's value is at least ``at``, else 0; NaN stays NaN."""

    at: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gate(Bound):
    """Gate that a completion must pass to be reinforced: if the value is below ``at`` its advantages are at most 0.

    ``A <- min(A, 0)`` for each of its tokens, after estimation: other completions are still compared with it. A
    completion that cannot be scored does not pass.

    Attributes:
      of: a reward, or a function.
      at: the least value that passes.
    """

    at: float = 0.5


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Limit on the mean of a cost: ``R = r - lam * (cost - limit)``, the Lagrangian of E[cost] <= limit.

    After each step ``lam <- max(0, lam + rate * (mean cost - limit))``, over all groups finished in it. A completion
    with a NaN or failed cost is left out of the mean and has no advantage. Readers of rewards before the advantages
    (filters of groups, ``reward/mean``, shaping) see r alone.

    Attributes:
      cost: a reward, or a function, to be kept low.
      limit: of its mean.
      rate: of lam, for one step and one unit of cost.
      multiplier: lam before the first step.
      name: names its metrics; None for the cost's.
    """

    cost: Any
    limit: float
    rate: float
    multiplier: float = 0.0
    name: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "cost", as_reward(self.cost))

    @property
    def part(self) -> str:
        """Name of its column in groups, metrics and samples."""
        return f"constraint/{self.label}/cost"

    @property
    def coefficient(self) -> str:
        """Name of lam in metrics."""
        return f"constraint/{self.label}/multiplier"

    @property
    def label(self) -> str:
        """Name, or the cost's."""
        return self.cost.name if self.name is None else self.name


@dataclasses.dataclass(frozen=True)
class TaskReward(Bound):
    """Reward of the completions of some of a mixture's tasks only; other completions are scored without it.

    Attributes:
      of: the reward.
      tasks: their labels.
    """

    tasks: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the reward, with those of its tasks."""
        return f"{self.of.name}/{'+'.join(self.tasks)}"

    @property
    def weight(self) -> float:
        """Weight of the reward."""
        return self.of.weight


def places_of(reward: Any, items: Sequence[Item]) -> list[int]:
    """Return the indices of the completions that a reward scores."""
    has_tasks = isinstance(reward, TaskReward)
    return [place for place, (problem, _) in enumerate(items) if not has_tasks or problem.task in reward.tasks]


def spread(values: np.ndarray, places: Sequence[int], count: int) -> np.ndarray:
    """Return one or several columns of ``count`` completions from the values of the scored ones; NaN for the others."""
    if len(places) == count:
        return values
    column = np.full((count, *values.shape[1:]), np.nan, np.result_type(values, np.float64))
    column[places] = values
    return column


def inner_reward(reward: Any) -> Any:
    """Return the innermost reward, which is scored for this one."""
    return inner_reward(reward.of) if isinstance(reward, Bound) else reward


def reward_values(reward: Any, values: np.ndarray) -> np.ndarray:
    """Return a reward's values, float64[n], from those of its ``inner_reward``; a gate's are 1 where it rejects."""
    if not isinstance(reward, Bound):
        return values
    inner = reward_values(reward.of, values)
    match reward:
        case Hinge():
            return -np.maximum(0.0, inner - reward.limit)
        case Threshold():
            return np.where(np.isnan(inner), np.nan, inner >= reward.at)
        case Gate():
            return np.where(inner >= reward.at, 0.0, 1.0)
    return inner


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
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to the accuracy. 0 up to ``max_length -
    cache`` tokens, then falling in a line to -1 at ``max_length``, and -1 beyond. The stop token counts. The defaults
    are the paper's: the fall begins at its "expected maximum length" of 16384.
    """

    max_length: int = 20480
    cache: int = 4096
    weight: float = 1.0
    name: ClassVar[str] = "soft_overlong"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        remaining = self.max_length - self.cache - completion.length
        return max(-self.cache, min(0, remaining)) / self.cache


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
    """ProRL v2's cosine of the length: ``low + (high - low) / 2 * (1 + cos(pi * min(t, T) / T))``. t is the
    completion's length and T = ``max_length``, in tokens: ``high`` at t = 0, ``low`` from t = T on. The paper switches
    it on for some updates only, which is the recipe's part.
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
    """-1 if the completion was ended because it only repeated itself (``rollout.repetition``), else 0."""

    weight: float = 1.0
    name: ClassVar[str] = "repetition_penalty"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return -1.0 if completion.finish_reason == "repetition" else 0.0


@dataclasses.dataclass(frozen=True)
class Format:
    """1 if the regular expression matches the whole text, else 0; ``.`` matches line breaks too. A text for which it
    takes more than ``PATTERN_S`` does not match: nested repetitions, ``(a+)+``, can take forever.
    """

    pattern: str
    weight: float = 1.0
    name: ClassVar[str] = "format"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        return float(_matches_in_time(_compile("format", self.pattern).fullmatch, completion.text))


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
        patterns = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        object.__setattr__(self, "patterns", patterns)

    def __call__(self, problem: Problem, completion: Completion) -> float:
        text = completion.text[: self.within].replace("\u2019", "'")
        patterns = (_compile("Refusals", pattern, regex.IGNORECASE) for pattern in self.patterns)
        return float(any(_matches_in_time(pattern.search, text) for pattern in patterns))


PATTERN_S = 1.0
"""Seconds that a regular expression may take for one text."""
BUILT_IN = (SoftOverlong, LengthPenalty, CosineLength, RepetitionPenalty, Format, Refusals)
"""Rewards that neither hang nor raise: the scorer calls them in its own process."""

Reward = (
    Accuracy | SoftOverlong | LengthPenalty | CosineLength | RepetitionPenalty | Format | Refusals | CodeTests | Hinge
    | Threshold | Function | Local | StepFunction | ModelReward | StepReward | Rubric | Pairwise | TaskReward | Lost
)  # fmt: skip


def name_rewards(rewards: Sequence[Reward]) -> dict[str, Reward]:
    """Return the rewards by the names of their columns, in order; the second of a name becomes ``name_2``. ``accuracy``
    is the verifier's: another reward of that name gets a number too.
    """
    by_name: dict[str, Reward] = {}
    of_the_sum = {"mean", "std", "zero_std_fraction", "errors", "timeouts"}  # ``reward/<name>`` of the sum has these
    for reward in rewards:
        verifier = () if isinstance(reward, Accuracy) else ("accuracy",)
        by_name[free_name(reward.name, {*of_the_sum, *verifier, *by_name})] = reward
    return by_name


def free_name(name: str, used: Collection[str]) -> str:
    """Return the name, with a number if it is taken."""
    free = name
    number = 2
    while free in used:
        free = f"{name}_{number}"
        number = number + 1
    return free


def check_reward(reward: Any) -> None:
    """Refuse a reward, a constraint or a gate that cannot work."""
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
            _compile("format", reward.pattern)
        case Refusals() if not reward.patterns or not all(reward.patterns):
            raise InputError(
                "Refusals has no pattern, or an empty one, which is found in every text: give regular expressions"
            )
        case Refusals():
            for pattern in reward.patterns:
                _compile("Refusals", pattern, regex.IGNORECASE)
        case TaskReward():
            check_reward(reward.of)
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
    if isinstance(inner_reward(inner), OF_STEPS):
        raise InputError(f"{kind} holds the step reward {inner.name}: give a reward with one value a completion")
    check_reward(inner)
    if inner.weight != 1:
        raise InputError(f"{inner.name} in {kind} has the weight {inner.weight:g}, which nothing reads: leave it out")


@functools.lru_cache(maxsize=256)
def _compile(what: str, pattern: str, flags: int = 0) -> Any:
    try:
        return regex.compile(pattern, regex.DOTALL | flags)
    except regex.error as error:
        raise InputError(f"{what} pattern {pattern!r} is not a regular expression ({error}); correct it") from error


def _matches_in_time(match: Callable[..., Any], text: str) -> bool:
    """Whether a regular expression matches a text within ``PATTERN_S``."""
    try:
        return match(text, timeout=PATTERN_S) is not None
    except TimeoutError:
        return False


Finite = Annotated[float, Range("(-inf, inf)", words="finite")]


@dataclasses.dataclass(frozen=True)
class StopProperly:
    """Penalty on truncation: a truncated completion gets ``min(reward, scale * reward)``; ProRL v2's "stop properly"
    has scale 0. Its recipes multiply, for rewards that are never below 0. Below 0 that would be a gain, -1 becoming 0:
    such a reward stays. With any scale, truncation never gains.
    """

    scale: Finite = 0.0

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        cut = np.array([c.finish_reason == "length" for c in group.completions])
        least = np.minimum(group.rewards, self.scale * group.rewards)
        return dataclasses.replace(group, rewards=np.where(cut, least, group.rewards))


@dataclasses.dataclass(frozen=True)
class RelativeLength:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), added with ``weight`` after ``warmup`` updates.
    ``lam = 0.5 - (length - shortest) / (longest - shortest)`` within the group; a right answer gets lam, a wrong one
    min(0, lam), and all get 0 if the lengths are equal. The paper publishes neither weight nor warm-up.
    """

    weight: Finite = 1.0
    warmup: Annotated[int, Range("[0, inf]")] = 0

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        lengths = np.array([c.length for c in group.completions], np.float64)
        spread = lengths.max() - lengths.min()
        lam = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros_like(lengths)
        part = np.where(group.accuracy >= 1, lam, np.minimum(0, lam))
        return _add_part(group, "relative_length", part, self.weight if updates >= self.warmup else 0.0)


@dataclasses.dataclass(frozen=True)
class LengthCycle:
    """Schedule of ProRL v2's ``CosineLength`` up to the budget, in ``on`` of every ``on + off`` updates. The weight is
    our choice: the recipes do not publish it.
    """

    low: float = -1.0
    high: float = 0.0
    weight: Finite = 0.5
    on: Annotated[int, Range("[1, inf]")] = 100
    off: Annotated[int, Range("[0, inf]")] = 500

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        cosine = CosineLength(budget, self.low, self.high)
        part = np.array([cosine(group.problem, c) for c in group.completions])
        return _add_part(group, "cosine_length", part, self.weight if updates % (self.on + self.off) < self.on else 0.0)


GroupShaping = StopProperly | RelativeLength | LengthCycle


def _add_part(group: Group, name: str, part: np.ndarray, weight: float) -> Group:
    name = free_name(name, group.parts)  # a reward, or another shaping, may be called the same
    return dataclasses.replace(group, rewards=group.rewards + weight * part, parts=group.parts | {name: part})
