"""The reward models and judges of a run on its devices: loading them, and scoring completions with them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.rewards.functions import ModelReward, StepReward
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.rl.device_model import DeviceModel, Item, load_judge
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.stages.rl.judge_model import asked_models, judge_models, judging_passes
from jaxrl_llm.stages.rl.step_rewards import by_step
from jaxrl_llm.stages.stage import SCORED_AT_ONCE, Architectures, Pass, run_by, scored_sample
from jaxrl_llm.stages.taught import readers
from jaxrl_llm.tasks import Prompts


@dataclasses.dataclass(frozen=True)
class Judges(Ingredient):
    """The reward models and judges of a run: of its rewards, its constraints, its gate and its evaluations."""

    run: configs.Run
    name = "judges"

    @classmethod
    def of(cls, run: configs.Run) -> Self:
        """Return the ingredient for every run, even without reward models: it clears an earlier phase's from the
        scorer.
        """
        names = [*(path for _, path in readers(run)), *(judge.model for judge in asked_models(run))]
        return cls(run, loads=tuple(dict.fromkeys(names)))

    def prepared(self, around: Around) -> Self:
        """Load the models into the scorer.

        Raises:
          InputError: as ``judges_of``.
        """
        asked = {task.label: known for known in (around.test_prompts, around.prompts) for task in known.tasks}
        around.scorer.models = judges_of(self.run, around.where, around.tokenizer, asked, around.progress.status)
        return self

    def passes(
        self, samples: Sequence[Sample], forwards: Mapping[str, Forward], where: Any, find: Architectures
    ) -> Sequence[Pass]:
        """Return a pass for each architecture, in chunks of completions: models of one architecture share a program."""
        models = collections.Counter(find(path) for path in dict.fromkeys(path for _, path in readers(self.run)))
        calls = -(-len(samples) // SCORED_AT_ONCE)
        some = [scored_sample(one.prompt, one.tokens, {}) for one in samples[:SCORED_AT_ONCE]]
        dtype = jnp.dtype(self.run.learner.compute.dtype)
        passes, rollout = [], self.run.rollout
        for number, (config, count) in enumerate(models.items(), start=1):
            forward = run_by(self.run.learner, config, where, rollout.max_length + 1, rollout.max_new_tokens + 1)
            model = jax.eval_shape(lambda c=config: with_scalar_head(initialise(c, jax.random.key(0), dtype)))
            name = "judges" if number == 1 else f"judges {number}"
            passes.append(Pass(name, forward, some, "values", calls * count, model=model, copies=count))
        return [*passes, *judging_passes(self.run, samples, where, find)]

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Add ``reward_model/mean``, the mean of the first model reward, if there is one: NaN if nothing was scored."""
        models = [name for name, reward in named(configs.rewards(self.run)).items() if isinstance(reward, ModelReward)]
        if not models:
            return batch
        mean = batch.metrics.get(f"reward/{models[0]}", math.nan)
        return dataclasses.replace(batch, metrics=batch.metrics | {"reward_model/mean": mean})


def judges_of(
    run: configs.Run, where: Mesh, tokenizer: Any, prompts: Mapping[str, Prompts], status: Callable[[str], None]
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """Return functions that compute the rewards of models, by reward: ``together``, ``by_step``, or the answers of a
    judge; empty without any.

    Args:
      run: with its settings resolved.
      where: the mesh that samples.
      tokenizer: the policy's.
      prompts: of each task, by its label.
      status: receives progress messages.

    Raises:
      InputError: a model that is missing, is not a reward model, was trained with another format, or has other tokens
        than the policy.
    """
    for reader, path in readers(run):
        reader.check(path)
    models: dict[str, DeviceModel] = {}
    for reader, path in readers(run):
        if path not in models:
            models[path] = load_judge(run, path, reader.field.removesuffix(":"), where, tokenizer, prompts, status)
    found: dict[Any, Callable[[Sequence[Item]], Any]] = {}
    for base in configs.bases(run):
        if isinstance(base, ModelReward):
            found[base] = functools.partial(together, [models[path] for path in base.paths])
        elif isinstance(base, StepReward):
            found[base] = functools.partial(by_step, base, models[base.path], tokenizer)
    return found | judge_models(run, where, status)


def together(models: Sequence[DeviceModel], items: Sequence[Item]) -> np.ndarray:
    """Return the score of each completion by each model, float64[n, m]."""
    scores = [[float(values[-1]) for values in one.values(items)] for one in models]
    return np.asarray(scores, np.float64).T
