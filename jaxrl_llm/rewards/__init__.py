"""Rewards: verifiers, shaping, and the scorer that runs them."""

from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.endpoint import Endpoint, JudgeModel
from jaxrl_llm.rewards.functions import Function, Local, ModelReward, StepFunction, StepReward
from jaxrl_llm.rewards.rubric import Pairwise, Rubric
from jaxrl_llm.rewards.scorer import Failures, Scorer, Scores
from jaxrl_llm.rewards.shaping import (
    Accuracy,
    Constraint,
    CosineLength,
    Format,
    Gate,
    Hinge,
    LengthPenalty,
    Refusals,
    RepetitionPenalty,
    Reward,
    SoftOverlong,
    TaskReward,
    Threshold,
)
from jaxrl_llm.rewards.verify import accuracy
