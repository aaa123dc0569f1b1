"""The policy loss: an ``Algorithm`` is a value, ``policy_loss`` a pure function of it and of arrays."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrl_llm.algorithms import reduce as reducers
from jaxrl_llm.algorithms.advantages import KLInReward
from jaxrl_llm.algorithms.tokens import (
    AT_LEAST_0,
    FINITE,
    FloatBT,
    Tokens,
    as_array,
    check_rank,
    check_self,
    check_shape,
    clamp_log_ratio,
    clean_tokens,
    divisor,
    mu_logp,
)
from jaxrl_llm.types import PolicyBatch

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm: ``reduce(w M surrogate(ratio, advantage)) + kl_coef reduce(kl) - entropy_coef
    reduce(H)``. A piece may be any callable value of the right shape. A contradictory combination is refused when the
    value is made.

    Attributes:
      advantage: rewards [P, G] -> advantages [P, G] or, with a context, [B, T]. Where the KL is in the reward, it is
        wrapped in ``advantages.KLInReward``, so that a call includes the penalty.
      ratio: log importance ratios [B, T].
      surrogate: per-token loss [B, T].
      reduce: to a scalar, by global counts.
      kl: estimator of the KL to the reference; None for no KL.
      kl_coef: its coefficient; at 0 no reference is needed.
      kl_in: "loss", reduced like the policy term and not weighted by anything else; or "reward".
      entropy_coef: coefficient of the entropy bonus.
      correction: weights [B, T] on the policy term, for the gap between training and inference (w).
      sequence_filter: 0 or 1 for each sequence, on the policy term (M); counts are unchanged.
      token_filter: likewise for each token, chosen among all tokens of an optimiser step.
    """

    advantage: Any
    ratio: Any
    surrogate: Any
    reduce: Any
    kl: Any = None
    kl_coef: Annotated[float, AT_LEAST_0, FINITE] = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: Annotated[float, AT_LEAST_0, FINITE] = 0.0
    correction: Any = None
    sequence_filter: Any = None
    token_filter: Any = None

    def __post_init__(self):
        for field, (attributes, example) in PIECES.items():
            piece = getattr(self, field)
            optional = piece is None and field in OPTIONAL
            fits = callable(piece) and not isinstance(piece, type) and all(hasattr(piece, name) for name in attributes)
            if not (optional or fits):
                raise ValueError(f"{field} must be a value such as {example}, got {piece!r}")
        check_self(self)
        estimator = self.advantage.estimator if isinstance(self.advantage, KLInReward) else self.advantage
        _check_mix(self, estimator)
        penalised = self.kl_in == "reward" and self.kl_coef
        object.__setattr__(self, "advantage", KLInReward(estimator, self.kl, self.kl_coef) if penalised else estimator)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the extra per-token arrays that the pieces read; see ``Completion.extras``."""
        pieces = (self.ratio, self.surrogate, self.correction, self.sequence_filter)
        return tuple(sorted({name for piece in pieces for name in getattr(piece, "reads", ())}))

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is computed, in the loss or in the reward."""
        return self.kl is not None and self.kl_coef != 0

    @property
    def corrects_sampler(self) -> bool:
        """Whether the policy term is weighted for the gap between the sampler and the learner."""
        return self.correction is not None or self.surrogate.reads_sampler

    @property
    def kl_in_loss(self) -> bool:
        """Whether ``policy_loss`` reads a KL coefficient."""
        return self.surrogate.reads_kl_coef or (self.kl is not None and self.kl_in == "loss")

    @property
    def chooses(self) -> tuple[Any, ...]:
        """Return the pieces that look at all tokens of an optimiser step; see ``whole_step``."""
        return tuple(piece for piece in (self.surrogate, self.token_filter) if getattr(piece, "of_step", ""))


PIECES = {
    "advantage": (("needs", "by_token", "several"), "advantages.GroupZScore()"),
    "ratio": (("level", "anchor"), "ratios.Token()"),
    "surrogate": (
        ("clipped", "reads_ratio", "reads_sampler", "reads_kl_coef", "whole_sequences"),
        "surrogates.PPOClip()",
    ),
    "reduce": (("weight",), "reduce.TokenMean()"),
    "kl": ((), "kl.K3()"),
    "correction": ((), "ratios.TruncatedIS()"),
    "sequence_filter": ((), "ratios.OffPolicySequenceMask()"),
    "token_filter": (("of_step", "over_step"), "surrogates.TopEntropy()"),
}
"""The attributes that each piece must have in addition to being callable, and an example of one."""
OPTIONAL = ("kl", "correction", "sequence_filter", "token_filter")
"""Fields of ``Algorithm`` that may be None."""


def _check_mix(algorithm: Algorithm, estimator: Any) -> None:
    """Refuse contradictory pieces and give the reason."""
    ratio = algorithm.ratio
    surrogate = algorithm.surrogate
    kind = type(surrogate).__name__
    by_sequence = ratio.level == "sequence"
    to_sampler = ratio.anchor == "sampler"
    in_reward = algorithm.kl_in == "reward"
    contradictions = {
        f"kl_coef={algorithm.kl_coef} needs an estimator: set kl, for example kl.K3()":
            algorithm.kl_coef and algorithm.kl is None and not surrogate.reads_kl_coef,
        f"{kind} has a KL of its own, with the same coefficient: set kl=None":
            algorithm.kl is not None and surrogate.reads_kl_coef,
        "a sequence ratio needs SequenceMean: any other reducer weights GSPO's sequences by length":
            by_sequence and not isinstance(algorithm.reduce, reducers.SequenceMean),
        f"{kind} is made of the tokens' own log-probabilities: a sequence ratio would go unread; use ratios.Token()":
            by_sequence
            and (surrogate.whole_sequences or not surrogate.reads_ratio or getattr(surrogate, "token_ratios", False)),
        f"{kind} is one value for each sequence: only SequenceSum adds it up once":
            surrogate.whole_sequences and not isinstance(algorithm.reduce, reducers.SequenceSum),
        f"{kind} is one value for each sequence: only SequenceMean counts it once":
            getattr(surrogate, "averaged", False) and not isinstance(algorithm.reduce, reducers.SequenceMean),
        "the ratio is against the sampler already: a correction, or MiniRL's weight, would count that gap twice":
            to_sampler and algorithm.corrects_sampler,
        f"{kind} has no ratio, so that its anchor would go unread: use ratios.Token()":
            to_sampler and not surrogate.reads_ratio and algorithm.kl is None,
        f"{kind} weights by the sampler's log-probabilities itself: a correction would count that gap twice":
            algorithm.correction is not None and surrogate.reads_sampler,
        "kl_in='reward' puts nothing into the reward: set kl, for example kl.K1()":
            in_reward and algorithm.kl is None,
        f"{type(estimator).__name__} has no one reward to put a KL in: set kl_in='loss'":
            in_reward and (estimator.several or not {"step_rewards", "turn_rewards"}.isdisjoint(estimator.needs)),
    }  # fmt: skip
    for reason, holds in contradictions.items():
        if holds:
            raise ValueError(reason)


def policy_loss(
    algorithm: Algorithm,
    logp: FloatBT,
    batch: PolicyBatch,
    token_count: ArrayLike | None = None,
    sequence_count: ArrayLike | None = None,
    entropy: FloatBT | None = None,
    kl_coef: ArrayLike | None = None,
    entropy_coef: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """Return the scalar loss to minimise, and its metrics: a dict of scalars. Both are divided by the same counts:
    adding them over microbatches gives the step's value. ValueError: an input that the algorithm needs is None or of
    the wrong shape, or an input is given that nothing reads; the message names it.

    Args:
      algorithm: static.
      logp: live log-probabilities float[B, T], nats, with gradient. Padding may hold anything and gets gradient 0.
      batch: advantages, mask and the other log-probabilities.
      token_count: valid tokens of the whole optimiser step; None for this batch's own.
      sequence_count: rows with a valid token of the whole optimiser step; None for this batch's own.
      entropy: float[B, T], nats, with gradient; needed iff the entropy coefficient is not 0.
      kl_coef: overrides the algorithm's; may be traced.
      entropy_coef: likewise.
    """
    overridden = kl_coef is not None
    kl_coef = kl_coef if overridden else algorithm.kl_coef
    entropy_coef = algorithm.entropy_coef if entropy_coef is None else entropy_coef
    check_rank(0, kl_coef=kl_coef, entropy_coef=entropy_coef)
    # What is traced may be 0: only a number can be refused.
    if overridden and _is_computed(kl_coef) and not isinstance(kl_coef, jax.Array) and not algorithm.kl_in_loss:
        raise ValueError("nothing in this loss reads kl_coef: it has no KL term")
    at = _prepare_tokens(algorithm, logp, batch, kl_coef, entropy)
    at = at._replace(extras=at.extras | _over_step(algorithm.chooses, at))
    tokens = divisor(token_count, at.lengths, "token_count", at.mask.dtype)
    rows = divisor(sequence_count, at.lengths > 0, "sequence_count", at.mask.dtype)
    losses, per_token = _loss_terms(algorithm, at)
    if entropy is not None:
        per_token["entropy"] = jnp.where(at.mask > 0, as_array(entropy, "entropy").astype(at.mask.dtype), 0)
    if _is_computed(entropy_coef):
        if entropy is None:
            raise ValueError("the entropy coefficient is not 0: entropy must be given")
        losses = losses - entropy_coef * per_token["entropy"]
    weights = at.mask * algorithm.reduce.weight(at.lengths, tokens, rows)
    metrics = [jax.lax.stop_gradient(x.astype(at.mask.dtype) * at.mask) for x in per_token.values()]
    loss, *totals = reducers.totals(losses * weights, *metrics)
    means = {name: total / tokens for name, total in zip(per_token, totals, strict=True)}
    return loss, jax.lax.stop_gradient({"loss": loss} | means)


def clipped_tokens(algorithm: Algorithm, logp: FloatBT, batch: PolicyBatch) -> tuple[jax.Array, jax.Array]:
    """Return masks of gradients cut at the lower and at the upper bound: bool[B, T] each, False at padding."""
    surrogate = algorithm.surrogate
    at = _prepare_tokens(algorithm, jax.lax.stop_gradient(logp), batch, algorithm.kl_coef)
    at = at._replace(extras=at.extras | _over_step([piece for piece in algorithm.chooses if piece is surrogate], at))
    low, high = _clip_masks(surrogate, at)
    return (at.mask > 0) & low.astype(bool), (at.mask > 0) & high.astype(bool)


def log_ratios(algorithm: Algorithm, logp: FloatBT, batch: PolicyBatch) -> jax.Array:
    """Return the logarithm of each token's importance ratio, or of its sequence's: [B, T], 0 at padding."""
    at = _prepare_tokens(algorithm, jax.lax.stop_gradient(logp), batch, algorithm.kl_coef)
    return jnp.where(at.mask > 0, at.log_ratio, 0)


def whole_step(algorithm: Algorithm, logp: FloatBT, batch: PolicyBatch, entropy: FloatBT | None = None) -> Metrics:
    """Return the arrays [B, T], by name, that pieces compute over all tokens of an optimiser step; {} for most
    algorithms. Arguments are those of ``policy_loss``, which computes them over its own batch unless ``batch.extras``
    has them: who splits a step computes them first, over all of it, and gives each microbatch its part. Nothing has a
    gradient.
    """
    at = _prepare_tokens(algorithm, jax.lax.stop_gradient(logp), batch, algorithm.kl_coef, entropy)
    return _over_step(algorithm.chooses, at)


def _prepare_tokens(
    algorithm: Algorithm, logp: FloatBT, batch: PolicyBatch, kl_coef: ArrayLike, entropy: FloatBT | None = None
) -> Tokens:
    """Return the cleaned arrays with the log ratio and, where it is given, the entropy."""
    at = clean_tokens(logp, batch, kl_coef)
    if entropy is not None:
        check_shape(at.logp.shape, entropy=entropy)
        entropy = jnp.where(at.mask > 0, as_array(entropy, "entropy").astype(at.mask.dtype), 0)
    return at._replace(log_ratio=algorithm.ratio(at), entropy=jax.lax.stop_gradient(entropy))


def _over_step(pieces: Any, at: Tokens) -> Metrics:
    """Return the arrays of these pieces that are not given yet."""
    lacking = [piece for piece in pieces if piece.of_step not in at.extras]
    return {piece.of_step: jax.lax.stop_gradient(piece.over_step(at)) for piece in lacking}


def _clip_masks(surrogate: Any, at: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return the surrogate's masks of cuts; one that is written elsewhere may have ``clipped`` alone."""
    if hasattr(surrogate, "cut"):
        return surrogate.cut(at)
    return surrogate.clipped(jnp.exp(at.log_ratio), at.advantages)


def _loss_terms(algorithm: Algorithm, at: Tokens) -> tuple[jax.Array, Metrics]:
    """Return the weighted surrogate with the KL term, and the per-token metrics; [B, T] or [B, 1] each."""
    loss = algorithm.surrogate(at)
    ratio = jnp.exp(at.log_ratio)
    low, high = _clip_masks(algorithm.surrogate, at)
    per_token = {"ratio": ratio, "clip_fraction/low": low, "clip_fraction/high": high}
    for name in ("correction", "sequence_filter", "token_filter"):
        piece = getattr(algorithm, name)
        if piece is not None:
            per_token[name] = jax.lax.stop_gradient(piece(at))
            loss = loss * per_token[name]
    if algorithm.kl is not None and algorithm.kl_in == "loss" and _is_computed(at.kl_coef):
        if at.ref_logp is None:
            raise ValueError("this algorithm has a KL term: batch.ref_logp must be given")
        # Its ratio is by token, whatever the level of the surrogate's.
        anchor = mu_logp(at, algorithm.ratio) if algorithm.ratio.anchor == "sampler" else at.old_logp
        per_token["kl"] = algorithm.kl(at.logp, at.ref_logp, clamp_log_ratio(at.logp, anchor))
        loss = loss + at.kl_coef * per_token["kl"]
    return loss, per_token


def _is_computed(coefficient: Any) -> bool:
    """Whether a term is computed: always if its coefficient is an array, which may be traced."""
    return isinstance(coefficient, jax.Array) or coefficient != 0
