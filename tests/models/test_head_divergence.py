"""The divergence of two LM heads by chunks: equal to both models' log-softmax, and never all logits of either."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tiny import VOCAB, equations, largest_difference, tiny

from jaxrl_llm.algorithms.kl import JensenShannon, top_classes
from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig
from jaxrl_llm.models.decoder import initialise, unembed
from jaxrl_llm.models.heads import TeacherStates, token_divergence, top_tokens
from jaxrl_llm.sharding import BATCH, MeshShape, fit_spec, make_mesh, shardings

P, N, D, WIDE = 2, 23, 16, 24
HIDDEN, STATES = (
    jnp.asarray(np.random.default_rng(n).normal(size=(P, N, width)).astype(np.float32))
    for n, width in ((0, D), (1, WIDE))
)


def teacher_of(vocab, tied=False):
    """A model of another width."""
    config = ModelConfig("llama", vocab, WIDE, 1, 8, Attention(1, 1, 8), embeddings=Embeddings(tied=tied))
    return initialise(config, jax.random.key(2), scale=0.3)


def plain(divergence, model, hidden, teacher, temperature):
    """From all logits of both, over the tokens that both have."""
    both = min(model.config.vocab_size, teacher.config.vocab_size)
    ours = unembed(model, hidden) / temperature
    theirs = jax.nn.log_softmax((unembed(teacher, STATES) / temperature)[..., :both])
    if not divergence.top_k:
        return divergence(jax.nn.log_softmax(ours[..., :both]), theirs)
    ids = jax.lax.top_k(theirs, divergence.top_k)[1]
    return divergence(top_classes(jax.nn.log_softmax(ours), ids), top_classes(theirs, ids))


def chunked(divergence, model, hidden, teacher, temperature, chunk=7, count=None):
    given = TeacherStates(teacher, STATES)
    if divergence.top_k:
        given = top_tokens(teacher, STATES, divergence.top_k, temperature, model.config.vocab_size)
    return token_divergence(divergence, model, hidden, given, temperature, chunk, count)


def graded(function, divergence, kind, teacher):
    loss = lambda model, hidden: jnp.sum(jnp.sin(function(divergence, model, hidden, teacher, 0.8)))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(tiny(kind), HIDDEN)


WIDER, NARROWER = ("plain", VOCAB + 14), ("gemma", VOCAB - 3)


@pytest.mark.slow(but="divergence0-plain-64")
@pytest.mark.parametrize(
    ("divergence", "kind", "vocab"),
    [
        (JensenShannon(0), *WIDER),
        (JensenShannon(0.3), *NARROWER),
        (JensenShannon(1), *NARROWER),
        (JensenShannon(0.3, 5), *WIDER),
        (JensenShannon(0.3, 5), *NARROWER),
    ],
)
def test_values_and_gradients_are_those_of_all_logits(divergence, kind, vocab):
    """The teacher is wider, and has more tokens than the student or fewer; one student's head is tied and capped."""
    teacher = teacher_of(vocab, tied=kind == "plain")
    found, wanted = (graded(function, divergence, kind, teacher) for function in (chunked, plain))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert largest_difference(found[1], wanted[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 5])
def test_positions_that_are_not_asked_cost_nothing_and_the_teacher_gets_no_gradient(top_k):
    asked = functools.partial(chunked, chunk=3, count=9)
    found = asked(JensenShannon(0.5, top_k), tiny(), HIDDEN.at[:, 9:].set(jnp.nan), teacher_of(VOCAB), 1.0)
    assert (found[:, 9:] == 0).all() and (found[:, :9] > 0).all()
    slope = jax.grad(lambda teacher: jnp.sum(chunked(JensenShannon(0.5), tiny(), HIDDEN, teacher, 1.0)))
    assert not any(np.any(x) for x in jax.tree.leaves(slope(teacher_of(VOCAB))))


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 8])
def test_memory_does_not_grow_with_positions_times_vocabulary(top_k):
    vocab, chunk, counts = 4000, 64, (1024, 4096)
    models = [initialise(ModelConfig("llama", vocab, D, 1, 8, Attention(1, 1, 8)), jax.random.key(n)) for n in (0, 1)]

    def loss(model, hidden, states):
        given = TeacherStates(models[1], states)
        given = top_tokens(*given, top_k, 1.0, vocab) if top_k else given
        return jnp.sum(token_divergence(JensenShannon(0.5, top_k), model, hidden, given, 1.0, chunk))

    peaks = []
    for count in counts:
        inputs = (jnp.zeros((1, count, D)),) * 2
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(models[0], *inputs)
        widest = max(v.aval.size for e in equations(traced.jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "size"))
        assert widest <= 512 * vocab < counts[0] * vocab  # top tokens are read in the usual chunks
        peaks.append(traced.lower().compile().memory_analysis().temp_size_in_bytes)
    assert peaks[1] - peaks[0] < chunk * vocab * 2, peaks
    assert peaks[1] < 12 * max(chunk, 512 * (top_k > 0)) * vocab * 4, peaks


@pytest.mark.slow
def test_on_a_mesh_it_is_the_same():
    sizes = {"vocab_size": 640, "width": D, "layers": 1, "mlp_width": 8}
    models = [initialise(ModelConfig("llama", *sizes.values(), Attention(1, 1, 8), embeddings=Embeddings(tied=tied)),
                         jax.random.key(tied), scale=0.3) for tied in (False, True)]  # fmt: skip
    hidden, states = jnp.tile(HIDDEN, (2, 1, 1)), jnp.tile(HIDDEN[..., ::-1], (2, 1, 1))

    def loss(model, teacher, hidden, states):
        return jnp.sum(token_divergence(JensenShannon(0.4), model, hidden, TeacherStates(teacher, states), 0.8, 8))

    graded, mesh = jax.jit(jax.value_and_grad(loss, argnums=(0, 2))), make_mesh(MeshShape(2, 2, 2))
    with jax.set_mesh(mesh):
        rows = [jax.device_put(x, NamedSharding(mesh, fit_spec(x.shape, (BATCH,), mesh))) for x in (hidden, states)]
        found = graded(*(jax.device_put(model, shardings(model, mesh)) for model in models), *rows)
    assert largest_difference(found, graded(*models, hidden, states)) < 1e-5
