"""Runs whose rewards models give, through the command line: where these come from, gone on with, in two processes."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from end_to_end.test_resume import documented
from learner.rollouts import one_device
from transformers import AutoTokenizer

from jaxrl_llm.cli.export import how_to_score
from jaxrl_llm.data import Pairs, Steps
from jaxrl_llm.models import load_pretrained, save_pretrained, scores
from jaxrl_llm.models.config import Rope
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.pretrained import TINY, tiny_tokenizer
from jaxrl_llm.runs import find_run, load_model
from jaxrl_llm.stages.taught import format_of_run, reward_format
from jaxrl_llm.tasks import problem_index
from jaxrl_llm.tasks.template import CHATML, template_fingerprint

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).parents[1] / "fixtures" / "runs" / "digits.jsonl"
SCORING = """
from jaxrl_llm.config import *
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.models.config import Lora
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
config = RewardModel(
    "tiny-random", {data}, batch=BatchSize(4, 40), learner=Learner(Optimiser(learning_rate=3e-2), lora=Lora({rank})),
    steps=2, output=Output(checkpoint_every=1, keep=9, trackers=()),
)
"""
RUN = """
import dataclasses
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GAE, ProcessSupervised
from jaxrl_llm.config import *
from jaxrl_llm.learner import Critic, Learner, Optimiser
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards import *
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
config = Run(
    "tiny-random", Task(Table("digits.jsonl"), template="chatml"),
    scoring=Scoring(({reward},)),
    recipe=Recipe("own", {recipe}),
    rollout=Rollout(prompts=4, group=4, max_prompt_tokens=32, max_new_tokens=8,
                    engine=EngineOptions(slots=16, chunk=8)),
    learner=Learner(Optimiser(learning_rate=2e-3)), evaluation=Evaluation(every=0, limit=2),
    output=Output(checkpoint_every=1, keep=9, trackers=()), steps=2,
)
"""
SWAPPED = """
from safetensors.numpy import load_file, save_file
weights = load_file("exported/model.safetensors")
save_file(weights | {"score.weight": weights["score.weight"] + 1}, "exported/model.safetensors", {"format": "pt"})
"""
GONE = "import shutil\nshutil.rmtree('runs/rm/checkpoints/2')\n"
GRPO = "dataclasses.replace(PRESETS['grpo'], kl_coef=0.0)"
CONFIGS = {
    "rm": SCORING.format(data="Pairs(Table('rm.jsonl'), template='chatml')", rank=0),
    "prm": SCORING.format(data="Steps(Table('prm.jsonl'), template='chatml', separator=' ')", rank=2),
    "rl": RUN.format(reward="ModelReward('runs/rm')", recipe=GRPO),
    "steps": RUN.format(
        reward="StepReward('runs/prm', separator=' ')",
        recipe="dataclasses.replace(PRESETS['grpo'], advantage=ProcessSupervised(), kl_coef=0.0)",
    ),
    "rises": RUN.format(
        reward="StepReward('runs/prm', separator=' ', differences=True, start=0.5), "
        "ModelReward(('runs/rm', 'at_stop'), weight=0.0, name='two')",
        recipe="dataclasses.replace(PRESETS['ppo'], kl_coef=0.0), critic=Critic()",
    ),
}
CONFIGS |= {"swapped": SWAPPED + CONFIGS["rl"], "gone": GONE + CONFIGS["rl"]}
"""Reward models of both kinds, one of them an adapter; a run for each kind of reward."""
LINES = {
    "rm": "train rm.py --run_dir runs/rm",
    "prm": "train prm.py --run_dir runs/prm",
    "export": "export runs/rm --out exported",
    "before": "train rm.py --run_dir at_stop --seed 1 --bootstrap --score_at stop",
    "at_stop": "train rm.py --run_dir at_stop --seed 1 --bootstrap --score_at stop --steps 3",
    "whole": "train rl.py --run_dir whole",
    "half": "train rl.py --run_dir broken --steps 1",
    "exported": "train rl.py --run_dir by_directory --steps 1 --scoring.rewards.0.path exported",
    "stale": "train rl.py --run_dir stale --rollout.collect.staleness 1",
    "wholes": "eval whole --limit 2 --samples 2 --temperature 1 --rerank runs/rm@1 --json",
    "trained on": "train rm.py --run_dir runs/rm --steps 3",
    "rest": "train rl.py --run_dir broken",
    "steps": "train steps.py --run_dir steps",
    "rises": "train rises.py --run_dir rises",
    "eval": "eval whole --task.verifier none --max_new_tokens 4 --json",
    "by_steps": "eval whole --limit 2 --samples 2 --temperature 1 --rerank runs/prm --rerank_by minimum --json",
    "eval_steps": "eval steps --limit 2 --json",
}
CHANGED = {
    "train swapped.py --run_dir by_directory --steps 2 --scoring.rewards.0.path exported": (
        "reward model: exported is not as it was when by_directory began (its weights have changed): put it back, or"
    ),
}
"""Judges of runs that have begun, and what is said where they are others now."""
GONE = "train gone.py --run_dir broken --steps 3"
PATH = "train rl.py --run_dir refused --scoring.rewards.0.path"
RERANK = "eval whole --samples 2 --temperature 1 --rerank"
REFUSED = {
    f"{PATH} nowhere": ["reward model: no such model: nowhere"],
    f"{PATH} runs/reward_quickstart": ["reward model: runs/reward_quickstart not found: jaxrl-llm train reward"],
    f"{PATH} tiny-random": ["reward model: tiny-random is a language model, which gives no score: train a RewardModel"],
    f"{PATH} whole": ["reward model: whole@2 is a language model"],
    f"{PATH} foreign": ["reward model: the tokens of foreign are not those of tiny-random"],
    f"{PATH} mute": ["reward model: mute has no tokenizer: put tokenizer.json and tokenizer_config.json next to"],
    f"{PATH} short": ["short was made for 39 positions", "up to 41: lower max_new_tokens"],
    "train rises.py --run_dir refused --recipe grpo": ["reward steps gives differences", "(--recipe ppo)"],
    "train steps.py --run_dir refused --scoring.rewards.0.separator ": ["reward steps has an empty separator"],
    f"{PATH} runs/prm": ["reward model: runs/prm@2 learned to score steps: take StepReward for it"],
    f"{PATH} runs/rm --task.template plain": ["reward model: runs/rm@3 learned from chats in the template chatml"],
    f"{PATH} exported --task.template plain": ["exported learned from chats in", "task digits", "(template 'plain')"],
    "train prm.py --run_dir refused --score_at stop": ["score_at stop is of pairs and rankings, and data is Steps"],
    f"{RERANK} runs/prm": ["--rerank runs/prm learned to score steps: set --rerank_by product"],
    f"{RERANK} runs/rm --rerank_by last": ["--rerank runs/rm learned to score whole answers: set --rerank_by score"],
    f"{RERANK} short --max_new_tokens 30": ["--rerank: short was made for 39 positions"],
    "eval runs/rm --rerank runs/rm": ["--rerank"],
    "eval whole --task.verifier none --max_new_tokens 2040": ["--max_new_tokens 2040 after a prompt of"],
}


RM = [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": f"x{n}"} for n in range(8)]


def models_in(folder):
    """Reward models that the policy's completions cannot be given to."""
    _, tokenizer = load_pretrained("tiny-random")
    for name, positions in (("short", 39), ("foreign", 64), ("mute", 64)):
        attention = dataclasses.replace(TINY.attention, rope=Rope(max_positions=positions))
        config = dataclasses.replace(TINY, layers=1, attention=attention)
        save_pretrained(with_scalar_head(initialise(config, jax.random.key(0))), tokenizer, folder / name)
    for path in (folder / "mute").glob("*token*"):
        path.unlink()
    path = folder / "foreign" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|im_end|>"', '"<|over|>"'))
    other = folder / "foreign" / "tokenizer_config.json"
    other.write_text(other.read_text().replace("<|im_end|>", "<|over|>"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    (folder / "digits.jsonl").write_text(DIGITS.read_text())
    for name, text in CONFIGS.items():
        (folder / f"{name}.py").write_text(text)
    steps = [{"prompt": f"Say {n}", "completions": [f"{n}", "so"], "labels": [n % 2, 1]} for n in range(8)]
    for name, table in (("rm", RM), ("prm", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    models_in(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    lines = [*LINES.values(), *REFUSED, *CHANGED, GONE]
    return dict(zip([*LINES, *REFUSED, *CHANGED, GONE], commands(lines, folder), strict=True))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain(row):
    """A step's metrics but for what the clock decides, and for the evaluation at the end of the first half."""
    return {
        name: x for name, x in row.items() if not name.startswith(("time/", "throughput/", "event/resumed", "eval/"))
    }


def test_a_run_learns_from_a_reward_models_scores_alone(folder, answers):
    for name in ("rm", "whole"):
        assert answers[name].code == 0, answers[name].err
    metrics = rows(folder / "whole")[1:]
    assert len(metrics) == 2
    for row in metrics:
        assert row["reward_model/mean"] == row["reward/model"] == row["reward/mean"] != 0 and row["reward/std"] > 0
        assert 0 <= row["reward/accuracy"] <= 1 and row["reward/errors"] == 0 and row["loss"] != 0
    known = list(documented())
    assert not [name for name in metrics[-1] if not any(re.fullmatch(pattern, name) for pattern in known)]


def test_it_goes_on_bit_for_bit_with_the_judge_that_it_began_with(folder, answers):
    for name in ("half", "trained on", "rest"):
        assert answers[name].code == 0, answers[name].err
    assert [plain(row) for row in rows(folder / "broken")[:3]] == [plain(row) for row in rows(folder / "whole")]


def test_a_run_goes_on_with_its_judge_though_that_step_of_it_is_gone(folder, answers):
    assert answers[GONE].code == 0 and not (folder / "runs" / "rm" / "checkpoints" / "2").exists(), answers[GONE].err
    last = rows(folder / "broken")[-1]
    assert last["step"] == 3 and math.isfinite(last["reward_model/mean"])


def test_an_exported_directory_gives_the_runs_numbers(folder, answers):
    for name in ("export", "exported"):
        assert answers[name].code == 0, answers[name].err
    assert plain(rows(folder / "by_directory")[1]) == plain(rows(folder / "whole")[1])


def margins(folder, checkpoint, places):
    """The better answers' scores less the others', of these rows of rm.jsonl, by the model of a checkpoint: read at the
    last token of the messages, and at the token before."""
    model, tokenizer = load_model(str(folder / checkpoint), "float32", one_device())
    sides = [(RM[place]["prompt"], RM[place][side]) for side in ("chosen", "rejected") for place in places]
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in sides]
    whole = [tokenizer.apply_chat_template(chat, chat_template=CHATML, return_dict=False) for chat in chats]
    rows = np.zeros((8, 48), np.int32)
    for row, ids in zip(rows, whole, strict=True):
        row[: len(ids)] = ids
    found = [np.asarray(scores(model, rows, [len(ids) - less for ids in whole])) for less in (0, 1)]
    return [(one[:4] - one[4:]).mean() for one in found]


def test_scores_are_learned_at_the_end_of_the_messages_or_at_the_stop(folder, answers):
    for name in ("before", "at_stop"):
        assert answers[name].code == 0, answers[name].err
    drawn = np.random.default_rng([1, 8]).integers(8, size=8)
    assert f"8 rows to learn from are drawn by seed 1, {len(set(drawn))} different ones" in answers["at_stop"].err
    for run, seed, step, draws in (("runs/rm", 0, 2, range(8)), ("at_stop", 1, 3, drawn)):
        places = [draws[problem_index(seed, number, 8)] for number in range(4 * (step - 1), 4 * step)]
        end, before = margins(folder, f"{run}@{step - 1}", places)
        wanted = before if run == "at_stop" else end
        np.testing.assert_allclose(rows(folder / run)[step]["pairs/margin"], wanted, rtol=1e-4)
        assert abs(end - before) > 100 * 1e-4 * abs(wanted), "the two places are told apart"
    assert [reward_format(str(folder / name)).score_at for name in ("runs/rm", "exported", "at_stop")] == [
        *2 * ["template"],
        "stop",
    ]


def test_an_exported_directory_says_what_it_was_taught(folder, answers):
    told = {"template": "chatml", "fingerprint": template_fingerprint("chatml", tiny_tokenizer())}
    config = json.loads((folder / "exported" / "config.json").read_text())
    assert config["jaxrl_llm"] == told | {"kind": "ranking", "score_at": "template"}
    steps = format_of_run(find_run(str(folder / "runs/prm")).run, tiny_tokenizer())
    assert steps.to_json() == told | {"kind": "steps", "separator": " "}


def test_a_card_says_how_transformers_scores_as_the_model_was_taught(folder, answers):
    assert answers["export"].code == 0, answers["export"].err
    run, out = find_run(str(folder / "runs/rm")).run, str(folder / "exported")
    chat = [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "one"}]
    whole = tiny_tokenizer().apply_chat_template(chat, chat_template=CHATML, return_dict=False)
    steps = dataclasses.replace(run, data=Steps(run.data.source, template="chatml"))
    plain = dataclasses.replace(run, data=Pairs(run.data.source, template="plain"))
    for one, ids in (
        (run, whole),
        (dataclasses.replace(run, score_at="stop"), whole[:-1]),
        (steps, whole[:-2]),
        (plain, tiny_tokenizer()("Say 1one<|im_end|>")["input_ids"]),
    ):
        code = re.search("```python\n(.*?)```", how_to_score(one, out), re.DOTALL)[1]
        code = code.replace('"..."', '"Say 1"', 1).replace("...", "one")
        found = {"AutoTokenizer": AutoTokenizer}
        exec("\n".join(line for line in code.splitlines() if "torch" not in line and "model" not in line), found)
        assert found["ids"] == ids
    assert how_to_score(run, "exported") in (folder / "exported" / "README.md").read_text()


def test_what_several_models_disagree_about_is_measured_and_shown(folder, answers):
    row = rows(folder / "rises")[2]
    assert row["reward/two/disagreement"] > 0 and row["reward/two"] == row["reward_model/mean"]
    known = list(documented())
    assert not [name for name in row if not any(re.fullmatch(pattern, name) for pattern in known)]
    assert "reward/model/disagreement" not in rows(folder / "whole")[1]
    assert "disagreement" in answers["rises"].out and "disagreement" not in answers["whole"].out


def test_what_is_sampled_ahead_is_scored_too(folder, answers):
    assert answers["stale"].code == 0, answers["stale"].err
    stale, whole = rows(folder / "stale"), rows(folder / "whole")
    assert stale[1]["reward_model/mean"] == whole[1]["reward_model/mean"]
    assert math.isfinite(stale[2]["reward_model/mean"])


@pytest.mark.parametrize("name", ["steps", "rises"])
def test_a_process_reward_model_values_steps(folder, answers, name):
    assert answers["prm"].code == 0 == answers[name].code, answers[name].err
    for row in rows(folder / name)[1:]:
        assert row["reward/mean"] == 0 < row["advantage/nonzero_fraction"]
        assert ("reward_model/mean" in row) == (name == "rises"), (
            "which has a reward of whole answers too, of no weight"
        )
        assert (0 < row["reward/steps"] < 1) if name == "steps" else (-0.5 < row["reward/steps"] < 0.5)


def test_answers_that_nothing_verifies_are_scored_by_the_runs_model(folder, answers):
    for name in ("eval", "eval_steps"):
        assert answers[name].code == 0, answers[name].err
    assert json.loads(answers["eval"].out)["eval/digits/reward"] != 0
    assert "eval/digits/pass@1" in json.loads(answers["eval_steps"].out), "what is verified needs no model"


@pytest.mark.parametrize("name", ["wholes", "by_steps"])
def test_a_run_of_a_reward_model_chooses_among_answers(answers, name):
    assert answers[name].code == 0, answers[name].err
    assert 0 <= json.loads(answers[name].out)["eval/digits/rerank@2"] <= 1


@pytest.mark.parametrize(("line", "words"), CHANGED.items(), ids=["another"])
def test_a_run_is_not_continued_under_another_judge(answers, line, words):
    assert answers[line].code == 2 and words in answers[line].err.splitlines()[-1], answers[line].err
    assert "Traceback" not in answers[line].err


@pytest.mark.parametrize("line", REFUSED, ids=[line[:80] for line in REFUSED])
def test_what_cannot_judge_is_refused_in_one_line(folder, answers, line):
    assert_refused(answers[line], *REFUSED[line])
    assert not (folder / "refused").exists()
