"""How many forward passes a step makes, and how often its programs are compiled: none that nothing reads, and once."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import T, UpdateBy, forward_on, groups, one_device, policy_training, rollout, sample
from tiny import VOCAB, Compilations, equations, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.learner import Forward, Layout, Learner, Optimiser, Training, create_state, learn, pack
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import Update, compile_ahead, kl_of_policy
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import causal_rows, forward

MODEL, MESH = tiny("windows"), one_device()


def embeddings(function, *given):
    """How often the traced program looks tokens up in the embedding: each forward pass does so once, no backward pass
    does.
    """
    traced = jax.make_jaxpr(function)(*given)
    tables = [e.invars[0].aval.shape for e in equations(traced.jaxpr) if e.primitive.name == "gather"]
    return tables.count((VOCAB, MODEL.config.width))


def step(settings, algorithm):
    """Forward passes of every update of one rollout, scoring included; all microbatches of a call count once."""
    samples = groups(rollout())
    real = policy_training(algorithm, settings.optimiser, several=settings.updates > 1)

    def update(state, packed, coefficients):
        return real.update(state, packed, coefficients)[0], {
            "policy_kl": np.float32(0),
            "refused/not_finite": np.float32(0),
        }

    def whole(state):
        training = (Training(real.objectives, UpdateBy(update)),)
        return learn(state, samples, settings, forward_on(MESH, Layout(2, 40, T), ComputeOptions()), training, {}, 0)[0]

    state = create_state(tiny("windows"), build(settings.optimiser), algorithm.needs_reference, MESH)
    return embeddings(whole, state)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "name", "wanted"), [
    (Learner(), "dapo", 1),  # one update follows the rollout: no old policy, and no KL: no reference
    (Learner(), "grpo", 2),  # and the reference once
    (Learner(epochs=2), "dapo", 3),  # the old policy once, two updates
    (Learner(minibatches=3), "dapo", 6),  # of each minibatch
    (Learner(epochs=3), "grpo", 5),  # old policy and reference once, however often they are compared with
    (Learner(epochs=2, minibatches=2), "grpo", 8),
])  # fmt: skip
def test_forward_passes_of_a_step(settings, name, wanted):
    assert step(settings, PRESETS[name]) == wanted


def test_a_reference_that_the_loss_does_not_read_is_not_scored():
    in_reward = dataclasses.replace(PRESETS["grpo"], kl_in="reward")
    assert in_reward.needs_reference and step(Learner(), in_reward) == 1


def test_a_controller_costs_one_pass_over_each_minibatch():
    batches = [pack(samples, Layout(2, 40, T)) for samples in groups(rollout())]
    batches = [batch.with_tokens(old_logp=np.zeros(batch.mask.shape, np.float32)) for batch in batches]
    state = create_state(tiny("windows"), build(Learner().optimiser), False, MESH)
    assert (
        embeddings(
            lambda state: kl_of_policy(state, batches, forward_on(MESH, Layout(2, 40, T), ComputeOptions())), state
        )
        == len(batches)
        == 3
    )


def test_the_count_counts():
    rows = jnp.zeros((2, 4), jnp.int32)
    once = lambda model: jnp.sum(forward(model, causal_rows(rows), ComputeOptions(remat="full")))
    assert embeddings(once, MODEL) == 1 == embeddings(jax.grad(once), MODEL)
    assert embeddings(lambda model: once(model) + once(model), MODEL) == 2


def test_programs_are_compiled_once_and_ahead():
    zeros = np.zeros(T, np.float32)
    longest = [sample(one.prompt, np.zeros(T, np.int32), zeros == 0, zeros, 0.0) for one in rollout()]
    settings = Learner(epochs=2)
    real = policy_training(PRESETS["dapo"], settings.optimiser, ComputeOptions(), several=True)
    forward = forward_on(MESH, Layout(1, 20, T).with_room(longest), ComputeOptions())
    state = create_state(tiny("windows"), build(settings.optimiser), False, MESH)
    compile_ahead(state, longest, settings, forward, (real,), {})
    with Compilations() as compilations, jax.set_mesh(MESH):  # of this thread
        for members in (groups(rollout()), groups(rollout())[:1]):
            state, _ = learn(state, members, settings, forward, (real,), {}, 0)
    assert int(state.policy.updates) == 4
    assert not {"jit(update)", "jit(_score)"} & {*compilations.heard}


def test_learning_waits_for_compilations_before_its_first_pass():
    said = []

    class Waiting(UpdateBy):
        def compiled(self):
            said.append("waited")

    class Telling(Forward):
        def score(self, *given):
            said.append("scored")
            return super().score(*given)

    settings = Learner(epochs=2)
    real = policy_training(PRESETS["dapo"], settings.optimiser, several=True)
    plain = forward_on(MESH, Layout(2, 40, T), ComputeOptions())
    forward = Telling(plain.layout, plain.compute, plain.temperature, plain.mesh)
    state = create_state(tiny("windows"), build(settings.optimiser), False, MESH)
    with jax.set_mesh(MESH):
        learn(state, groups(rollout()), settings, forward, (Training(real.objectives, Waiting(real.update)),), {}, 0)
    assert said == ["waited", "scored"]


def test_an_update_waits_for_its_compilation():
    said = []

    class Slow:
        def lower(self, *arguments):
            time.sleep(0.2)
            return self

        def compile(self):
            said.append("compiled")

        def __call__(self, *arguments):
            said.append("called")
            return arguments[0], {}

    update, state = Update(Slow()), create_state(tiny("windows"), build(Optimiser()), False, MESH)
    update.compile_ahead([update.program.lower], MESH)
    update(state, None, {})
    assert said == ["compiled", "called"]
