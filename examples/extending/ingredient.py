"""An ingredient of reinforcement learning: the loss on right answers of VAPO (arXiv 2504.05118, section 3.3).

An ingredient is an addition to a run's policy gradient: a critic, texts of pretraining, limits of costs. It is a value
in a file of its own, with the hooks of ``Ingredient`` (``jaxrl_llm/stages/ingredients.py``) that it needs:
objectives, coefficients and rules; what it loads; what it adds to samples, and to those of the plan.
"""


# jaxrl_llm/rollout/settings.py, in Collect, after replay: Replay
class Collect:
    right_answers: float = 0.0


# jaxrl_llm/stages/right_answers.py
import dataclasses
from typing import ClassVar

from jaxrl_llm.algorithms.preference import pretraining_loss
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.stages.ingredients import Ingredient


@dataclasses.dataclass(frozen=True)
class RightAnswerLoss(Objective):
    """``-coef mean_t logp`` over the tokens of right answers."""

    coef: float
    name: ClassVar[str] = "right_answers"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs, batch, counts, coefficients):
        loss = pretraining_loss(outputs["logp"], batch.mask, counts.tokens)
        return self.coef * loss, {"loss": self.coef * loss, "right_answers/loss": loss}


@dataclasses.dataclass(frozen=True)
class RightAnswers(Ingredient):
    """Right answers count twice: for the policy gradient and for their likelihood."""

    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, run):
        coef = run.rollout.collect.right_answers
        return cls(objectives=(RightAnswerLoss(coef),)) if coef else None

    def prepared(self, context):
        others = tuple(name for name in context.objectives if name != "right_answers")
        return dataclasses.replace(self, others=others)

    def samples(self, samples, batch):
        return [
            [
                one if right == 1 else one.counting(self.others)
                for one, right in zip(members, group.accuracy, strict=True)
            ]
            for members, group in zip(samples, batch.groups, strict=True)
        ]


# jaxrl_llm/stages/programs.py, at the top: from jaxrl_llm.stages.right_answers import RightAnswers
# jaxrl_llm/stages/programs.py, in INGREDIENTS, before *(SharedCredit
INGREDIENTS = [
    RightAnswers,
]
