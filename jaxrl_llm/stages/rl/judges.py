"""The reward models of a run: loading them, and scoring completions with them."""

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
from jaxrl_llm.rewards.functions import ON_DEVICE, ModelReward, StepReward
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.rl.device_model import DeviceModel, Item, forward_of, load_judge
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.stages.rl.step_rewards import by_step
from jaxrl_llm.stages.stage import SCORED_AT_ONCE, Architectures, Pass, scored_sample
from jaxrl_llm.stages.taught import check_readers
from jaxrl_llm.tasks import Prompts


@dataclasses.dataclass(frozen=True)
class Judges(Ingredient):
    """The reward models of a run: those of its rewards, its constraints, its gate and its evaluations."""

    run: configs.Run
    name = "judges"

    @classmethod
    def of(cls, run: configs.Run) -> Self:
        """Return the ingredient for every run, even without reward models: it clears an earlier phase's from the
        scorer.
        """
        found = []
        for base in configs.bases(run):
            if isinstance(base, ON_DEVICE):
                found += base.paths if isinstance(base, ModelReward) else (base.path,)
        return cls(run, loads=tuple(dict.fromkeys(found)))

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
        models = collections.Counter(find(path) for path in self.loads)
        calls = -(-len(samples) // SCORED_AT_ONCE)
        some = [scored_sample(one.prompt, one.tokens, {}) for one in samples[:SCORED_AT_ONCE]]
        dtype = jnp.dtype(self.run.learner.compute_dtype)
        passes = []
        for number, (config, count) in enumerate(models.items(), start=1):
            forward = forward_of(self.run, config, where)
            model = jax.eval_shape(lambda c=config: with_scalar_head(initialise(c, jax.random.key(0), dtype)))
            name = "judges" if number == 1 else f"judges {number}"
            passes.append(Pass(name, forward, some, "values", calls * count, model=model, copies=count))
        return passes

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Add ``reward_model/mean`` to the metrics of the batch; see ``modelled``."""
        return dataclasses.replace(batch, metrics=batch.metrics | modelled(self.run, batch.metrics))


def modelled(run: configs.Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return ``reward_model/mean``, the mean reward of the first model reward; empty without one.

    NaN for a step in which nothing was scored.
    """
    models = [name for name, reward in named(configs.rewards(run)).items() if isinstance(reward, ModelReward)]
    return {"reward_model/mean": metrics.get(f"reward/{models[0]}", math.nan)} if models else {}


def judges_of(
    run: configs.Run, where: Mesh, tokenizer: Any, prompts: Mapping[str, Prompts], status: Callable[[str], None]
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """Return functions that compute the rewards of models, by reward: ``together`` or ``by_step``; empty without any.

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


def together(models: Sequence[DeviceModel], items: Sequence[Item]) -> np.ndarray:
    """Return the score of each completion by each model, float64[n, m]."""
    scores = [[float(values[-1]) for values in one.values(items)] for one in models]
    return np.asarray(scores, np.float64).T
