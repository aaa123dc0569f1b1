"""What is sampled, and when a completion ends: values without arrays, quick to import."""

import dataclasses
import math

from jaxrl_llm.errors import InputError

MAX_STOP_IDS = 8


@dataclasses.dataclass(frozen=True)
class Repetition:
    """When a completion that only repeats itself is ended; both rules are off where their count is 0.

    Attributes:
      longest_period: the longest run of n tokens whose repetition is noticed; shapes what is compiled.
      times: end where the last n tokens, for any n up to ``longest_period``, stand this many times in a row.
      probability: end where each of the last ``tail`` tokens had a probability above this under the policy at
        temperature 1.
      tail: MiniMax-M1 takes 3000 tokens above 0.99 (arXiv 2506.13585, section 3.2).
      learn: whether the loss counts completions that are ended so. If not they are left out, and their rewards count.
        The reward ``RepetitionPenalty`` punishes them.
    """

    longest_period: int = 0
    times: int = 0
    probability: float = 1.0
    tail: int = 0
    learn: bool = True

    def __post_init__(self):
        _refuse_wrong(self, {
            "longest_period": (self.longest_period >= 0, "at least 0 (0 looks for no repetition)"),
            "times": (self.times == 0 if self.longest_period == 0 else self.times >= 2,
                      "at least 2 where longest_period is set, and 0 where it is not"),
            "probability": (0 <= self.probability < 1 if self.tail else self.probability == 1,
                            "from 0 to below 1 where tail is set, and 1 where it is not"),
            "tail": (self.tail >= 0, "at least 0 (0 looks at no probability)"),
            "learn": (self.learn or self.on, "True where no repetition is looked for"),
        })  # fmt: skip

    @property
    def on(self) -> bool:
        """Whether any repetition is looked for."""
        return self.times > 0 or self.tail > 0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is sampled; its numbers are traced, so changing them does not recompile.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      max_new_tokens: longest completion, the stop token included.
      stop_ids: any of these tokens ends a completion (and belongs to it).
      min_p: keep the tokens that are at least this share as likely as the most likely one; 0 keeps all.
      repetition: ends a completion that repeats itself; None lets it go on.
      keep_mask: record which tokens were kept at every position, so that the learner can leave out the same ones.

    The temperature acts first, then top-k, then top-p on the mass that top-k left, then min-p. Tokens as likely as the
    last one kept are kept too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition: Repetition | None = None
    keep_mask: bool = False

    def __post_init__(self):
        _refuse_wrong(
            self,
            {
                "temperature": (0 <= self.temperature < math.inf, "at least 0 (0 is greedy), and finite"),
                "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
                "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
                "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
                "stop_ids": (len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids"),
                "min_p": (0 <= self.min_p <= 1, "from 0 (keeps all) to 1"),
                "keep_mask": (self.truncates or not self.keep_mask, "False where nothing is cut off"),
            },
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off, so that the sampled distribution is not the policy's."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def alters_policy(self) -> bool:
        """Whether tokens are sampled from another distribution than the policy's own at temperature 1."""
        return self.temperature != 1 or self.truncates


def _refuse_wrong(settings: object, checks: dict[str, tuple[bool, str]]) -> None:
    """Raise for the first field that breaks its rule."""
    for name, (fine, rule) in checks.items():
        if not fine:
            raise InputError(f"{name} must be {rule}, got {getattr(settings, name)}")
