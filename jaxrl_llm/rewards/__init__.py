"""Rewards: verifiers, shaping, and the scorer that runs them."""

from jaxrl_llm.rewards.bounds import Constraint, Gate, Hinge, TaskReward, Threshold
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.endpoint import Endpoint, JudgeModel
from jaxrl_llm.rewards.functions import Function, Local, ModelReward, StepFunction, StepReward
from jaxrl_llm.rewards.rubric import Pairwise, Rubric
from jaxrl_llm.rewards.scorer import Scorer
from jaxrl_llm.rewards.scores import Failures, Scores
from jaxrl_llm.rewards.shaping import (
    Accuracy,
    CosineLength,
    Format,
    LengthPenalty,
    Refusals,
    RepetitionPenalty,
    Reward,
    SoftOverlong,
)  # fmt: skip
from jaxrl_llm.rewards.verify import accuracy
