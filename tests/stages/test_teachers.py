"""Teachers of a run: what they tell of each token equals the log-softmax of whole distributions, without packing."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import one_device

from jaxrl_llm.algorithms.kl import JensenShannon, SampledKL, top_classes
from jaxrl_llm.config import Context, Distillation, TaskTeacher, load_config, resolved, validate
from jaxrl_llm.data import Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward, Layout, Sample
from jaxrl_llm.learner.objectives import TEACHER_INDEX, DivergenceLoss, TeacherDivergence
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.heads import TeacherStates
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.ingredients import StageContext
from jaxrl_llm.stages.teachers import Teachers, add_teacher_advantages, known_facts, teacher_prompt, with_teacher_prompt
from jaxrl_llm.tasks import Prompts, Table
from jaxrl_llm.telemetry.progress import Progress, Schedule
from jaxrl_llm.types import Completion, Group, Problem, Role, TrainState

SMOKE = load_config("smoke")[1]
TEMPERATURE, T = 0.8, 6
MODEL, TOKENIZER = load_pretrained("tiny-random")
SHOWN = "{prompt}\nA right answer is {success}; now answer yourself."


def moved(seed):
    """Another model of the same kind."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda x: x + 0.3 * np.abs(x).mean() * jax.random.normal(next(keys), x.shape), MODEL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("teachers")
    for seed in (1, 2):
        save_pretrained(moved(seed), TOKENIZER, made / str(seed))
    return made


def by_teacher(distillation):
    return dataclasses.replace(SMOKE.scoring, distillation=distillation)


def taught(distillation, **changes):
    return resolved(dataclasses.replace(SMOKE, scoring=by_teacher(distillation), **changes))


def groups():
    """Two tasks' groups of two completions; the second of the first group is right."""
    random, prompts = np.random.default_rng(0), Prompts(SMOKE.task, TOKENIZER)
    found = []
    for number, task in enumerate((SMOKE.task.label, "other")):
        problem = Problem(str(number), ({"role": "user", "content": f"{number} + 1 ="},), "2", task)
        members = []
        for size in (T, T - 2):
            tokens = random.integers(32, 90, size).astype(np.int32)
            logp = np.float32(random.normal(size=size) - 5)
            members.append(Completion(tokens, logp, "stop", np.ones(size, bool), np.zeros(size), text="two"))
        accuracy = np.float64([0, 1 - number])
        found.append(Group(problem, prompts[problem], tuple(members), accuracy, accuracy))
    return found


def scored(run, state=None, more=()):
    """The samples of the groups, in order, with what the teachers tell of them; and the metrics."""
    forward = Forward(Layout(2, 96, T), ComputeOptions(), TEMPERATURE, one_device())
    made = groups()
    batch = RolloutBatch(made, made, Carryover(), 0, 0, {})
    samples = []
    for place, group in enumerate(made):
        members = [
            Sample(group.prompt, one.tokens, one.mask, {"advantages": 0.5}, {"sampler_logp": one.sampler_logp},
                   place=(place, member))
            for member, one in enumerate(group.completions)
        ]  # fmt: skip
        samples.append(members)
    prompts = Prompts(run.task, TOKENIZER)
    names = ("policy", "distillation", *["text"] * bool(more))
    context = StageContext(
        TOKENIZER, prompts, prompts, (), {"policy": forward}, names, None, None, None, Progress(Schedule(1))
    )
    with jax.set_mesh(forward.mesh):
        found, measured = Teachers.of(run).prepared(context).scored(state, [*samples, *more], batch)
    return [one for members in found for one in members], measured


def oracle(model, prompt, tokens):
    """Log-probabilities [t, V] of all tokens, from one row."""
    row = np.concatenate([prompt, tokens])[None]
    return jax.nn.log_softmax(logits(model, row)[0, len(prompt) - 1 : -1] / TEMPERATURE)


def test_each_token_has_its_teachers_advantage_in_addition_to_the_tasks(folder):
    """The second task has a teacher of its own."""
    other = (TaskTeacher("other", str(folder / "2")),)
    found, measured = scored(taught(Distillation(str(folder / "1"), weight=2.0, by_task=other), model="tiny-random"))
    far = []
    for sample in found:
        logp = oracle(moved(1 + sample.place[0]), sample.prompt, sample.tokens)[
            np.arange(len(sample.tokens)), sample.tokens
        ]
        wanted = 0.5 + 2 * (logp - sample.arrays["sampler_logp"])
        np.testing.assert_allclose(sample.arrays["advantages"], wanted, rtol=1e-4, atol=1e-5)
        assert "advantages" not in sample.scalars
        far.append(sample.arrays["sampler_logp"] - logp)
    np.testing.assert_allclose(measured["distillation/kl"], np.mean(np.concatenate(far)), rtol=1e-4)


def test_the_update_is_told_the_number_of_each_samples_teacher(folder):
    models = [str(folder / name) for name in "12"]
    several = Distillation(models[0], 0.5, by_task=(TaskTeacher("other", models[1]),))
    found, _ = scored(taught(several, model="tiny-random"))
    assert [one.scalars[TEACHER_INDEX] for one in found] == [0.0, 0.0, 1.0, 1.0]


class Said(TeacherDivergence):
    """Teachers that have read the rows already."""

    @staticmethod
    def _states(teacher, model, batch):
        return lambda: teacher


def test_each_row_has_the_divergence_from_its_own_teacher():
    """One of three teachers, which differ in what they have read."""
    scatter = np.array([[0, 1, 4, 5], [8, 9, 10, 12]])  # of three rows of four tokens; 12 is padding
    read = [np.float32(np.random.default_rng(n).normal(size=(2, 4, MODEL.config.width))) for n in range(4)]
    batch = SimpleNamespace(
        teachers={name: TeacherStates(MODEL, jnp.asarray(states)) for name, states in zip("abc", read, strict=False)},
        predictions=SimpleNamespace(scatter=jnp.asarray(scatter)),
        mask=np.ones((3, 4), bool),
        by_sequence={TEACHER_INDEX: jnp.float32([2, 0, 1])},
    )
    measured = lambda *names: np.asarray(Said(JensenShannon(0.5), names)(MODEL, jnp.asarray(read[3]), batch, 1.0))
    first, second, third = (measured(name) for name in "abc")
    wanted = [[*third[0, :2], *first[0, 2:]], [*second[1, :3], 0.0]]
    np.testing.assert_allclose(measured("a", "b", "c"), wanted, rtol=1e-6)
    assert np.abs(first - second)[:, :3].min() > 1e-6 < np.abs(first - third)[:, :3].min()


@pytest.mark.parametrize("mask", [[[1, 0, 1], [0, 1, 0]], [[0, 0, 1], [0, 0, 0]], [[1, 1, 1], [1, 1, 0]]])
def test_what_an_environment_said_is_not_distilled(mask):
    """Neither in the loss nor in the advantages; a token of no value there changes nothing."""
    mask = np.array(mask, bool)
    each = np.where(mask, np.float32([[0.5, 7.0, 2.0], [9.0, 0.25, 1.0]]), np.float32(1e6))
    loss = DivergenceLoss(2.0, JensenShannon(0.5), ("a",))
    counts = SimpleNamespace(tokens=max(int(mask.sum()), 1))
    found, metrics = loss({loss.outputs[0]: each}, SimpleNamespace(mask=mask), counts, {})
    wanted = each[mask].sum() / max(mask.sum(), 1)
    np.testing.assert_allclose([found, metrics["distillation/divergence"]], [2 * wanted, wanted], rtol=1e-6)
    samples = [
        Sample(np.int32([1]), np.int32([2, 3, 4]), row, {"advantages": 0.5},
               {"sampler_logp": np.float32([-1, -2, -3])}, place=(0, 0))
        for row in mask
    ]  # fmt: skip
    told = [np.float32([-2, -1, -1]), np.float32([-3, np.nan, -2])]
    valued_, far = add_teacher_advantages(samples, told, None, Distillation("a", weight=2.0))
    gaps = np.array([[-1, 1, 2], [-2, np.nan, 1]])
    counts = mask & ~np.isnan(gaps)
    wanted = np.where(counts, 0.5 + 2 * gaps, 0.5)
    np.testing.assert_allclose([one.arrays["advantages"] for one in valued_], wanted, rtol=1e-6)
    np.testing.assert_allclose(far, -gaps[counts].mean(), rtol=1e-6)


def test_a_completion_that_its_teacher_is_not_told_of_keeps_its_advantage():
    own = Sample(np.int32([1]), np.int32([2, 3]), np.ones(2, bool), {"advantages": 0.5},
                 {"sampler_logp": np.float32([-1, -2])}, place=(0, 0))  # fmt: skip
    found, far = add_teacher_advantages([own, own], [None, np.float32([-2, -2])], None, Distillation("a"))
    np.testing.assert_array_equal([one.arrays["advantages"] for one in found], [[0.5, 0.5], [-0.5, 0.5]])
    assert far == 0.5 and math.isnan(add_teacher_advantages([own], [None], None, Distillation("a"))[1])


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_a_prompt_with_what_is_told_is_no_longer_than_its_limit(room):
    """A longer one would not fit into the rows of the teacher: its completion is not taught."""
    first = groups()[0]
    prompts = Prompts(SMOKE.task, TOKENIZER)
    length = len(teacher_prompt(SHOWN, first, 0, prompts))
    context = Context(SHOWN, length + room - SMOKE.rollout.max_prompt_tokens)
    run = dataclasses.replace(SMOKE, scoring=by_teacher(Distillation(None, JensenShannon(0.0, 7), context=context)))
    one = first.completions[0]
    sample = Sample(first.prompt, one.tokens, one.mask, place=(0, 0))
    found = with_teacher_prompt(sample, RolloutBatch([first], [first], Carryover(), 0, 0, {}), run, prompts)
    assert (found is None) == (room < 0)
    assert found is None or len(found.prompt) == length


@pytest.mark.slow
def test_a_scaled_reward_leads_away_from_the_reference(folder):
    state = TrainState({"policy": Role(MODEL, None, jnp.int32(0))}, {"reference": moved(3)})
    found, _ = scored(taught(Distillation(str(folder / "1"), SampledKL(1.5)), model="tiny-random"), state)
    for sample in found:
        at = np.arange(len(sample.tokens)), sample.tokens
        teacher, before = (oracle(moved(seed), sample.prompt, sample.tokens)[at] for seed in (1, 3))
        wanted = 0.5 + 1.5 * (teacher - before) - (sample.arrays["sampler_logp"] - before)
        np.testing.assert_allclose(sample.arrays["advantages"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_policy_teaches_itself_by_what_a_right_completion_shows():
    """Only the first completion has another one that is right."""
    distillation = Distillation(None, JensenShannon(0.0, 7), context=Context(SHOWN, 64))
    state = TrainState({"policy": Role(moved(1), None, jnp.int32(0))}, {})
    found, measured = scored(taught(distillation, model="tiny-random"), state)
    assert [one.counted_by for one in found] == [None, ("policy",), ("policy",), ("policy",)]
    assert measured == {"distillation/told_fraction": 0.25}
    assert all(one.arrays["teacher_logp"].shape == (len(one.tokens), 8) for one in found), "for a step of none, too"
    prompt = found[0].prompt
    content = SHOWN.format(prompt="0 + 1 =", success="two")
    told = Prompts(SMOKE.task, TOKENIZER)[Problem("x", ({"role": "user", "content": content},), "", SMOKE.task.label)]
    assert len(told) > len(prompt)
    logp = oracle(moved(1), told, found[0].tokens)
    wanted = top_classes(logp, found[0].arrays["teacher_ids"])
    np.testing.assert_allclose(found[0].arrays["teacher_logp"], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.sort(wanted[:, :-1])[:, ::-1], jax.lax.top_k(logp, 7)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_given_texts_are_taught_by_the_first_teacher_and_others_not_at_all(folder):
    distillation = Distillation(str(folder / "1"), JensenShannon(0.5, 3), lmbda=0.8, texts=Texts(Table("none.jsonl")))
    text = Sample(np.int32([72, 105]), np.int32([44, 45, 46]), np.ones(3, bool))
    given = [[text.counting(("distillation",))], [text.counting(("text",))]]
    found, _ = scored(taught(distillation, model="tiny-random"), more=given)
    wanted = top_classes(oracle(moved(1), text.prompt, text.tokens), found[4].arrays["teacher_ids"])
    np.testing.assert_allclose(found[4].arrays["teacher_logp"], wanted, rtol=1e-4, atol=1e-5)
    assert "teacher_ids" in found[0].arrays and found[5].counted_by == ("text",)
    shares = [dataclasses.replace(distillation, lmbda=share) for share in (0.8, 0.5, 0)]
    assert [one.rows_of(64) for one in shares] == [16, 64, 64]


def test_a_context_has_the_facts_of_a_completion_and_no_others():
    first = groups()[0]
    assert known_facts(first, 0) == {"answer": "2", "attempt": "two", "verdict": "wrong", "success": "two"}
    assert known_facts(first, 1) == {"answer": "2", "attempt": "two", "verdict": "right"}
    prompts = Prompts(SMOKE.task, TOKENIZER)
    assert teacher_prompt("{prompt} {solution}", first, 0, prompts) is None
    with_column = dataclasses.replace(first, problem=dataclasses.replace(first.problem, metadata={"solution": 3}))
    text = TOKENIZER.decode(teacher_prompt("{prompt} {solution} {{}}", with_column, 0, prompts))
    assert text.endswith("0 + 1 = 3 {}")


ONE = "model"
REFUSED = {
    "unknown": (lambda: Distillation(ONE, "reverse"), "divergence 'reverse' is unknown: did you mean"),
    "empty": (lambda: Distillation(""), "teacher is empty: give a model"),
    "itself": (
        lambda: Distillation(None),
        "teacher None is the policy itself, which learns nothing from what it knows",
    ),
    "own": (lambda: Distillation(ONE, own="reference"), "own reference is of a policy that teaches itself"),
    "whole": (lambda: Distillation(None, 0.0, context=Context(SHOWN)), "context is read in rows of its own"),
    "nothing new": (lambda: Distillation(ONE, context=Context("{prompt}")), "must name {prompt} and another fact"),
    "brace": (lambda: Distillation(ONE, context=Context("{prompt} {")), "template has a brace too many"),
    "task": (lambda: Distillation(ONE, by_task=(TaskTeacher("sums", "x"),)), "by_task[0].task 'sums' is no task of"),
    "share": (lambda: Distillation(ONE, 0.5, lmbda=0.5), "lmbda 0.5 leaves the others of its rows empty"),
    "sampled": (
        lambda: Distillation(ONE, lmbda=0.5, texts=Texts(Table("a.jsonl"))),
        "texts are sampled by no policy, and SampledKL values sampled tokens",
    ),
    "rewards": (
        lambda: Distillation(ONE, 0.5, lmbda=0, texts=Texts(Table("a.jsonl"))),
        "lmbda 0 samples nothing that scoring.rewards could be about: set scoring.rewards (), or",
    ),
    "no text": (lambda: Distillation(ONE, 0.5, texts=Texts(Table("a.jsonl"))), "have no row among 64 completions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_teach_is_refused(name):
    make, words = REFUSED[name]
    with pytest.raises(InputError) as refusal:
        validate(dataclasses.replace(SMOKE, scoring=by_teacher(make())))
    assert words in str(refusal.value), str(refusal.value)


def test_signals_have_short_names():
    named = [
        Distillation(ONE, name).divergence for name in ("policy_gradient", "forward_kl", "reverse_kl", "jsd", 0.25)
    ]
    assert named == [SampledKL(), *map(JensenShannon, (0.0, 1.0, 0.5, 0.25))]
