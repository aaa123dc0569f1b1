"""The frozen models that teach a run's policy: how they are found, loaded and run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner import Forward
from jaxrl_llm.learner.platform import KERNELS, compute_for, layout_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.sharding import abstract, platform_of, shardings
from jaxrl_llm.stages.stage import Architectures


def is_base(name: str | None, run: configs.Run) -> bool:
    """Whether a teacher is the frozen base of the policy's own adapter, which the state holds already."""
    return name == run.model and run.learner.lora.rank > 0


def load_teacher(name: str, run: configs.Run, forward: Forward, tokenizer: Any) -> Decoder | None:
    """Load a teacher in the dtype that it computes in, divided over the mesh as the policy is; None for its own base.

    Raises:
      InputError: it is missing, scores texts, or has other tokens than the policy, whose ``tokenizer`` this is.
    """
    if is_base(name, run):
        return None
    field = field_of(name, run)
    try:
        model, own = load_model(name, run.learner.compute.dtype, forward.mesh)
    except InputError as error:
        raise InputError(f"{field}: {error}") from None
    if isinstance(model, ScalarModel):
        raise InputError(f"{field}: {name} is a reward model, which gives no distribution of tokens: take ModelReward")
    require(
        own is None or own.get_vocab() == tokenizer.get_vocab(),
        f"{field}: the tokenizer of {name} is not that of {run.model}: give a teacher that reads the policy's tokens",
    )
    return model


def run_teacher(name: str | None, run: configs.Run, forward: Forward, find: Architectures) -> Forward:
    """Return how a teacher is run: in the rows of the policy, which ``forward`` runs, or in longer ones with a context.

    ``name``: None for the policy itself.

    Raises:
      InputError: it is missing, or has fewer positions or tokens than the run needs.
    """
    settings: Any = run.scoring.distillation
    more = 0 if settings.context is None else settings.context.max_tokens
    longest = run.longest_row + more
    itself = name is None or is_base(name, run)
    field = "scoring.distillation.context" if itself else field_of(name, run)
    if itself and not more:
        return forward
    try:
        config = find(run.model if name is None else name)
    except InputError as error:
        raise InputError(f"{field}: {error}") from None
    positions = config.attention.rope.max_positions
    require(
        longest <= positions,
        f"{field}: {name or run.model} was made for {positions} positions, and what a teacher reads has up to "
        f"{longest}: lower rollout.max_new_tokens, rollout.max_prompt_tokens, or the context's max_tokens",
    )
    top_k = settings.top_k
    require(
        top_k < config.vocab_size,
        f"scoring.distillation.divergence.top_k {top_k} leaves no other token of the {config.vocab_size} of "
        f"{name or run.model}: set it to 0 to compare all",
    )
    compute = forward.compute
    attention = "auto" if KERNELS.get(compute.attention) == "gpu" else compute.attention
    own = run.learner.computing(attention=attention, row_tokens=0 if more else forward.layout.row_tokens)
    compute = compute_for(own, config, platform_of(forward.mesh), compute.compiler)
    layout = forward.layout
    if more:
        layout = layout_for(own, compute, longest, run.rollout.max_new_tokens, forward.mesh, config)
    return dataclasses.replace(forward, compute=compute, layout=layout)


def teacher_shapes(config: ModelConfig, run: configs.Run, forward: Forward) -> Decoder:
    """Return a teacher as shapes on the mesh."""
    dtype = jnp.dtype(run.learner.compute.dtype)
    model = jax.eval_shape(lambda: initialise(config, jax.random.key(0), dtype))
    return abstract(model, shardings(model, forward.mesh))


def field_of(name: str, run: configs.Run) -> str:
    """Return the setting that names a teacher, for messages."""
    settings = run.scoring.distillation
    first = settings is None or name == settings.teacher
    return f"scoring.distillation.{'teacher' if first else 'by_task'}"
