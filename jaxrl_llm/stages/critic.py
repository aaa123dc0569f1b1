"""PPO's critic: a role that learns the value of each state of a completion."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Run, tasks_in
from jaxrl_llm.errors import naming, require
from jaxrl_llm.learner import Critic, Forward, Sample, Training, ValueLoss, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import ATTENTION_PLATFORMS, compute_for
from jaxrl_llm.learner.samples import value_sample
from jaxrl_llm.learner.update import NewRole
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.models.lora import create_adapter, model_of
from jaxrl_llm.rules import not_a_number
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.stages.ingredients import Ingredient, StageContext
from jaxrl_llm.stages.stage import Architectures, Pass
from jaxrl_llm.stages.taught import check_reward_template, reward_format
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.types import TrainState

CRITIC = ValueLoss.role


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
    forward: Any = None

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        critic = run.recipe.critic
        if critic is None:
            return None
        rate, field = critic.optimiser.learning_rate, "recipe.critic.optimiser"
        guard = functools.partial(not_a_number, learning_rate=rate, field=field, prefix="critic/")
        return cls(run, critic, rules={"critic_not_a_number": guard})

    def prepared(self, context: StageContext) -> Self:
        """See ``Ingredient``."""
        return dataclasses.replace(self, forward=context.forwards[CRITIC])

    def role(
        self, policy: ModelConfig, forward: Forward, tokenizer: Any, find: Architectures
    ) -> tuple[Training, Forward]:
        """Return the critic's training and how it is run: in rows of the policy's shapes.

        Args:
          policy: the architecture of the policy.
          forward: how the policy is run.
          tokenizer: the policy's; None if nothing will be loaded.
          find: maps the name of a model to its architecture.

        Raises:
          InputError: ``recipe.critic.model`` cannot be found, or cannot read the policy's texts.
        """
        run, name = self.run, self.critic.model
        optimiser = build(self.critic.optimiser)
        begins = NewRole(CRITIC, with_value_head, optimiser)
        if self.critic.adapter:
            key = jax.random.fold_in(jax.random.key(run.seed), 1)  # the policy's adapter takes the seed as it is
            adapter = lambda base: create_adapter(base.config, run.learner.lora, key, jnp.zeros(base.config.width))  # noqa: E731
            begins = begins._replace(first=adapter)
        compute = forward.compute
        if name is not None:
            config = critic_config(name, run, policy, find)
            # Another architecture, in rows laid out for the policy's attention.
            attention = "auto" if ATTENTION_PLATFORMS.get(compute.attention) == "gpu" else compute.attention
            settings = run.learner.computing(attention=attention, row_tokens=forward.layout.row_tokens)
            compute = compute_for(settings, config, platform_of(forward.mesh), compute.compiler)
            dtype = jnp.dtype(run.learner.dtype)
            begins = begins._replace(
                load=lambda: load_critic(name, run, tokenizer, forward.mesh),
                shapes=jax.eval_shape(lambda: with_value_head(initialise(config, jax.random.key(0), dtype))),
            )
        objectives = (ValueLoss(self.critic.clip),)
        update = make_update(objectives, optimiser, learning_rate(self.critic.optimiser), compute)
        return Training(objectives, update, begins, self.critic.epochs), dataclasses.replace(forward, compute=compute)

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add zero returns and old values to the samples."""
        with_zeros = []
        for sample in samples:
            zeros = np.zeros(len(sample.tokens), np.float32)
            with_zeros.append(sample.with_arrays(returns=zeros, old_values=zeros))
        return with_zeros

    def planned_pass(self, samples: Sequence[Sample], forward: Forward) -> Pass:
        """Return the pass that computes the critic's values of all completions of a step."""
        bootstraps = "bootstrap" in self.run.recipe.algorithm.advantage.needs
        return Pass(
            "values", forward, [value_sample(sample, bootstraps) for sample in samples], "values", 1, role=CRITIC
        )

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Exclude the policy while the critic warms up."""
        return [role for role in training if role.role != "policy"] if step <= self.critic.warmup else training

    def values(self, state: TrainState) -> Callable[[Sequence[Sample]], list[np.ndarray]]:
        """Return the function that computes the values of samples."""
        return functools.partial(self.forward.by_sample, model_of(state, CRITIC), output="values")


def with_value_head(model: Decoder | ScalarModel) -> ScalarModel:
    """Return the model with its scalar head; a decoder gets one of zeros."""
    return model if isinstance(model, ScalarModel) else with_scalar_head(model)


def critic_config(name: str, run: Run, policy: ModelConfig, find: Architectures) -> ModelConfig:
    """Return the architecture of a critic's initial model.

    Raises:
      InputError: it is missing, or has fewer positions or another vocabulary than the run needs.
    """
    with naming("recipe.critic.model"):
        config = find(name)
    positions = config.attention.rope.max_positions
    require(
        run.rollout.max_length <= positions,
        f"recipe.critic.model {name} was made for {positions} positions, and prompts with completions have up to "
        f"{run.rollout.max_length}: lower rollout.max_new_tokens or rollout.max_prompt_tokens, or give another critic",
    )
    require(
        config.vocab_size == policy.vocab_size,
        f"recipe.critic.model {name} has a vocabulary of {config.vocab_size} tokens, and that of {run.model} has "
        f"{policy.vocab_size}: give a critic that reads the policy's tokens",
    )
    return config


def load_critic(name: str, run: Run, tokenizer: Any, mesh: Mesh) -> ScalarModel:
    """Load a critic's initial model, in ``learner.dtype`` on the mesh.

    Raises:
      InputError: it is unreadable, has other tokens than the policy, or was trained with another chat template.
    """
    model, critic_tokenizer = load_model(name, run.learner.dtype, mesh)
    require(
        critic_tokenizer is None or critic_tokenizer.get_vocab() == tokenizer.get_vocab(),
        f"the tokens of recipe.critic.model {name} are not those of {run.model}: give a critic that reads the policy's "
        "tokens",
    )
    prompts = {task.label: Prompts(task, tokenizer) for task in tasks_in(run.task)}
    recorded = reward_format(name, critic_tokenizer or tokenizer)
    check_reward_template(recorded, f"recipe.critic.model {name}", prompts, tokenizer)
    return with_value_head(model)
