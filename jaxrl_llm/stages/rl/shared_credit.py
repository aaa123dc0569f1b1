"""Advantages of tokens that branches of an episode share: ARPO's "hard" form."""

import dataclasses
from typing import Self

import numpy as np

from jaxrl_llm.config import Run
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.rollout.branches import common_lengths, shared_credit
from jaxrl_llm.rollout.groups import RolloutBatch
from jaxrl_llm.stages.rl.ingredient import Ingredient


@dataclasses.dataclass(frozen=True)
class SharedCredit(Ingredient):
    """A token that several members of a group share has the mean of their advantages (arXiv 2507.19849)."""

    name = "shared_credit"

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        rule = run.recipe.branch
        return cls() if rule is not None and rule.credit == "hard" else None

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Return the samples with an advantage for each token."""
        return [one.with_arrays(advantages=np.zeros(len(one.tokens), np.float32)) for one in samples]

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Return the samples with an advantage for each token: the mean over the members that share it."""
        found = []
        for members, group in zip(samples, batch.groups, strict=True):
            own = [np.broadcast_to(np.float32(advantage_of(one)), one.tokens.shape) for one in members]
            shared = shared_credit(own, common_lengths(group.completions))
            found.append([one.with_arrays(advantages=values) for one, values in zip(members, shared, strict=True)])
        return found
