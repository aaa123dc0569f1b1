"""Settings of the sampling and of the end of completions: values without arrays, quick to import."""

import dataclasses
from typing import Annotated

from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import Range, check_fields

MAX_STOP_IDS = 8


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Rules that end a completion that only repeats itself; each is off if its count is 0.

    Attributes:
      longest_period: the longest run of n tokens checked for repetition; sets compiled shapes.
      times: end where the last n tokens, for any n up to ``longest_period``, repeat this many times in a row.
      probability: end where each of the last ``tail`` tokens had a larger one under the policy at temperature 1.
      tail: MiniMax-M1 takes 3000 tokens above 0.99 (arXiv 2506.13585, section 3.2).
      learn: whether the loss counts completions that are ended so. If not, their rewards still count, which
        ``RepetitionPenalty`` lowers.
    """

    longest_period: Annotated[int, Range("[0, inf]", "0 looks for no repetition")] = 0
    times: int = 0
    probability: float = 1.0
    tail: int = 0
    learn: bool = True

    def __post_init__(self):
        check_fields(self)
        require(
            self.times >= 2 if self.longest_period else self.times == 0,
            f"times must be at least 2 where longest_period is set, and 0 where it is not, got {self.times}",
        )
        require(
            0 <= self.probability < 1 if self.tail else self.probability == 1,
            f"probability must be from 0 to below 1 where tail is set, and 1 where it is not, got {self.probability}",
        )
        require(self.tail >= 0, f"tail must be at least 0 (0 looks at no probability), got {self.tail}")
        require(self.learn or self.on, f"learn must be True where no repetition is looked for, got {self.learn}")

    @property
    def on(self) -> bool:
        """Whether any repetition is checked."""
        return self.times > 0 or self.tail > 0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Rules of the sampling; their numbers are traced, so changing them does not recompile.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens that reaches this mass; 1 keeps all.
      max_new_tokens: longest completion, the stop token included.
      stop_ids: any of these tokens ends a completion (and belongs to it).
      min_p: keep the tokens that are at least this share as likely as the most likely one; 0 keeps all.
      repetition: ends a completion that repeats itself; None never does.
      keep_mask: record which tokens were kept at every position, so that the learner can leave out the same ones.

    The temperature acts first, then top-k, then top-p on the mass that top-k left, then min-p. Tokens as likely as the
    last one kept are kept too.
    """

    temperature: Annotated[float, Range("[0, inf)", "0 is greedy")] = 1.0
    top_k: Annotated[int, Range("[0, inf]", "0 keeps all")] = 0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    max_new_tokens: Annotated[int, Range("[1, inf]")] = 128
    stop_ids: tuple[int, ...] = ()
    min_p: Annotated[float, Range("[0, 1]", "keeps all")] = 0.0
    repetition: Repetition | None = None
    keep_mask: bool = False

    def __post_init__(self):
        check_fields(self)
        require(len(self.stop_ids) <= MAX_STOP_IDS, f"stop_ids must be at most {MAX_STOP_IDS} ids, got {self.stop_ids}")
        require(
            self.truncates or not self.keep_mask,
            f"keep_mask must be False where nothing is cut off, got {self.keep_mask}",
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off, so that the sampled distribution is not the policy's."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def alters_policy(self) -> bool:
        """Whether tokens are sampled from another distribution than the policy's own at temperature 1."""
        return self.temperature != 1 or self.truncates
