"""Tiny random models of every kind of layer, and a plain pass over their compiled programs."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl_llm.models.config import Attention, Embeddings, Experts, Latent, ModelConfig, Norm, Recurrent, Rope, Yarn
from jaxrl_llm.models.decoder import Decoder, neutral_norm, parameter_shapes
from jaxrl_llm.stages.programs import ingredients_of, rules_for

VOCAB = 50
KINDS = {
    "plain": ModelConfig("llama", VOCAB, 16, 2, 24, Attention(4, 2, 8)),
    "windows": ModelConfig(
        "mistral", VOCAB, 16, 3, 24, Attention(4, 2, 8, windows=(0, 3, 4)), embeddings=Embeddings(tied=True)),
    "bias": ModelConfig("qwen2", VOCAB, 16, 2, 24, Attention(2, 1, 8, rope=Rope(scaling=2.0))),
    "head_norm": ModelConfig("qwen3", VOCAB, 16, 2, 24, Attention(4, 4, 8)),
    "experts": ModelConfig(
        "qwen2_moe", VOCAB, 16, 2, 24, Attention(4, 2, 8), experts=Experts(6, 3, 12, True, shared_width=10)),
    "full_norm": ModelConfig("olmo2", VOCAB, 16, 2, 24, Attention(4, 2, 8)),
    "gemma": ModelConfig(
        "gemma2", VOCAB, 16, 3, 24,
        Attention(4, 2, 8, scale=0.5, softcap=5.0, windows=(3, 0, 4), rope=Rope(local_theta=100.0)),
        Norm(eps=1e-6, plus_one=True), "gelu_tanh", Embeddings(True, 4.0, 8.0)),
    "partial": ModelConfig(
        "glm4", VOCAB, 16, 2, 24,
        Attention(4, 2, 8, rope=Rope(50.0, 2.0, dims=4, interleaved=True, layers=(True, False)), biased=False),
        Norm(), embeddings=Embeddings(logit_divisor=2.0), residual_scale=0.5),
    "sinks": ModelConfig(
        "gpt_oss", VOCAB, 16, 2, 24,
        Attention(4, 2, 8, windows=(3, 0), rope=Rope(50.0, Yarn(4.0, 16, 4.0, 0.5, 1.2, False)), sinks=True),
        experts=Experts(4, 2, renormalise=True, limit=0.5)),
    "delta": ModelConfig(
        "qwen3_5_text", VOCAB, 16, 4, 24, Attention(4, 2, 8, rope=Rope(dims=4), gated=True), Norm(plus_one=True),
        recurrent=Recurrent("delta", (True, True, False, True), 4, 2, 4, 8, 6)),
    "conv": ModelConfig(
        "lfm2", VOCAB, 16, 4, 24, Attention(4, 2, 8), embeddings=Embeddings(tied=True),
        recurrent=Recurrent("conv", (True, False, True, False), 3)),
    "latent": ModelConfig(
        "deepseek_v3", VOCAB, 16, 3, 24,
        Attention(4, 4, 7, rope=Rope(dims=4, interleaved=True), latent=Latent(6, 5, 3, 4, 5)),
        experts=Experts(8, 3, 10, True, 12, dense_layers=1, sigmoid=True, groups=4, active_groups=2, scaling=1.5)),
    "gemma4": ModelConfig(
        "gemma4_text", VOCAB, 16, 5, 24,
        Attention(4, 2, 8, scale=0.25, windows=(3, 4, 0, 3, 0), rope=Rope(50.0), normed_values=True),
        Norm(), "gelu_tanh", Embeddings(True, 4.0, 8.0),
        experts=Experts(6, 3, 12, True, beside_mlp=True),
        global_attention=Attention(
            4, 1, 12, scale=0.25, rope=Rope(100.0, rotated_pairs=2), normed_values=True, keys_as_values=True),
        shared_kv_layers=2, shared_kv_mlp_width=32, per_layer_width=6),
}  # fmt: skip
"""A configuration for each thing that a family may have; all else is as small as can be."""


def tiny(kind: str = "plain", seed: int = 0, dtype: str = "float32") -> Decoder:
    """A model whose every weight, norms and biases too, is random and matters; NumPy makes it, so nothing compiles."""
    config, random = KINDS[kind], np.random.default_rng(seed)

    leaves = {}
    for path, shape in parameter_shapes(config).items():
        centre = neutral_norm(config, path) if "norm" in path else 0.0
        leaves[path] = jax.device_put((centre + 0.3 * random.normal(size=shape)).astype(np.float32).astype(dtype))
    return Decoder(config, traverse_util.unflatten_dict(leaves, sep="."))


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def largest_difference(a, b) -> float:
    """The largest difference between two trees, relative to the largest entry of each leaf of the second."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(jnp.abs(jnp.asarray(x) - jnp.asarray(y)).max() / (jnp.abs(jnp.asarray(y)).max() + 1e-9)) for x, y in pairs
    )


@contextlib.contextmanager
def compiled(optimised):
    """What compiles here is as fast as a run's, or is there sooner; XLA's optimisations are most of its time."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not optimised)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def rules_in(run):
    """The rules between the steps of a run."""
    return rules_for(run, ingredients_of(run))


class Compilations(logging.Handler):
    """Hears the name of everything that JAX compiles."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.heard = []

    def emit(self, record):
        if record.getMessage().startswith("Compiling "):
            self.heard.append(record.getMessage().split()[1])

    def __enter__(self):
        self.context = jax.log_compiles()
        self.context.__enter__()
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *details):
        logging.getLogger("jax").removeHandler(self)
        self.context.__exit__(*details)


def logprob_and_entropy(scaled_logits, targets):
    """The plain form: log-probability of targets [...] and entropy [...] of all logits [..., V], differentiated by
    JAX.
    """
    logp = jax.nn.log_softmax(scaled_logits)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)
