"""Distillation in the learner: the divergence from teachers as an output of the forward pass, and its loss."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.kl import JensenShannon
from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Output, Outputs, count_of, predicting
from jaxrl_llm.learner.objectives import Objective, Scalars, Share
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.models.heads import TeacherStates, TopTokens, token_divergence, top_tokens
from jaxrl_llm.models.lora import without_adapter

DISTILLATION = "distillation"
"""The name of the objective, for ``Sample.counted_by``, and the prefix of its metrics."""
WHICH = "teacher"
"""The name of the number of a sample's teacher among its scalars, if there are several."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("model",), meta_fields=("compute",))
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that is run with each microbatch of the policy.

    Attributes:
      model: it, or its shapes; None for the frozen base of the policy's own adapter.
      compute: how its layers are computed.
    """

    model: Any
    compute: ComputeOptions


@dataclasses.dataclass(frozen=True)
class TopOutput:
    """A teacher's most likely tokens as an output: ``models.heads.TopTokens`` [P, N, ...].

    Attributes:
      k: how many.
      vocab: of the student; tokens from there on are left out.
    """

    k: int
    vocab: int

    def __call__(self, model: Decoder, hidden: jax.Array, batch: Packed, temperature: jax.Array) -> TopTokens:
        """Return the tokens and their log-probabilities at each prediction."""
        return top_tokens(model, hidden, self.k, temperature, self.vocab)


@dataclasses.dataclass(frozen=True)
class TeacherDivergence:
    """The divergence from the teacher as an output, float32[P, N], nats.

    With ``divergence.top_k`` it reads ``teacher_ids`` and ``teacher_logp`` of the predictions; otherwise the batch's
    teachers read its rows here, and no logits outlive a chunk. Of several teachers only those run that have a row in
    the microbatch.

    Attributes:
      divergence: which one.
      teachers: names in ``Packed.teachers``, in the order of the numbers of samples' teachers.
    """

    divergence: JensenShannon
    teachers: tuple[str, ...]

    def __call__(self, model: Decoder, hidden: jax.Array, batch: Packed, temperature: jax.Array) -> jax.Array:
        """Return the divergence at each prediction."""
        measure = functools.partial(
            token_divergence, self.divergence, model, hidden, temperature=temperature, count=count_of(batch)
        )
        if self.divergence.top_k:
            return measure(TopTokens(batch.by_prediction["teacher_ids"], batch.by_prediction["teacher_logp"]))
        assert batch.teachers is not None
        states = [self._states(batch.teachers[name], model, batch) for name in self.teachers]
        if len(states) == 1:
            return measure(states[0]())
        places = jnp.minimum(batch.predictions.scatter // batch.mask.shape[1], len(batch.mask) - 1)
        which = batch.by_sequence[WHICH][places]
        valid = batch.predictions.scatter < batch.mask.size
        found = zeros = jnp.zeros(which.shape, jnp.float32)
        for number, of_teacher in enumerate(states):
            own = valid & (which == number)
            theirs = jax.lax.cond(jnp.any(own), lambda s=of_teacher: measure(s()), lambda: zeros)
            found = jnp.where(own, theirs, found)
        return found

    @staticmethod
    def _states(teacher: Teacher, model: Decoder, batch: Packed) -> Any:
        """Return a function that runs the teacher on the rows."""

        def run() -> TeacherStates:
            own = without_adapter(model) if teacher.model is None else cast(teacher.model, teacher.compute.dtype)
            return TeacherStates(own, jax.lax.stop_gradient(predicting(own, batch, teacher.compute)[0]))

        return run


@dataclasses.dataclass(frozen=True)
class DivergenceLoss(Objective):
    """``weight mean_t(D)``: the divergence D of the policy from its teacher over the tokens that count, nats.

    It is a sum over the vocabulary divided by the number of tokens (GKD, arXiv 2306.13649). The tokens are the
    policy's or given ones; no gradient passes through how they were sampled.

    Attributes:
      weight: of the loss.
      divergence: D.
      teachers: names of the teachers.
    """

    weight: float
    divergence: JensenShannon
    teachers: tuple[str, ...]
    name: ClassVar[str] = DISTILLATION
    role: ClassVar[str] = "policy"

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return the divergence as an output."""
        return (TeacherDivergence(self.divergence, self.teachers),)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the loss, and as metrics the loss and the mean divergence without the weight."""
        each = outputs[self.outputs[0]]
        mean = jnp.sum(jnp.where(batch.mask, each, 0.0)) / jnp.maximum(counts.tokens, 1)
        return self.weight * mean, {"loss": self.weight * mean, f"{DISTILLATION}/divergence": mean}
