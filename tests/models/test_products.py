"""Products with float32 sums: what they are, and which operands each platform multiplies."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KINDS, tiny

from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import causal_rows, forward, unembed
from jaxrl_llm.models.heads import token_logprobs
from jaxrl_llm.models.layers import product

pytestmark = pytest.mark.slow

OPTIMISED = True

SCORES = "bskgh,bkhz->bkgsz"
DOT = re.compile(r"dot_general.*: \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\) -> tensor<(?:\d+x)*(\w+)>")


def operands(platform, function, *given):
    """Dtypes of every product, its two operands and its result, as lowered for a platform that need not be there."""
    lowered = jax.jit(function).trace(*given).lower(lowering_platforms=(platform,))
    return set(DOT.findall(lowered.as_text()))


def numbers(dtype, seed=0):
    random = np.random.default_rng(seed)
    return (
        jnp.asarray(random.normal(size=shape).astype(np.float32).astype(dtype))
        for shape in ((2, 64, 2, 2, 8), (2, 2, 8, 64))
    )


@functools.partial(jax.jit, static_argnums=0)
def graded(letters, x, y, g):
    value, back = jax.vjp(functools.partial(product, letters), x, y)
    return value, *back(g)


def test_products_of_bfloat16_are_summed_in_float32():
    # A layout that XLA for CPUs compiles and then refuses to run unless its operands are float32.
    x, y = numbers("bfloat16")
    g = np.random.default_rng(1).normal(size=(2, 2, 2, 64, 64)).astype(np.float32)
    value, d_x, d_y = graded(SCORES, x, y, g)
    assert (value.dtype, d_x.dtype, d_y.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    wide = [np.float64(a) for a in (x, y, g)]
    np.testing.assert_allclose(value, np.einsum(SCORES, *wide[:2]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.float64(d_x), np.einsum("bkgsz,bkhz->bskgh", wide[2], wide[1]), rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(np.float64(d_y), np.einsum("bskgh,bkgsz->bkhz", wide[0], wide[2]), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_programs_for_cpus_widen_the_operands(kind):
    model, rows = tiny(kind, dtype="bfloat16"), causal_rows(np.zeros((2, 6), np.int32))
    targets = np.zeros((2, 6), np.int32)
    compute = ComputeOptions("bfloat16", "full")

    def loss(m):
        hidden = forward(m, rows, compute)
        return jnp.sum(unembed(m, hidden)) + jnp.sum(token_logprobs(m, hidden, targets, 1.0)[0])

    mixed = {("bf16", "bf16", "bf16"), ("bf16", "bf16", "f32")}
    # Routers and states are float32 whatever the model is.
    wide = {("f32", "f32", "f32")} if model.config.experts or model.config.state_part == "delta" else set()
    assert operands("tpu", loss, model) == operands("cuda", loss, model) == mixed | wide
    assert mixed <= operands("tpu", jax.grad(loss), model)
    for function in (loss, jax.grad(loss)):
        assert operands("cpu", function, model) == {("bf16", "bf16", "bf16"), ("f32", "f32", "f32")}


def test_float32_is_left_as_it_is():
    x, y = numbers("float32")
    traced = jax.make_jaxpr(functools.partial(product, SCORES))(x, y)
    assert "platform_index" not in str(traced) and "dot_general" in str(traced)
