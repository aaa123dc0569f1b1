"""From scored groups to samples: which tokens count, and what each of them is worth."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import POLICY, READ_BY_THE_HEAD, Sample
from jaxrl_llm.types import AdvantageContext, Completion, Group

Models = Mapping[str, Callable[[Sequence[Sample]], list[np.ndarray]]]
"""What an estimator may ask of a model, one number for each token of each sample: ``ref_logp`` of the frozen reference,
``values`` of the critic."""

EXPLAINED = "critic/explained_variance"
SPREAD = ("critic/tokens", "critic/returns_variance", "critic/residual_variance")
"""What a step says of its returns, and of what the critic's values leave of them."""
WINDOW = 5
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
    """Groups as the learner sees them, and what was measured on the way.

    Args:
      algorithm: its estimator makes the advantages, of the whole batch at once.
      groups: P groups of G completions.
      version: of the policy that learns; tokens of other versions are not fresh.
      rewards: float[P, G], or [P, G, n] for an estimator of several.
      dropped: finish reasons of completions that are left out of the loss; their rewards count.
      length: T, the longest completion; the shape of what the estimator sees.
      models: asked for what the estimator needs: the reference only where the KL is in the reward.
      kl_coef: in place of the algorithm's, where the KL is in the reward.
      learn_earlier: count tokens of other versions; if not they are left out of the loss, and their rewards count.
    """
    samples = [
        _counted(group.prompt, completion, version, dropped, learn_earlier, algorithm.reads)
        for group in groups
        for completion in group.completions
    ]
    estimator = algorithm.advantage
    completions = [c for group in groups for c in group.completions]
    cut_off = [c.finish_reason == "length" for c in completions]
    context = _context(samples, cut_off, estimator.needs, length, models) if estimator.needs else None
    context = _with_steps(context, estimator.by_token, completions, length)
    moved = {} if kl_coef is None or algorithm.kl_in == "loss" else {"kl_coef": np.float32(kl_coef)}
    advantages, targets = jax.device_get(_estimate(estimator, rewards.astype(np.float32), context, **moved))
    measured = _measured(algorithm, context)
    if estimator.by_token:
        valued = _by_token(samples, advantages=advantages)
    else:
        valued = [
            _with(s, scalars={"advantages": float(x)}) for s, x in zip(samples, advantages.reshape(-1), strict=True)
        ]
    if targets is not None:
        scored = ~np.isnan(rewards.reshape(-1))
        # What could not be scored has no return: the critic leaves it out.
        valued = [s if known else s.counting(POLICY) for s, known in zip(valued, scored, strict=True)]
        valued = _by_token(valued, returns=targets, old_values=context.values)
        measured |= foreseen(targets, context.values, context.mask & scored[:, None])
    size = len(groups[0].completions)
    return [valued[i : i + size] for i in range(0, len(valued), size)], measured


def _counted(
    prompt: np.ndarray,
    completion: Completion,
    version: int,
    dropped: Collection[str],
    learn_earlier: bool,
    reads: Collection[str],
) -> Sample:
    """A completion with the tokens that the loss counts and what is read of them; its advantage is not known yet."""
    fresh = completion.version == version
    mask = completion.mask & (fresh | learn_earlier) & (completion.finish_reason not in dropped)
    missing = set(reads) - set(completion.extras)
    if missing:
        raise InputError(f"the loss reads {', '.join(sorted(missing))} of each token, which the sampler does not give")
    extras = {name: x for name, x in completion.extras.items() if name in reads or name in READ_BY_THE_HEAD}
    arrays = {"sampler_logp": completion.sampler_logp, "fresh": fresh} | extras
    return Sample(prompt, completion.tokens, mask, arrays=arrays)


def _with(
    sample: Sample, scalars: dict[str, float] | None = None, arrays: dict[str, np.ndarray] | None = None
) -> Sample:
    """The sample with more of what it carries."""
    return dataclasses.replace(sample, scalars=sample.scalars | (scalars or {}), arrays=sample.arrays | (arrays or {}))


def _by_token(samples: Sequence[Sample], **arrays: np.ndarray) -> list[Sample]:
    """The samples with their rows of [B, T] each."""
    return [
        _with(s, arrays={name: x[row, : len(s.tokens)] for name, x in arrays.items()}) for row, s in enumerate(samples)
    ]


def advantage_of(sample: Sample) -> Any:
    """A number, or one for each token."""
    return sample.scalars["advantages"] if "advantages" in sample.scalars else sample.arrays["advantages"]


def size_of_advantages(samples: Iterable[Sample]) -> float:
    """The mean of |advantage| over the tokens that the loss counts; NaN where it counts none."""
    total, tokens = 0.0, 0
    for sample in samples:
        total += float(np.sum(np.abs(advantage_of(sample)) * sample.mask))
        tokens += int(np.sum(sample.mask))
    return total / tokens if tokens else math.nan


def without_gain(sample: Sample) -> Sample:
    """The sample with ``min(A, 0)`` in place of its advantages A."""
    least = np.minimum(advantage_of(sample), 0)
    if "advantages" in sample.scalars:
        return _with(sample, scalars={"advantages": float(least)})
    return _with(sample, arrays={"advantages": least})


@functools.partial(jax.jit, static_argnums=0)
def _estimate(
    estimator: Any, rewards: np.ndarray, context: AdvantageContext | None, **coefficient: np.float32
) -> tuple[jax.Array, jax.Array | None]:
    """Advantages, and what a critic is trained towards where the estimator reads one's values."""
    if "values" in estimator.needs:
        return estimator.with_returns(rewards, context, **coefficient)
    return estimator(rewards, context, **coefficient), None


def _context(
    samples: Sequence[Sample], cut_off: Sequence[bool], needs: Sequence[str], length: int, models: Models
) -> AdvantageContext:
    """What an estimator may need beside rewards, [B, T] each.

    A KL in the reward is that of the policy which sampled: the sampler's own log-probabilities stand for it, for tokens
    of earlier steps too. The state after the last token has a value where the completion was ``cut_off``.
    """

    def padded(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        out = np.zeros((len(rows), length), dtype)
        for row, values in zip(out, rows, strict=True):
            row[: len(values)] = values
        return out

    context = AdvantageContext(mask=padded([s.mask for s in samples], bool))
    if "ref_logp" in needs:
        old = padded([s.arrays["sampler_logp"] for s in samples], np.float32)
        context = context._replace(old_logp=old, ref_logp=padded(models["ref_logp"](samples), np.float32))
    if "values" in needs:
        asked = [to_value(s, cut and "bootstrap" in needs) for s, cut in zip(samples, cut_off, strict=True)]
        found = models["values"](asked)
        values = [x[: len(s.tokens)] for x, s in zip(found, samples, strict=True)]
        after = [x[len(s.tokens)] if len(x) > len(s.tokens) else 0.0 for x, s in zip(found, samples, strict=True)]
        context = context._replace(values=padded(values, np.float32), bootstrap=np.asarray(after, np.float32))
    return context


def to_value(sample: Sample, one_more: bool) -> Sample:
    """What a critic reads of a sample; with ``one_more`` also a token that nobody sampled: what is predicted there is
    the value of the state after the last one."""
    more = int(one_more)
    return Sample(sample.prompt, np.pad(sample.tokens, (0, more)), np.pad(sample.mask, (0, more)))


def _with_steps(
    context: AdvantageContext | None, by_token: bool, completions: Sequence[Completion], length: int
) -> AdvantageContext | None:
    """The context with the rewards of steps, float32[B, T], NaN where none ends, for an estimator by token, if any."""
    if context is None or not by_token or not any("step_rewards" in c.extras for c in completions):
        return context
    steps = np.full((len(completions), length), np.nan, np.float32)
    for row, completion in zip(steps, completions, strict=True):
        found = completion.extras.get("step_rewards", ())
        row[: len(found)] = found
    return context._replace(step_rewards=steps)


def _measured(algorithm: Algorithm, context: AdvantageContext | None) -> dict[str, float]:
    """``kl``: the estimate's mean over tokens, where it is in the reward and so not seen by the loss."""
    if context is None or context.ref_logp is None:
        return {}
    estimate = np.asarray(algorithm.kl(context.old_logp, context.ref_logp))
    return {"kl": float(np.sum(estimate * context.mask) / max(np.sum(context.mask), 1))}


def foreseen(targets: np.ndarray, values: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """How well a critic foresaw, over the tokens that count: [B, T] each.

    ``critic/explained_variance``: ``1 - Var(returns - values) / Var(returns)``; NaN where the returns do not vary.
    ``critic/tokens`` and the two variances are what ``pooled`` adds up over steps.
    """
    returns = targets[counts].astype(np.float64)
    guesses = values[counts].astype(np.float64)
    names = (EXPLAINED, "critic/returns_mean", "critic/values_mean", *SPREAD)
    if not counts.any():
        return dict.fromkeys(names, math.nan) | {"critic/tokens": 0.0}
    # A return is an advantage and a value added up in float32: what is equal may differ by their rounding.
    noise = 16 * np.finfo(np.float32).eps * max(np.abs(returns).max(), np.abs(guesses).max())
    variance = np.var(returns) if np.ptp(returns) > noise else 0.0
    residual = np.var(returns - guesses)
    explained = 1 - residual / variance if variance else math.nan
    found = (explained, returns.mean(), guesses.mean(), returns.size, variance, residual)
    return {name: float(x) for name, x in zip(names, found, strict=True)}


def pooled(measured: Mapping[str, float], own: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """``critic/explained_variance_pooled``: of the last ``WINDOW`` steps together.

    ``1 - sum_k n_k Var_k(returns - values) / sum_k n_k Var_k(returns)`` with n_k tokens: the few completions that
    differ in one step decide its own. The variances are each step's around its own mean: that returns rise from step to
    step is the policy's merit, and no critic's.

    Args:
      measured: of this step; without ``critic/tokens`` there is no critic.
      own: what this function has returned after the step before; empty before the first.

    Returns:
      The metric, NaN where no return varies, and what to remember: JSON values.
    """
    if "critic/tokens" not in measured:
        return {}, dict(own)
    steps = list(own.get("steps", ()))
    if measured["critic/tokens"]:
        steps = [*steps, [measured[name] for name in SPREAD]][-WINDOW:]
    returns = sum(tokens * variance for tokens, variance, _ in steps)
    residual = sum(tokens * left for tokens, _, left in steps)
    return {f"{EXPLAINED}_pooled": 1 - residual / returns if returns else math.nan}, {"steps": steps}
