"""How the critic of a run begins and learns."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import Run, require, tasks_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward, Learner, Training, ValueLoss, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for
from jaxrl_llm.learner.state import NewRole
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.models.lora import create
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.stages.taught import check_template, taught
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.trained import config_of, load_model

Architectures = Callable[[str], ModelConfig]
"""From the name of a model to what it is, without its weights."""


def critic_of(
    run: Run, policy: ModelConfig, forward: Forward, tokenizer: Any, find: Architectures = config_of
) -> tuple[Training, Forward]:
    """How the critic is trained, and how it is run.

    Args:
      run: with its settings resolved.
      policy: the architecture of the policy.
      forward: how the policy is run: in rows of the same shapes.
      tokenizer: the policy's; None where nothing is going to be loaded.
      find: the architecture of a model.

    Raises:
      InputError: ``recipe.critic.model`` cannot be found, or cannot read what the policy writes.
    """
    critic = run.recipe.critic
    optimiser = build(critic.optimiser)
    begins = NewRole("critic", adapter_of(run) if critic.adapter else scored, optimiser)
    compute = forward.compute
    if critic.model is not None:
        config = readable(critic.model, run, policy, find)
        compute = compute_beside(run.learner, config, forward)
        dtype = jnp.dtype(run.learner.dtype)
        begins = begins._replace(
            load=lambda: loaded(critic.model, run, tokenizer, forward.mesh),
            shapes=jax.eval_shape(lambda: scored(initialise(config, jax.random.key(0), dtype))),
        )
    objectives = (ValueLoss(critic.clip),)
    update = make_update(objectives, optimiser, learning_rate(critic.optimiser), compute)
    return Training(objectives, update, begins, critic.epochs), dataclasses.replace(forward, compute=compute)


def scored(model: Decoder | ScalarModel) -> ScalarModel:
    """The model with its scalar head, or with one of zeros."""
    return model if isinstance(model, ScalarModel) else with_scalar_head(model)


def adapter_of(run: Run) -> Callable[[Decoder], Adapter]:
    """What makes an adapter, whose values are 0 yet, beside the policy's frozen model."""
    key = jax.random.fold_in(jax.random.key(run.seed), 1)  # the policy's adapter takes the seed as it is
    return lambda base: create(base.config, run.learner.lora, key, jnp.zeros(base.config.width))


def readable(name: str, run: Run, policy: ModelConfig, find: Architectures) -> ModelConfig:
    """The architecture of the model that a critic begins as.

    Raises:
      InputError: there is none, or it is made for shorter texts or another vocabulary than the policy's.
    """
    try:
        config = find(name)
    except InputError as error:
        raise InputError(f"recipe.critic.model: {error}") from None
    positions = config.attention.max_positions
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


def loaded(name: str, run: Run, tokenizer: Any, mesh: Mesh) -> ScalarModel:
    """The model that a critic begins as, in ``learner.dtype`` on the mesh.

    Raises:
      InputError: it cannot be read, its tokens are not the policy's, or it was taught with another chat template.
    """
    model, own = load_model(name, run.learner.dtype, mesh)
    require(
        own is None or own.get_vocab() == tokenizer.get_vocab(),
        f"the tokens of recipe.critic.model {name} are not those of {run.model}: give a critic that reads the policy's "
        "tokens",
    )
    prompts = {task.label: Prompts(task, tokenizer) for task in tasks_in(run.task)}
    check_template(taught(name, own or tokenizer), f"recipe.critic.model {name}", prompts, tokenizer)
    return scored(model)


def compute_beside(learner: Learner, config: ModelConfig, forward: Forward) -> Compute:
    """How a critic of another architecture is computed, in rows that are laid out for the policy's attention."""
    attention = "auto" if forward.compute.attention == "cudnn" else forward.compute.attention
    settings = dataclasses.replace(learner, attention=attention, row_tokens=forward.layout.row_tokens)
    return compute_for(settings, config, platform_of(forward.mesh))
