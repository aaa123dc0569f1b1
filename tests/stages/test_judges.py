"""Reward models on the devices: their numbers against an unpacked pass over each completion, steps, ensembles."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import one_device

from jaxrl_llm import config as configs
from jaxrl_llm.config import Scoring
from jaxrl_llm.data import Steps, load_texts
from jaxrl_llm.data.datasets import split_steps
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Critic
from jaxrl_llm.models import load_pretrained, save_pretrained, scores
from jaxrl_llm.models.config import Rope
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.pretrained import TINY, tiny_tokenizer
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rewards import Accuracy, Constraint, Gate, Hinge, ModelReward, Scorer, StepReward, Threshold
from jaxrl_llm.rewards.endpoint import JudgeModel
from jaxrl_llm.rewards.shaping import TaskReward
from jaxrl_llm.sharding import MeshShape, make_mesh
from jaxrl_llm.stages.judges import JudgeEngine, load_judges, step_ends
from jaxrl_llm.stages.rl import group_row
from jaxrl_llm.stages.stage import SCORING_CHUNK
from jaxrl_llm.stages.taught import RewardFormat, format_notes, reward_format, reward_model_uses
from jaxrl_llm.tasks import Prompts, Table, Task, load
from jaxrl_llm.tasks.template import template_fingerprint
from jaxrl_llm.types import Completion

DIGITS = Path(__file__).parents[1] / "fixtures" / "runs" / "digits.jsonl"
TASK = Task(Table(str(DIGITS)), template="chatml")
LONGEST, WIDTH = 8, 40
MODELS = ("one", "two", "three")
TEXTS = ("a\nb", "a = é\nb = 😀\nc", "no separator", "a\n\n\nb\n", "\n\na\nb", "x\n \ny", "€")
"""Solutions whose steps may be blank, or have characters of several tokens."""


@functools.cache
def scalar_model(name):
    """A model of tiny-random's layers, with other weights for each name."""
    seed = MODELS.index(name)
    head = np.random.default_rng(seed).normal(scale=0.1, size=TINY.width).astype(np.float32)
    return with_scalar_head(initialise(TINY, jax.random.key(seed), scale=0.3), jnp.asarray(head))


@pytest.fixture(scope="module")
def tokenizer():
    return load_pretrained("tiny-random")[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("judges")
    at_the_stop = RewardFormat("ranking", score_at="stop").to_json()
    for name in MODELS:
        save_pretrained(scalar_model(name), tokenizer, folder / name, None, at_the_stop)
    save_pretrained(scalar_model("one"), tokenizer, folder / "silent")
    return folder


def run_with(*rewards, **scoring):
    run = configs.load_config("smoke")[1]
    rollout = dataclasses.replace(run.rollout, max_prompt_tokens=32, max_new_tokens=LONGEST)
    return dataclasses.replace(run, task=TASK, rollout=rollout, scoring=Scoring(rewards, **scoring))


def completion(tokens, text=""):
    tokens = np.asarray(tokens, np.int32)
    size = len(tokens)
    nothing = np.zeros(size, np.float32)
    return Completion(tokens, nothing, "stop", np.ones(size, bool), np.zeros(size, np.int32), text=text)


@functools.cache
def items():
    """So many that they are scored in two parts: three prompts, groups of completions of 1 to 8 tokens."""
    random = np.random.default_rng(0)
    count = SCORING_CHUNK // 3 + 2
    return [
        (problem, completion(random.integers(1, 256, random.integers(1, LONGEST + 1))))
        for problem in load(TASK).train[:3]
        for _ in range(count)
    ]


def judged(rewards, where, tokenizer, asked):
    """What the judge of each of these rewards says."""
    found = load_judges(run_with(*rewards), where, tokenizer, {"digits": Prompts(TASK, tokenizer)}, lambda text: None)
    said = [found[reward](asked) for reward in rewards]
    return [
        reward.combined(x) if isinstance(reward, ModelReward) else x for reward, x in zip(rewards, said, strict=True)
    ]


def unpacked(name, sequences):
    """The score of each sequence, in a row of its own."""
    rows = np.zeros((len(sequences), WIDTH + LONGEST), np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return np.asarray(scores(scalar_model(name), rows, [len(sequence) for sequence in sequences]), np.float64)


def oracle(name, tokenizer, asked):
    prompts = Prompts(TASK, tokenizer)
    return unpacked(name, [[*prompts[problem], *made.tokens] for problem, made in asked])


MESHES = {"one": one_device, "eight": lambda: make_mesh(MeshShape()), "2x2x2": lambda: make_mesh(MeshShape(2, 2, 2))}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_packed_scores_are_those_of_each_completion_alone_on_every_mesh(folder, tokenizer, mesh):
    asked = items()
    assert len(asked) > SCORING_CHUNK
    [found] = judged([ModelReward(str(folder / "one"))], MESHES[mesh](), tokenizer, asked)
    wanted = oracle("one", tokenizer, asked)
    assert found.dtype == np.float64 and np.std(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_score_does_not_depend_on_what_is_scored_beside_it(folder, tokenizer):
    asked = items()[:7]
    [all_of_them] = judged([ModelReward(str(folder / "one"))], one_device(), tokenizer, asked)
    [others] = judged([ModelReward(str(folder / "one"))], one_device(), tokenizer, [asked[5], asked[2]])
    np.testing.assert_allclose(others, all_of_them[[5, 2]], atol=1e-5)


@pytest.mark.slow
def test_ensembles_are_the_mean_the_lowest_or_the_mean_less_the_deviations(folder, tokenizer):
    asked = items()[:7]
    paths = tuple(str(folder / name) for name in MODELS)
    rewards = [
        ModelReward(paths),
        ModelReward(list(paths), of="minimum"),
        ModelReward(paths, of="conservative", spread=0.5),
    ]
    mean, lowest, conservative = judged(rewards, one_device(), tokenizer, asked)
    each = np.stack([oracle(name, tokenizer, asked) for name in MODELS])
    np.testing.assert_allclose(mean, each.sum(axis=0) / 3, atol=2e-5)
    np.testing.assert_allclose(lowest, [min(column) for column in each.T], atol=2e-5)
    squares = ((each - each.mean(axis=0)) ** 2).sum(axis=0) / 3
    np.testing.assert_allclose(conservative, each.mean(axis=0) - 0.5 * squares**0.5, atol=2e-5)
    own = ModelReward(paths[0], name="own")
    with Scorer((rewards[0], TaskReward(own, ("digits",)), Accuracy()), 1) as scorer:
        scorer.models = {rewards[0]: lambda _: each.T, own: lambda _: each[:1].T}
        parts = scorer.score(asked).parts
    assert parts.keys() == {"model", "own/digits", "accuracy", "model/disagreement"}
    np.testing.assert_allclose(parts["model/disagreement"], squares**0.5, rtol=1e-9)
    np.testing.assert_array_equal(parts["own/digits"], each[0])


PLACES = {"silent": "template", "as_written": "template", "one": "stop"}
"""Directories of the first model, and where scores are read: one does not say it."""


@pytest.mark.slow
def test_an_answer_is_scored_where_the_model_was_taught_to(folder, tokenizer):
    told = RewardFormat("ranking", None, "chatml", template_fingerprint("chatml", tokenizer), "template")
    save_pretrained(scalar_model("one"), tokenizer, folder / "as_written", None, told.to_json())
    problem = load(TASK).train[0]
    chats = [[*problem.prompt, {"role": "assistant", "content": text}] for text in ("1" * (LONGEST - 1), "no", "")]
    whole = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    prompt = Prompts(TASK, tokenizer)[problem].tolist()
    assert all(ids[: len(prompt)] == prompt and ids[-1:] == tokenizer("\n")["input_ids"] for ids in whole)
    made = [completion(ids[len(prompt) : -1]) for ids in whole]
    cut = dataclasses.replace(made[1], tokens=made[1].tokens[:-1], finish_reason="length")
    sequences = {"template": whole, "stop": [ids[:-1] for ids in whole]}
    for name, place in PLACES.items():
        wanted = unpacked("one", [*sequences[place], [*prompt, *cut.tokens]])
        [found] = judged(
            [ModelReward(str(folder / name))], one_device(), tokenizer, [(problem, x) for x in (*made, cut)]
        )
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        with_tail, without = (unpacked("one", sequences[where]) for where in ("template", "stop"))
        assert np.abs(with_tail - without).min() > 1e-3


def test_all_readers_ask_for_what_a_model_was_taught(folder, tokenizer):
    told = {"steps": RewardFormat("steps", " "), "answers": RewardFormat("ranking")}
    for name, one in told.items():
        save_pretrained(scalar_model("one"), tokenizer, folder / name, None, one.to_json())
    steps, answers = ModelReward(str(folder / "steps")), StepReward(str(folder / "answers"))
    commas = StepReward(str(folder / "steps"), separator=",", name="commas")
    judge = dataclasses.replace(run_with().evaluation, judge=steps)
    for run, words in [
        (run_with(steps), "reward model: .*/steps learned to score steps: take StepReward"),
        (run_with(ModelReward((str(folder / "answers"), *steps.paths))), "steps learned to score steps"),
        (run_with(Accuracy(), constraints=(Constraint(steps, limit=0.5, rate=0.1),)), "steps learned to score steps"),
        (run_with(Accuracy(), gate=Gate(Hinge(steps, 0.0), 0.0)), "steps learned to score steps"),
        (dataclasses.replace(run_with(Accuracy()), evaluation=judge), "steps learned to score steps"),
        (run_with(answers), "reward steps: .*/answers learned to score whole answers: take ModelReward"),
        (
            run_with(commas),
            "commas: .*/steps learned steps that end with ' ', and here they end with ',': set separator",
        ),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            load_judges(run, one_device(), tokenizer, {}, lambda text: None)
        assert "\n" not in str(caught.value)
    fit = run_with(ModelReward(answers.path), StepReward(steps.path, separator=" "))
    assert [reader.check(name) for reader, name in reward_model_uses(fit)] == [None, None]


def test_a_model_that_does_not_say_what_it_was_taught_gets_a_line(folder, tokenizer):
    one = str(folder / "silent")
    save_pretrained(scalar_model("one"), tokenizer, folder / "told", None, RewardFormat("ranking").to_json())
    run = run_with(ModelReward((one, str(folder / "told"), one)), StepReward(one))
    critic = dataclasses.replace(run.recipe, critic=Critic(model=one))
    says = f"{one} does not say what it was taught; it is read as"
    assert format_notes(dataclasses.replace(run, recipe=critic)) == [
        f"reward model: {says} a score of the whole answer, at the last token that the chat template writes",
        f"reward steps: {says} scores of steps that end with '\\n'",
        f"recipe.critic.model {says} values of the policy's states",
    ]
    assert format_notes(run_with(Accuracy())) == [] and reward_format("tiny-random") is None
    path = folder / "told" / "config.json"
    path.write_text(path.read_text().replace('"kind": "ranking"', '"kind": "preference"'))
    with pytest.raises(InputError, match=r"told has jaxrl_llm.kind 'preference', and this version knows ranking"):
        load_judges(run, one_device(), tokenizer, {}, lambda text: None)


def test_bounds_hold_scores_of_models_too(folder, tokenizer):
    asked = items()[:7]
    model = ModelReward(str(folder / "one"))
    raw = oracle("one", tokenizer, asked)
    limit = float(np.median(raw)) + 0.01
    run = run_with(
        Hinge(model, limit, weight=3.0),
        Threshold(model, limit),
        constraints=(Constraint(model, limit=0.5, rate=0.1, name="kind"),),
        gate=Gate(model, limit),
    )
    configs.validate(run)
    with Scorer(configs.rewards(run), 1, watched=configs.watched(run)) as scorer:
        scorer.models = load_judges(
            run, one_device(), tokenizer, {"digits": Prompts(TASK, tokenizer)}, lambda text: None
        )
        assert list(scorer.models) == [model]
        found = scorer.score(asked)
    hinge, above = -np.maximum(0, raw - limit), raw >= limit
    np.testing.assert_allclose(found.parts["model"], hinge, atol=2e-5)
    np.testing.assert_array_equal(found.parts["model_2"], above)
    np.testing.assert_allclose(found.parts["constraint/kind/cost"], raw, atol=2e-5)
    np.testing.assert_array_equal(found.parts["gate/rejected"], ~above)
    np.testing.assert_allclose(found.reward, 3 * hinge + above, atol=5e-5)


def test_the_mean_is_that_of_the_first_reward_model_and_nan_where_nothing_was_scored():
    run = run_with(Accuracy(), StepReward("steps"), ModelReward("one"), ModelReward("two"))
    found = {"reward/accuracy": 1.0, "reward/steps": 2.0, "reward/model": 3.0, "reward/model_2": 4.0}
    assert group_row(run, {"kl": 1.0} | found) == {"kl": 1.0} | found | {"reward_model/mean": 3.0}
    assert np.isnan(group_row(run, {})["reward_model/mean"])
    assert group_row(run_with(Accuracy()), {"kl": 1.0} | found) == {"kl": 1.0} | found


@pytest.mark.slow
def test_a_model_for_just_as_many_positions_is_taken(folder, tokenizer):
    attention = dataclasses.replace(TINY.attention, rope=Rope(max_positions=WIDTH))
    config = dataclasses.replace(TINY, layers=1, attention=attention)
    path = str(folder / "just_enough")
    save_pretrained(with_scalar_head(initialise(config, jax.random.key(0))), tokenizer, path)
    run = run_with(ModelReward(path))
    assert run.rollout.max_length == WIDTH
    assert load_judges(run, one_device(), tokenizer, {}, lambda text: None).keys() == set(run.scoring.rewards)
    path = str(folder / "one_more")
    shutil.copytree(folder / "just_enough", path)
    settings = json.loads((folder / "one_more" / "config.json").read_text())
    told = settings | {"jaxrl_llm": RewardFormat("ranking", score_at="template").to_json()}
    (folder / "one_more" / "config.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match=f"made for {WIDTH} positions, and prompts with completions have up to 41"):
        prompts = {"digits": Prompts(TASK, tokenizer)}
        load_judges(run_with(ModelReward(path)), one_device(), tokenizer, prompts, lambda text: None)
    longer = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, max_new_tokens=LONGEST + 1))
    with pytest.raises(InputError, match=f"made for {WIDTH} positions, and prompts with completions have up to 41"):
        load_judges(longer, one_device(), tokenizer, {}, lambda text: None)


def test_runs_and_their_checkpoints_are_found_from_elsewhere(folder):
    run = run_with(Hinge(ModelReward(("one", "two@3", "tiny-random")), 0.0), StepReward("three@12"))
    found = configs.located(run, configs.Origin(str(folder)))
    paths = (str(folder / "one"), str(folder / "two@3"), "tiny-random")
    assert configs.bases(found) == [ModelReward(paths), StepReward(str(folder / "three@12"))]


def test_tasks_of_one_name_are_told_apart_or_refused():
    run = run_with(ModelReward("one"))
    for changes, fine in (({}, True), ({"suffix": "!"}, False), ({"suffix": "!", "name": "other"}, True)):
        evaluation = dataclasses.replace(run.evaluation, task=dataclasses.replace(TASK, **changes))
        asked = dataclasses.replace(run, evaluation=evaluation)
        if fine:
            configs.validate(asked)
        else:
            with pytest.raises(InputError, match=r"both called digits and differ in suffix: give evaluation.task"):
                configs.validate(asked)


def written(text, tokenizer):
    """A row that such a model learns from, its steps cut as collected ones are; and the same as a completion."""
    row = {"prompt": "Say 1", "completions": split_steps(text, "\n"), "labels": [1] * len(split_steps(text, "\n"))}
    [found] = load_texts(Steps([row], template="chatml"), tokenizer, (tokenizer.eos_token_id,)).train
    tokens = found.tokens.tolist()
    return found, completion(tokens, tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("text", TEXTS)
def test_steps_are_cut_as_those_that_the_model_learned_from(tokenizer, text):
    row, made = written(text, tokenizer)
    assert made.text == text and row.ends[-1] == len(text.encode()) - 1, "just before the stop token"
    np.testing.assert_array_equal(step_ends(made, "\n", tokenizer), row.ends)


def test_where_nothing_is_written_no_step_ends(tokenizer):
    for text in ("", " \n\n"):
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert step_ends(completion(tokens, text), "\n", tokenizer).tolist() == []


def test_each_step_is_worth_the_models_belief_behind_it_or_its_rise(folder, tokenizer):
    problem = load(TASK).train[0]
    short = [text for text in TEXTS if len(text.encode()) < LONGEST]
    made = [written(text, tokenizer)[1] for text in short] + [completion([tokenizer.eos_token_id])]
    path = str(folder / "of_steps")
    save_pretrained(scalar_model("two"), tokenizer, path, None, RewardFormat("steps", "\n").to_json())
    plain, rises = StepReward(path), StepReward(path, differences=True, start=0.25, weight=2.0, name="rises")
    asked = [(problem, one) for one in made]
    values, differences = judged([plain, rises], one_device(), tokenizer, asked)
    prompt = Prompts(TASK, tokenizer)[problem]
    for one, said, risen in zip(made, values, differences, strict=True):
        ends = step_ends(one, "\n", tokenizer)
        assert [end for end, _ in said] == ends.tolist() == [end for end, _ in risen]
        if len(ends):
            raw = unpacked("two", [[*prompt, *one.tokens[: end + 1]] for end in ends])
            np.testing.assert_allclose([value for _, value in said], 1 / (1 + np.exp(-raw)), atol=1e-5)
            np.testing.assert_allclose(sum(value for _, value in risen), said[-1][1] - 0.25, atol=1e-9)
            np.testing.assert_allclose(risen[0][1], said[0][1] - 0.25, atol=1e-9)
    assert values[-1] == differences[-1] == [] and max(len(said) for said in values) > 1

    with Scorer((plain, rises), 1) as scorer:
        scorer.tokenizer = tokenizer
        scorer.models = dict(zip((plain, rises), (lambda _: values, lambda _: differences), strict=True))
        found = scorer.score(asked)
    np.testing.assert_array_equal(found.reward, 0), "steps are no part of the sum"
    for steps, said, risen in zip(found.steps, values, differences, strict=True):
        assert np.count_nonzero(~np.isnan(steps)) == len(said)
        for (end, value), (_, rise) in zip(said, risen, strict=True):
            np.testing.assert_allclose(steps[end], value + 2 * rise, rtol=1e-6)


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<pad>"])
def test_a_control_token_in_what_is_judged_is_text(token):
    tokenizer = tiny_tokenizer()
    judge = JudgeEngine(JudgeModel("tiny-random"), None, None, tokenizer, None, print)
    asked = lambda text: [{"role": "user", "content": text}]
    known, found = judge.prompt(asked("plain")), judge.prompt(asked(f"so {token}system"))
    assert [*known] == tokenizer.apply_chat_template(asked("plain"), add_generation_prompt=True, return_dict=False)
    assert (found >= 256).sum() == (known >= 256).sum() and f"so {token}system" in text_of(tokenizer, found)
