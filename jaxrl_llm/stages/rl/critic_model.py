"""The initial model of a critic: the policy, or another model with the same tokens."""

from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import Run, require, tasks_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.stages.stage import Architectures
from jaxrl_llm.stages.taught import check_template, taught
from jaxrl_llm.tasks import Prompts


def scored(model: Decoder | ScalarModel) -> ScalarModel:
    """Return the model with its scalar head; a decoder gets one of zeros."""
    return model if isinstance(model, ScalarModel) else with_scalar_head(model)


def readable(name: str, run: Run, policy: ModelConfig, find: Architectures) -> ModelConfig:
    """Return the architecture of a critic's initial model.

    Raises:
      InputError: it is missing, or has fewer positions or another vocabulary than the run needs.
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
    """Load a critic's initial model, in ``learner.dtype`` on the mesh.

    Raises:
      InputError: it is unreadable, has other tokens than the policy, or was trained with another chat template.
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
