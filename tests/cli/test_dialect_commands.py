"""Names of other trainers on the command line: what is refused in one line, and what is said of the others."""

import re

import pytest
from commands import assert_refused, commands

from jaxrl_llm.cli.dialects import SPELLINGS
from jaxrl_llm.cli.dialects.verl import ACTOR

COMMANDS = {
    "train smoke --epsilon_high": ["--epsilon_high needs a value"],
    "train smoke --epsilon_high --steps 3": ["--epsilon_high needs a value"],
    f"train smoke {ACTOR}clip_ratio_c=": ["clip_ratio_c needs a value"],
    "train smoke --beta 0.1 --beta=0.2": ["--beta is given twice"],
    "train smoke --clip_ratio_high 0.3": [
        "--clip_ratio_high is short for",
        f"{ACTOR}clip_ratio_high",
        "write it whole",
    ],
    "train smoke --recipe.controller AdaptiveKL": ["no option --recipe.controller: a controller is set in the config"],
    "train smoke --beta 0.1 --stpes 3": ["no option --stpes", "did you mean --steps?"],
    f"train smoke {ACTOR}clip_ratio_hihg=0.3": ["did you mean", f"{ACTOR}clip_ratio_high?"],
    "train smoke actor_rollout_ref.model.path=x": ["no translation of actor_rollout_ref.model.path"],
    "train smoke data.train_batch_size=3": ["here it is --rollout.prompts"],
    "train smoke --output.profile 99": ["output.profile 99 is after the last step", "name a step of the run"],
    "train smoke --profile 3": ["did you mean --output.profile?"],
    "train smoke --recipe gpro": ["no recipe 'gpro'", "did you mean grpo?"],
    "train smoke --recipe GSPO": ["did you mean gspo?"],
    "train smoke --resume": ["no option --resume: the same command resumes"],
    "train smoke --load_in_4bit True": ["weights are not quantised; --learner.lora.rank 16"],
    "train smoke --batch-size=8": ["no option --batch-size: --rollout.prompts, each with --rollout.group completions"],
    "train smoke --push_to_hub": ["jaxrl-llm export RUN --out DIR --push USER/NAME"],
    "train smoke --recipe cispo --epsilon_high 0.2": ["--epsilon_high 0.2", "write --epsilon_high 1.2"],
    f"train smoke --beta 1 {ACTOR}clip_ratio_low=0.3": ["use one dialect in a command"],
    f"train smoke {ACTOR}kl_loss_type=k1": ["recipe.algorithm.kl K1 with kl_coef 0.04", "its expected gradient is 0"],
}
HELP = "train smoke --help all"
UNDERSTOOD = "train smoke --recipe gspo --epsilon_high 5e-4 --mesh.data 3"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    lines = [*COMMANDS, UNDERSTOOD, HELP]
    return dict(zip(lines, commands(lines, tmp_path_factory.mktemp("dialects")), strict=True))


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_refuses_in_one_line(answers, line):
    assert_refused(answers[line], *COMMANDS[line])


def test_the_command_line_says_what_a_name_became(answers):
    said, refused = answers[UNDERSTOOD].err.splitlines()
    assert said == "--epsilon_high 5e-4: surrogate PPOClip(low=0.0003, high=0.0005)"
    assert "does not fit 1 devices" in refused


def test_no_flag_of_a_run_has_a_foreign_name(answers):
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w.-]+)", answers[HELP].out)}
    assert "recipe.algorithm.kl_coef" in flags and not flags & SPELLINGS.keys()
    # What the lines at a run's start advise.
    advised = {
        "recipe.overlong.weight",
        "recipe.resets.optimiser_every",
        "rollout.collect.staleness",
        "recipe.overlong.no_drop",
    }
    assert advised | {"learner.minibatches", "learner.epochs"} <= flags
