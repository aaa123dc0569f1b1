"""Rows of every kind, their samples, and the losses of data written out over completions one by one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from learner.rollouts import moved
from tiny import VOCAB, logprob_and_entropy, tiny

from jaxrl_llm.algorithms.preference import DPO, IPO, KTO, ORPO, SimPO
from jaxrl_llm.data import Judged, Ranked, Stepped, Text
from jaxrl_llm.learner.objectives import NextToken, PairLoss, Ranking, StepEntropy, UnpairedLoss
from jaxrl_llm.models.decoder import causal_rows, forward, logits
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import with_adapter
from jaxrl_llm.stages.dataset import text_sample
from jaxrl_llm.stages.preference import pair_samples, unpaired_samples
from jaxrl_llm.stages.reward_model import reward_samples

T, WIDTH = 11, 18
LENGTHS = ((3, 8), (5, 1), (2, 4, 7), (6, 3, 2, 9), (4, 4))
"""Tokens of each prompt's completions, best first."""
MODEL = tiny("windows")
REFERENCE = moved(MODEL, tiny("windows", 5), 0.02)
SCALAR = ScalarModel(MODEL, {"scalar": jnp.asarray(np.random.default_rng(3).normal(size=16).astype(np.float32))})


def drawn(count, seed):
    return np.random.default_rng(seed).integers(1, VOCAB, count).astype(np.int32)


def prompt(number):
    """The last two are one and the same."""
    return drawn(2 + min(number, 3), 50 + min(number, 3))


@functools.cache
def rankings(most=4):
    """Of two, three and four completions with margins, or of the best few of them."""
    return [
        Ranked(
            str(number),
            prompt(number),
            tuple(drawn(length, 10 * number + place) for place, length in enumerate(lengths[:most])),
            0.25 * number,
            str(number),
        )
        for number, lengths in enumerate(LENGTHS)
    ]


@functools.cache
def texts():
    """Of some of their tokens nothing is learned, as of what the user says between two turns."""
    return [
        Text(row.id, row.prompt, tokens, np.arange(len(tokens)) % 3 != 1, row.where)
        for row in rankings()
        for tokens in row.completions
    ]


SOLUTIONS = {9: {0: 1.0, 3: 1.0, 8: 0.0}, 6: {1: 0.75, 2: 0.25}, 1: {0: 0.125}, 7: {2: 1.0, 5: 0.5}}
"""By how many tokens they have, the label of the step that ends at each place."""


@functools.cache
def solutions():
    """Their steps end at first, last, and neighbouring tokens; labels are hard and soft."""
    return [
        Stepped(str(n), prompt(n % 2), drawn(length, 90 + n), np.array([*ends]), np.array([*ends.values()]), str(n))
        for n, (length, ends) in enumerate(SOLUTIONS.items())
    ]


def members(rows):
    """Prompt and tokens of every completion."""
    return [(row.prompt, tokens) for row in rows for tokens in getattr(row, "completions", [getattr(row, "tokens", 0)])]


@functools.partial(jax.jit, static_argnums=0)
def pulled(output, params, base, rows, slope):
    """An output [B, WIDTH] of rows that hold one completion after its prompt each, and the parameters' gradient for its
    slopes. Column c is what the state before token c says.
    """

    def read(params):
        model = with_adapter(base, params)
        if output == "values":
            found = forward(model.decoder, causal_rows(rows)) @ model.weights.scalar[...]
        else:
            found, _ = logprob_and_entropy(logits(model, rows), jnp.roll(rows, -1, axis=1))
        return jnp.roll(found, 1, axis=1)

    found, back = jax.vjp(read, params)
    return found, back(slope)[0]


def rows_of(completions):
    """int32[B, WIDTH]."""
    rows = np.zeros((16, WIDTH), np.int32)
    for row, (asked, tokens) in zip(rows, completions, strict=False):
        row[: len(asked) + len(tokens)] = [*asked, *tokens]
    return rows


def at_tokens(found, completions):
    """What is found at each completion's tokens, and one place behind the last."""
    return [found[n, len(asked) :][: len(tokens) + 1] for n, (asked, tokens) in enumerate(completions)]


def by_hand(output, params, completions, loss, base=None):
    """Value and gradient of a loss of what is found for each completion by itself."""
    rows = rows_of(completions)
    found, _ = pulled(output, params, base, rows, np.zeros(rows.shape, np.float32))
    value, slope = jax.jit(jax.value_and_grad(lambda x: loss(at_tokens(x, completions))))(found)
    return value, pulled(output, params, base, rows, slope)[1]


def likelihood(found):
    """Mean negative log-likelihood of the tokens that are learned, of all texts together."""
    learned = [logp[at] for text, logp in zip(texts(), found, strict=True) for at in np.flatnonzero(text.mask)]
    return -sum(learned) / len(learned)


@functools.cache
def known():
    """Log-probabilities of both completions of each pair under the reference, float64[n, 2]."""
    completions = members(rankings(2))
    rows = rows_of(completions)
    found, _ = pulled("logp", REFERENCE, None, rows, np.zeros(rows.shape, np.float32))
    return np.array([x[:-1].astype(np.float64).sum() for x in at_tokens(np.asarray(found), completions)]).reshape(-1, 2)


def minus_log_sigmoid(x):
    return jnp.log(1 + jnp.exp(-x))


def preference(formula, average):
    """The mean of a formula over pairs, of ``h = (logp_w - ref_w) - (logp_l - ref_l)``."""

    def loss(found):
        sizes = [len(tokens) if average else 1 for _, tokens in members(rankings(2))]
        gaps = [
            (sum(logp[:-1]) - ref) / size for logp, ref, size in zip(found, known().reshape(-1), sizes, strict=True)
        ]
        margins = [better - worse for better, worse in zip(gaps[::2], gaps[1::2], strict=True)]
        return sum(map(formula, margins)) / len(margins)

    return loss


def odds(mean):
    return mean - jnp.log(1 - jnp.exp(mean))


def without_reference(formula):
    """The mean of a formula over pairs, of the mean log-probabilities of both answers."""

    def loss(found):
        means = [sum(logp[:-1]) / (len(logp) - 1) for logp in found]
        return sum(formula(a, b) for a, b in zip(means[::2], means[1::2], strict=True)) / len(means) * 2

    return loss


def unpaired():
    """Samples of the better answers as good ones and of the worse as bad ones, each with one of another prompt: the
    worse answer of the pair before.
    """
    rows = [
        (Judged(row.id, row.prompt, tokens, not place, row.where), before.completions[1])
        for row, before in zip(rankings(2)[:4], [rankings(2)[3], *rankings(2)[:3]], strict=True)
        for place, tokens in enumerate(row.completions)
    ]
    references = np.linspace(-40, -20, 2 * len(rows)).reshape(-1, 2)
    return [unpaired_samples(row, other, ref) for (row, other), ref in zip(rows, references, strict=True)]


def prospect(found):
    """KTO with other weights for good and bad answers; z, of the answers to other prompts, is a number."""
    samples = [sample.scalars for group in unpaired() for sample in group]
    gaps = [sum(logp[:-1]) - one["ref_logp"] for logp, one in zip(found, samples, strict=True)]
    point = jax.lax.stop_gradient(jnp.maximum(sum(gaps[1::2]) / len(gaps[1::2]), 0))
    total = 0.0
    for gap, one in zip(gaps[::2], samples[::2], strict=True):
        below = 0.05 * (point - gap)
        total += 1 / (1 + jnp.exp(-below)) if one["label"] else 1.5 / (1 + jnp.exp(below))
    return total / len(gaps[::2])


def ranked(centre):
    """The mean over prompts of the mean over their pairs of ``-log sigmoid(r_w - r_l - margin)``; a score is what is
    found behind the last token.
    """

    def loss(found):
        scores = iter([values[-1] for values in found])
        total = 0.0
        for row in rankings():
            own = [next(scores) for _ in row.completions]
            pairs = [(a, b) for i, a in enumerate(own) for b in own[i + 1 :]]
            total += sum(minus_log_sigmoid(a - b - row.margin) for a, b in pairs) / len(pairs)
            total += centre * (2 * sum(own) / len(own)) ** 2
        return total / len(rankings())

    return loss


def stepwise(found):
    """The mean over all steps of the cross-entropy of what is found behind their last tokens."""
    losses = [
        label * minus_log_sigmoid(values[end + 1]) + (1 - label) * minus_log_sigmoid(-values[end + 1])
        for row, values in zip(solutions(), found, strict=True)
        for end, label in zip(row.ends, row.labels, strict=True)
    ]
    return sum(losses) / len(losses)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss as the package has it, and by hand."""

    objective: Any
    params: Any
    groups: Any
    completions: Any
    loss: Any


def pairs():
    """Samples of both completions of each pair."""
    return [pair_samples(row, ref, n) for n, (row, ref) in enumerate(zip(rankings(2), known(), strict=True))]


def case(name):
    """The losses by name."""
    if name == "texts":
        return Case(NextToken(), MODEL, [[text_sample(t)] for t in texts()], members(texts()), likelihood)
    if name in PREFERENCES:
        loss, formula = PREFERENCES[name]
        return Case(PairLoss(loss), MODEL, pairs(), members(rankings(2)), preference(formula, loss.average))
    if name in ALONE:
        loss, formula = ALONE[name]
        return Case(PairLoss(loss), MODEL, pairs(), members(rankings(2)), without_reference(formula))
    if name == "kto":
        completions = [(sample.prompt, sample.tokens) for group in unpaired() for sample in group]
        return Case(UnpairedLoss(KTO(0.05, undesirable=1.5)), MODEL, unpaired(), completions, prospect)
    if name == "steps":
        groups = [reward_samples(row, n) for n, row in enumerate(solutions())]
        return Case(StepEntropy(), SCALAR, groups, members(solutions()), stepwise)
    groups = [reward_samples(row, n) for n, row in enumerate(rankings())]
    return Case(Ranking(0.1), SCALAR, groups, members(rankings()), ranked(0.1))


PREFERENCES = {
    "dpo": (DPO(0.3), lambda h: minus_log_sigmoid(0.3 * h)),
    "dpo of averages, smoothed": (
        DPO(2.0, 0.2, average=True),
        lambda h: 0.8 * minus_log_sigmoid(2 * h) + 0.2 * minus_log_sigmoid(-2 * h),
    ),
    "ipo": (IPO(0.3), lambda h: (h - 1 / 0.6) ** 2),
}
ALONE = {
    "simpo": (SimPO(2.0, 1.0), lambda a, b: minus_log_sigmoid(2 * (a - b) - 1)),
    "orpo": (ORPO(0.3), lambda a, b: -a + 0.3 * minus_log_sigmoid(odds(a) - odds(b))),
}
"""Losses without a reference."""
CASES = ("texts", *PREFERENCES, *ALONE, "kto", "centred", "steps")
