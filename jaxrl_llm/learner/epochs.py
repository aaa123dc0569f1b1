"""Training on one rollout: epochs and minibatches over its samples, from a state to a new state."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.learner.batch import Packed, Sample
from jaxrl_llm.learner.forward import Forward
from jaxrl_llm.learner.objectives import BEFORE, CLIPPED, Objective, divergence
from jaxrl_llm.learner.routing import load_by_expert, replaying, without_routes
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.learner.state import NewRole
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.types import NOT_FINITE, TrainState

Row = dict[str, float]
"""Numbers by name, on the host."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of one role.

    Attributes:
      objectives: the terms of its loss.
      update: of ``make_update``, for them.
      begins: the initialisation of the role; None for the policy, which is the model of the run.
      epochs: passes over each rollout; 0 takes the learner's setting.
      teachers: models that its objectives run with each microbatch, by name; see ``learner.teaching``.
    """

    objectives: tuple[Objective, ...]
    update: Update
    begins: NewRole | None = None
    epochs: int = 0
    teachers: dict[str, Any] | None = None

    @property
    def role(self) -> str:
        """Return the role with the parameters that are updated."""
        return self.objectives[0].role

    @property
    def needs(self) -> set[str]:
        """Return the names of the arrays that its objectives need before the first update."""
        return {name for objective in self.objectives for name in objective.needs}

    def passes(self, settings: Learner) -> int:
        """Return the number of passes over each rollout."""
        return self.epochs or settings.epochs

    def reads(self, packed: Packed) -> Packed:
        """Return the data with the teachers, and without what only other roles need, so that the update is the same
        program without them."""
        own = {objective.name for objective in self.objectives}
        return packed._replace(
            by_token={name: x for name, x in packed.by_token.items() if name in self.needs or name not in BEFORE},
            by_column=packed.by_column if self.role == "policy" else without_routes(packed).by_column,
            counted={name: x for name, x in packed.counted.items() if name in own},
            counts={name: x for name, x in packed.counts.items() if name in own},
            teachers=self.teachers,
        )


def learn(
    state: TrainState,
    groups: Sequence[Sequence[Sample]],
    settings: Learner,
    forward: Forward,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    seed: int,
    measure_kl: bool = False,
    monitor_kl: bool = False,
) -> tuple[TrainState, Row]:
    """Update each role on every minibatch of the groups, in every epoch that the role makes.

    The passes end with the first update of the policy that is refused for its distance from the old one (early
    stopping), and with any update refused for a non-finite loss or gradient; an update without tokens is skipped. The
    first update is never too far: nothing has changed before it.

    Args:
      state: donated.
      groups: samples of each prompt.
      settings: epochs, minibatches, ``target_kl``.
      forward: how models are run.
      training: of each role that learns, in the order of updates; the policy first, if it learns.
      coefficients: numbers that objectives read, by name.
      seed: of the groups' order in each epoch after the first.
      measure_kl: whether to measure the KL over the whole batch after the policy's last update, for a controller; see
        ``kl_of_policy``.
      monitor_kl: whether the reference is in no objective, and the policy's KL to it is measured before the first
        update; see ``kl_to_reference``.

    Returns:
      The new state, and metrics averaged over the applied updates (``sampler/`` ones from the first, the only on-policy
      one), NaN without any; ``updates`` counts them, ``updates/not_finite`` those refused for their loss or
      gradient, and ``not_finite/...`` is what was not finite. Names of
      other roles' metrics begin with the role's name.
    """
    objectives = tuple(objective.name for one in training for objective in one.objectives)
    needed = set().union(*(one.needs for one in training))
    of_policy = any(one.role == "policy" for one in training)
    measure_kl = measure_kl and of_policy
    held = state.reference is not None and not monitor_kl
    kl_to = {"ref_logp" if held else "old_logp"} if measure_kl else set()
    batches = []
    for samples in _split(groups, settings.minibatches):
        packed = _packed(state, samples, objectives, settings, forward)
        batches.append(packed.with_tokens(**before(state, packed, forward, (needed | kl_to) - set(packed.by_token))))
    watched = _watched(state, groups, batches, forward, monitor_kl) if of_policy else {}
    coefficients = {"temperature": forward.temperature} | coefficients
    rows: dict[str, list[Row]] = {one.role: [] for one in training}
    for epoch, packed in _passes(batches, max(one.passes(settings) for one in training), seed):
        learning = [one for one in training if epoch < one.passes(settings)]
        state, refused = _update_each(state, packed, settings, learning, coefficients, rows)
        if refused:
            break
    measured = watched | (kl_of_policy(state, batches, forward) if measure_kl else {})
    found = (
        {"updates": 0.0}
        | wrong_samples(groups)
        | {name: float(value) for name, value in jax.device_get(measured).items()}
    )
    for one in training:
        prefix = "" if one.role == "policy" else f"{one.role}/"
        found |= {prefix + name: value for name, value in _summary(rows[one.role], settings).items()}
    return state, found


def wrong_samples(groups: Sequence[Sequence[Sample]]) -> Row:
    """Return how many samples have numbers that count and are not finite, by the names of such numbers."""
    found: collections.Counter[str] = collections.Counter()
    for sample in itertools.chain.from_iterable(groups):
        counted = {name: x[sample.mask] for name, x in sample.arrays.items() if x.ndim == 1 and x.dtype.kind == "f"}
        numbers = (sample.scalars if sample.mask.any() else {}) | counted
        found.update(NOT_FINITE + name for name, x in numbers.items() if not np.isfinite(x).all())
    return {name: float(count) for name, count in found.items()}


def _update_each(
    state: TrainState,
    packed: Packed,
    settings: Learner,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    rows: dict[str, list[Row]],
) -> tuple[TrainState, bool]:
    """Update every role on one minibatch, and append each update's metrics to ``rows``.

    Returns the state, and whether the passes end here. Frozen models are kept out of the updates, so that these are
    the same programs with and without them.
    """
    frozen = state.frozen
    state = state._replace(frozen={})
    for one in training:
        seen = rows[one.role]
        own = coefficients
        if settings.target_kl is not None and one.role == "policy":
            own = own | {"target_kl": settings.target_kl if any(map(_applied, seen)) else math.inf}
        state, metrics = one.update(state, one.reads(packed), own)
        seen.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        if seen[-1]["refused/not_finite"] or seen[-1].get("refused/far"):
            return state._replace(frozen=frozen), True
    return state._replace(frozen=frozen), False


def _packed(
    state: TrainState, samples: Sequence[Sample], objectives: Sequence[str], settings: Learner, forward: Forward
) -> Packed:
    """Return a minibatch's data, with the experts to replay."""
    packed = forward.packed(samples, objectives)
    return replaying(packed, settings.routing_replay, model_of(state), forward.compute)


def _watched(
    state: TrainState, groups: Sequence[Sequence[Sample]], batches: Sequence[Packed], forward: Forward, kl: bool
) -> dict[str, Any]:
    """Return metrics of the policy and its data before the first update; ``kl``: also ``kl_to_reference``."""
    load = load_by_expert([sample for group in groups for sample in group], model_of(state).config.experts)
    return load | (kl_to_reference(state, batches, forward) if kl else {})


def before(state: TrainState, packed: Packed, forward: Forward, names: set[str]) -> dict[str, jax.Array]:
    """Compute the arrays [M, B, T] of these names, at the shapes that the updates use. Experts are replayed for the
    policy alone.
    """
    found = {}
    for name in sorted(names):
        whose, output = BEFORE[name]
        given = packed if whose == "policy" else without_routes(packed)
        found[name] = forward.score(model_of(state, whose), given, output)
    return found


def kl_of_policy(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return the policy's KL for a controller, by one forward pass over all data that it learned from.

    ``controller/kl``: nats per token; ``controller/kl_sequence``: nats per sequence, summed over its tokens; NaN if no
    token is in the loss. It is the KL to the reference if the batches have its log-probabilities, else to the old
    policy.
    """
    model = model_of(state, "policy")
    far = sum(divergence(packed, forward.score(model, packed)) for packed in batches)
    counts = [packed.counts["policy"] for packed in batches]
    return {
        "controller/kl": far / sum(one.tokens for one in counts),
        "controller/kl_sequence": far / sum(one.sequences for one in counts),
    }


def kl_to_reference(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return ``kl``, the policy's distance in nats per token to a reference that no objective reads.

    It uses forward passes of its own, so that learning is the same bit for bit without it. The estimate is unbiased k3,
    weighted by policy over sampler; 0 while the policy equals the reference; NaN if no token is in the loss.
    """
    far: Any = 0
    for packed in batches:
        lacking = {"old_logp", "ref_logp"} - set(packed.by_token)
        both = packed.with_tokens(**before(state, packed, forward, lacking))
        far += divergence(both, both.by_token["old_logp"])
    return {"kl": far / sum(packed.counts["policy"].tokens for packed in batches)}


def _passes(batches: list[Packed], epochs: int, seed: int) -> Iterator[tuple[int, Packed]]:
    """Yield the number and the minibatches of every epoch: in order in the first, shuffled in each later one."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(batches)) if epoch else range(len(batches))
        yield from ((epoch, batches[index]) for index in order)


def _split(groups: Sequence[Sequence[Sample]], parts: int) -> list[list[Sample]]:
    """Split the groups into minibatches as evenly as possible, whole and in order."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [[s for group in groups[a:b] for s in group] for a, b in itertools.pairwise(bounds)]


def _applied(row: Row) -> bool:
    return not any(value for name, value in row.items() if name.startswith("refused/"))


def _summary(rows: list[Row], settings: Learner) -> Row:
    """Combine the metrics of one role's updates; see ``learn``."""
    if not rows:  # the passes ended before its first update
        return {"updates": 0.0}
    applied = [row for row in rows if _applied(row)]
    names = [name for name in rows[0] if not name.startswith("refused/")]
    means = {name: float(np.mean([row[name] for row in applied])) if applied else math.nan for name in names}
    # The updates measure shares of all tokens, of which the mean over those that are clipped is made here.
    for side in ("low", "high"):
        if (name := f"{CLIPPED}/{side}") in means:
            share = means[f"clip_fraction/{side}"]
            means[name] = means[name] / share if share else math.nan
    first = {name: value for name, value in applied[0].items() if name.startswith("sampler/")} if applied else {}
    counts = {"updates": float(len(applied)), "updates/not_finite": sum(row["refused/not_finite"] for row in rows)}
    if counts["updates/not_finite"]:
        wrong = {"loss", "grad_norm"} & rows[-1].keys()
        counts |= {NOT_FINITE + name: 1.0 for name in sorted(wrong) if not math.isfinite(rows[-1][name])}
    if settings.target_kl is not None and "refused/far" in rows[-1]:
        counts["target_kl/early_stops"] = rows[-1]["refused/far"]
    return means | first | counts
