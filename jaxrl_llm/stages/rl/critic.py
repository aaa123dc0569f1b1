"""PPO's critic: a role that learns the value of each state of a completion."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Run
from jaxrl_llm.learner import Critic, Forward, Sample, Training, ValueLoss, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import KERNELS, compute_for
from jaxrl_llm.learner.samples import pooled, to_value
from jaxrl_llm.learner.update import NewRole
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.lora import create, model_of
from jaxrl_llm.rules import not_a_number
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.stages.rl.device_model import critic_config, load_critic, with_score
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.stages.stage import Architectures, Pass
from jaxrl_llm.types import TrainState

ROLE = ValueLoss.role


@dataclasses.dataclass(frozen=True)
class CriticRole(Ingredient):
    """The critic of a run.

    Attributes:
      run: with its settings resolved.
      critic: its own settings.
      forward: how it is run; None before it is prepared.
    """

    run: Run
    critic: Critic
    forward: Forward | None = None
    name = ROLE

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        critic = run.recipe.critic
        if critic is None:
            return None
        rate, field = critic.optimiser.learning_rate, "recipe.critic.optimiser"
        guard = functools.partial(not_a_number, learning_rate=rate, field=field, prefix="critic/")
        loads = () if critic.model is None else (critic.model,)
        return cls(run, critic, rules={"critic_not_a_number": guard}, loads=loads)

    def prepared(self, around: Around) -> Self:
        """See ``Ingredient``."""
        return dataclasses.replace(self, forward=around.forwards[ROLE])

    def role(
        self, policy: ModelConfig, forward: Forward, tokenizer: Any, find: Architectures
    ) -> tuple[Training, Forward]:
        """Return the critic's training and how it is run: in rows of the policy's shapes.

        Raises:
          InputError: ``recipe.critic.model`` cannot be found, or cannot read the policy's texts.
        """
        run, name = self.run, self.critic.model
        optimiser = build(self.critic.optimiser)
        begins = NewRole(ROLE, with_score, optimiser)
        if self.critic.adapter:
            key = jax.random.fold_in(jax.random.key(run.seed), 1)  # the policy's adapter takes the seed as it is
            adapter = lambda base: create(base.config, run.learner.lora, key, jnp.zeros(base.config.width))  # noqa: E731
            begins = begins._replace(first=adapter)
        compute = forward.compute
        if name is not None:
            config = critic_config(name, run, policy, find)
            # Another architecture, in rows laid out for the policy's attention.
            attention = "auto" if KERNELS.get(compute.attention) == "gpu" else compute.attention
            settings = run.learner.computing(attention=attention, row_tokens=forward.layout.row_tokens)
            compute = compute_for(settings, config, platform_of(forward.mesh), compute.compiler)
            dtype = jnp.dtype(run.learner.dtype)
            begins = begins._replace(
                load=lambda: load_critic(name, run, tokenizer, forward.mesh),
                shapes=jax.eval_shape(lambda: with_score(initialise(config, jax.random.key(0), dtype))),
            )
        objectives = (ValueLoss(self.critic.clip),)
        update = make_update(objectives, optimiser, learning_rate(self.critic.optimiser), compute)
        return Training(objectives, update, begins, self.critic.epochs), dataclasses.replace(forward, compute=compute)

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add zero returns and old values to the samples."""
        found = []
        for sample in samples:
            zeros = np.zeros(len(sample.tokens), np.float32)
            found.append(sample.with_arrays(returns=zeros, old_values=zeros))
        return found

    def passes(
        self, samples: Sequence[Sample], forwards: Mapping[str, Forward], where: Any, find: Architectures
    ) -> Sequence[Pass]:
        """Return the pass that computes the critic's values of all completions of a step."""
        one_more = "bootstrap" in self.run.recipe.algorithm.advantage.needs
        return [Pass("values", forwards[ROLE], [to_value(one, one_more) for one in samples], "values", 1, role=ROLE)]

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Exclude the policy while the critic warms up."""
        return [one for one in training if one.role != "policy"] if step <= self.critic.warmup else training

    def models(self, state: TrainState) -> Mapping[str, Any]:
        """Return the critic as the model ``values``."""
        model, forward = model_of(state, ROLE), self.forward
        return {"values": lambda samples: forward.by_sample(model, samples, output="values")}

    def remembered(self, measured: Mapping[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the explained variance pooled over the last steps (``learner.samples.pooled``)."""
        return pooled(measured, own)
