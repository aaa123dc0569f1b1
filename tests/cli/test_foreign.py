"""Other trainers' names: each is refused with ours, and with the value where both mean the same."""

import dataclasses
import operator
import shlex

import pytest
from commands import ROOT

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.preference import KTO, SimPO
from jaxrl_llm.cli.flags import parse
from jaxrl_llm.cli.foreign import NAMES, NOTES, PAGES
from jaxrl_llm.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:get_parser")
SMOKE, PAIRS, TEXTS = (configs.load_config(name)[1] for name in ("smoke", "simpo_quickstart", "sft_quickstart"))
RUNS = (
    *(configs.with_recipe(SMOKE, name) for name in ("grpo", "sapo")),
    *(dataclasses.replace(PAIRS, loss=loss) for loss in (SimPO(), KTO())),
    TEXTS,
)
"""Runs that have every flag that is named, between them."""
VALUES = {int: "3", float: "2.5", type(None): "2.5", str: "x"}


def refusal(run, *arguments):
    with pytest.raises(InputError) as refused:
        parse(type(run), list(arguments), "train", "", run)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def has(run, flag):
    """Whether a run has this setting, which may be a whole piece."""
    try:
        operator.attrgetter(flag)(run)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_refused_with_a_flag_that_is_there_and_takes_the_value(name):
    owner, meanings = NAMES[name]
    typed = f"--{name}" if owner != "verl" else name
    for flag, equal in meanings:
        if not flag:
            said = refusal(SMOKE, f"{typed}=x")
            note = NOTES.get(name.rpartition(".")[2])
            shown = f"{typed} ({note})" if note else typed
            assert said == f"{shown} is {owner}'s name, without an equal here: {PAGES[owner]}"
            continue
        run = next(run for run in RUNS if has(run, flag))
        if not equal:
            said = f"{typed} (nearest: --{flag}) is {owner}'s name, without an equal here: {PAGES[owner]}"
            assert refusal(run, f"{typed}=x") == said
            continue
        now = operator.attrgetter(flag)(run)
        value = "x" if flag == "output.run_dir" else VALUES[type(now)]
        value = "0.5" if value == str(now) else value
        said = refusal(run, f"{typed}={value}")
        before, _, ours = said.partition("; here it is ")
        assert before == f"{typed} is {owner}'s name"
        found = operator.attrgetter(flag)(parse(type(run), shlex.split(ours), "train", "", run))
        assert str(found) == value and str(now) != value, ours


def test_all_of_a_command_are_in_one_line():
    line = "--num_generations 8 --steps 3 --beta=0.04 --max_steps 3 --use_vllm --learning-rate 1e-5"
    assert refusal(SMOKE, *line.split()) == (
        "--num_generations and --beta and --learning-rate are TRL's names; here they are --rollout.group 8 "
        "--recipe.algorithm.kl_coef 0.04 --learner.optimiser.learning_rate 1e-5; --max_steps (nearest: --steps) and "
        "--use_vllm (the sampler is built in) are TRL's names, without an equal here: docs/from_trl.md"
    )
    said = refusal(SMOKE, "+actor_rollout_ref.rollout.n=8", "--data.max_response_length", "9", "--loss_type", "dapo")
    assert "+actor_rollout_ref.rollout.n and --data.max_response_length are verl's names; here they are" in said


def test_a_value_is_quoted_and_may_be_missing():
    assert refusal(SMOKE, "--output_dir", "my runs/a").endswith("here it is --output.run_dir 'my runs/a'")
    assert refusal(SMOKE, "--num_generations", "--quiet").endswith("here it is --rollout.group")


def test_a_name_of_a_flag_that_the_run_does_not_have_is_unknown():
    assert refusal(TEXTS, "--num_generations", "8").startswith("no option --num_generations")
    assert all((ROOT / page).is_file() for page in PAGES.values())
