"""The forward pass: padding, packing, rematerialisation and precision change nothing that they should not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import KINDS, VOCAB, equations, largest_difference, tiny

from jaxrl_llm.models.config import ComputeOptions, Recurrent
from jaxrl_llm.models.decoder import (
    Decoder,
    TokenRows,
    Weights,
    cast,
    causal_rows,
    forward,
    initialise,
    layer_places,
    logits,
    periods_of,
    scan_layers,
    to_parameters,
    unembed,
)

TREE = {
    1: ([7, 3, 9, 4], [[5, 6], [11, 2, 30, 8, 1]]),
    2: ([1], [[21, 22, 23], [4], [9, 9, 9, 9]]),
}
"""Two groups: a prompt, and the completions that share it."""

hidden = jax.jit(lambda model, rows: forward(model, rows))


def packed_row(width):
    """The groups of ``TREE`` in one row, and for each completion the columns of its path (prompt, then itself)."""
    columns, paths = {name: np.zeros((1, width), np.int32) for name in TokenRows._fields}, []
    at = 0
    for group, (prompt, branches) in TREE.items():
        first = at
        for branch, tokens in enumerate([prompt, *branches]):
            span = slice(at, at + len(tokens))
            offset = 0 if branch == 0 else len(prompt)
            for name, value in (
                ("tokens", tokens),
                ("positions", offset + np.arange(len(tokens))),
                ("group", group),
                ("branch", branch),
            ):
                columns[name][0, span] = value
            if branch:
                paths.append((prompt + tokens, [*range(first, first + len(prompt)), *range(span.start, span.stop)]))
            at = span.stop
    return TokenRows(**columns), paths


@pytest.mark.slow(but=("windows", "gemma", "sinks", "delta"))
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_one_row_for_each_completion(kind):
    model = tiny(kind)
    rows, paths = packed_row(24)
    together = np.asarray(hidden(model, rows))[0]
    alone = np.asarray(hidden(model, causal_rows([(tokens + [0] * 24)[:24] for tokens, _ in paths])))
    for (tokens, columns), row in zip(paths, alone, strict=True):
        np.testing.assert_allclose(together[columns], row[: len(tokens)], rtol=1e-4, atol=2e-5)


def test_packing_keeps_groups_apart_bit_for_bit():
    model = tiny("windows")
    rows, _ = packed_row(24)
    other = TokenRows(rows.tokens.copy(), *rows[1:])
    other.tokens[rows.group != 1] = 17
    before, after = (np.asarray(hidden(model, r))[0][rows.group[0] == 1] for r in (rows, other))
    np.testing.assert_array_equal(before, after)
    other.tokens[(rows.group == 1) & (rows.branch == 1)] = 13
    first_prompt_and_second_branch = (rows.group[0] == 1) & (rows.branch[0] != 1)
    np.testing.assert_array_equal(np.asarray(hidden(model, other))[0][first_prompt_and_second_branch],
                                  np.asarray(hidden(model, rows))[0][first_prompt_and_second_branch])  # fmt: skip


@pytest.mark.slow(but=("gemma", "experts", "conv"))
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_cannot_change_a_real_position(kind):
    model = tiny(kind)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
    rubbish = tokens.copy()
    rubbish[:, 6:] = [[0, 3, 49], [-1, 10**6, VOCAB]]
    padded = np.asarray(logits(model, tokens))[:, :6]
    np.testing.assert_array_equal(padded, np.asarray(logits(model, rubbish))[:, :6])
    np.testing.assert_allclose(padded, np.asarray(logits(model, tokens[:, :6])), rtol=1e-4, atol=2e-5)


@pytest.mark.slow(but=("windows", "gemma", "experts", "conv"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_what_is_before_it_and_within_its_windows(kind):
    model, attention = tiny(kind), KINDS[kind].attention
    tokens = np.random.default_rng(0).integers(1, VOCAB, (1, 9))
    changed = tokens.copy()
    changed[0, 4] = 0
    moved = np.abs(np.asarray(logits(model, tokens)) - np.asarray(logits(model, changed))).max(axis=-1)[0]
    assert not moved[:4].any() and moved[4] > 1e-3 and moved[5] > 1e-6
    if not attention.windows:
        assert np.all(moved[5:] > 1e-6)


def test_windows_of_all_layers_bound_what_is_seen():
    config = dataclasses.replace(
        KINDS["windows"], attention=dataclasses.replace(KINDS["windows"].attention, windows=(2, 2, 2))
    )
    model = Decoder(config, to_parameters(tiny("windows")))
    tokens = np.random.default_rng(0).integers(1, VOCAB, (1, 9))
    changed = tokens.copy()
    changed[0, 1] = 0
    moved = np.abs(np.asarray(logits(model, tokens)) - np.asarray(logits(model, changed))).max(axis=-1)[0]
    # Each of the three layers sees one token back: the fourth after the change cannot know of it.
    assert np.all(moved[1:5] > 1e-7) and not moved[5:].any()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
@pytest.mark.parametrize("kind", ["plain", "gemma"])
def test_rematerialisation_changes_neither_values_nor_gradients(kind, remat):
    model, rows = tiny(kind), packed_row(24)[0]

    @functools.partial(jax.jit, static_argnums=1)
    def graded(model, how):
        return jax.value_and_grad(lambda m: jnp.sum(jnp.sin(forward(m, rows, ComputeOptions(remat=how)))))(model)

    traced = str(jax.make_jaxpr(graded, static_argnums=1)(model, remat))
    assert ("MemorySpace.Host" in traced) == (remat == "offload")
    plain, again = graded(model, "none"), graded(model, remat)
    np.testing.assert_allclose(again[0], plain[0], rtol=1e-5)
    assert largest_difference(again[1], plain[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_bfloat16(kind):
    model, rows = tiny(kind, dtype="bfloat16"), packed_row(24)[0]
    traced = jax.make_jaxpr(
        lambda m: jax.grad(lambda w: jnp.sum(unembed(w, forward(w, rows, ComputeOptions(remat="full")))))(m)
    )(model)
    products = [e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    forward_only = jax.make_jaxpr(lambda m: unembed(m, forward(m, rows)))(model)
    # Without a cache to keep, the scans over layers return their carry and nothing else.
    scans = [e for e in equations(forward_only.jaxpr) if e.primitive.name == "scan"]
    carried = {v.aval.dtype for e in scans for v in e.outvars if v.aval.ndim == 3}
    assert carried == {jnp.dtype(jnp.bfloat16)}
    assert len(products) > 10 and jax.eval_shape(hidden, model, rows).dtype == jnp.bfloat16
    assert jax.eval_shape(logits, model, rows.tokens).dtype == jnp.float32
    assert all(v.aval.dtype == jnp.bfloat16 for v in traced.jaxpr.outvars)


@functools.cache
def loss_and_gradient(kind):
    """A loss that depends on all logits, and its gradient."""
    model = tiny(kind)
    rows = causal_rows(np.random.default_rng(0).integers(0, VOCAB, (2, 6)))
    weights = jax.random.normal(jax.random.key(1), (2, 6, VOCAB))
    loss = jax.jit(lambda m: jnp.mean(weights * jax.nn.log_softmax(unembed(m, forward(m, rows)))))
    return model, loss, jax.jit(jax.grad(loss))(model)


@pytest.mark.slow(but="gemma")
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_slope(kind):
    model, loss, grad = loss_and_gradient(kind)
    # Along the gradient itself the slope is the largest that there is, so float32 can see it.
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grad)))
    step = 2e-4
    up, down = (float(loss(jax.tree.map(lambda w, g, s=s: w + s * g / norm, model, grad))) for s in (step, -step))
    np.testing.assert_allclose((up - down) / (2 * step), float(norm), rtol=1e-2)


@pytest.mark.slow
def test_every_parameter_gets_a_gradient():
    for kind in KINDS:
        for path, leaf in jax.tree.leaves_with_path(loss_and_gradient(kind)[2]):
            # By the one experts are chosen and nothing is weighed; the other is a constant in transformers.
            constant = any(name in jax.tree_util.keystr(path) for name in ("choice_bias", "layer_scale"))
            assert np.asarray(leaf).any() != constant, (kind, path)


@pytest.mark.slow
def test_initialise_follows_the_scale_and_leaves_norms_neutral():
    for kind in ("bias", "gemma"):
        model = initialise(KINDS[kind], jax.random.key(0), jnp.bfloat16, scale=0.1)
        named = {jax.tree_util.keystr(path): np.asarray(x, np.float32) for path, x in jax.tree.leaves_with_path(model)}
        norms = {name: x for name, x in named.items() if "norm" in name}
        assert all(np.all(x == (0.0 if KINDS[kind].norm.plus_one else 1.0)) for x in norms.values())
        assert all(not x.any() for name, x in named.items() if "bias" in name)
        assert all(0.08 < x.std() < 0.12 for name, x in named.items() if name not in norms and "bias" not in name)


def test_the_bias_by_which_experts_are_chosen_keeps_its_digits():
    model = tiny("latent")
    bias = 7.5 + 0.01 * np.arange(8, dtype=np.float32)
    parameters = to_parameters(model)
    parameters["blocks"]["experts"]["choice_bias"] = jnp.broadcast_to(bias, (2, 8))
    narrow = cast(Decoder(model.config, parameters), "bfloat16").weights.blocks.experts
    assert narrow.router.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.choice_bias, np.stack([bias, bias]))


def test_keys_that_layers_share_are_kept_once_for_the_backward_pass():
    windows = tuple(0 if i % 3 == 2 else 4 for i in range(12))
    attention = dataclasses.replace(KINDS["gemma4"].attention, windows=windows)
    config = dataclasses.replace(KINDS["gemma4"], layers=12, experts=None, shared_kv_layers=6, attention=attention)
    model = jax.eval_shape(lambda: initialise(config, jax.random.key(0)))
    rows, compute = causal_rows(np.zeros((3, 40))), ComputeOptions(remat="full")
    backward = jax.make_jaxpr(lambda m: jax.vjp(lambda m: jnp.sum(forward(m, rows, compute)), m)[1])(model)
    shapes = [x.shape for x in backward.out_avals]
    for heads in ((2, 8), (1, 12)):
        kept = [shape for shape in shapes if shape[-4:] == (3, 40, *heads)]
        assert kept == [(3, 40, *heads)] * 2, "keys and values"


def mixed(layers):
    """Layers of two kinds: "a" has attention, others a state."""
    recurrent = Recurrent("delta", tuple(layer != "a" for layer in layers), 4, 2, 4, 8, 6)
    return dataclasses.replace(KINDS["delta"], layers=len(layers), recurrent=recurrent)


MIXED = {"dddadddaddda": 2, "dadadad": 3, "cacca" * 2: 4, "ddda": 2, "adddddd": 2, "a": 1}
"""Layers, and the bodies that are compiled for them."""


@pytest.mark.parametrize("layers", MIXED)
def test_every_layer_is_in_one_period(layers):
    """Few bodies are compiled, and each layer runs once, in order, with its own weights."""
    config, order = mixed(layers), []
    for period in periods_of(config):
        for repeat in range(period.repeats):
            for run in period.runs:
                for i in range(run.count):
                    places = {part: place + repeat * period.sizes[part] + i for part, place in run.places.items()}
                    order.append(places)
    assert order == list(layer_places(config))
    assert sum(len(period.runs) for period in periods_of(config)) == MIXED[layers]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("layers", MIXED)
def test_layers_run_in_order_on_their_own_weights(layers, indexed):
    """Those of learning are cut out of their stacks, and those of sampling read by number."""
    config, random = mixed(layers), np.random.default_rng(0)
    parts = sorted({part for places in layer_places(config) for part in places} - {"layer"})
    stacks = {part: {"w": random.integers(1, 9, len(config.layers_with(part))).astype(float)} for part in parts}

    def layer(x, w, inputs):
        own = sum(getattr(w, part).w[...] for part in parts if hasattr(w, part))
        return (x * 3 + own) % 1009, {part: own for part in ("attn", "delta") if hasattr(w, part)}

    inputs = {"layer": np.arange(config.layers)}
    found, outputs = scan_layers(layer, jnp.float32(1), config, Weights(stacks), inputs, indexed=indexed)
    x, each = 1.0, {"attn": [], "delta": []}
    for places in layer_places(config):
        own = sum(stacks[part]["w"][i] for part, i in places.items() if part in stacks)
        x = (x * 3 + own) % 1009
        each["attn" if "attn" in places else "delta"].append(own)
    assert float(found) == x
    assert {part: np.asarray(own).tolist() for part, own in outputs.items()} == {k: v for k, v in each.items() if v}
