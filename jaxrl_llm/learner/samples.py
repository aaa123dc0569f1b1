"""Samples from scored groups: the tokens that count, and their advantages."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.algorithms.advantages import KLInReward
from jaxrl_llm.algorithms.surrogates import LOTS, lots_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import HEAD_ARRAYS, POLICY, Sample
from jaxrl_llm.learner.forward import sampled_routes
from jaxrl_llm.sharding import BATCH, constrain, fit_spec, lay_out, replicated
from jaxrl_llm.types import AdvantageContext, Completion, Group, Turn

Models = Mapping[str, Callable[[Sequence[Sample]], list[np.ndarray]]]
"""Model outputs for estimators, one number for each token of each sample: ``ref_logp`` of the frozen reference,
``values`` of the critic.
"""

EXPLAINED_VARIANCE = "critic/explained_variance"
POOLED_METRICS = ("critic/tokens", "critic/returns_variance", "critic/residual_variance")
"""Metrics of a step's returns, and of their residuals to the critic's values."""
POOLING_STEPS = 5
"""Steps that the explained variance is pooled over."""


def to_samples(
    algorithm: Algorithm,
    groups: Sequence[Group],
    version: int,
    rewards: np.ndarray,
    dropped: Collection[str],
    length: int,
    models: Models,
    kl_coef: float | None = None,
    learn_earlier: bool = True,
) -> tuple[list[list[Sample]], dict[str, float]]:
    """Return the samples of scored groups, and metrics.

    Args:
      algorithm: its estimator computes the advantages, of the whole batch at once.
      groups: P groups of G completions.
      version: of the policy that learns; tokens of other versions are not fresh.
      rewards: float[P, G], or [P, G, n] for an estimator of several.
      dropped: finish reasons of completions that the loss excludes; their rewards count.
      length: T, the longest completion; the shape of the estimator's inputs.
      models: called for the estimator's inputs: the reference only if the KL is in the reward.
      kl_coef: of a KL in the reward; None for the algorithm's.
      learn_earlier: count tokens of other versions; if not the loss excludes them, and their rewards count.
    """
    samples = [
        to_sample(group, (number, i), version, dropped, learn_earlier, algorithm.reads)
        for number, group in enumerate(groups)
        for i in range(len(group.completions))
    ]
    if getattr(algorithm.surrogate, "draws", False):
        samples = [s.with_arrays(**{LOTS: lots_of(s.tokens, number)}) for number, s in enumerate(samples)]
    estimator = algorithm.advantage
    context = advantage_context(samples, [c for group in groups for c in group.completions], estimator, length, models)
    metrics = {}
    if context is not None and "turn_rewards" in estimator.needs:
        turns = turn_arrays(groups, rewards, length)
        context = context._replace(**turns)
        metrics["episode/equal_states_fraction"] = equal_state_fraction(**turns)
    in_reward = isinstance(estimator, KLInReward)
    coef = np.float32(estimator.coef if kl_coef is None else kl_coef) if in_reward else None
    estimated = estimate_advantages(estimator, rewards.astype(np.float32), shard_rows(context), coef)
    if jax.process_count() > 1:  # rows are on the devices of all
        estimated = jax.device_put(estimated, replicated(jax.sharding.get_mesh()))
    advantages, targets = jax.device_get(estimated)
    if context is not None and context.ref_logp is not None:  # where the KL is in the reward, the loss sees none
        estimate = np.asarray(algorithm.kl(context.old_logp, context.ref_logp))
        metrics["kl"] = float(np.sum(estimate * context.mask) / max(np.sum(context.mask), 1))
    if estimator.by_token:
        samples = add_token_arrays(samples, advantages=advantages)
    else:
        numbers = zip(samples, advantages.reshape(-1).tolist(), strict=True)
        samples = [dataclasses.replace(s, scalars=s.scalars | {"advantages": number}) for s, number in numbers]
    if targets is not None:
        scored = ~np.isnan(rewards.reshape(-1))
        # What could not be scored has no return: the critic leaves it out.
        samples = [s if has_return else s.counting(POLICY) for s, has_return in zip(samples, scored, strict=True)]
        samples = add_token_arrays(samples, returns=targets, old_values=context.values)
        metrics |= value_metrics(targets, context.values, context.mask & scored[:, None])
    size = len(groups[0].completions)
    return [samples[i : i + size] for i in range(0, len(samples), size)], metrics


def to_sample(
    group: Group,
    place: tuple[int, int],
    version: int,
    dropped: Collection[str],
    learn_earlier: bool,
    reads: Collection[str],
) -> Sample:
    """Return a completion's sample with the mask of the loss and the arrays that it reads; the advantage is set
    later.
    """
    completion = group.completions[place[1]]
    fresh = completion.version == version
    mask = completion.mask & (fresh | learn_earlier) & (completion.finish_reason not in dropped)
    missing = set(reads) - set(completion.extras)
    if missing:
        raise InputError(f"the loss reads {', '.join(sorted(missing))} of each token, which the sampler does not give")
    extras = {name: array for name, array in completion.extras.items() if name in reads or name in HEAD_ARRAYS}
    experts, prompt_experts = sampled_routes(completion)
    arrays = {"sampler_logp": completion.sampler_logp, "fresh": fresh} | extras | experts
    return Sample(
        group.prompt,
        completion.tokens,
        mask,
        {},
        arrays,
        prompt_arrays=prompt_experts,
        place=place,
        forks=completion.forks,
    )


def add_token_arrays(samples: Sequence[Sample], **arrays: np.ndarray) -> list[Sample]:
    """Return the samples, each with its rows of the arrays [B, T]."""
    return [
        sample.with_arrays(**{name: array[row, : len(sample.tokens)] for name, array in arrays.items()})
        for row, sample in enumerate(samples)
    ]


def advantage_of(sample: Sample) -> Any:
    """Return the sample's advantage: a number, or one for each token."""
    return sample.scalars["advantages"] if "advantages" in sample.scalars else sample.arrays["advantages"]


def mean_abs_advantage(samples: Sequence[Sample]) -> float:
    """Return the mean |advantage| over the tokens that the loss counts; NaN without any."""
    tokens = sum(int(np.sum(sample.mask)) for sample in samples)
    total = sum(float(np.sum(np.abs(advantage_of(sample)) * sample.mask)) for sample in samples)
    return total / tokens if tokens else math.nan


def clip_positive_advantage(sample: Sample) -> Sample:
    """Return the sample with ``min(A, 0)`` in place of its advantages A."""
    clipped = np.minimum(advantage_of(sample), 0)
    if "advantages" in sample.scalars:
        return dataclasses.replace(sample, scalars=sample.scalars | {"advantages": float(clipped)})
    return sample.with_arrays(advantages=clipped)


@functools.partial(jax.jit, static_argnums=0)
def estimate_advantages(
    estimator: Any, rewards: Any, context: AdvantageContext | None, kl_coef: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute advantages, and the critic's targets if the estimator reads its values. ``kl_coef``: of a KL in the
    reward; the rows of arrays [B, T] stay on their devices.
    """
    if kl_coef is not None:
        rewards, context = estimator.penalised(rewards, context, kl_coef)
        estimator = estimator.estimator
    if "values" in estimator.needs:
        return jax.tree.map(lambda x: constrain(x, BATCH), estimator.with_returns(rewards, context))
    return constrain(estimator(rewards, context), BATCH), None


def shard_rows(context: AdvantageContext | None) -> Any:
    """Return an estimator's inputs [B, ...] with their rows divided over the mesh set by ``jax.set_mesh``, which may be
    abstract; unchanged on one device, or without a mesh.
    """
    mesh: Any = jax.sharding.get_mesh()
    if context is None or mesh.empty or mesh.size == 1:
        return context
    return lay_out(context, jax.tree.map(lambda x: NamedSharding(mesh, fit_spec(x.shape, (BATCH,), mesh)), context))


SCRATCH_ARRAYS = 3
"""Arrays float32[B, T] that estimators need in addition to inputs and results, as the compiler counts them."""


def estimator_bytes(estimator: Any, rows: int, length: int) -> float:
    """Return by a formula the bytes in which advantages of B = ``rows`` completions of T = ``length`` are estimated."""
    if not estimator.needs:
        return 0.0
    inputs = len({*estimator.needs} - {"mask", "bootstrap"})
    results = estimator.by_token + ("values" in estimator.needs)
    return rows * length * (1.0 + 4 * (inputs + results + SCRATCH_ARRAYS))


def advantage_context(
    samples: Sequence[Sample], completions: Sequence[Completion], estimator: Any, length: int, models: Models
) -> AdvantageContext | None:
    """Return the estimator's inputs besides rewards, [B, T] each; None if it needs nothing. A KL in the reward is that
    of the policy that sampled, from the sampler's own log-probabilities, for tokens of earlier steps too. The state
    after the last token has a value if the completion was cut off. Step rewards are NaN where no step ends.
    """
    needs = estimator.needs
    if not needs:
        return None

    def padded(rows: Sequence[Any], dtype: Any, padding: float = 0) -> np.ndarray:
        array = np.full((len(rows), length), padding, dtype)
        for row, values in zip(array, rows, strict=True):
            row[: len(values)] = values
        return array

    context = AdvantageContext(mask=padded([s.mask for s in samples], bool))
    if "ref_logp" in needs:
        old = padded([s.arrays["sampler_logp"] for s in samples], np.float32)
        context = context._replace(old_logp=old, ref_logp=padded(models["ref_logp"](samples), np.float32))
    if "values" in needs:
        cut_off = [c.finish_reason == "length" and "bootstrap" in needs for c in completions]
        value_rows = models["values"]([value_sample(s, cut) for s, cut in zip(samples, cut_off, strict=True)])
        values = [x[: len(s.tokens)] for x, s in zip(value_rows, samples, strict=True)]
        ends = [x[len(s.tokens)] if len(x) > len(s.tokens) else 0.0 for x, s in zip(value_rows, samples, strict=True)]
        context = context._replace(values=padded(values, np.float32), bootstrap=np.asarray(ends, np.float32))
    if estimator.by_token and any("step_rewards" in c.extras for c in completions):
        steps = [c.extras.get("step_rewards", ()) for c in completions]
        context = context._replace(step_rewards=padded(steps, np.float32, np.nan))
    return context


def turn_arrays(groups: Sequence[Group], rewards: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Return ``turn_rewards`` and ``states`` of ``AdvantageContext``, [B, T] each, for rewards float[P, G]. A state is
    what the environment called it (``Step.state``), else all that the model read and wrote before the turn.
    """
    rewards_at_ends = np.full((rewards.size, length), np.nan, np.float32)
    states = np.zeros((rewards.size, length), np.int32)
    numbers: dict[Hashable, int] = {}
    completions = [(number, completion) for number, group in enumerate(groups) for completion in group.completions]
    for row, ((group, completion), reward) in enumerate(zip(completions, rewards.reshape(-1), strict=True)):
        turns = completion.episode.turns if completion.episode is not None else (Turn(len(completion.tokens), {}),)
        turn_rewards = [turn.reward for turn in turns]
        turn_rewards[-1] += reward - sum(turn_rewards)
        later = (turn.state or tokens_before_next_turn(completion, turn) for turn in turns[:-1])
        for turn, turn_reward, state in zip(turns, turn_rewards, (b"", *later), strict=True):
            rewards_at_ends[row, turn.end - 1] = turn_reward
            states[row, turn.end - 1] = numbers.setdefault((group, state), len(numbers))
    return {"turn_rewards": rewards_at_ends, "states": states}


def equal_state_fraction(turn_rewards: np.ndarray, states: np.ndarray) -> float:
    """Return the share of turns that begin in a state in which another of their group begins; NaN without turns. An
    episode's first turn is left out: all of a group begin at one prompt. Both arrays are those of ``turn_arrays``.
    """
    ends = ~np.isnan(turn_rewards)
    later = ends & (np.cumsum(ends, axis=1) > 1)
    return float(np.mean(np.bincount(states[ends])[states[later]] > 1)) if later.any() else math.nan


def tokens_before_next_turn(completion: Completion, turn: Turn) -> bytes:
    """Return all tokens before the turn that follows this one."""
    if turn.fork:
        return completion.forks[turn.end].tobytes()
    return completion.tokens[: turn.end + int(np.argmax(completion.mask[turn.end :]))].tobytes()


def value_sample(sample: Sample, with_bootstrap: bool) -> Sample:
    """Return a sample for the critic; ``with_bootstrap`` appends a token, to get the value after the last one."""
    extra = (0, int(with_bootstrap))
    return Sample(sample.prompt, np.pad(sample.tokens, extra), np.pad(sample.mask, extra), forks=sample.forks)


def value_metrics(targets: np.ndarray, values: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return how well a critic predicted the returns, over the tokens that count: [B, T] each.
    ``critic/explained_variance``: ``1 - Var(returns - values) / Var(returns)``; NaN if the returns do not vary.
    ``pool_explained_variance`` adds up ``critic/tokens`` and the two variances over steps.
    """
    returns = targets[counts].astype(np.float64)
    predictions = values[counts].astype(np.float64)
    names = (EXPLAINED_VARIANCE, "critic/returns_mean", "critic/values_mean", *POOLED_METRICS)
    if not counts.any():
        return dict.fromkeys(names, math.nan) | {"critic/tokens": 0.0}
    # A return is an advantage and a value added up in float32: what is equal may differ by their rounding.
    noise = 16 * np.finfo(np.float32).eps * max(np.abs(returns).max(), np.abs(predictions).max())
    variance = np.var(returns) if np.ptp(returns) > noise else 0.0
    residual = np.var(returns - predictions)
    explained = 1 - residual / variance if variance else math.nan
    numbers = (explained, returns.mean(), predictions.mean(), returns.size, variance, residual)
    return {name: float(number) for name, number in zip(names, numbers, strict=True)}


def pool_explained_variance(
    metrics: Mapping[str, float], steps: Sequence[list[float]]
) -> tuple[dict[str, float], list[list[float]]]:
    """Return ``critic/explained_variance_pooled`` over the last ``POOLING_STEPS`` steps, NaN if no return varies, and
    the numbers of these steps. ``metrics``: of this step; without ``critic/tokens`` nothing is pooled. ``steps``: the
    numbers ``POOLED_METRICS`` of the steps before.

    ``1 - sum_k n_k Var_k(returns - values) / sum_k n_k Var_k(returns)`` with n_k tokens: a single step's value depends
    on the few completions that differ in it. The variances are around each step's own mean: a rise of returns from step
    to step is due to the policy, not the critic.
    """
    if "critic/tokens" not in metrics:
        return {}, list(steps)
    if metrics["critic/tokens"]:
        steps = [*steps, [metrics[name] for name in POOLED_METRICS]][-POOLING_STEPS:]
    returns = sum(tokens * variance for tokens, variance, _ in steps)
    residual = sum(tokens * variance for tokens, _, variance in steps)
    return {f"{EXPLAINED_VARIANCE}_pooled": 1 - residual / returns if returns else math.nan}, list(steps)
