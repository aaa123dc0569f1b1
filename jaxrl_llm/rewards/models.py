"""Rewards that models on the devices give: values; ``stages.judges`` loads the models and runs them."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.steps import StepFunction


@dataclasses.dataclass(frozen=True)
class ModelReward:
    """The score that a reward model gives a completion: the value of its scalar head at the last token.

    Of several models (an ensemble) it is their mean, the lowest, or the mean minus ``spread`` standard deviations: what
    they disagree about is mistrusted. How much that is, ``reward/<name>/disagreement``, is measured of any ensemble.

    Attributes:
      path: RUN[@STEP] or a Hugging Face directory of a sequence classifier with one label; or several of them. Each
        must have the policy's tokenizer.
      weight: in the sum of the rewards.
      of: "mean", "minimum" or "conservative", where there are several.
      spread: k of "conservative"; deviations are those of the models at hand (ddof 0).
      name: of its column in metrics and samples.
    """

    path: str | tuple[str, ...]
    weight: float = 1.0
    of: Literal["mean", "minimum", "conservative"] = "mean"
    spread: float = 1.0
    name: str = "model"

    def __post_init__(self):
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def combined(self, scores: np.ndarray) -> np.ndarray:
        """One score of each completion, float64[n], of those that the models give it, float64[n, m]; n of one model."""
        if scores.ndim == 1:
            return scores
        if self.of == "minimum":
            return scores.min(axis=1)
        mean = scores.mean(axis=1)
        return mean - self.spread * scores.std(axis=1) if self.of == "conservative" else mean


@dataclasses.dataclass(frozen=True)
class StepReward:
    """The value that a process reward model gives each step of a completion: ``sigmoid`` of its scalar head behind it.

    Steps are cut as ``tasks.Steps`` cuts those that such a model learns from. Like those of a ``StepFunction`` they are
    no part of the sum of the rewards: estimators that read ``step_rewards`` see them.

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

    path: str
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
"""``<reward>/disagreement`` is a part of its own: by how much the models of an ensemble differ."""


def check_model(reward: ModelReward | StepReward) -> None:
    """Refuse what cannot work, before anything is loaded; whether the models are there is seen later.

    Raises:
      InputError: names the field and its value.
    """
    if isinstance(reward, StepReward):
        if not reward.separator:
            raise InputError(f"reward {reward.name} has an empty separator; give what ends a step, such as a line end")
        return
    if not reward.paths:
        raise InputError(f"reward {reward.name} names no model; give RUN, or a directory")
    if reward.of not in ("mean", "minimum", "conservative"):
        raise InputError(f"reward {reward.name} is of {reward.of!r}; give mean, minimum or conservative")
    if not reward.spread >= 0:
        raise InputError(f"reward {reward.name} has the spread {reward.spread}; give 0 or more")
