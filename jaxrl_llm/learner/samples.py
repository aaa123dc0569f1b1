"""From scored groups to samples: which tokens count, and what each of them is worth."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import READ_BY_THE_HEAD, Sample
from jaxrl_llm.types import AdvantageContext, Completion, Group

Reference = Callable[[Sequence[Sample]], list[np.ndarray]]
"""Log-probabilities of each sample's tokens under the frozen reference."""


def to_samples(
    algorithm: Algorithm,
    groups: Sequence[Group],
    version: int,
    rewards: np.ndarray,
    dropped: Collection[str],
    length: int,
    reference: Reference,
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
      reference: asked only where the KL is in the reward.
      kl_coef: in place of the algorithm's, where the KL is in the reward.
      learn_earlier: count tokens of other versions; if not they are left out of the loss, and their rewards count.
    """
    samples = [
        _counted(group.prompt, completion, version, dropped, learn_earlier, algorithm.reads)
        for group in groups
        for completion in group.completions
    ]
    estimator = algorithm.advantage
    context = _context(samples, estimator.needs, length, reference) if estimator.needs else None
    context = _with_steps(context, estimator.by_token, [c for group in groups for c in group.completions], length)
    moved = {} if kl_coef is None or algorithm.kl_in == "loss" else {"kl_coef": np.float32(kl_coef)}
    advantages = np.asarray(_estimate(estimator, rewards.astype(np.float32), context, **moved))
    if estimator.by_token:
        valued = [
            _with(s, arrays={"advantages": row[: len(s.tokens)]}) for s, row in zip(samples, advantages, strict=True)
        ]
    else:
        valued = [
            _with(s, scalars={"advantages": float(x)}) for s, x in zip(samples, advantages.reshape(-1), strict=True)
        ]
    size = len(groups[0].completions)
    return [valued[i : i + size] for i in range(0, len(valued), size)], _measured(algorithm, context)


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


def advantage_of(sample: Sample) -> Any:
    """A number, or one for each token."""
    return sample.scalars["advantages"] if "advantages" in sample.scalars else sample.arrays["advantages"]


def without_gain(sample: Sample) -> Sample:
    """The sample with ``min(A, 0)`` in place of its advantages A."""
    least = np.minimum(advantage_of(sample), 0)
    if "advantages" in sample.scalars:
        return _with(sample, scalars={"advantages": float(least)})
    return _with(sample, arrays={"advantages": least})


@functools.partial(jax.jit, static_argnums=0)
def _estimate(
    estimator: Any, rewards: np.ndarray, context: AdvantageContext | None, **coefficient: np.float32
) -> jax.Array:
    return estimator(rewards, context, **coefficient)


def _context(samples: Sequence[Sample], needs: Sequence[str], length: int, reference: Reference) -> AdvantageContext:
    """What an estimator may need beside rewards, [B, T] each.

    A KL in the reward is that of the policy which sampled: the sampler's own log-probabilities stand for it, for tokens
    of earlier steps too.
    """

    def padded(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        out = np.zeros((len(rows), length), dtype)
        for row, values in zip(out, rows, strict=True):
            row[: len(values)] = values
        return out

    context = AdvantageContext(mask=padded([s.mask for s in samples], bool))
    if "ref_logp" not in needs:
        return context
    old = padded([s.arrays["sampler_logp"] for s in samples], np.float32)
    return context._replace(old_logp=old, ref_logp=padded(reference(samples), np.float32))


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
