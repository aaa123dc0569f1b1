"""Rewards: verifiers, shaping, and the scorer that runs them."""

from jaxrl_llm.rewards.bounds import Constraint, Gate, Hinge, Threshold
from jaxrl_llm.rewards.failures import Failures
from jaxrl_llm.rewards.functions import Function, Local
from jaxrl_llm.rewards.judge import Judge, Panel
from jaxrl_llm.rewards.models import ModelReward, StepReward
from jaxrl_llm.rewards.refusals import Refusals
from jaxrl_llm.rewards.scorer import Scorer, Scores
from jaxrl_llm.rewards.shaping import (
    Accuracy,
    CosineLength,
    Format,
    LengthPenalty,
    RepetitionPenalty,
    Reward,
    SoftOverlong,
)  # fmt: skip
from jaxrl_llm.rewards.steps import StepFunction
from jaxrl_llm.rewards.verify import accuracy

__all__ = [
    "Accuracy",
    "Constraint",
    "CosineLength",
    "Failures",
    "Format",
    "Function",
    "Gate",
    "Hinge",
    "Judge",
    "ModelReward",
    "StepReward",
    "LengthPenalty",
    "Local",
    "Panel",
    "Refusals",
    "RepetitionPenalty",
    "Reward",
    "Scorer",
    "Scores",
    "SoftOverlong",
    "StepFunction",
    "Threshold",
    "accuracy",
]
