"""QuantisedMatrix frozen matrices: their numbers, their gradients, and that no whole stack of them is ever wide."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import T, one_device, policy_gradient, policy_update, rollout
from tiny import VOCAB, largest_difference

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import quantised
from jaxrl_llm.models.config import Attention, ComputeOptions, Lora, ModelConfig
from jaxrl_llm.models.decoder import cast, initialise, logits, to_parameters
from jaxrl_llm.models.hf import save_pretrained
from jaxrl_llm.models.lora import BasePacker, create_adapter, frozen_form, merge, with_adapter
from jaxrl_llm.models.pretrained import load_either
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.rules import checksums_by_name, parameter_path, weights_digest

CONFIG = ModelConfig("llama", VOCAB, 64, 3, 192, Attention(4, 2, 16))
BASE = cast(initialise(CONFIG, jax.random.key(0), scale=0.1), "bfloat16")
TOKENS = np.arange(24).reshape(2, 12)
KINDS = ("int8", "nf4")


def adapter(kind):
    """An adapter that matters."""
    fresh = create_adapter(CONFIG, Lora(2, 3.0, base=kind), jax.random.key(0))
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), fresh)


def held(kind):
    return frozen_form(BASE, Lora(2, base=kind), one_device())


def widened(kind):
    """The packed model, written out in float32."""
    return merge(with_adapter(held(kind), jax.tree.map(jnp.zeros_like, adapter(kind))))


def layer_of(packed, index=0):
    return jax.tree.map(lambda x: x[index], packed)


def test_nf4_has_the_bits_of_bitsandbytes():
    """``quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")`` of version 0.50.2 made the
    file, of ``torch.manual_seed(0); matrix = (torch.randn(40, 448) * 0.05).half().float()``, [out, in].
    """
    stored = np.load(Path(__file__).parents[1] / "fixtures" / "nf4.npz")
    packed = layer_of(quantised.quantise("nf4", jnp.asarray(stored["matrix"].T[None]), 1))
    for name in ("nibbles", "scales"):
        np.testing.assert_array_equal(getattr(packed, name)[...], stored[name])
    for name in ("scale_scales", "offset"):
        np.testing.assert_allclose(getattr(packed, name)[...], stored[name], rtol=1e-6)
    np.testing.assert_allclose(quantised.widen(packed, jnp.float32).T, stored["wide"], atol=1e-7)


@pytest.mark.parametrize("inputs", [1, 2])
def test_int8_is_off_by_half_a_step_at_most(inputs):
    stack = np.random.default_rng(0).normal(size=(2, 8, 6, 5)).astype(np.float32)
    packed = quantised.quantise("int8", jnp.asarray(stack), inputs)
    for index in range(2):
        layer = layer_of(packed, index)
        step = np.abs(stack[index]).max(axis=tuple(range(inputs))) / 127
        assert layer.codes[...].dtype == jnp.int8 and layer.scales[...].shape == step.shape
        assert (np.abs(np.asarray(quantised.widen(layer, jnp.float32)) - stack[index]) <= 0.5001 * step).all()
    zeros = layer_of(quantised.quantise("int8", jnp.zeros((1, 4, 3)), 1))
    np.testing.assert_array_equal(quantised.widen(zeros, jnp.float32), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_computes_as_its_numbers_written_out(kind):
    """Learner, sampler and the gradient of the adapters."""
    policy, wide, packed = adapter(kind), widened(kind), held(kind)
    assert {x.dtype.name for x in jax.tree.leaves(packed)} >= {"int8" if kind == "int8" else "uint8"}
    close = np.abs(np.asarray(logits(wide, TOKENS)) - logits(cast(BASE, "float32"), TOKENS))
    assert 0 < close.mean() < (0.02 if kind == "int8" else 0.3)
    model = cast(with_adapter(packed, policy), "float32")
    np.testing.assert_allclose(logits(model, TOKENS), logits(with_adapter(wide, policy), TOKENS), atol=2e-5)
    data = pack(rollout(), Layout(8, 22, T))
    gradient = jax.jit(
        lambda base: policy_gradient(policy, data, PRESETS["dapo"], ComputeOptions(remat="full"), base)[0]
    )
    found, wanted = gradient(packed), gradient(wide)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    assert largest_difference(found, wanted) < 1e-6 * max(size, 1)
    rules = Sampling(max_new_tokens=6)
    sampled = [
        Engine(m, 2, 32, 4).generate(m, TOKENS.tolist(), [0, 1], rules) for m in (model, with_adapter(wide, policy))
    ]
    for ours, theirs in zip(*sampled, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.sampler_logp, theirs.sampler_logp, atol=2e-5)


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
def test_factors_and_norms_are_cast_and_matrices_are_not(kind):
    form = BASE if kind == "bf16" else held(kind)
    model = with_adapter(form, adapter("bf16"))
    dtypes = {parameter_path(path): x.dtype.name for path, x in jax.tree.leaves_with_path(cast(model, "float16"))}
    before = {parameter_path(path): x.dtype.name for path, x in jax.tree.leaves_with_path(model)}
    changed = {name for name in dtypes if dtypes[name] == "float16"}
    assert changed == {name for name in dtypes if name.endswith(("/a", "/b")) or "norm" in name}
    assert all(dtypes[name] == before[name] for name in dtypes.keys() - changed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_changes_nothing(kind):
    """Codes are divided over fsdp and tensor, and gathered a layer at a time."""
    lora, data = Lora(2, 3.0, base=kind), pack(rollout(), Layout(8, 22, T))
    moments = []
    for where in (one_device(), make_mesh(MeshShape(2, 2, 2))):
        update = policy_update(PRESETS["dapo"], Optimiser(learning_rate=1e-2), ComputeOptions(remat="full"))
        with jax.set_mesh(where):
            state = create_state(jax.tree.map(jnp.copy, BASE), build(Optimiser(learning_rate=1e-2)), False, where, lora)
            codes = state.policy.base.weights.blocks.mlp.up
            codes = codes.codes[...] if kind == "int8" else codes.nibbles[...]
            assert codes.sharding.is_fully_replicated == (where.size == 1)
            state = state.with_role(
                "policy", params=jax.device_put(adapter(kind), shardings(state.policy.params, where))
            )
            state, _ = update(state, put_on_mesh(data, where))
        moments.append(jax.device_get(state.policy.opt_state[1].mu))
    assert largest_difference(*moments) < 1e-5


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_stack_is_ever_wide(kind, remat):
    policy, data = adapter(kind), pack(rollout(), Layout(8, 22, T))
    compute = ComputeOptions(remat=remat)
    program = jax.jit(lambda base: policy_gradient(policy, data, PRESETS["dapo"], compute, base)[0])
    text = program.lower(held(kind)).compile().as_text()
    layers = CONFIG.layers
    assert f"[{layers},64,192]" in text or f"[{layers},192,32]" in text, "the packed stack is read"
    assert not re.search(rf"(f32|bf16)\[{layers},(64,192|192,64)\]", text)


def test_nothing_of_a_matrix_is_hoisted_out_of_the_loop_over_layers():
    """Choices among constants once were: sixteen arrays of each matrix's size."""
    policy, data = adapter("nf4"), pack(rollout(), Layout(1, 22, T))

    def temporaries(kind):
        gradient = lambda base: policy_gradient(policy, data, PRESETS["dapo"], ComputeOptions(remat="full"), base)[0]
        return jax.jit(gradient).lower(held(kind)).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("nf4") - temporaries("int8") < 8 * 4 * 64 * 192


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_is_packed_as_it_is_read(kind, tmp_path):
    save_pretrained(BASE, None, tmp_path / "model")
    lora = Lora(rank=2, base=kind)
    packer = BasePacker(lora)
    packed, _ = load_either(tmp_path / "model", "bfloat16", one_device(), pack=packer)
    assert packer.digest() == weights_digest(BASE) and packer.checksums.keys() == checksums_by_name(BASE).keys()
    assert isinstance(packed.weights.blocks.mlp.up, quantised.QuantisedMatrix)
    state = create_state(packed, build(Optimiser()), False, one_device(), lora, checksums=packer.checksums)
    jax.tree.map(np.testing.assert_array_equal, state.policy.checksums, checksums_by_name(BASE))
    stack = jnp.ones((2, 64, 64), jnp.bfloat16)
    packer("blocks/mlp/up", stack)
    assert stack.is_deleted()
    wanted = frozen_form(BASE, lora, one_device())
    jax.tree.map(np.testing.assert_array_equal, state.policy.base, wanted)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(InputError, match=r"nf4 packs 64 inputs .* one of 24: set it to int8 or bf16"):
        quantised.quantise("nf4", jnp.zeros((1, 24, 8)), 1)
    assert set(to_parameters(held("nf4"))) == set(to_parameters(BASE))
