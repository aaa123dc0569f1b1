"""QuantisedMatrix frozen matrices: their numbers, their gradients, and that no whole stack of them is ever wide."""

import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from learner.rollouts import T, one_device, policy_gradient, policy_update, sample
from tiny import VOCAB, largest_difference

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import layers, quantised
from jaxrl_llm.models.config import ADAPTED, Attention, ComputeOptions, Experts, Lora, ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast, causal_rows, forward, logits, parameter_shapes, to_parameters
from jaxrl_llm.models.hf import save_pretrained
from jaxrl_llm.models.lora import BasePacker, create_adapter, frozen_form, merge, with_adapter
from jaxrl_llm.models.pretrained import load_either
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.rules import checksums_by_name, parameter_path, weights_digest

CONFIG = ModelConfig("llama", VOCAB, 64, 3, 192, Attention(4, 2, 16))
MIXTURE = ModelConfig("mixtral", VOCAB, 64, 3, 64, Attention(4, 2, 16), experts=Experts(4, 2, 128, True))
TOKENS = np.arange(24).reshape(2, 12)
CODES = {"int8": "int8", "fp8": "float8_e4m3fn", "nf4": "uint8", "mxfp4": "uint8"}
KINDS = ("int8", "nf4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8", "mxfp4")))


@functools.cache
def model_of(config):
    """A model in bfloat16; NumPy draws it, so nothing compiles."""
    random, leaves = np.random.default_rng(0), {}
    for path, shape in parameter_shapes(config).items():
        drawn = np.ones(shape) if "norm" in path else 0.1 * random.normal(size=shape)
        leaves[path] = jnp.asarray(drawn.astype(jnp.bfloat16))
    return Decoder(config, traverse_util.unflatten_dict(leaves, sep="."))


def adapter(kind, config=CONFIG, targets=ADAPTED):
    """An adapter that matters."""
    fresh = jax.eval_shape(lambda: create_adapter(config, Lora(2, 3.0, targets, kind), jax.random.key(0)))
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), fresh)


def step(rows=4):
    """The data of a step: groups of random completions, some tokens of which are not counted."""
    random = np.random.default_rng(0)
    drawn = lambda length: random.integers(1, VOCAB, length).astype(np.int32)
    samples = []
    for prompt in (drawn(3), drawn(9)):
        for length in (T, 4, 7):
            logp, counted = -random.random(length).astype(np.float32), random.random(length) > 0.1
            samples.append(sample(prompt, drawn(length), counted, logp, float(random.normal())))
    return pack(samples, Layout(rows, 22, T))


def held(kind):
    return frozen_form(model_of(CONFIG), Lora(2, base=kind), one_device())


def widened(kind):
    """The packed model, written out in float32."""
    return merge(with_adapter(held(kind), jax.tree.map(jnp.zeros_like, adapter(kind))))


def codes_of(nibbles):
    """The codes [in, out] of a byte for inputs i and i + 32 of each 64."""
    rows = [(i // 64 * 32 + i % 32, 4 if i % 64 < 32 else 0) for i in range(2 * len(nibbles))]
    return np.stack([np.asarray(nibbles)[row] >> shift & 15 for row, shift in rows])


def gradient_over(policy, remat):
    """The adapter's gradient, as a function of the model below it."""
    data, compute = step(), ComputeOptions(remat=remat)
    return jax.jit(lambda base: policy_gradient(policy, data, PRESETS["dapo"], compute, base)[0])


@functools.cache
def compiled_gradient(kind, remat):
    """That over the packed model."""
    return gradient_over(adapter(kind), remat).lower(held(kind)).compile()


def check_gradient(program, packed, wide, gradient):
    """The adapter's gradient over packed numbers is that over the same ones written out."""
    found, wanted = program(packed), gradient(wide)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    assert largest_difference(found, wanted) < 1e-6 * max(size, 1)


def assert_never_wide(text):
    """The packed stack is read, and no wide one of all layers is made."""
    depth = CONFIG.layers
    assert f"[{depth},64,192]" in text or f"[{depth},32,192]" in text, "the packed stack is read"
    assert not re.search(rf"(f32|bf16)\[{depth},(64,192|192,64)\]", text)


def layer_of(packed, index=0):
    return jax.tree.map(lambda x: x[index], packed)


def test_nf4_has_the_bits_of_bitsandbytes():
    """``quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")`` of version 0.50.2 made the
    file, of ``torch.manual_seed(0); matrix = (torch.randn(40, 448) * 0.05).half().float()``, [out, in].
    """
    with np.load(Path(__file__).parents[1] / "fixtures" / "nf4.npz") as file:
        stored = dict(file)
    packed = layer_of(quantised.quantise("nf4", jnp.asarray(stored["matrix"].T[None]), 1))
    np.testing.assert_array_equal(packed.scales[...], stored["scales"])
    np.testing.assert_array_equal(
        codes_of(packed.nibbles[...]), np.stack([stored["nibbles"] >> 4, stored["nibbles"] & 15], -1).reshape(40, -1).T
    )
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
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, *stack.shape[1 : 1 + inputs])), jnp.bfloat16)
    found = layers.project_frozen(inputs, 1.0, x, layer_of(packed), None)
    wanted = np.tensordot(np.float64(x), np.float64(quantised.widen(layer_of(packed), jnp.float32)), inputs)
    assert found.dtype == jnp.bfloat16, "rounded once"
    np.testing.assert_allclose(np.float64(found), wanted, rtol=2**-8, atol=1e-5)
    back = jax.vjp(lambda x: layers.project_frozen(inputs, 1.0, x, layer_of(packed), None), x)[1](found)[0]
    axes = tuple(range(-stack[0].ndim + inputs, 0))
    matrix, g = np.float64(quantised.widen(layer_of(packed), jnp.float32)), np.float64(found)
    wanted, most = np.tensordot(g, matrix, (axes, axes)), np.tensordot(np.abs(g), np.abs(matrix), (axes, axes))
    assert (np.abs(np.float64(back) - wanted) <= 2**-8 * (most + np.abs(wanted))).all(), "g is rounded, and the sum"
    zeros = layer_of(quantised.quantise("int8", jnp.zeros((1, 4, 3)), 1))
    np.testing.assert_array_equal(quantised.widen(zeros, jnp.float32), 0)


def test_mxfp4_is_the_formats_own():
    """The shared exponent is that of the largest number less 2, and the numbers are ``float4_e2m1fn`` (OCP
    Microscaling 1.0, 6.3), saturated. What is packed stays as it is when packed again.
    """
    stack = np.random.default_rng(0).normal(size=(1, 128, 40)).astype(np.float32)
    stack[0, :32, 0] = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7.9, -0.75, -5.1, *([4.0] * 20)]
    stack[0, 32:64, 0] = 0
    layer = layer_of(quantised.quantise("mxfp4", jnp.asarray(stack), 1))
    blocks = stack[0].T.reshape(40, 4, 32)
    power = np.floor(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30))) - 2
    numbers = np.clip(blocks / 2.0**power, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * 2.0**power
    found = quantised.widen(layer, jnp.float32)
    np.testing.assert_array_equal(found, numbers.reshape(40, 128).T)
    np.testing.assert_array_equal(
        quantised.widen(layer_of(quantised.quantise("mxfp4", found[None], 1)), jnp.float32), found
    )


def test_fp8_has_a_scale_for_each_block():
    stack = np.random.default_rng(0).normal(size=(1, 150, 3, 50)).astype(np.float32)
    stack[0, 128:, 2, 30:] *= 1000
    layer = layer_of(quantised.quantise("fp8", jnp.asarray(stack), 1))
    assert layer.scales.shape == (2, 2) and layer.codes.shape == (150, 3, 50)
    found = np.asarray(quantised.widen(layer, jnp.float32)).reshape(150, 150)
    wide = stack.reshape(150, 150)
    for rows, columns in itertools.product((slice(0, 128), slice(128, 150)), repeat=2):
        block = wide[rows, columns]
        scale = np.float32(np.abs(block).max() / 448)
        wanted = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        np.testing.assert_allclose(found[rows, columns], wanted, rtol=1e-6)


@pytest.mark.slow(but="nf4")
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_computes_as_its_numbers_written_out(kind):
    """The sampler, and the gradient of the adapters, for which no stack is ever wide."""
    policy, wide, packed = adapter(kind), widened(kind), held(kind)
    assert {x.dtype.name for x in jax.tree.leaves(packed)} >= {CODES[kind]}
    close = np.abs(np.asarray(logits(wide, TOKENS)) - logits(cast(model_of(CONFIG), "float32"), TOKENS))
    assert 0 < close.mean() < {"int8": 0.02, "fp8": 0.1}.get(kind, 0.4)
    model = cast(with_adapter(packed, policy), "float32")
    program = compiled_gradient(kind, "full")
    check_gradient(program, packed, wide, gradient_over(policy, "full"))
    assert_never_wide(program.as_text())
    rules = Sampling(max_new_tokens=6)
    sampled = [
        Engine(m, 2, 32, 4).generate(m, TOKENS.tolist(), [0, 1], rules) for m in (model, with_adapter(wide, policy))
    ]
    for ours, theirs in zip(*sampled, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.sampler_logp, theirs.sampler_logp, atol=2e-5)


@pytest.mark.parametrize(
    "kind", ["mxfp4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8", "nf4"))]
)
def test_packed_experts_compute_as_their_numbers_written_out(kind):
    """With an adapter on attention and experts. Wide experts of all layers are never in memory, without remat too."""
    policy = adapter(kind, MIXTURE, ("attn/q", "experts/up"))
    packed = frozen_form(model_of(MIXTURE), Lora(2, base=kind), one_device())
    assert isinstance(packed.weights.blocks.experts.down, quantised.QuantisedMatrix)
    assert isinstance(packed.weights.blocks.attn.q, quantised.QuantisedMatrix) == (kind != "mxfp4")
    wide = merge(with_adapter(packed, jax.tree.map(jnp.zeros_like, policy)))
    model = cast(with_adapter(packed, policy), "float32")
    np.testing.assert_allclose(logits(model, TOKENS), logits(with_adapter(wide, policy), TOKENS), atol=2e-5)
    gradient = gradient_over(policy, "none")
    program = gradient.lower(packed).compile()
    check_gradient(program, packed, wide, gradient)
    assert not re.search(rf"(f32|bf16)\[{MIXTURE.layers},4,64,128\]", program.as_text())


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
def test_factors_and_norms_are_cast_and_matrices_are_not(kind):
    form = model_of(CONFIG) if kind == "bf16" else held(kind)
    model = with_adapter(form, adapter("bf16"))
    dtypes = {parameter_path(path): x.dtype.name for path, x in jax.tree.leaves_with_path(cast(model, "float16"))}
    before = {parameter_path(path): x.dtype.name for path, x in jax.tree.leaves_with_path(model)}
    changed = {name for name in dtypes if dtypes[name] == "float16"}
    assert changed == {name for name in dtypes if name.endswith(("/a", "/b")) or "norm" in name}
    assert all(dtypes[name] == before[name] for name in dtypes.keys() - changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "mesh"),
    [("int8", CONFIG, MeshShape(2, 2, 2)), ("nf4", CONFIG, MeshShape(2, 2, 2)), ("fp8", CONFIG, MeshShape(2, 2, 2)),
     ("mxfp4", MIXTURE, MeshShape(1, 2, 2, expert=2))],
)  # fmt: skip
def test_the_mesh_changes_nothing(kind, config, mesh):
    """Codes are divided over fsdp, expert and tensor, and gathered a layer at a time."""
    data, moments = step(), []
    targets = ("attn/q", "attn/o", "mlp/up", "mlp/down", "experts/down")
    for where in (one_device(), make_mesh(mesh)):
        update = policy_update(PRESETS["dapo"], Optimiser(learning_rate=1e-2), ComputeOptions(remat="full"))
        with jax.set_mesh(where):
            copy, lora = jax.tree.map(jnp.copy, model_of(config)), Lora(2, 3.0, targets, kind)
            state = create_state(copy, build(Optimiser(learning_rate=1e-2)), False, where, lora)
            blocks = state.policy.base.weights.blocks
            codes = blocks.mlp.up if config is CONFIG else blocks.experts.up
            codes = codes.codes[...] if kind in ("int8", "fp8") else codes.nibbles[...]
            assert codes.sharding.is_fully_replicated == (where.size == 1)
            state = state.with_role(
                "policy",
                params=jax.device_put(adapter(kind, config, targets), shardings(state.policy.params, where)),
            )
            state, _ = update(state, put_on_mesh(data, where))
        moments.append(jax.device_get(state.policy.opt_state[1].mu))
    assert largest_difference(*moments) < 1e-5


def test_packed_experts_stay_with_their_devices():
    mesh = make_mesh(MeshShape(1, 1, 2, expert=4))
    packed = frozen_form(model_of(MIXTURE), Lora(2, base="mxfp4"), mesh)
    gate = jax.device_put(packed, shardings(packed, mesh)).weights.blocks.experts.gate
    assert "expert" in str(gate.nibbles.sharding.spec) and "expert" in str(gate.scales.sharding.spec)
    with jax.set_mesh(mesh):
        text = jax.jit(lambda matrix: quantised.widen(layer_of(matrix), jnp.bfloat16)).lower(gate).compile().as_text()
    assert "all-gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_stack_is_ever_wide_where_activations_are_kept(kind):
    assert_never_wide(compiled_gradient(kind, "none").as_text())


def test_dots_keep_one_array_of_each_adapted_product():
    """The sum of x W and (x a) b: beside a layer's input the backward pass is given outputs of products."""
    rows, policy = causal_rows(jnp.asarray(TOKENS)), adapter("bf16")

    def kept(remat):
        compute = ComputeOptions(remat=remat)
        run = lambda policy: forward(cast(with_adapter(model_of(CONFIG), policy), "float32"), rows, compute)
        backward = jax.eval_shape(lambda policy: jax.vjp(run, policy)[1], policy)
        return sum(x.size for x in jax.tree.leaves(backward))

    outputs = (4 + 2 + 2) * 16 + 64 + 192 + 192 + 64
    assert 0 < kept("dots") - kept("full") <= CONFIG.layers * TOKENS.size * outputs


@pytest.mark.slow
def test_nothing_of_a_matrix_is_hoisted_out_of_the_loop_over_layers():
    """Choices among constants once were: sixteen arrays of each matrix's size."""
    temporaries = lambda kind: compiled_gradient(kind, "full").memory_analysis().temp_size_in_bytes
    assert temporaries("nf4") - temporaries("int8") < 8 * 4 * 64 * 192


@pytest.mark.slow(but="nf4")
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_is_packed_as_it_is_read(kind, tmp_path):
    save_pretrained(model_of(CONFIG), None, tmp_path / "model")
    lora = Lora(rank=2, base=kind)
    packer = BasePacker(lora)
    packed, _ = load_either(tmp_path / "model", "bfloat16", one_device(), pack=packer)
    base = model_of(CONFIG)
    assert packer.digest() == weights_digest(base) and packer.checksums.keys() == checksums_by_name(base).keys()
    assert isinstance(packed.weights.blocks.mlp.up, quantised.QuantisedMatrix)
    state = create_state(packed, build(Optimiser()), False, one_device(), lora, checksums=packer.checksums)
    jax.tree.map(np.testing.assert_array_equal, state.policy.checksums, checksums_by_name(base))
    stacks = [jnp.ones((1, 64, 192), jnp.bfloat16) for _ in range(CONFIG.layers)]
    packer(CONFIG, "blocks/mlp/up", stacks.__getitem__, lambda *_: None)
    assert all(layer.is_deleted() for layer in stacks)
    wanted = frozen_form(base, lora, one_device())
    jax.tree.map(np.testing.assert_array_equal, state.policy.base, wanted)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(InputError, match=r"nf4 packs 64 inputs .* one of 24: set it to int8, fp8 or bf16"):
        quantised.quantise("nf4", jnp.zeros((1, 24, 8)), 1)
    assert set(to_parameters(held("nf4"))) == set(to_parameters(model_of(CONFIG)))
