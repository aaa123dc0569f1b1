"""Losses of data: rows, packed, through the model, against the formulas written out over completions one by one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import one_device
from oracles import number
from tiny import VOCAB, largest_difference, logprob_and_entropy, tiny

from jaxrl_llm.algorithms.preference import DPO, IPO
from jaxrl_llm.learner import Layout, pack
from jaxrl_llm.learner.comparisons import PairLoss, Ranking, StepEntropy
from jaxrl_llm.learner.epochs import _split
from jaxrl_llm.learner.forward import Forward, on_mesh
from jaxrl_llm.learner.likelihood import NextToken
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import Lora
from jaxrl_llm.models.decoder import causal_rows, forward, logits
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import attached, create
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.stages.preference import pair_samples, sums
from jaxrl_llm.stages.reward_model import pair_numbers, samples_of, step_numbers
from jaxrl_llm.stages.supervised import sample_of, text_numbers
from jaxrl_llm.tasks import Ranked, Stepped, Text
from jaxrl_llm.types import Role

T, WIDTH = 11, 18
LENGTHS = ((3, 8), (5, 1), (2, 4, 7), (6, 3, 2, 9), (4, 4))
"""Tokens of each prompt's completions, best first."""
DIVIDED = Layout(8, 40, T, parts=4)
COMPUTE = Compute(remat="full")
MODEL = tiny("windows")
REFERENCE = jax.tree.map(lambda a, b: a + 0.02 * b, MODEL, tiny("windows", 5))
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
        model = attached(base, params)
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
    value, slope = jax.value_and_grad(lambda x: loss(at_tokens(x, completions)))(found)
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
        return Case(NextToken(), MODEL, [[sample_of(t)] for t in texts()], members(texts()), likelihood)
    if name in PREFERENCES:
        loss, formula = PREFERENCES[name]
        return Case(PairLoss(loss), MODEL, pairs(), members(rankings(2)), preference(formula, loss.average))
    if name == "steps":
        groups = [samples_of(row, n) for n, row in enumerate(solutions())]
        return Case(StepEntropy(), SCALAR, groups, members(solutions()), stepwise)
    groups = [samples_of(row, n) for n, row in enumerate(rankings())]
    centre = {"rankings": 0.0, "centred": 0.1}[name]
    return Case(Ranking(centre), SCALAR, groups, members(rankings()), ranked(centre))


PREFERENCES = {
    "dpo": (DPO(0.3), lambda h: minus_log_sigmoid(0.3 * h)),
    "dpo of averages, smoothed": (
        DPO(2.0, 0.2, average=True),
        lambda h: 0.8 * minus_log_sigmoid(2 * h) + 0.2 * minus_log_sigmoid(-2 * h),
    ),
    "ipo": (IPO(0.3), lambda h: (h - 1 / 0.6) ** 2),
    "ipo of averages": (IPO(2.0, average=True), lambda h: (h - 1 / 4) ** 2),
}
CASES = ("texts", *PREFERENCES, "rankings", "centred", "steps")


def together(groups):
    return [sample for group in groups for sample in group]


@functools.partial(jax.jit, static_argnums=(2,))
def graded(params, packed, objective, base=None):
    """Gradient and metrics of one optimiser step."""
    role = Role(params, None, jnp.int32(0), base)
    return accumulate(role, packed, (objective,), {"temperature": jnp.float32(1.0)}, COMPUTE)


def packed_of(name, layout):
    """The step's data of a case."""
    return pack(together(case(name).groups), layout, (case(name).objective.name,))


@functools.cache
def alone(name):
    """Gradient and metrics on one device, over several microbatches."""
    packed = packed_of(name, small(name))
    assert int(packed.totals.microbatches) > 1
    return graded(case(name).params, packed, case(name).objective)


def small(name):
    """Rows for one completion or two; those of one prompt that are compared need two rows at least."""
    return Layout(1 if name in ("texts", "steps") else 2, 18, T)


@functools.cache
def wanted(name):
    one = case(name)
    return by_hand("values" if one.params is SCALAR else "logp", one.params, one.completions, one.loss)


@pytest.mark.parametrize("name", CASES)
def test_gradients_through_packing_and_microbatches_are_those_of_the_formula(name):
    loss, slope = wanted(name)
    found, metrics = alone(name)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert largest_difference(found, slope) < 1e-5


ONE_OF_EACH = ("texts", "dpo of averages, smoothed", "centred", "steps")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_eight_devices_and_one_microbatch_change_nothing(name):
    packed = packed_of(name, DIVIDED)
    assert int(packed.totals.microbatches) == 1
    mesh = make_mesh(MeshShape(2, 2, 2))
    params = case(name).params
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        found, metrics = jax.device_get(graded(placed, on_mesh(packed, mesh), case(name).objective))
    first, before = alone(name)
    assert largest_difference(found, wanted(name)[1]) < 1e-5
    assert largest_difference(found, first) < 1e-5
    assert metrics.keys() == before.keys()
    for key, value in before.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_lies_in_padding_changes_nothing(name):
    packed = packed_of(name, small(name))
    empty = packed.rows.group == 0
    unread = packed.scatter == packed.mask[0].size
    absent = ~packed.mask.any(axis=2)  # nothing of theirs is counted; in rankings the others of the prompt are none
    if "together" in packed.by_sequence:
        absent &= packed.by_sequence["together"] == np.arange(absent.shape[1])
    spoiled = packed._replace(
        rows=packed.rows._replace(tokens=np.where(empty, 7, packed.rows.tokens)),
        target=np.where(unread, 7, packed.target),
        by_token={n: np.where(packed.mask, x, np.float32(np.nan)) for n, x in packed.by_token.items()},
        by_sequence={
            n: x if n in ("together", "last") else np.where(absent, np.float32(7), x)
            for n, x in packed.by_sequence.items()
        },
    )
    assert empty.any() and unread.any()
    found, metrics = graded(case(name).params, spoiled, case(name).objective)
    jax.tree.map(np.testing.assert_array_equal, (found, metrics), alone(name))


def test_minibatches_of_as_many_pairs_are_the_batch_in_parts():
    name = "dpo"
    groups = case(name).groups[:4]
    size = Layout(4, 40, T)
    parts = [together(groups), *_split(groups, 2)]
    assert [len(part) for part in parts[1:]] == [len(together(groups[:2])), len(together(groups[2:]))]
    whole, first, second = (
        graded(case(name).params, pack(part, size, (case(name).objective.name,)), case(name).objective)
        for part in parts
    )
    halves = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert largest_difference(halves[0], whole[0]) < 1e-5
    for key, value in whole[1].items():
        np.testing.assert_allclose(halves[1][key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_an_adapter_learns_from_preferences_as_beside_the_whole_model():
    made = create(MODEL.config, Lora(2, 3.0), jax.random.key(1))
    random = np.random.default_rng(2)
    adapter = jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), made)
    one = case("dpo")
    _, slope = by_hand("logp", adapter, one.completions, one.loss, MODEL)
    mesh = make_mesh(MeshShape(2, 2, 2))
    with jax.set_mesh(mesh):
        params, base = (jax.device_put(x, shardings(x, mesh)) for x in (adapter, MODEL))
        found, _ = graded(params, on_mesh(packed_of("dpo", DIVIDED), mesh), one.objective, base)
    assert largest_difference(jax.device_get(found), slope) < 1e-5


def forwards():
    return Forward(Layout(8, 40, T), COMPUTE, 1.0, one_device())


def silent(text):
    del text


def test_the_reference_is_what_the_model_gives_whole_completions():
    np.testing.assert_allclose(sums(forwards(), REFERENCE, rankings(2), silent), known(), rtol=1e-5)


def test_metrics_of_pairs_are_of_their_order_and_implicit_rewards():
    margins = by_hand_margins()
    for name in ("dpo", "ipo"):
        _, metrics = alone(name)
        np.testing.assert_allclose(metrics["pairs/accuracy"], np.mean(margins > 0), rtol=1e-6)
        np.testing.assert_allclose(metrics["pairs/margin"], 0.3 * np.mean(margins), rtol=1e-4)
    assert 0 < np.mean(margins > 0) < 1


def by_hand_margins():
    """Of each pair, float64."""
    rows = rows_of(members(rankings(2)))
    found, _ = pulled("logp", MODEL, None, rows, np.zeros(rows.shape, np.float32))
    gaps = [x[:-1].astype(np.float64).sum() for x in at_tokens(np.asarray(found), members(rankings(2)))]
    return (np.reshape(gaps, (-1, 2)) - known()) @ [1, -1]


def scores():
    """What the scalar model says at each token of every completion and behind it, by rankings and by solutions."""
    for rows in (rankings(), solutions()):
        packed = rows_of(members(rows))
        found, _ = pulled("values", SCALAR, None, packed, np.zeros(packed.shape, np.float32))
        yield at_tokens(np.asarray(found, np.float64), members(rows))


def test_evaluations_are_those_of_completions_by_themselves():
    by_completion, by_solution = scores()
    last = iter([float(values[-1]) for values in by_completion])
    known_scores = [[next(last) for _ in row.completions] for row in rankings()]
    samples = together(case("rankings").groups)
    found = iter([float(x[-1]) for x in forwards().by_sample(SCALAR, samples, "values")])
    np.testing.assert_allclose([next(found) for _ in samples], [x for row in known_scores for x in row], rtol=1e-4)
    numbers = pair_numbers(known_scores)
    _, metrics = alone("rankings")
    for ours, theirs in {
        "accuracy": "pairs/accuracy",
        "margin": "pairs/margin",
        "reward_mean": "reward_model/mean",
    }.items():
        np.testing.assert_allclose(metrics[theirs], numbers[f"eval/pairs/{ours}"], rtol=1e-4, atol=1e-6)
    numbers = step_numbers(solutions(), by_solution)
    np.testing.assert_allclose(numbers["eval/steps/loss"], wanted("steps")[0], rtol=1e-5)
    np.testing.assert_allclose(numbers["eval/steps/accuracy"], alone("steps")[1]["steps/accuracy"], rtol=1e-6)
    numbers = text_numbers(forwards(), MODEL, texts(), silent)
    np.testing.assert_allclose(numbers["eval/text/loss"], wanted("texts")[0], rtol=1e-5)
    np.testing.assert_allclose(numbers["eval/text/perplexity"], np.exp(wanted("texts")[0]), rtol=1e-4)


def given(objective, groups, output, values):
    """Loss of an objective where the model says ``values``: of each sample by token."""
    samples = together(groups)
    packed = pack(samples, Layout(len(samples), 18, T), (objective.name,))
    batch = jax.tree.map(lambda x: x[0], packed._replace(totals=None))
    found = np.full(batch.mask.shape, 3.0, np.float32)
    for row, own in zip(found, values, strict=False):
        row[: len(own)] = own
    counts = packed.totals.counts[objective.name]
    return objective({output: jnp.asarray(found)}, batch, counts, {})[0]


def row_of(*lengths, margin=0.0):
    return Ranked("", prompt(0), tuple(drawn(length, length) for length in lengths), margin, "")


def test_published_numbers_come_out_of_the_objectives():
    for loss, name in ((DPO(0.1), "loss"), (IPO(0.1), "ipo_loss_sumlogp"), (IPO(0.1, average=True), "ipo_avg_len4_5")):
        group = pair_samples(row_of(4, 5), number("DPO/ref"), 0)
        logp = [np.full(size, total / size) for size, total in zip((4, 5), number("DPO/logp"), strict=True)]
        np.testing.assert_allclose(given(PairLoss(loss), [group], "logp", logp), number(f"DPO/{name}"), rtol=1e-5)
    for key, name, margin in (("BT", "loss", 0.0), ("BT", "margin0p5", 0.5), ("BT_K3", "loss", 0.0)):
        ranks = number(f"{key}/r")
        group = samples_of(row_of(*range(2, 2 + len(ranks)), margin=margin), 0)
        values = [np.append(np.full(2 + n, 9.0), score) for n, score in enumerate(ranks)]
        np.testing.assert_allclose(given(Ranking(), [group], "values", values), number(f"{key}/{name}"), rtol=1e-5)
    right = number("PRM/s")
    row = Stepped("", prompt(0), drawn(7, 1), np.array([1, 3, 4]), number("PRM/labels"), "")
    values = np.full(8, 9.0)
    values[[2, 4, 5]] = np.log(right / (1 - right))
    np.testing.assert_allclose(
        given(StepEntropy(), [samples_of(row, 0)], "values", [values]), number("PRM/loss"), rtol=1e-5
    )
