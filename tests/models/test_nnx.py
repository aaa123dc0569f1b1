"""What all models here assume of flax: a module is an immutable pytree of parameters, static apart from its arrays."""

import copy
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KINDS, tiny

from jaxrl_llm.models.decoder import Decoder, to_parameters


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_is_a_trainable_array_of_one_dtype(kind):
    leaves = jax.tree.leaves(tiny(kind, dtype="bfloat16"))
    assert {type(leaf) for leaf in leaves} == {type(jnp.zeros(1))}
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    stored = jax.tree.leaves(to_parameters(tiny(kind)))
    assert len(stored) == len(leaves)


def test_structure_is_the_configuration():
    plain, other = tiny("plain"), tiny("plain", seed=1)
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    assert hash(jax.tree.structure(plain)) == hash(jax.tree.structure(other))
    assert jax.tree.structure(plain) != jax.tree.structure(tiny("bias"))
    assert jax.tree.structure(plain) == jax.tree.structure(jax.eval_shape(lambda m: m, plain))


def test_jit_and_grad_give_models_back_and_compile_once():
    double = jax.jit(lambda m: jax.tree.map(lambda x: x + x, m))
    for seed in (0, 1):
        model = tiny("gemma", seed)
        out = double(model)
        assert type(out) is Decoder and out.config == KINDS["gemma"]
        np.testing.assert_array_equal(out.weights.embed[...], 2 * model.weights.embed[...])
    assert double._cache_size() == 1
    grad = jax.grad(lambda m: jnp.sum(m.weights.embed[...] ** 2))(tiny("plain"))
    assert jax.tree.structure(grad) == jax.tree.structure(tiny("plain"))
    assert not np.any(grad.weights.final_norm[...])


def test_assignment_inside_jit_is_lost_which_is_why_nothing_here_assigns():
    model = tiny("plain")
    before = np.array(model.weights.embed[...])

    @jax.jit
    def forgetful(m):
        m.weights.embed[...] = jnp.zeros_like(m.weights.embed[...])
        return jnp.sum(m.weights.embed[...])

    assert float(forgetful(model)) == 0
    np.testing.assert_array_equal(model.weights.embed[...], before)


def test_scan_and_vmap_go_over_the_stacked_layers():
    blocks = tiny("plain").weights.blocks
    _, norms = jax.lax.scan(lambda c, w: (c, jnp.sum(w.attn.q[...])), None, blocks)
    np.testing.assert_allclose(norms, jax.vmap(lambda w: jnp.sum(w.attn.q[...]))(blocks), rtol=1e-5)
    assert norms.shape == (KINDS["plain"].layers,)


def test_parameters_round_trip_and_copies_are_apart():
    model = tiny("full_norm")
    again = Decoder(model.config, to_parameters(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True))
    assert jax.tree.structure(copy.deepcopy(model)) == jax.tree.structure(model)
    shapes = Decoder(model.config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), to_parameters(model)))
    assert jax.tree.leaves(shapes)[0].shape == jax.tree.leaves(model)[0].shape


def test_a_donated_model_is_gone_and_its_copy_is_not():
    model = tiny("plain")
    other = jax.tree.map(jnp.copy, model)
    jax.jit(lambda m: jax.tree.map(lambda x: x + 1, m), donate_argnums=0)(model)
    assert all(x.is_deleted() for x in jax.tree.leaves(model))
    assert not any(x.is_deleted() for x in jax.tree.leaves(other))


def test_flax_is_bounded_on_both_sides():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (flax,) = (line for line in project["dependencies"] if line.startswith("flax"))
    assert ">=" in flax and "<" in flax
