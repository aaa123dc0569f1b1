"""Models that a run loads besides its policy: a critic's initial model, and reward models.

A reward model is loaded once, and run on the devices in packed rows as the learner runs its models.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.stages.stage import Architectures, run_by, scored, scored_sample
from jaxrl_llm.stages.taught import check_template, taught
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.chats import Pieces, closed
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.types import Completion, Problem

Item = tuple[Problem, Completion]


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A reward model on the devices where it scores.

    Attributes:
      model: in the dtype that it computes in.
      forward: how it is run.
      prompts: of each task, by its label.
      status: receives progress messages.
      closings: the tokens that close a completion where its score is read, by task label; see ``tasks.chats.closed``.
    """

    model: ScalarModel
    forward: Forward
    prompts: Mapping[str, Prompts]
    status: Callable[[str], None]
    closings: Mapping[str, Sequence[int] | None]

    def values(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Return for each completion float32[t + 1]: at place t the value before token t, last the value after all.

        If the model reads on to the end of the chat template, the t tokens include those of the template.
        """
        samples = [
            scored_sample(self.prompts[problem.task][problem], closed(completion, self.closings.get(problem.task)), {})
            for problem, completion in items
        ]
        with jax.set_mesh(self.forward.mesh):  # of this thread
            return scored(self.forward, self.model, samples, "values", self.status)


def load_judge(
    run: configs.Run,
    path: str,
    field: str,
    where: Mesh,
    tokenizer: Any,
    prompts: Mapping[str, Prompts],
    status: Callable[[str], None],
) -> DeviceModel:
    """Load a reward model for the completions of the run's policy.

    Args:
      run: gives the policy, the lengths of prompts and completions, and how the learner computes.
      path: RUN[@STEP] or a directory.
      field: the setting that names it, for messages.
      where, tokenizer, prompts, status: as for ``judges_of``.

    Raises:
      InputError: as ``judges_of``.
    """
    status(f"loading {path}")
    try:
        model, own = load_model(path, run.learner.compute.dtype, where)
    except InputError as error:
        raise InputError(f"{field}: {error}") from None
    if not isinstance(model, ScalarModel):
        raise InputError(f"{field}: {path} is a language model, which gives no score: train a RewardModel")
    check_tokenizer(own, f"{field}: {path}")
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{field}: the tokens of {path} are not those of {run.model}: give a reward model that reads the policy's "
            "tokens"
        )
    known = taught(path, own)
    check_template(known, f"{field}: {path}", prompts, tokenizer)
    closes = known is not None and known.score_at == "template"  # else a score is read at the completion's own end
    ends = (
        {label: Pieces(one.task(label), tokenizer, (), {}).closing for label, one in prompts.items()} if closes else {}
    )
    more = max((len(closing) - 1 for closing in ends.values() if closing), default=0)  # a stop token is there already
    longest = run.rollout.max_length + more
    positions = model.config.attention.rope.max_positions
    configs.require(
        longest <= positions,
        f"{field}: {path} was made for {positions} positions, and prompts with completions have up to {longest}: lower "
        "max_new_tokens or max_prompt_tokens, or give another reward model",
    )
    forward = run_by(run.learner, model.config, where, longest + 1, run.rollout.max_new_tokens + more + 1)
    return DeviceModel(model, forward, prompts, status, ends)


def with_score(model: Decoder | ScalarModel) -> ScalarModel:
    """Return the model with its scalar head; a decoder gets one of zeros."""
    return model if isinstance(model, ScalarModel) else with_scalar_head(model)


def critic_config(name: str, run: configs.Run, policy: ModelConfig, find: Architectures) -> ModelConfig:
    """Return the architecture of a critic's initial model.

    Raises:
      InputError: it is missing, or has fewer positions or another vocabulary than the run needs.
    """
    try:
        config = find(name)
    except InputError as error:
        raise InputError(f"recipe.critic.model: {error}") from None
    positions = config.attention.rope.max_positions
    configs.require(
        run.rollout.max_length <= positions,
        f"recipe.critic.model {name} was made for {positions} positions, and prompts with completions have up to "
        f"{run.rollout.max_length}: lower rollout.max_new_tokens or rollout.max_prompt_tokens, or give another critic",
    )
    configs.require(
        config.vocab_size == policy.vocab_size,
        f"recipe.critic.model {name} has a vocabulary of {config.vocab_size} tokens, and that of {run.model} has "
        f"{policy.vocab_size}: give a critic that reads the policy's tokens",
    )
    return config


def load_critic(name: str, run: configs.Run, tokenizer: Any, mesh: Mesh) -> ScalarModel:
    """Load a critic's initial model, in ``learner.dtype`` on the mesh.

    Raises:
      InputError: it is unreadable, has other tokens than the policy, or was trained with another chat template.
    """
    model, own = load_model(name, run.learner.dtype, mesh)
    configs.require(
        own is None or own.get_vocab() == tokenizer.get_vocab(),
        f"the tokens of recipe.critic.model {name} are not those of {run.model}: give a critic that reads the policy's "
        "tokens",
    )
    prompts = {task.label: Prompts(task, tokenizer) for task in configs.tasks_in(run.task)}
    check_template(taught(name, own or tokenizer), f"recipe.critic.model {name}", prompts, tokenizer)
    return with_score(model)
