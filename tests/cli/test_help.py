"""The command line before any weight is loaded: help, lists, and what the process itself answers."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
from commands import MAIN, Answer, assert_refused, command, commands, environment

from jaxrl_llm.algorithms.preference import IPO
from jaxrl_llm.cli.export import check_adapter, model_card
from jaxrl_llm.cli.train import row_output
from jaxrl_llm.config import Origin, Preference, RewardModel, Supervised, to_json
from jaxrl_llm.data import Pairs, Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Learner
from jaxrl_llm.models.config import Lora
from jaxrl_llm.runs import Trained
from jaxrl_llm.tasks import Table

ROWS = Table("rows.jsonl")


def test_the_process_itself_exits_with_code_2_and_one_line(tmp_path):
    assert_refused(command("train", "smoke", "--stpes", "3", folder=tmp_path), "did you mean --steps?")
    assert_refused(command("train", "smoke", "--model", "r.gguf", folder=tmp_path), "no such file: r.gguf")
    assert not list(tmp_path.iterdir())


def test_python_runs_the_package_as_the_command(tmp_path):
    program = [sys.executable, "-m", "jaxrl_llm", "trian"]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean train?" in done.stderr


def test_windows_is_refused_in_one_line():
    program = (
        "import sys; sys.platform, sys.modules['fcntl'] = 'win32', None; from jaxrl_llm.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert_refused(Answer(done.returncode, done.stdout, done.stderr), "Windows is not supported: use WSL2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["train smoke --stpes 3", "train smoke --steps x", "train smok", "eval nowhere", "train smoke --help"]
)
def test_a_typo_is_answered_without_the_slow_libraries(tmp_path, line):
    assert slow_libraries(tmp_path, line) <= {"jax"}


@pytest.mark.parametrize("line", ["--help", "list configs"])
def test_names_are_listed_without_jax(tmp_path, line):
    assert not slow_libraries(tmp_path, line)


def slow_libraries(folder, line):
    """Those that a command imports."""
    program = (
        "import sys\nfrom jaxrl_llm.cli import run\ntry:\n    run(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('loaded', "
        "*{'jax', 'flax', 'optax', 'orbax', 'transformers', 'reasoning_gym', 'datasets'} & set(sys.modules))"
    )
    arguments = [sys.executable, "-c", program, *line.split()]
    done = subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    loaded, *found = done.stdout.splitlines()[-1].split()
    assert loaded == "loaded"
    return set(found)


def test_types_that_tyro_keeps_are_not_mixed_up(tmp_path):
    # Where pytest is loaded, tyro compares a tenth of what it keeps with what it would find anew; here all of it.
    checks = "import random, pytest; random.random = lambda: 0.0"
    done = command("train", "smoke", "--steps", "x", folder=tmp_path, before=checks, anew=True)
    assert_refused(done, "--steps")


def test_a_run_goes_on_when_nobody_reads_its_rows_any_more(capfd):
    reading, writing = os.pipe()
    with open(writing, "w") as out, contextlib.redirect_stdout(out), row_output(False, True) as voice:
        voice.rows({"step": 1, "event/reward_failed": "mine: naïve"})
        assert os.read(reading, 100) == b'{"step": 1, "event/reward_failed": "mine: na\\u00efve"}\n'
        os.close(reading)
        voice.rows({"step": 2})
        voice.rows({"step": 3})
    assert capfd.readouterr() == ("", "jaxrl-llm: nobody reads stdout any more; the rows are in metrics.jsonl\n")


@pytest.mark.slow
def test_help_tells_the_commands_and_the_fields(tmp_path):
    top, none, version, wrong, part, *helps = commands(
        ["--help", "", "--version", "train smoke --help rollot", "train smoke --help output",
         "train --help", "train smoke --help", "eval --help", "eval tiny-random --help",
         "generate --help", "generate tiny-random --help", "export --help", "list --help"],
        tmp_path,
    )  # fmt: skip
    assert top.code == 0 and all(name in top.out for name in ("train", "eval", "generate", "export", "list"))
    assert none.code == 2 and "no command ''" in none.err
    assert version.out.count(".") == 2
    for answer in helps:
        assert answer.code == 0 and "usage" in answer.out.lower() and not answer.err
    assert "--output.no_ratios" in part.out and "--output.trackers [STR" in part.out and "--steps" not in part.out
    assert_refused(wrong, "no part 'rollot' of the settings: did you mean rollout?")
    usual = re.findall(r"^  --([a-z._]+) (?:None.)?[A-Z]+\b", helps[1].out, re.MULTILINE)
    assert usual[usual.index("model") :][:4] == ["model", "run_dir", "steps", "learner.optimiser.learning_rate"]
    assert "--recipe NAME" in helps[1].out and "--help all lists all" in helps[1].out
    assert all(flag in helps[number].out for flag in ("--quiet", "--json") for number in (0, 1))
    assert "--top_p" in helps[5].out and "--samples" in helps[3].out
    assert not list(tmp_path.iterdir())


def test_list_names_what_there_is(tmp_path):
    everything, configurations, tasks, recipes, models = commands(
        ["list", "list configs", "list tasks", "list recipes", "list models"], tmp_path
    )
    assert "smoke       " in configurations.out and "Two random layers" in configurations.out
    assert "chain_sum" in tasks.out and "Table(" in tasks.out
    assert "gspo" in recipes.out and "arXiv 2507.18071" in recipes.out
    assert "tiny-random" in models.out and "qwen3" in models.out
    for answer in (configurations, recipes, models):
        assert answer.code == 0 and answer.out.strip() in everything.out


def test_bash_completes_commands_configurations_recipes_and_flags(tmp_path):
    bash, zsh, wrong = commands(["completion bash", "completion zsh", "completion fish"], tmp_path)
    assert_refused(wrong, "completion does not know 'fish': there are bash and zsh")
    assert "bashcompinit" in zsh.out and zsh.out.endswith(bash.out)
    typed = {
        "tr": "train",
        "train quick": "quickstart",
        "train quickstart --recipe ds": "",
        "train quickstart --recipe gs": "gspo",
        "train quickstart --learner.opt": "--learner.optimiser.learning_rate",
        "eval runs/quickstart --samp": "--samples",
        "list rec": "recipes",
    }
    lines = [f"COMP_WORDS=(jaxrl-llm {words}) COMP_CWORD={len(words.split())}; _jaxrl_llm" for words in typed]
    program = bash.out + "".join(f'{line}; echo "${{COMPREPLY[*]}}"\n' for line in lines)
    done = subprocess.run(["bash", "-u"], input=program, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == ([*typed.values()], "")


@pytest.mark.slow
def test_list_fits_a_narrow_terminal_and_a_pipe(tmp_path):
    lines = ["list", "list configs", "list tasks", "list recipes", "list models"]
    for answer in commands(lines, tmp_path, COLUMNS="80"):
        assert max(len(line) for line in answer.out.splitlines()) <= 80
    bare = {name: value for name, value in environment().items() if name != "COLUMNS"}
    piped = subprocess.run(
        [sys.executable, "-c", MAIN, "list"], cwd=tmp_path, env=bare, capture_output=True, text=True, check=True
    )
    assert max(len(line) for line in piped.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    "run, told, use",
    [
        (Supervised("base", Texts(ROWS)), "Supervised fine-tuning from `base`", "jaxrl-llm generate out"),
        (Preference("base", Pairs(ROWS), IPO()), "Preference learning by IPO from `base`", "jaxrl-llm generate out"),
        (RewardModel("base", Pairs(ROWS)), "A reward model from `base`", "reward-model]"),
    ],
)
def test_the_card_of_an_export_names_method_base_and_data(run, told, use, tmp_path):
    card = model_card("run", Trained(run, tmp_path / "checkpoints/40", 40), "out", adapter=False)
    assert told in card and "step 40 of 100, learned from `rows`" in card and use in card
    assert ("generate" in card) == (not isinstance(run, RewardModel)) and "| held out |" not in card


def test_an_export_names_a_base_that_others_find(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text(
        json.dumps(to_json(Supervised("smollm2-135m", Texts(ROWS))) | Origin("").to_json())
    )
    over_model, over_run = (
        Trained(Supervised(name, Texts(ROWS), learner=Learner(lora=Lora(2))), tmp_path / "checkpoints/40", 40)
        for name in ("smollm2-135m", f"{first}@3")
    )
    check_adapter("second", over_model)
    with pytest.raises(InputError, match=r"@3, and PEFT .* without what that run learned \(Supervised fine-tuning\)"):
        check_adapter("second", over_run)
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for trained, told in ((over_model, f"from `{hub}`"), (over_run, f"from `{first}@3` (from `{hub}`)")):
        card = model_card("second", trained, "out", adapter=True)
        assert f"base_model: {hub}\n" in card and told in card
