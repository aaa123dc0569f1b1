"""Settings of rewards from models on the devices; ``stages.rl.judges`` loads the models and runs them."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import numpy as np

from jaxrl_llm.rewards.functions import StepFunction
from jaxrl_llm.system.setting import MODEL


@dataclasses.dataclass(frozen=True)
class ModelReward:
    """Score of a completion by a reward model: the value of its scalar head at the last token.

    With several models (an ensemble) it is their mean, the lowest, or the mean minus ``spread`` standard deviations,
    which mistrusts disagreement. Every ensemble reports that as ``reward/<name>/disagreement``.

    Attributes:
      path: RUN[@STEP] or a Hugging Face directory of a sequence classifier with one label; or several of them. Each
        must have the policy's tokenizer.
      weight: in the sum of the rewards.
      of: "mean", "minimum" or "conservative", for several models.
      spread: k of "conservative"; deviations are those of the models at hand (ddof 0).
      name: of its column in metrics and samples.
    """

    path: Annotated[str | tuple[str, ...], MODEL]
    weight: float = 1.0
    of: Literal["mean", "minimum", "conservative"] = "mean"
    spread: float = 1.0
    name: str = "model"

    def __post_init__(self):
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all models."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def combined(self, scores: np.ndarray) -> np.ndarray:
        """Combine the models' scores float64[n, m] into one of each completion, float64[n]; [n] of one model stays."""
        if scores.ndim == 1:
            return scores
        if self.of == "minimum":
            return scores.min(axis=1)
        mean = scores.mean(axis=1)
        return mean - self.spread * scores.std(axis=1) if self.of == "conservative" else mean


@dataclasses.dataclass(frozen=True)
class StepReward:
    """Value of each step of a completion by a process reward model: ``sigmoid`` of its scalar head at the step's end.

    Steps are cut as ``data.Steps`` cuts the model's training data. Like those of a ``StepFunction`` they do not count
    in the sum of the rewards: estimators that read ``step_rewards`` see them.

    Attributes:
      path: RUN[@STEP] or a Hugging Face directory, with the policy's tokenizer.
      weight: in the sum of the step rewards.
      differences: each step is worth ``s_j - s_(j-1)``, the rise of its score (potential-based shaping: they sum to
        ``s_last - start``, however many steps there are); for GAE only, since an estimator that centres every step
        would leave a sum that depends on how many there are. Otherwise it is worth ``s_j``.
      start: s_0, the score before the first step.
      separator: ends a step, and belongs to it.
      name: of its column in metrics and samples: the mean over a completion's steps.
    """

    path: Annotated[str, MODEL]
    weight: float = 1.0
    differences: bool = False
    start: float = 0.0
    separator: str = "\n"
    name: str = "steps"
    positions: ClassVar[str] = "tokens"


ON_DEVICE = (ModelReward, StepReward)
"""Rewards that the devices compute."""
OF_STEPS = (StepFunction, StepReward)
"""Rewards of steps."""
DISAGREEMENT = "disagreement"
"""Suffix of the part ``<reward>/disagreement``: the standard deviation over the models of an ensemble."""
