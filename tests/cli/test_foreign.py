"""Other trainers' names: each is refused with ours, and with the value where both mean the same."""

import contextlib
import dataclasses
import functools
import io
import operator
import re

import pytest
from commands import ROOT

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.preference import KTO, SimPO
from jaxrl_llm.cli.flags import NAMES, NOTES, PAGES, parse_flags, refuse_foreign
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
        parse_flags(type(run), list(arguments), "train", "", run)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@functools.cache
def flags_of(number):
    """All flags of one of the runs, as its help lists them."""
    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
        parse_flags(type(RUNS[number]), ["--help", "all"], "train", "", RUNS[number])
    return frozenset(re.findall(r"^ *--([\w.]+)", text.getvalue(), re.MULTILINE))


def run_with(flag):
    """The number of the first run that has a flag."""
    return next(number for number in range(len(RUNS)) if flag in flags_of(number))


def value_of(flag):
    """A value that a flag takes, other than the one that the run with it has."""
    now = operator.attrgetter(flag)(RUNS[run_with(flag)])
    value = "x" if flag == "output.run_dir" else VALUES[type(now)]
    return "0.5" if value == str(now) else value


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_refused_with_a_flag_that_is_there(name):
    owner, meanings = NAMES[name]
    typed = f"--{name}" if owner != "verl" else name
    for flag, equal in meanings:
        number, value = (run_with(flag), value_of(flag) if equal else "x") if flag else (0, "x")
        with pytest.raises(InputError) as refused:
            refuse_foreign([f"{typed}={value}"], flags_of(number))
        if equal:
            assert str(refused.value) == f"{typed} is {owner}'s name; here it is --{flag} {value}"
        else:
            note = f"nearest: --{flag}" if flag else NOTES.get(name.rpartition(".")[2])
            shown = f"{typed} ({note})" if note else typed
            assert str(refused.value) == f"{shown} is {owner}'s name, without an equal here: {PAGES[owner]}"


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_flags_that_are_equal_take_the_value(number):
    equal = {flag for _, meanings in NAMES.values() for flag, alike in meanings if alike and run_with(flag) == number}
    arguments = [word for flag in sorted(equal) for word in (f"--{flag}", value_of(flag))]
    run = parse_flags(type(RUNS[number]), arguments, "train", "", RUNS[number])
    assert {flag: str(operator.attrgetter(flag)(run)) for flag in equal} == {flag: value_of(flag) for flag in equal}


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
