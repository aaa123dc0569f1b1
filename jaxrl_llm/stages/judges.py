"""Reward models on the devices: loaded once, run in packed rows as the learner runs its models."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.collection.rows import split_steps, step_lengths
from jaxrl_llm.config import Run
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.rewards.models import ON_DEVICE, ModelReward, StepReward
from jaxrl_llm.rewards.steps import last_token
from jaxrl_llm.sharding import batch_parts, platform_of
from jaxrl_llm.stages.reading import scored, scored_sample
from jaxrl_llm.stages.taught import check_readers, check_template, closings, taught
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.endings import closed
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.trained import load_model
from jaxrl_llm.types import Completion, Problem

Item = tuple[Problem, Completion]


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A reward model where it scores.

    Attributes:
      model: in the dtype that it computes in.
      forward: how it is run.
      prompts: of each task, by its label.
      status: hears what is going on.
      closings: what ends a completion of each task where its score is read, by label; see ``tasks.endings.closed``.
    """

    model: ScalarModel
    forward: Forward
    prompts: Mapping[str, Prompts]
    status: Callable[[str], None]
    closings: Mapping[str, Sequence[int] | None]

    def values(self, items: Sequence[Item]) -> list[np.ndarray]:
        """For each completion float32[t + 1]: at place t the value of the state before token t, last that after all.

        Where the model reads on to the end of what the chat template writes, its tokens t are among them.
        """
        samples = [
            scored_sample(self.prompts[problem.task][problem], closed(completion, self.closings.get(problem.task)), {})
            for problem, completion in items
        ]
        with jax.set_mesh(self.forward.mesh):  # of this thread
            return scored(self.forward, self.model, samples, "values", self.status)


def judges_of(
    run: Run,
    where: Mesh,
    tokenizer: Any,
    prompts: Mapping[str, Prompts],
    status: Callable[[str], None],
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """What computes the rewards that models give, by those rewards: ``together``, or ``by_step``; nothing for a run
    without any.

    Args:
      run: with its settings resolved.
      where: the mesh that samples.
      tokenizer: the policy's.
      prompts: of each task, by its label.
      status: hears what is going on.

    Raises:
      InputError: a model that is not there, is no reward model, was taught something else, or has other tokens than
        the policy.
    """
    check_readers(run)
    loaded: dict[str, DeviceModel] = {}

    def model_at(path: str, name: str) -> DeviceModel:
        if path not in loaded:
            loaded[path] = load_judge(run, path, f"reward {name}", where, tokenizer, prompts, status)
        return loaded[path]

    found: dict[Any, Callable[[Sequence[Item]], Any]] = {}
    for base in configs.bases(run):
        if isinstance(base, ModelReward):
            models = [model_at(path, base.name) for path in base.paths]
            found[base] = functools.partial(together, models)
        elif isinstance(base, StepReward):
            found[base] = functools.partial(by_step, base, model_at(base.path, base.name), tokenizer)
    return found


def load_judge(
    run: Run,
    path: str,
    field: str,
    where: Mesh,
    tokenizer: Any,
    prompts: Mapping[str, Prompts],
    status: Callable[[str], None],
) -> DeviceModel:
    """A reward model for what the run's policy writes.

    Args:
      run: names the policy, and says how long prompts and completions are and how the learner computes.
      path: RUN[@STEP] or a directory.
      field: what names it, for messages.
      where, tokenizer, prompts, status: as for ``judges_of``.

    Raises:
      InputError: as ``judges_of``.
    """
    status(f"loading {path}")
    try:
        model, own = load_model(path, run.learner.compute_dtype, where)
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
    ends = closings(known, prompts, tokenizer)
    more = max((len(closing) - 1 for closing in ends.values() if closing), default=0)  # a stop token is there already
    longest = run.rollout.max_length + more
    positions = model.config.attention.max_positions
    configs.require(
        longest <= positions,
        f"{field}: {path} was made for {positions} positions, and prompts with completions have up to {longest}: lower "
        "max_new_tokens or max_prompt_tokens, or give another reward model",
    )
    return DeviceModel(model, forward_of(run, model.config, where, more), prompts, status, ends)


def forward_of(run: Run, config: ModelConfig, where: Any, more: int = 0) -> Forward:
    """How a reward model of this architecture is run on the mesh that samples.

    ``more``: tokens that it reads after a completion.
    """
    longest = run.rollout.max_length + more + 1
    parts = batch_parts(where)
    rows = -(-run.learner.microbatch_rows // parts) * parts
    settings = dataclasses.replace(run.learner, microbatch_rows=rows, attention="auto", row_tokens=0)
    compute = compute_for(settings, config, platform_of(where))
    layout = layout_for(settings, compute, longest, run.rollout.max_new_tokens + more + 1, where, config)
    return Forward(layout, compute, 1.0, where)


def paths_of(run: Run) -> list[str]:
    """The reward models that the run loads, each once."""
    found = []
    for base in configs.bases(run):
        if isinstance(base, ON_DEVICE):
            found += base.paths if isinstance(base, ModelReward) else (base.path,)
    return list(dict.fromkeys(found))


def together(models: Sequence[DeviceModel], items: Sequence[Item]) -> np.ndarray:
    """The score of each completion by each of some models, float64[n, m]."""
    scores = [[float(values[-1]) for values in one.values(items)] for one in models]
    return np.asarray(scores, np.float64).T


def by_step(reward: StepReward, model: DeviceModel, tokenizer: Any, items: Sequence[Item]) -> np.ndarray:
    """For each completion ``[(index of a step's last token, value), ...]``, as an array of lists [n]."""
    found = np.zeros(len(items), object)
    for place, ((_, completion), values) in enumerate(zip(items, model.values(items), strict=True)):
        ends = step_ends(completion, reward.separator, tokenizer)
        scores = 1 / (1 + np.exp(-values[ends + 1].astype(np.float64)))
        if reward.differences:
            scores = np.diff(scores, prepend=reward.start)
        found[place] = [(int(end), float(score)) for end, score in zip(ends, scores, strict=True)]
    return found


def solution_scores(
    model: DeviceModel,
    items: Sequence[Item],
    by: Literal["score", "product", "minimum", "last"],
    separator: str,
    tokenizer: Any,
) -> np.ndarray:
    """One score of each completion, float64[n]: that of the whole, or of its steps' probabilities the product, the
    lowest or the last (arXiv 2305.20050, section 2.6); then 0 where there is no step.
    """
    if by == "score":
        return np.asarray([values[-1] for values in model.values(items)], np.float64)
    said = by_step(StepReward("", separator=separator), model, tokenizer, items)
    found = [np.asarray([value for _, value in steps] or [0.0]) for steps in said]
    of = {"product": np.prod, "minimum": np.min, "last": lambda steps: steps[-1]}[by]
    return np.asarray([of(steps) for steps in found], np.float64)


def step_ends(completion: Completion, separator: str, tokenizer: Any) -> np.ndarray:
    """The index of each step's last token, int64[k]: that of the separator, or of the text's end; rising.

    Steps are those of ``collection.rows.split_steps``: what holds nothing but white space belongs to the one before.
    """
    text = completion.text
    tokens = completion.tokens.tolist()
    ends = step_lengths(split_steps(text, separator), separator)
    return np.asarray(sorted({last_token(text, tokens, end, tokenizer) for end in ends}), np.int64)
