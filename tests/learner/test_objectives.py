"""Objectives and roles: losses that couple rows, arrays by name, several roles in one state, rows that only some
objectives count.
"""

import dataclasses
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    G,
    T,
    forward_on,
    moved,
    objective_gradient,
    one_device,
    padded,
    rollout,
    unpacked_logp,
    unpacked_loss,
)
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.preference import DPO, pretraining_loss, sequence_logp
from jaxrl_llm.algorithms.surrogates import Surrogate
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import (
    Layout,
    Optimiser,
    PolicyGradient,
    Sample,
    pack,
    to_samples,
)
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.types import Completion, Group, Problem

MODEL = tiny("windows")
MOVED = moved(MODEL, tiny("windows", 5), 0.02)
LAYOUTS = (Layout(2, 22, T), Layout(4, 60, T))
COMPUTE = ComputeOptions(remat="full")
OPTIMISER = Optimiser(learning_rate=1e-2)


@dataclasses.dataclass(frozen=True)
class Pairs(Objective):
    """Direct preference optimisation: the loss of a pair needs both of its completions."""

    beta: float = 0.3
    name: ClassVar[str] = "pairs"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)
    needs: ClassVar[tuple[str, ...]] = ("ref_logp",)

    def __call__(self, outputs, batch, counts, coefficients):
        gain = sequence_logp(outputs["logp"], batch.mask) - sequence_logp(batch.by_token["ref_logp"], batch.mask)
        side, together = batch.by_sequence["side"], batch.by_sequence["together"]
        margin = jax.ops.segment_sum(gain * side, together, len(side))
        held = jax.ops.segment_sum(jnp.abs(side), together, len(side)) > 0
        losses = jnp.where(held, -jax.nn.log_sigmoid(self.beta * margin), 0.0)
        loss = jnp.sum(losses) / (counts.sequences / 2)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True)
class Text(Objective):
    """Log-probability of text that is mixed into a step."""

    name: ClassVar[str] = "text"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs, batch, counts, coefficients):
        loss = 0.5 * pretraining_loss(outputs["logp"], batch.mask, counts.tokens)
        return loss, {"loss": loss, "text/loss": loss}


def pairs():
    """Chosen and rejected completions of one prompt each, in an order that keeps no pair side by side."""
    samples = rollout()
    every = [np.ones(len(s.tokens), bool) for s in samples]
    made = []
    for number in range(0, len(samples) - 1, 2):
        for at, side in ((number, 1.0), (number + 1, -1.0)):
            s = samples[at]
            made.append(Sample(s.prompt, s.tokens, every[at], {"side": side}, together=f"pair {number}"))
    return made[::2] + made[1::2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_of_pairs_is_that_of_rows_side_by_side(layout):
    samples = pairs()
    packed = pack(samples, layout, ("pairs",))
    assert int(packed.microbatches) == (3 if layout is LAYOUTS[0] else 1)
    forwards = forward_on(one_device(), layout)
    packed = packed.with_tokens(ref_logp=forwards.score(MODEL, packed))
    found, metrics = objective_gradient(MOVED, packed, (Pairs(),))
    reference = np.asarray(unpacked_logp(MODEL, samples))
    mask = padded(samples, "mask").astype(bool)
    half = len(samples) // 2

    def loss(model):
        gain = sequence_logp(unpacked_logp(model, samples) - reference, mask)
        return jnp.mean(DPO(0.3)(gain[:half] - gain[half:]))

    wanted, gradients = jax.value_and_grad(loss)(MOVED)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert largest_difference(found, gradients) < 1e-5


def test_what_belongs_together_is_never_split_or_refused():
    samples = pairs()
    for rows in (2, 3, 4):
        packed = pack(samples, Layout(rows, 20, T), ("pairs",))
        seen = 0
        for m in range(int(packed.microbatches)):
            side, together = (packed.by_sequence[name][m] for name in ("side", "together"))
            for key in set(together[side != 0]):
                assert sorted(side[(together == key) & (side != 0)]) == [-1.0, 1.0]
                seen += 1
        assert seen == len(samples) // 2
    with pytest.raises(
        InputError, match="2 completions that are compared with each other, or rows of one episode, fill more than one"
    ):
        pack(samples, Layout(1, 20, T), ("pairs",))


def test_samples_without_a_key_are_packed_as_before():
    loose = [dataclasses.replace(s, together=None) for s in pairs()]
    plain = pack(loose, LAYOUTS[0], ("pairs",))
    assert "together" not in plain.by_sequence
    mixed = pack([*loose, *pairs()], LAYOUTS[0], ("pairs",))
    counts = mixed.counts["pairs"]
    assert counts.sequences == 2 * plain.counts["pairs"].sequences
    assert counts.tokens == 2 * plain.counts["pairs"].tokens


@dataclasses.dataclass(frozen=True)
class BySurprise(Surrogate):
    """A surrogate that weighs each token by an array of the sampler's."""

    reads: ClassVar[tuple[str, ...]] = ("entropy",)

    def __call__(self, at):
        return -jnp.exp(at.log_ratio) * at.advantages * at.extras["entropy"]


def scored_groups(extras):
    """Groups of the tiny model's rollout with these arrays of each completion."""
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
    rewards = np.random.default_rng(3).normal(size=(3, G))
    made = []
    for p, row in enumerate(rewards):
        members = rollout()[p * G : (p + 1) * G]
        completions = tuple(
            Completion(s.tokens, s.arrays["sampler_logp"], "stop", s.mask, np.zeros(len(s.tokens), np.int32), extras(s))
            for s in members
        )
        made.append(Group(problem, members[0].prompt, completions, row, row))
    return made, rewards


def test_a_per_token_array_of_the_engine_reaches_the_loss_by_its_name():
    algorithm = dataclasses.replace(PRESETS["dr_grpo"], surrogate=BySurprise())
    assert algorithm.reads == ("entropy",) and PRESETS["dr_grpo"].reads == ()
    weigh = lambda s: np.linspace(0.1, 2, len(s.tokens), dtype=np.float32)
    made, rewards = scored_groups(lambda s: {"entropy": weigh(s), "unread": weigh(s)})
    found, _ = to_samples(algorithm, made, 0, rewards, (), T, {})
    samples = [s for group in found for s in group]
    packed = pack(samples, LAYOUTS[0])
    assert set(packed.by_token) == {"sampler_logp", "fresh", "entropy"}
    got, _ = objective_gradient(MOVED, packed, (PolicyGradient(algorithm),))

    def loss(model):
        logp = unpacked_logp(model, samples)
        advantages = np.array([s.scalars["advantages"] for s in samples], np.float32)
        extras = {"entropy": padded(samples, "entropy")}
        return policy_loss(algorithm, logp, PolicyBatch(advantages, padded(samples, "mask"), extras=extras))[0]

    assert largest_difference(got, jax.grad(loss)(MOVED)) < 1e-5
    missing, _ = scored_groups(lambda s: {})
    with pytest.raises(InputError, match="the loss reads entropy of each token, which the sampler does not give"):
        to_samples(algorithm, missing, 0, rewards, (), T, {})


def test_arrays_that_prompts_have_too_lie_beside_the_tokens():
    samples = []
    for number, s in enumerate(rollout()):
        random = np.random.default_rng(number // G)
        own = np.random.default_rng(100 + number).integers(1, 99, (len(s.tokens), 2)).astype(np.int32)
        prompt = random.integers(1, 99, (len(s.prompt), 2)).astype(np.int32)
        samples.append(dataclasses.replace(s, arrays=s.arrays | {"experts": own}, prompt_arrays={"experts": prompt}))
    packed = pack(samples, Layout(4, 60, T))
    experts = packed.by_column["experts"]
    chex.assert_shape(experts, (*packed.rows.tokens.shape, 2))
    chex.assert_type(experts, np.int32)
    assert "experts" not in packed.by_token
    whole = {
        (*s.prompt.tolist(), *s.tokens.tolist()): np.concatenate([s.prompt_arrays["experts"], s.arrays["experts"]])
        for s in samples
    }
    seen = 0
    for at in np.ndindex(packed.rows.tokens.shape[:2]):
        tokens, _, group, branch = (np.asarray(x[at]) for x in packed.rows)
        for g, b in {(g, b) for g, b in zip(group, branch, strict=True) if b > 0}:
            read = (group == g) & ((branch == 0) | (branch == b))
            np.testing.assert_array_equal(experts[at][read], whole[tuple(tokens[read].tolist())])
            seen += 1
    assert seen == len(samples) and not experts[packed.rows.group == 0].any()


@pytest.mark.slow
def test_objectives_of_one_role_share_a_forward_pass_and_count_their_own_rows():
    samples = [dataclasses.replace(s, counted_by=("policy",)) for s in rollout()]
    text = [
        dataclasses.replace(s, mask=np.ones(len(s.tokens), bool), counted_by=("text",), tokens=(s.tokens + 1) % 50)
        for s in rollout()[:3]
    ]
    both = (PolicyGradient(PRESETS["dapo"]), Text())
    packed = pack([*samples, *text], LAYOUTS[0], ("policy", "text"))
    found, metrics = objective_gradient(MOVED, packed, both)
    policy, alone = jax.grad(lambda m: unpacked_loss(PRESETS["dapo"], m, rollout()), has_aux=True)(MOVED)
    mask = padded(text, "mask").astype(bool)
    ptx, slope = jax.value_and_grad(lambda m: 0.5 * pretraining_loss(unpacked_logp(m, text), mask))(MOVED)
    assert largest_difference(found, jax.tree.map(jnp.add, policy, slope)) < 1e-5
    np.testing.assert_allclose(metrics["loss"], alone["loss"] + ptx, rtol=1e-5)
    np.testing.assert_allclose(metrics["text/loss"], ptx, rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio"], alone["ratio"], rtol=1e-5, atol=1e-6)
