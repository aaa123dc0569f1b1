"""A run of reinforcement learning: prompts are sampled, answers scored, and the policy learns from their advantages."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.learner import Sample, Training, to_samples
from jaxrl_llm.learner.samples import advantage_of, size_of_advantages
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.dynamic_sampling import Sampler, collect
from jaxrl_llm.rollout.evaluate import Evaluated, Tested
from jaxrl_llm.rollout.groups import RECORDS, Carryover, RolloutBatch
from jaxrl_llm.stages.rl.constraints import separately
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.stages.rl.ingredients import dropped_endings
from jaxrl_llm.stages.rl.problems import same_groups, stream_left, successes_left
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.telemetry.records import token_texts
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforcement(Stage):
    """A run of reinforcement learning, once its files are read.

    Attributes:
      run: its settings.
      sampler: fills steps with groups.
      transfer: maps the policy to weights to sample from.
      evaluation: evaluates such weights, task by task; empty if there is nothing to test on.
      ingredients: prepared.
    """

    run: configs.Run
    sampler: Sampler
    transfer: Callable[[Any], Any]
    evaluation: Callable[[Any], tuple[Evaluated, ...]]
    ingredients: Sequence[Ingredient] = ()
    records: ClassVar[Sequence[type]] = RECORDS

    def learning(self, step: int) -> Sequence[Training]:
        """Return all roles except those that an ingredient holds back."""
        training = self.training
        for one in self.ingredients:
            training = one.learning(step, training)
        return training

    def weights(self, policy: Any) -> Any:
        """Return the weights to sample from."""
        return self.transfer(policy)

    def test(self, policy: Any, first: bool = False) -> Tested | None:
        """Evaluate on the problems to test on and with the ingredients; ``first``: before the first step."""
        found = Tested({}, self.evaluation(self.transfer(policy)))
        for one in self.ingredients:
            found = one.tested(found, policy, first)
        return found if found.numbers or found.answers else None

    def followed(self, state: TrainState, samples: list[Sample]) -> list[Sample]:
        """Add ``ratio``, of the current policy to the sampler, and ``clipped``, 1 where it is outside the surrogate's
        bounds.

        ``clipped`` is added only for algorithms with bounds on token ratios alone. Both are NaN where the loss does not
        count a token.
        """
        algorithm = self.run.recipe.algorithm
        found = []
        for sample, logp in zip(samples, self.forward.by_sample(model_of(state, "policy"), samples), strict=True):
            ratio = np.exp(np.where(sample.mask, logp - sample.arrays["sampler_logp"], np.nan))
            arrays = {"ratio": ratio}
            if algorithm.ratio.level == "token" and getattr(algorithm.surrogate, "bounds_ratio", True):
                bounds = algorithm.surrogate.clipped(ratio, np.asarray(advantage_of(sample)))
                arrays["clipped"] = np.where(sample.mask, np.logical_or(*bounds), np.nan)
            found.append(sample.with_arrays(**arrays))
        return found

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return token_texts(tokens, self.sampler.source.tokenizer)

    def next(
        self, weights: Any, version: int, left: Carryover | None, late: Callable[[], bool] = lambda: False
    ) -> RolloutBatch:
        """Return the groups of one step; the batch no longer lists all sampled groups, which are counted already."""
        left = left or Carryover()
        if configs.samples_groups(self.run):
            batch = collect(self.sampler, weights, version, left, late)
        else:
            batch = RolloutBatch([], [], left, 0, version, {})
        batch = dataclasses.replace(batch, sampled=[], metrics={"kl": math.nan} | batch.metrics)
        for one in self.ingredients:
            batch = one.batch(batch, left)
        return batch

    def let_go(self, left: Carryover | None) -> Any:
        """Return the carryover after a rollback of the policy: without groups of the policy that is undone."""
        fresh: dict[str, Any] = {"carried": (), "unfinished": (), "good": 0.0, "seen": 0.0, "underway": {}}
        return None if left is None else dataclasses.replace(left, **fresh)

    def carried_over(
        self, left: Carryover | None, before: configs.Run, after: configs.Run, anew: bool = False
    ) -> Carryover | None:
        """Return the whole carryover if groups are sampled and scored as before, in the same run.

        Otherwise groups that were not learned from are dropped, and so is the memory of tasks that ``after`` lacks.
        """
        if left is None or (same_groups(before, after) and not anew):
            return left
        stream = stream_left(left.stream, left.cursor, before, after)
        successes = successes_left(left.successes, before, after, anew)
        return dataclasses.replace(self.let_go(left), stream=stream, successes=successes)

    def samples(
        self, state: TrainState, batch: RolloutBatch, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the groups as samples: the advantage of each token, and whether the loss counts it."""
        run, groups = self.run, batch.groups
        models: dict[str, Any] = {}
        if state.reference is not None:
            models["ref_logp"] = functools.partial(self.forward.by_sample, model_of(state, "reference"))
        algorithm = run.recipe.algorithm
        rewards = np.stack([group.rewards for group in groups]) if groups else np.zeros((0, run.rollout.group))
        for one in self.ingredients:
            models |= one.models(state)
            rewards = one.rewards(rewards, groups, coefficients)
        if algorithm.advantage.several:
            algorithm, rewards = separately(algorithm, named(configs.rewards(run)), groups)
        samples: list[list[Sample]] = []
        measured: dict[str, float] = {}
        if groups:
            samples, measured = to_samples(
                algorithm,
                groups,
                batch.version,
                rewards,
                dropped_endings(run),
                self.forward.layout.completion_tokens,
                models,
                coefficients.get("kl_coef"),
                run.rollout.collect.learn_earlier,
            )
        for one in self.ingredients:
            samples, told = one.scored(state, samples, batch)
            samples = one.samples(samples, batch)
            measured |= told
        every = [sample for members in samples for sample in members]
        sampled = [sample for sample in every if "advantages" in (*sample.scalars, *sample.arrays)]
        if sampled:
            moving = [bool(np.any(advantage_of(one))) for one in sampled]
            measured["advantage/nonzero_fraction"] = float(np.mean(moving))
            measured["advantage/abs_mean"] = size_of_advantages(sampled)
        return samples, measured | {"completions": len(groups) * run.rollout.group}

    def remembered(
        self, measured: Mapping[str, Any], memory: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the ingredients' metrics of a step; each keeps its memory under its own name."""
        found: dict[str, Any] = {}
        for one in self.ingredients:
            metrics, own = one.remembered(measured, memory.get(one.name, {}))
            if metrics:
                found |= metrics
                memory = memory | {one.name: own}
        return found, memory
