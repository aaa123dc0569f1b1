"""Configurations: the shipped ones, what is refused before anything is loaded, and the JSON that a run leaves."""

import dataclasses
import json

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.advantages import GDPO
from jaxrl_llm.algorithms.surrogates import CISPO
from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.config.run import MAX_SEED
from jaxrl_llm.data import Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import DAPO, GRPO, PRORL_V1, PRORL_V2, RECIPES, Overlong
from jaxrl_llm.rewards import Accuracy, CosineLength, Format, Function, LengthPenalty, RepetitionPenalty
from jaxrl_llm.rollout import Repetition
from jaxrl_llm.rules import Phase, Rules
from jaxrl_llm.tasks import HubDataset, ReasoningGym, Table, Task

TASK = Task(Table("problems.jsonl"), template="plain", holdout=0.1)
RUN = Run(model="tiny-random", task=TASK)
INF = float("inf")


def replaced(run, path, value):
    """The run with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(run, **{name: replaced(getattr(run, name), rest, value) if rest else value})


@pytest.mark.parametrize("name", configs.config_names())
def test_a_shipped_configuration_is_sound_and_survives_its_json(name):
    found, run = configs.load_config(name)
    assert found == name
    configs.validate(run)
    assert configs.from_json(json.loads(json.dumps(configs.to_json(run)))) == run


@pytest.mark.parametrize("name", configs.config_names())
def test_a_shipped_configuration_says_its_command(name):
    text = (configs.config_folder() / f"{name}.py").read_text()
    assert f"\n    jaxrl-llm train {name}\n" in text


def test_the_published_configurations_are_shipped():
    assert {"quickstart", "smoke", "dapo_qwen2_5_32b", "prorl_r1_distill_1_5b", "gspo_qwen3_30b_a3b"} <= set(
        configs.config_names()
    )


def test_dapo_has_the_numbers_of_its_paper():
    run = configs.load_config("dapo_qwen2_5_32b")[1]
    completions = run.rollout.prompts * run.rollout.group
    assert (completions, completions // run.learner.minibatches) == (8192, 512)
    assert run.learner.optimiser.warmup == 20 * run.learner.minibatches * run.learner.epochs
    right, overlong = configs.rewards(run)
    assert (overlong.max_length, overlong.cache, overlong.weight) == (20480, 4096, right.weight / 2)
    assert (run.learner.optimiser.weight_decay, run.recipe.overlong.drop, run.recipe) == (0.1, False, DAPO)
    surrogate = run.recipe.algorithm.surrogate
    assert (surrogate.low, surrogate.high, run.recipe.algorithm.needs_reference) == (0.2, 0.28, False)


@pytest.mark.parametrize(
    "name", ["dapo_qwen2_5_32b", "prorl_r1_distill_1_5b", "gspo_qwen3_30b_a3b", "grpo_qwen2_5_1_5b_gsm8k"]
)
def test_a_configuration_of_a_paper_makes_the_papers_updates(name):
    run = configs.load_config(name)[1]
    made, paper = run.learner.epochs * run.learner.minibatches, run.recipe.paper
    assert made == paper.count
    if name != "grpo_qwen2_5_1_5b_gsm8k" and paper.completions:  # whose groups of 8 stand for the paper's 64
        assert run.rollout.prompts * run.rollout.group / made == paper.completions


@pytest.mark.parametrize(("name", "chips"), [
    ("quickstart", 1), ("smoke", 1), ("grpo_qwen2_5_1_5b_gsm8k", 8), ("prorl_r1_distill_1_5b", 32),
    ("gspo_qwen3_30b_a3b", 128), ("dapo_qwen2_5_32b", 256),
])  # fmt: skip
def test_a_shipped_configuration_fits_the_machine_that_it_names(name, chips):
    configs.validate_on_devices(configs.load_config(name)[1], chips)
    assert chips == 1 or f"written for {chips} chips" in (configs.config_folder() / f"{name}.py").read_text()


def test_prorl_has_the_numbers_of_its_paper():
    run = configs.load_config("prorl_r1_distill_1_5b")[1]
    assert (run.rollout.prompts, run.rollout.prompts // run.learner.minibatches, run.rollout.group) == (256, 64, 16)
    assert (run.rollout.max_length, run.rollout.temperature, run.learner.optimiser.learning_rate) == (8096, 1.2, 2e-6)
    assert run.recipe.resets.with_optimiser and run.recipe.resets.on_stall


def test_a_truncated_sampler_is_fine_where_the_learner_leaves_out_the_same_tokens():
    rollout = dataclasses.replace(RUN.rollout, temperature=1.0, top_p=0.9)
    configs.validate(
        dataclasses.replace(RUN, rollout=rollout, learner=dataclasses.replace(RUN.learner, keep_sampling_mask=True))
    )
    assert rollout.sampling((), True).keep_mask and not rollout.sampling(()).keep_mask


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_chosen_for_a_configuration(name):
    of_turns = bool(RECIPES[name].branch) or "turn_rewards" in RECIPES[name].algorithm.advantage.needs
    tools = ("jaxrl_llm.environments.examples:multiply",) * of_turns
    run = dataclasses.replace(configs.with_recipe(RUN, name), evaluation=Evaluation(every=1))
    run = replaced(run, "task.tools", tools)
    configs.validate(run)
    assert run.recipe == RECIPES[name] and configs.from_json(configs.to_json(run)) == run


def test_every_kind_of_value_survives_its_json():
    rewards = (
        Accuracy(2.0),
        Format(r"a\d"),
        LengthPenalty(0.1),
        CosineLength(9),
        RepetitionPenalty(),
        Function("os.path:join"),
    )
    rollout = dataclasses.replace(RUN.rollout, repetition=Repetition(8, 3, 0.9, 100))
    sources = (Table("a.parquet"), HubDataset("a/b", "c"), ReasoningGym("chain_sum", {"min_terms": 2, "x": True}))
    for source in sources:
        run = dataclasses.replace(
            RUN,
            rollout=rollout,
            task=Task(source),
            scoring=Scoring(rewards),
            evaluation=Evaluation(task=TASK),
            output=Output(trackers=("wandb:w",)),
        )
        assert configs.from_json(json.loads(json.dumps(configs.to_json(run)))) == run


REFUSED = [
    ("steps", 0, "steps must be at least 1, got 0"),
    ("model", "", "model is empty"),
    ("seed", -1, "seed must be from 0"),
    ("seed", MAX_SEED, "seed must be from 0"),
    ("rollout.group", 1, "rollout.group 1 leaves nothing to compare: dapo needs at least 2"),
    ("rollout.temperature", 0.0, "rollout.temperature must be above 0"),
    ("rollout.top_p", 0.9, "set rollout.top_k 0 and rollout.top_p 1"),
    ("rollout.top_k", 5, "set learner.keep_sampling_mask True, or"),
    ("rollout.top_p", 1.5, "rollout.top_p must be above 0 and at most 1"),
    ("learner.keep_sampling_mask", True, "set rollout.top_k or rollout.top_p"),
    ("rollout.collect.max_age", -1, "rollout.collect.max_age must be at least 0"),
    ("rollout.top_k", -1, "rollout.top_k must be at least 0"),
    ("learner.minibatches", 9, "learner.minibatches 9 exceeds rollout.prompts 8"),
    ("learner.compute.remat", "some", "none, dots, full or offload"),
    ("learner.compute.attention", "flash", "auto, xla, splash, triton or cudnn"),
    ("learner.dtype", "float64", "learner.dtype 'float64' is unknown: float32 or bfloat16"),
    (
        "learner.dtype",
        "bfloat16",
        "rounds away steps of 1e-06 (learner.optimiser.learning_rate 1e-06): set learner.dtype float32 "
        "and learner.compute.dtype bfloat16, or learner.lora.rank above 0",
    ),
    ("learner.compute.row_tokens", 100, "set it to at least 512"),
    ("learner.target_kl", 0.0, "learner.target_kl must be above 0"),
    ("learner.optimiser.learning_rate", 0.0, "learner.optimiser.learning_rate must be above 0"),
    ("learner.optimiser.schedule", "wsd", "constant, cosine or linear, got wsd"),
    ("learner.optimiser.name", "sgd", "learner.optimiser.name must be adamw, adafactor or muon, got sgd"),
    ("learner.optimiser.moments.dtype", "int8", "moments.dtype must be float32 or bfloat16, got int8"),
    ("learner.optimiser.decay", (0, 9), "or 0 0 with schedule constant, got (0, 9)"),
    ("learner.lora.rank", -1, "learner.lora.rank must be at least 0"),
    ("learner.lora.alpha", 0.0, "learner.lora.alpha must be above 0"),
    ("learner.lora.targets", (), "learner.lora.targets must be some of attn/q,"),
    ("learner.lora.targets", ("attn/q", "attn/q"), "each once; got attn/q, attn/q"),
    ("learner.optimiser.warmup", -1, "learner.optimiser.warmup must be at least 0"),
    ("learner.optimiser.moments.b2", 1.0, "learner.optimiser.moments.b2 must be from 0 to below 1"),
    ("learner.optimiser", Optimiser(schedule="cosine"), "above warmup (0)"),
    (
        "learner.optimiser",
        Optimiser(schedule="linear", warmup=9, decay=(0, 9)),
        "above warmup (9)",
    ),
    ("recipe.overlong.share", 1.0, "recipe.overlong.share must be from 0 to below 1"),
    ("recipe.filter_groups", "acc", "recipe.filter_groups must be accuracy, reward or False, got 'acc'"),
    ("recipe.overlong.weight", -1.0, "recipe.overlong.weight must be at least 0, got -1.0"),
    ("recipe.overlong.weight", INF, "recipe.overlong.weight must be at least 0, got inf"),
    (
        "recipe",
        dataclasses.replace(GRPO, overlong=Overlong(weight=1.0)),
        "recipe.overlong.weight 1.0 has no part of the budget to act in",
    ),
    ("recipe.resets.reference_every", 5, "recipe.resets.reference_every 5 has no reference to reset"),
    ("recipe.resets.on_stall", 5, "recipe.resets.on_stall 5 has no reference to reset"),
    (
        "recipe",
        dataclasses.replace(PRORL_V2, algorithm=dataclasses.replace(PRORL_V2.algorithm, advantage=GDPO())),
        "recipe.shaping StopProperly, LengthCycle changes the sum of the rewards, and GDPO looks at each alone",
    ),
    ("recipe", PRORL_V1, "waits for evaluations: set evaluation.every above 0"),
    ("evaluation.samples", 4, "set evaluation.temperature above 0"),
    ("evaluation.temperature", -1.0, "evaluation.temperature must be at least 0"),
    ("evaluation.top_p", 0.0, "evaluation.top_p must be above 0"),
    ("evaluation.limit", -1, "evaluation.limit must be at least 0"),
    ("evaluation.task", Task(TASK.source, verifier="no"), "verifier 'no' is unknown"),
    (
        "evaluation.task",
        Task(TASK.source, verifier="none"),
        "evaluation.task.verifier none leaves the reward Accuracy nothing",
    ),
    (
        "task.verifier",
        "none",
        "task.verifier none leaves the reward Accuracy nothing to compare: give the task its answers",
    ),
    ("task.source.answer_field", None, "task.source.answer_field None leaves the reward Accuracy nothing to compare"),
    ("task.date", "yesterday", "date 'yesterday' is not a date"),
    ("task.extractor", "no", "extractor 'no' is unknown"),
    ("task.holdout", 1.0, "holdout is 1.0"),
    ("task.keep", "jaxrl_llm.tasks.filters:nonnegative", "did you mean nonnegative_answer?"),
    ("scoring.rewards", (), "scoring.rewards is empty"),
    ("scoring.rewards", (Format("("),), "is not a regular expression"),
    ("scoring.rewards", (Function("nowhere:f"),), "nowhere:f cannot be imported"),
    ("scoring.rewards", (Accuracy(float("nan")),), "give a finite number"),
    ("scoring.rewards", (RepetitionPenalty(),), "set rollout.repetition.longest_period and times, or leave it out"),
    ("scoring.timeout_s", 0.0, "scoring.timeout_s must be above 0"),
    ("scoring.on_error", INF, "scoring.on_error must be a finite number"),
    ("output.keep", 0, "output.keep must be at least 1"),
    ("learner.target_kl", INF, "learner.target_kl must be finite, got inf: give a finite number or None"),
    ("learner.lora.alpha", INF, "learner.lora.alpha must be finite, got inf: give a finite number"),
    ("recipe.algorithm.surrogate", CISPO(INF), "recipe.algorithm.surrogate.ratio_max must be finite, got inf"),
    ("rules", Rules((Phase("on", changes={"learner.target_kl": INF}),)), "phase 'on': learner.target_kl must be"),
]


@pytest.mark.parametrize(
    ("path", "value", "words"), REFUSED, ids=[f"{path}={value}"[:60] for path, value, _ in REFUSED]
)
def test_what_cannot_work_is_refused_in_one_line(path, value, words):
    configs.validate(RUN)
    with pytest.raises(InputError) as refusal:
        configs.validate(replaced(RUN, path, value))
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("steps", True, "steps is True: give a whole number"),
        ("scoring.timeout_s", False, "scoring.timeout_s is False: give a number"),
        ("rules.guards", "all", r"rules.guards is 'all': give a tuple of text, of one alone as \(x,\)"),
        ("rules.phases", Phase("a"), r"rules.phases is Phase\(...\): give a tuple of Phase\(...\)"),
        ("rules.phases", (Phase("a", changes=[1]),), r"rules.phases\[0\].changes is \[1\]: give a dict"),
    ],
)
def test_a_value_of_another_type_is_refused(path, value, words):
    configs.check_types(RUN)
    with pytest.raises(InputError, match=words):
        configs.check_types(replaced(RUN, path, value))


def test_evaluations_need_something_to_test_on():
    run = replaced(replaced(RUN, "task.holdout", 0.0), "evaluation.every", 5)
    with pytest.raises(InputError, match=r"set task.holdout above 0, or evaluation.task"):
        configs.validate(run)
    configs.validate(replaced(run, "evaluation.task", TASK))


def test_problems_without_answers_need_no_verifier_and_nothing_that_reads_who_is_right():
    own = dataclasses.replace(RUN, scoring=Scoring((Format("a"),)))
    for changed in (replaced(own, "task.verifier", "none"), replaced(own, "task.source.answer_field", None)):
        configs.validate(changed)
        with pytest.raises(InputError, match=r"but recipe.shaping RelativeLength rewards short answers that are right"):
            configs.validate(dataclasses.replace(changed, recipe=RECIPES["kimi_k1_5"]))
    assert configs.verifies(RUN) and not configs.verifies(own)


def test_what_is_longer_than_the_model_was_made_for_is_refused():
    configs.validate_on_model(RUN, 512)
    with pytest.raises(
        InputError, match="max_new_tokens 256 need 512 positions, and the model was made for 500: lower one by 12"
    ):
        configs.validate_on_model(RUN, 500)


def test_a_date_stands_where_none_is_given():
    run = configs.dated(replaced(RUN, "evaluation.task", dataclasses.replace(TASK, date="2024-02-29")), "2025-07-01")
    assert (run.task.date, run.evaluation.task.date) == ("2025-07-01", "2024-02-29")
    assert configs.dated(replaced(RUN, "evaluation.task", TASK), "2025-07-01").evaluation.task.date == "2025-07-01"
    assert configs.dated(run, "2026-01-01") == run and configs.dated(RUN, "2025-07-01").evaluation.task is None


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    for rows in (0, 8):
        configs.validate_on_devices(replaced(RUN, "learner.compute.microbatch_rows", rows), 8)
    with pytest.raises(InputError, match=r"rows 2 does not divide over mesh .* = 1 x 8: make it a multiple of 8, or 0"):
        configs.validate_on_devices(replaced(RUN, "learner.compute.microbatch_rows", 2), 8)


def write(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_file_of_ones_own_is_a_configuration(tmp_path):
    text = "from jaxrl_llm.config import Run, load_config\nconfig = load_config('smoke')[1]\n"
    assert configs.load_config(str(write(tmp_path, text))) == ("mine", configs.load_config("smoke")[1])


@pytest.mark.parametrize(("text", "words"), [
    ("config = 3", "must set config = Run(...)"),
    ("x = 1\nconfig = run", "mine.py, line 2: NameError: name 'run' is not defined"),
    ("config = (", "mine.py, line 1: SyntaxError"),
    ("from jaxrl_llm.rollout import Rollout\nRollout(slot=3)", "line 2: TypeError"),
])  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path, text, words):
    with pytest.raises(InputError) as refusal:
        configs.load_config(str(write(tmp_path, text)))
    assert words in str(refusal.value)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(InputError, match="did you mean quickstart"):
        configs.load_config("quickstrat")
    with pytest.raises(InputError, match="did you mean gspo"):
        configs.with_recipe(RUN, "gpso")


def test_a_saved_run_builds_nothing_but_configuration(tmp_path):
    saved = configs.to_json(RUN) | configs.Origin("").to_json()
    for kind in ("os:system", "subprocess:Popen", "jaxrl_llm.config:validate", "jaxrl_llm.config.run:Runs"):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(saved | {"learner": {"type": kind}}))
        with pytest.raises(InputError, match="not a configuration class of this version"):
            configs.whole(configs.read(path).run)
    path.write_text(json.dumps(saved | {"unknown": 1}))
    with pytest.raises(InputError, match="does not describe a run of this version"):
        configs.whole(configs.read(path).run)


def test_changes_are_named_by_field():
    other = dataclasses.replace(RUN, seed=3, learner=Learner(Optimiser(learning_rate=2e-6)))
    assert configs.changes(RUN, other) == ["learner.optimiser.learning_rate: 1e-06 -> 2e-06", "seed: 0 -> 3"]
    assert configs.changes(RUN, dataclasses.replace(RUN, recipe=DAPO)) == []
    unscorable = replaced(RUN, "scoring.on_error", float("nan"))
    assert configs.changes(unscorable, configs.from_json(json.loads(json.dumps(configs.to_json(unscorable))))) == []


def test_prompts_are_asked_as_the_data_words_them():
    data = Texts(Table("none.jsonl"), template="chatml", system="Be brief.", suffix=" Now.", date="2026-01-02")
    found = configs.wording(configs.Supervised("tiny-random", data))
    assert (found.template, found.system, found.suffix, found.date) == ("chatml", "Be brief.", " Now.", "2026-01-02")
