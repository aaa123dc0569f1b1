"""Distillation in the learner: the packed loss and its gradient are those of whole distributions without packing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import TEMPERATURE, WIDTH, G, T, objective_gradient, one_device, padded, rollout
from tiny import VOCAB, equations, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import JensenShannon, top_classes
from jaxrl_llm.learner import Forward, Layout, PolicyGradient, pack
from jaxrl_llm.learner.objectives import TEACHER_INDEX, DivergenceLoss, Teacher, TopOutput
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models.config import Attention, ComputeOptions, Lora, ModelConfig
from jaxrl_llm.models.decoder import initialise, logits
from jaxrl_llm.models.lora import create_adapter, with_adapter
from jaxrl_llm.stages.teachers import with_top
from jaxrl_llm.types import Role

pytestmark = pytest.mark.slow

STUDENT = tiny("windows", 5)
WIDER = initialise(
    ModelConfig("llama", VOCAB + 6, 24, 1, 16, Attention(3, 1, 8)), jax.random.key(2), scale=0.3
)  # another width, depth and padding
TEACHERS = {"wider": WIDER, "gemma": tiny("gemma", 3)}
COMPUTE = ComputeOptions(remat="full")
LAYOUTS = (Layout(2, 22, T), Layout(4, 60, T))
BOTH = ("policy", "distillation")


def unpacked(model, samples):
    """Log-probabilities [B, T, V] of all tokens, one row of the forward pass for each completion."""
    rows = np.zeros((len(samples), WIDTH), np.int32)
    for row, s in zip(rows, samples, strict=True):
        row[: len(s.prompt) + len(s.tokens)] = [*s.prompt, *s.tokens]
    starts = np.array([len(s.prompt) for s in samples])
    at = np.minimum(starts[:, None] + np.arange(T)[None] - 1, WIDTH - 1)
    return jnp.take_along_axis(logits(model, rows) / TEMPERATURE, at[..., None], axis=1)


def dense(divergence, model, samples, teachers):
    """The mean divergence over the tokens that count; ``teachers``: that of each sample, by name."""
    each = {}
    for name in set(teachers):
        both = min(VOCAB, TEACHERS[name].config.vocab_size) if name in TEACHERS else VOCAB
        theirs = jax.nn.log_softmax(unpacked(TEACHERS.get(name, STUDENT), samples)[..., :both])
        ours = jax.nn.log_softmax(unpacked(model, samples)[..., :both])
        if divergence.top_k:
            ids = jax.lax.top_k(theirs, divergence.top_k)[1]
            ours, theirs = top_classes(ours, ids), top_classes(theirs, ids)
        each[name] = divergence(ours, theirs)
    chosen = jnp.stack([each[name][row] for row, name in enumerate(teachers)])
    mask = padded(samples, "mask")
    return jnp.sum(jnp.where(mask > 0, chosen, 0)) / mask.sum()


@pytest.mark.parametrize(
    ("divergence", "layout"),
    [(JensenShannon(0), LAYOUTS[0]), (JensenShannon(1), LAYOUTS[1]), (JensenShannon(0.4, 6), LAYOUTS[0])],
)
def test_the_gradient_is_that_of_whole_distributions_without_packing(layout, divergence):
    samples = rollout()
    if divergence.top_k:
        forward = Forward(layout, COMPUTE, TEMPERATURE, one_device())
        with jax.set_mesh(forward.mesh):
            told = forward.by_sample(WIDER, samples, TopOutput(divergence.top_k, VOCAB))
        samples = [with_top(one, top) for one, top in zip(samples, told, strict=True)]
    packed = pack(samples, layout, BOTH)._replace(teachers={"wider": Teacher(WIDER, COMPUTE)})
    loss = DivergenceLoss(0.7, divergence, ("wider",))
    found, metrics = objective_gradient(STUDENT, packed, (loss,))
    names = ["wider"] * len(samples)
    value, wanted = jax.value_and_grad(lambda m: dense(divergence, m, samples, names))(STUDENT)
    np.testing.assert_allclose(metrics["distillation/divergence"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], 0.7 * value, rtol=1e-5)
    assert largest_difference(found, jax.tree.map(lambda x: 0.7 * x, wanted)) < 1e-5


def test_each_sample_has_its_own_of_several_teachers():
    """The second prompt's is the other one; the loss of the policy gradient is added, each over its own tokens."""
    samples = [
        dataclasses.replace(one, scalars=one.scalars | {TEACHER_INDEX: float(place // G == 1)})
        for place, one in enumerate(rollout())
    ]
    names = [("wider", "gemma")[int(one.scalars[TEACHER_INDEX])] for one in samples]
    teachers = {name: Teacher(model, COMPUTE) for name, model in TEACHERS.items()}
    packed = pack(samples, LAYOUTS[0], BOTH)._replace(teachers=teachers)
    divergence, policy = JensenShannon(0.3), PolicyGradient(PRESETS["dapo"])
    found, metrics = objective_gradient(STUDENT, packed, (policy, DivergenceLoss(1.0, divergence, tuple(TEACHERS))))
    idle = objective_gradient(
        STUDENT, packed, (dataclasses.replace(policy, idle=True), DivergenceLoss(1.0, divergence, tuple(TEACHERS)))
    )
    alone, without = objective_gradient(STUDENT, packed, (policy,))
    value, slope = jax.value_and_grad(lambda m: dense(divergence, m, samples, names))(STUDENT)
    np.testing.assert_allclose(metrics["loss"], without["loss"] + value, rtol=1e-5, atol=1e-6)
    assert largest_difference(found, jax.tree.map(jnp.add, alone, slope)) < 1e-5
    assert largest_difference(idle[0], slope) < 1e-5 and largest_difference(idle[1], metrics) < 1e-6


def test_an_adapter_learns_from_its_own_base_without_a_copy():
    """The base is a teacher of distance 0 at first, and then the dense oracle's."""
    fresh = create_adapter(STUDENT.config, Lora(2, 4.0), jax.random.key(1))
    moved = jax.tree.map(lambda x: x + 0.1, fresh)
    packed = pack(rollout(), LAYOUTS[0], BOTH)._replace(teachers={"base": Teacher(None, COMPUTE)})
    loss = DivergenceLoss(1.0, JensenShannon(0.5), ("base",))
    given = {"temperature": jnp.float32(TEMPERATURE)}
    graded = jax.jit(lambda role: accumulate(role, packed, (loss,), given, COMPUTE))
    at_0 = graded(Role(fresh, None, jnp.int32(0), STUDENT))[1]
    assert abs(float(at_0["distillation/divergence"])) < 1e-6
    found, metrics = graded(Role(moved, None, jnp.int32(0), STUDENT))
    oracle = lambda adapter: dense(
        JensenShannon(0.5), with_adapter(STUDENT, adapter), rollout(), ["base"] * len(rollout())
    )
    value, wanted = jax.value_and_grad(oracle)(moved)
    np.testing.assert_allclose(metrics["distillation/divergence"], value, rtol=1e-5)
    assert largest_difference(found, wanted) < 1e-4


def test_the_update_never_holds_the_logits_of_a_microbatch():
    """Neither model's: the widest array that has the vocabulary as an axis is one chunk."""
    tall = [
        initialise(ModelConfig("llama", 4096, width, 1, 8, Attention(1, 1, 8)), jax.random.key(width))
        for width in (8, 16)
    ]
    samples = [
        dataclasses.replace(
            one,
            tokens=np.ones(256, np.int32),
            mask=np.ones(256, bool),
            arrays={name: np.zeros(256, x.dtype) for name, x in one.arrays.items()},
        )
        for one in rollout()
    ]
    packed = pack(samples, Layout(4, 1056, 256), BOTH)._replace(teachers={"tall": Teacher(tall[1], COMPUTE)})
    loss = DivergenceLoss(1.0, JensenShannon(0.5), ("tall",))
    given = {"temperature": jnp.float32(TEMPERATURE)}
    role = Role(tall[0], None, jnp.int32(0))
    traced = jax.jit(lambda role, packed: accumulate(role, packed, (loss,), given, COMPUTE)).trace(role, packed)
    found = [
        v.aval.shape
        for e in equations(traced.jaxpr.jaxpr)
        for v in e.outvars
        if 4096 in getattr(v.aval, "shape", ()) and not {8, 16} & set(v.aval.shape)
    ]
    positions = packed.predictions.target.shape[1] * packed.predictions.target.shape[2]
    assert max(np.prod(shape) for shape in found) <= 512 * 4096 < positions * 4096
    text = traced.lower().compile().as_text()
    assert f"{positions},4096]" not in text
