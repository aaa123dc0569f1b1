"""Losses of data: rows, packed, through the model, against the formulas written out over completions one by one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.comparing import (
    CASES,
    MODEL,
    REFERENCE,
    SCALAR,
    T,
    at_tokens,
    by_hand,
    case,
    drawn,
    known,
    members,
    odds,
    prompt,
    pulled,
    rankings,
    rows_of,
    solutions,
    texts,
)
from learner.rollouts import one_device
from oracles import number
from tiny import largest_difference

from jaxrl_llm.algorithms.preference import DPO, IPO, KTO, ORPO, SimPO
from jaxrl_llm.data import Judged, Ranked, Stepped
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, pack
from jaxrl_llm.learner.forward import Forward, put_on_mesh
from jaxrl_llm.learner.objectives import PairLoss, Ranking, StepEntropy
from jaxrl_llm.learner.update import accumulate, split_minibatches
from jaxrl_llm.models.config import ComputeOptions, Lora
from jaxrl_llm.models.lora import create_adapter
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.stages import preference
from jaxrl_llm.stages.dataset import evaluate_texts, fit_microbatch
from jaxrl_llm.stages.preference import pair_samples, sum_logprobs
from jaxrl_llm.stages.reward_model import ranking_metrics, reward_samples, step_metrics
from jaxrl_llm.types import Role

DIVIDED = Layout(8, 40, T, parts=4)
COMPUTE = ComputeOptions(remat="full")


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
    assert int(packed.microbatches) > 1
    return graded(case(name).params, packed, case(name).objective)


def small(name):
    """Rows for one completion or two; those of one prompt that are compared need two rows at least."""
    return Layout(1 if name in ("texts", "steps") else 2, 18, T)


ONE_OF_EACH = ("texts", "dpo of averages, smoothed", "kto", "centred", "steps")


@functools.cache
def wanted(name):
    one = case(name)
    return by_hand("values" if one.params is SCALAR else "logp", one.params, one.completions, one.loss)


@pytest.mark.slow(but=ONE_OF_EACH)
@pytest.mark.parametrize("name", CASES)
def test_gradients_through_packing_and_microbatches_are_those_of_the_formula(name):
    loss, slope = wanted(name)
    found, metrics = alone(name)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert largest_difference(found, slope) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_eight_devices_and_one_microbatch_change_nothing(name):
    packed = packed_of(name, DIVIDED)
    assert int(packed.microbatches) == 1
    mesh = make_mesh(MeshShape(2, 2, 2))
    params = case(name).params
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        found, metrics = jax.device_get(graded(placed, put_on_mesh(packed, mesh), case(name).objective))
    first, before = alone(name)
    assert largest_difference(found, wanted(name)[1]) < 1e-5
    assert largest_difference(found, first) < 1e-5
    chex.assert_trees_all_close(metrics, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_lies_in_padding_changes_nothing(name):
    packed = packed_of(name, small(name))
    empty = packed.rows.group == 0
    unread = packed.predictions.scatter == packed.mask[0].size
    absent = ~packed.mask.any(axis=2)  # nothing of theirs is counted; in rankings the others of the prompt are none
    if "together" in packed.by_sequence:
        absent &= packed.by_sequence["together"] == np.arange(absent.shape[1])
    spoiled = packed._replace(
        rows=packed.rows._replace(tokens=np.where(empty, 7, packed.rows.tokens)),
        predictions=packed.predictions._replace(target=np.where(unread, 7, packed.predictions.target)),
        by_token={n: np.where(packed.mask, x, np.float32(np.nan)) for n, x in packed.by_token.items()},
        by_sequence={
            n: x if n in ("together", "last") else np.where(absent, np.float32(7), x)
            for n, x in packed.by_sequence.items()
        },
    )
    assert empty.any() and unread.any()
    found, metrics = graded(case(name).params, spoiled, case(name).objective)
    chex.assert_trees_all_equal((found, metrics), alone(name))


def test_minibatches_of_as_many_pairs_are_the_batch_in_parts():
    name = "dpo"
    groups = case(name).groups[:4]
    size = Layout(8, 40, T)  # one microbatch each: one program
    parts = [together(groups), *split_minibatches(groups, 2)]
    assert [len(part) for part in parts[1:]] == [len(together(groups[:2])), len(together(groups[2:]))]
    whole, first, second = (
        jax.device_get(graded(case(name).params, pack(part, size, (case(name).objective.name,)), case(name).objective))
        for part in parts
    )
    halves = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    assert largest_difference(halves[0], whole[0]) < 1e-5
    chex.assert_trees_all_close(halves[1], whole[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_adapter_learns_from_preferences_as_beside_the_whole_model():
    made = create_adapter(MODEL.config, Lora(2, 3.0), jax.random.key(1))
    random = np.random.default_rng(2)
    adapter = jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), made)
    one = case("dpo")
    _, slope = by_hand("logp", adapter, one.completions, one.loss, MODEL)
    mesh = make_mesh(MeshShape(2, 2, 2))
    with jax.set_mesh(mesh):
        params, base = (jax.device_put(x, shardings(x, mesh)) for x in (adapter, MODEL))
        found, _ = graded(params, put_on_mesh(packed_of("dpo", DIVIDED), mesh), one.objective, base)
    assert largest_difference(jax.device_get(found), slope) < 1e-5


def forwards():
    return Forward(Layout(8, 40, T), COMPUTE, 1.0, one_device())


def silent(text):
    del text


def test_the_reference_is_what_the_model_gives_whole_completions():
    np.testing.assert_allclose(sum_logprobs(forwards(), REFERENCE, rankings(2), silent), known(), rtol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "dpo of averages, smoothed"])
def test_numbers_of_pairs_are_of_their_order_and_implicit_rewards_in_a_step_and_in_a_test(name):
    loss = case(name).objective.loss
    margins = by_hand_margins(loss.average)
    assert 0 < np.mean(margins > 0) < 1
    pairs = rankings(2)
    tested = preference.paired_metrics(loss, pairs, sum_logprobs(forwards(), MODEL, pairs, silent), known())
    for prefix, found in (("", alone(name)[1]), ("eval/", tested)):
        np.testing.assert_allclose(found[f"{prefix}pairs/accuracy"], np.mean(margins > 0), rtol=1e-6)
        np.testing.assert_allclose(found[f"{prefix}pairs/margin"], loss.beta * np.mean(margins), rtol=1e-4)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_numbers_of_pairs_without_a_reference(name):
    loss, pairs = case(name).objective.loss, rankings(2)
    nothing = np.zeros((len(pairs), 2))
    means = [x[:-1].astype(np.float64).mean() for x in found_of_pairs()]
    worth = np.reshape([float(odds(mean)) if name == "orpo" else mean for mean in means], (-1, 2))
    margins = worth @ [1, -1]
    tested = preference.paired_metrics(loss, pairs, sum_logprobs(forwards(), MODEL, pairs, silent), nothing)
    np.testing.assert_allclose(tested["eval/pairs/accuracy"], np.mean(margins > 0), rtol=1e-6)
    np.testing.assert_allclose(tested["eval/pairs/margin"], loss.beta * np.mean(margins), rtol=1e-4)


def test_numbers_of_answers_with_labels():
    rows = [Judged(str(n), prompt(n), drawn(3, n), good, str(n)) for n, good in enumerate([True, False, True, False])]
    logp = np.array([[1.0, 9], [2.0, 9], [3.0, 9], [0.0, 9]])
    found = preference.unpaired_metrics(KTO(0.5), rows, logp, np.zeros((4, 2)))
    assert found == {"eval/pairs/accuracy": 0.75, "eval/pairs/margin": 0.5 * (2 - 1)}
    assert np.isnan(preference.unpaired_metrics(KTO(), rows[:1], logp[:1], np.zeros((1, 2)))["eval/pairs/accuracy"])
    _, metrics = alone("kto")
    assert metrics["kto/point"] > 0, "below it, the reference point would be held at 0"
    assert np.isfinite(metrics["pairs/margin"])


def test_the_unrelated_answer_is_the_next_one_to_another_prompt():
    rows = [Judged(name, drawn(4, 1), drawn(5, n), True, str(n)) for n, name in enumerate("aabba")]
    found = preference.unrelated_answers(rows, 7)
    for tokens, place in zip(found, (2, 2, 4, 4, 2), strict=True):
        np.testing.assert_array_equal(tokens, rows[place].tokens[:3])
    with pytest.raises(InputError, match="0: all rows answer one prompt, and KTO compares with answers to other"):
        preference.unrelated_answers(rows[:2], 7)


def by_hand_margins(average):
    """Of each pair, float64."""
    gaps = [x[:-1].astype(np.float64).sum() for x in found_of_pairs()]
    sizes = [len(tokens) if average else 1 for _, tokens in members(rankings(2))]
    return (np.reshape(gaps, (-1, 2)) - known()) / np.reshape(sizes, (-1, 2)) @ [1, -1]


def found_of_pairs():
    """Log-probabilities of the tokens of each completion, and one number behind them."""
    rows = rows_of(members(rankings(2)))
    found, _ = pulled("logp", MODEL, None, rows, np.zeros(rows.shape, np.float32))
    return at_tokens(np.asarray(found), members(rankings(2)))


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
    samples = together(case("centred").groups)
    found = iter([float(x[-1]) for x in forwards().by_sample(SCALAR, samples, "values")])
    np.testing.assert_allclose([next(found) for _ in samples], [x for row in known_scores for x in row], rtol=1e-4)
    numbers = ranking_metrics(known_scores)
    _, metrics = alone("centred")
    for ours, theirs in {
        "accuracy": "pairs/accuracy",
        "margin": "pairs/margin",
        "reward_mean": "reward_model/mean",
    }.items():
        np.testing.assert_allclose(metrics[theirs], numbers[f"eval/pairs/{ours}"], rtol=1e-4, atol=1e-6)
    numbers = step_metrics(solutions(), by_solution)
    np.testing.assert_allclose(numbers["eval/steps/loss"], wanted("steps")[0], rtol=1e-5)
    np.testing.assert_allclose(numbers["eval/steps/accuracy"], alone("steps")[1]["steps/accuracy"], rtol=1e-6)
    numbers = evaluate_texts(forwards(), MODEL, texts(), silent)
    np.testing.assert_allclose(numbers["eval/text/loss"], wanted("texts")[0], rtol=1e-5)
    np.testing.assert_allclose(numbers["eval/text/perplexity"], np.exp(wanted("texts")[0]), rtol=1e-4)


def given(objective, groups, output, values):
    """Loss and metrics of an objective where the model says ``values``: of each sample by token."""
    samples = together(groups)
    packed = pack(samples, Layout(len(samples), 18, T), (objective.name,))
    batch = jax.tree.map(lambda x: x[0], packed._replace(microbatches=None, counts=None))
    found = np.full(batch.mask.shape, 3.0, np.float32)
    for row, own in zip(found, values, strict=False):
        row[: len(own)] = own
    counts = packed.counts[objective.name]
    return called(objective, {output: found}, batch, counts)


@functools.partial(jax.jit, static_argnums=0)
def called(objective, outputs, batch, counts):
    return objective(outputs, batch, counts, {})


def row_of(*lengths, margin=0.0):
    return Ranked("", prompt(0), tuple(drawn(length, length) for length in lengths), margin, "")


def test_published_numbers_come_out_of_the_objectives():
    for loss, name in ((DPO(0.1), "loss"), (IPO(0.1), "ipo_loss_sumlogp"), (IPO(0.1, average=True), "ipo_avg_len4_5")):
        group = pair_samples(row_of(4, 5), number("DPO/ref"), 0)
        logp = [np.full(size, total / size) for size, total in zip((4, 5), number("DPO/logp"), strict=True)]
        np.testing.assert_allclose(given(PairLoss(loss), [group], "logp", logp)[0], number(f"DPO/{name}"), rtol=1e-5)
    for key, name, margin in (("BT", "loss", 0.0), ("BT", "margin0p5", 0.5), ("BT_K3", "loss", 0.0)):
        ranks = number(f"{key}/r")
        group = reward_samples(row_of(*range(2, 2 + len(ranks)), margin=margin), 0)
        values = [np.append(np.full(2 + n, 9.0), score) for n, score in enumerate(ranks)]
        np.testing.assert_allclose(given(Ranking(), [group], "values", values)[0], number(f"{key}/{name}"), rtol=1e-5)
    right = number("PRM/s")
    row = Stepped("", prompt(0), drawn(7, 1), np.array([1, 3, 4]), number("PRM/labels"), "")
    values = np.full(8, 9.0)
    values[[2, 4, 5]] = np.log(right / (1 - right))
    loss, _ = given(StepEntropy(), [reward_samples(row, 0)], "values", [values])
    np.testing.assert_allclose(loss, number("PRM/loss"), rtol=1e-5)


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("loss", [DPO(0.1), IPO(0.1, average=True), SimPO(), ORPO()])
def test_a_pair_with_an_empty_answer_teaches_nothing(loss, empty):
    """Neither loss, order nor margin has it; 3 of 4 answers count, and so the loss is divided by 1.5 pairs."""
    rows, logp = (row_of(4, 5), row_of(3, 6)), [np.full(size, -0.5 * size) for size in (4, 5, 3, 6)]
    groups = [pair_samples(row, (-3.0, -2.0), number) for number, row in enumerate(rows)]
    alone = given(PairLoss(loss), groups[:1], "logp", logp[:2])
    lost = groups[1][empty]
    groups[1][empty] = dataclasses.replace(lost, mask=np.zeros(len(lost.tokens), bool))
    found = given(PairLoss(loss), groups, "logp", logp)
    chex.assert_trees_all_close(jax.tree.map(lambda x: 1.5 * x, found), alone, rtol=1e-5)


def test_a_step_is_right_on_its_labels_side_of_a_half_and_a_half_is_not_above_it():
    row = Stepped("", prompt(0), drawn(7, 1), np.array([1, 2, 4, 5]), np.array([0.45, 0.55, 0.55, 0.5]), "")
    values = np.full(8, 9.0)
    for found, right in (([-0.1, 0.1, 0.2, -0.1], 1.0), ([0.1, 0.1, 0.2, 0.0], 0.75), ([0.1, -0.1, -0.2, 0.1], 0.0)):
        values[row.ends + 1] = found
        _, metrics = given(StepEntropy(), [reward_samples(row, 0)], "values", [values])
        assert float(metrics["steps/accuracy"]) == step_metrics([row], [values])["eval/steps/accuracy"] == right


def test_a_row_that_fills_more_than_a_microbatch_is_named_or_given_room_where_rows_are_chosen():
    groups = [(f"rows.jsonl:{n}", samples) for n, samples in enumerate(case("centred").groups, start=1)]
    one = Forward(Layout(1, 18, T), ComputeOptions(), 1.0, one_device())
    assert fit_microbatch(dataclasses.replace(one, layout=Layout(2, 18, T)), groups, 2).layout.rows == 2
    with pytest.raises(
        InputError, match=r"rows.jsonl:3: 3 completions .* raise learner.compute.microbatch_rows \(now 1\)"
    ):
        fit_microbatch(one, groups, 1)
    assert fit_microbatch(one, groups, 0).layout.rows == 2
    assert fit_microbatch(dataclasses.replace(one, layout=Layout(8, 18, T, 8)), groups, 0).layout.rows == 8
    assert fit_microbatch(dataclasses.replace(one, layout=Layout(8, 18, T, 8)), groups[:2], 0).layout.rows == 8
