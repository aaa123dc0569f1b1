"""Which completions refuse to answer: by patterns in what they begin with, or by any other reward."""

import dataclasses
import functools
import re

from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Completion, Problem

REFUSED = "completions/refusal"
"""The part of a group that says which completions refuse."""
REFUSES_FROM = 0.5
"""A completion refuses where what tells it, a reward, is at least this."""
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
"""How assistants commonly refuse in English; no list finds all of it, and none of another language is here."""


@dataclasses.dataclass(frozen=True)
class Refusals:
    """1 where a regular expression is found near the beginning of the text, else 0.

    Upper and lower case are alike, typographic apostrophes are plain ones, and ``.`` matches line breaks too.

    Attributes:
      patterns: regular expressions of whatever language; the default ones are a short list for English.
      within: characters at the beginning that are looked at: later words quote, or speak of something else.
      weight: in the sum of the rewards, where it is one of them.
    """

    patterns: tuple[str, ...] = ENGLISH
    within: int = 300
    weight: float = 1.0

    def __post_init__(self):
        given = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        object.__setattr__(self, "patterns", given)

    @property
    def name(self) -> str:
        """Names its column in metrics and samples."""
        return "refusal"

    def __call__(self, problem: Problem, completion: Completion) -> float:
        text = completion.text[: self.within].replace("\u2019", "'")
        return float(any(_compiled(pattern).search(text) for pattern in self.patterns))


def check_refusals(reward: Refusals) -> None:
    """Refuse what finds nothing, or cannot be read.

    Raises:
      InputError: names the pattern or the number.
    """
    if not reward.patterns or not all(reward.patterns):
        raise InputError(
            "Refusals has no pattern, or an empty one, which is found in every text: give regular expressions"
        )
    if reward.within < 1:
        raise InputError(f"Refusals.within must be at least 1 character, got {reward.within}")
    for pattern in reward.patterns:
        _compiled(pattern)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL | re.IGNORECASE)
    except re.error as error:
        raise InputError(f"Refusals pattern {pattern!r} is no regular expression ({error}); correct it") from error
