"""Texts beside the groups of a step: what they add to the gradient, and where in the step they stand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    TEMPERATURE,
    T,
    forward_on,
    groups,
    objective_gradient,
    one_device,
    rollout,
    unpacked_logp,
    unpacked_loss,
)
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.data import Text
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, PolicyGradient, pack
from jaxrl_llm.learner.objectives import NextToken
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.ingredients import PretrainingMix, max_text_tokens, split_text

MODEL = tiny("windows")
LAYOUT = Layout(2, 22, T)
ALGORITHM = PRESETS["reinforce"]
COEF = 0.7


def text(number, prompt=1, size=4):
    """A text of random tokens; its first one is not learned."""
    ids = np.random.default_rng(number).integers(1, 50, prompt + size).astype(np.int32)
    mask = np.ones(size, bool)
    mask[0] = prompt == 1
    return Text(str(number), ids[:prompt], ids[prompt:], mask, f"rows.jsonl:{number}")


TEXTS = tuple(text(number, prompt=1 + number % 2, size=3 + number % 4) for number in range(5))
MIXTURE = PretrainingMix(
    TEXTS, (), 3, 0, others=("policy",), forward=forward_on(one_device(), LAYOUT), status=lambda _: None
)


def mixed(drawn=3):
    return MIXTURE.samples(groups(rollout()), RolloutBatch([], [], Carryover(texts=drawn), 0, 0, {}))


@pytest.mark.slow
def test_the_gradient_is_that_of_the_policy_and_of_the_texts_likelihood():
    samples = [sample for group in mixed() for sample in group]
    texts = [sample for sample in samples if sample.counted_by == ("text",)]
    objectives = (PolicyGradient(ALGORITHM), NextToken(COEF, "text/"))
    packed = pack(samples, LAYOUT, ("policy", "text"))
    grads, metrics = objective_gradient(MODEL, packed, objectives)

    def likelihood(model):
        logp = unpacked_logp(model, texts)
        learned = np.zeros(logp.shape, bool)
        for row, sample in zip(learned, texts, strict=True):
            row[: len(sample.mask)] = sample.mask
        return -jnp.sum(jnp.where(learned, logp, 0.0)) / float(learned.sum())

    wanted = jax.grad(lambda model: unpacked_loss(ALGORITHM, model, rollout())[0] + COEF * likelihood(model))(MODEL)
    assert largest_difference(grads, wanted) < 1e-5
    np.testing.assert_allclose(metrics["text/loss"], likelihood(MODEL), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["loss"], unpacked_loss(ALGORITHM, MODEL, rollout())[0] + COEF * likelihood(MODEL), rtol=1e-5, atol=1e-6
    )


def test_an_epoch_has_every_text_once_and_each_minibatch_its_share():
    found = []
    for step in range(1, 6):
        order = [group[0].counted_by == ("text",) for group in mixed(3 * step)]
        assert order == [False, True, False, True, False, True]
        found += [group[0].tokens.tobytes() for group in mixed(3 * step) if group[0].counted_by == ("text",)]
    wanted = sorted(one.tokens.tobytes() for one in TEXTS)
    assert [sorted(found[begin : begin + 5]) for begin in (0, 5, 10)] == [wanted] * 3
    assert {sample.counted_by for group in mixed() for sample in group} == {("policy",), ("text",)}


def test_a_long_plain_text_is_cut_and_every_token_learned_once():
    long = dataclasses.replace(text(7, size=25), mask=np.arange(25) % 3 > 0)
    parts = split_text(long, 22, T)
    assert [len(part.tokens) for part in parts] == [10, 10, 5]
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), long.tokens)
    np.testing.assert_array_equal(np.concatenate([part.mask for part in parts]), long.mask)
    assert [int(part.prompt[0]) for part in parts] == [int(long.prompt[0]), *(int(long.tokens[at]) for at in (9, 19))]
    assert split_text(TEXTS[0], 22, T) == [TEXTS[0]]
    with pytest.raises(InputError, match=r"rows.jsonl:8 has a prompt of 3 and a completion of 25 tokens"):
        split_text(text(8, prompt=3, size=25), 22, T)
    asked = text(8, prompt=3, size=25)
    cut = asked.cut(max_text_tokens(asked, 22, T))
    assert split_text(cut, 22, T) == [cut] and cut.length == min(22, 3 + T) and max_text_tokens(long, 22, T) == np.inf


def test_held_out_texts_are_tested_at_temperature_one():
    plain = dataclasses.replace(MIXTURE.forward, temperature=1.0)
    mixtures = [dataclasses.replace(MIXTURE, held_out=TEXTS[:2], forward=x) for x in (plain, MIXTURE.forward)]
    found, other = (one.evaluate(MODEL) for one in mixtures)
    assert TEMPERATURE != 1 and abs(found["eval/text/loss"] - other["eval/text/loss"]) > 1e-3
    np.testing.assert_allclose(np.log(found["eval/text/perplexity"]), found["eval/text/loss"], rtol=1e-6)
