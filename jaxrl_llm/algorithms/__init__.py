"""Objectives as values: an algorithm is composed of five small pure functions."""

from jaxrl_llm.algorithms import advantages, kl, preference, ratios, reduce, surrogates, values
from jaxrl_llm.algorithms.loss import Algorithm, policy_loss
from jaxrl_llm.algorithms.presets import PRESETS
from jaxrl_llm.types import AdvantageContext, PolicyBatch
