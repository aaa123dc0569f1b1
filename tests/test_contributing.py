"""The examples of CONTRIBUTING.md work, in as many files as its table says.

The parts of a file of ``examples/extending/`` begin with a comment that names the file they go to, and the place in it.
"""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
import unittest
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.batches import ragged
from extending import backend, ingredient, objective, per_token_array, rule, stage, surrogate
from learner.rollouts import T, forward_on, groups, one_device, policy_training, rollout
from oracles import SEQUENCE_MEANS
from tiny import tiny

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.tokens import clean_tokens
from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.learner import Layout, Learner, Optimiser, create_state, learn
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.rules import decide
from jaxrl_llm.stages import STAGES
from jaxrl_llm.stages import rl as prepare
from jaxrl_llm.stages.programs import INGREDIENTS, ingredients_of
from jaxrl_llm.trainer.loop import train

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = sorted((ROOT / "examples" / "extending").glob("*.py"))


class Part(NamedTuple):
    """The lines of an example that go to one place."""

    path: str
    place: str | None
    code: str

    def into(self, source):
        """The source of its file with these lines at their place; at the end without one."""
        if self.place is None:
            return f"{source}\n\n{self.code}"
        top = re.fullmatch(r"at the top: (.+)", self.place)
        if top:
            return re.sub(r"^(?=import |from )", f"{top[1]}\n", source, count=1, flags=re.MULTILINE)
        name, side, text = re.fullmatch(r"in (\w+), (before|after) (.+)", self.place).groups()
        lines = source.splitlines()
        begin = next(n for n, line in enumerate(lines) if re.match(rf"((def|class) )?{name}\b", line))
        found = next(n for n in range(begin + 1, len(lines)) if lines[n].strip().startswith(text))
        _, *body = self.code.strip().splitlines()  # the first line repeats what the others are in
        body = body[:-1] if body[-1] in (")", "]", "}") else body
        indent = re.match(" *", lines[found])[0]
        at = found + (side == "after")
        lines[at:at] = textwrap.indent(textwrap.dedent("\n".join(body)), indent).splitlines()
        return "\n".join(lines) + "\n"


def parts(name):
    """The parts of an example for the package's files."""
    text = (ROOT / "examples" / "extending" / f"{name}.py").read_text()
    pieces = re.split(r"^# ((?:jaxrl_llm|tests)/[\w/]+\.py)(?:, (.*))?\n", text, flags=re.MULTILINE)[1:]
    found = [Part(*piece) for piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)]
    return [part for part in found if part.path.startswith("jaxrl_llm/")]


def module_with(part):
    """The module that a part goes to, with the part."""
    made = types.ModuleType("example_of_contributing")
    sys.modules[made.__name__] = made  # dataclasses look their module up
    exec(compile(part.into((ROOT / part.path).read_text()), part.path, "exec"), made.__dict__)
    return made


def package_with(names, folder):
    """Write a copy of the package that has these examples."""
    shutil.copytree(ROOT / "jaxrl_llm", folder / "jaxrl_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configs", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for part in (part for name in names for part in parts(name)):
        path = folder / part.path
        path.write_text(part.into(path.read_text() if path.exists() else '"""New."""\n'))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_change_takes_as_many_files_as_the_table_says(path):
    (row,) = re.findall(rf"^\| [^|]+ \| (\d+)[^|]* \|.*`{path.name}`.* \|$", PAGE, re.MULTILINE)
    assert int(row) == len({part.path for part in parts(path.stem)})
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_example_of_the_page_is_the_file_that_is_tested():
    (printed,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert printed in (ROOT / "examples" / "extending" / "surrogate.py").read_text()


def test_a_new_surrogate_and_its_oracle_agree():
    assert "spo" not in SEQUENCE_MEANS, "SPO is there already: show another example"
    logp, batch = ragged(0)
    wanted = []
    for row, valid in enumerate(batch.mask):
        ratios = np.exp(np.float64(logp[row] - batch.old_logp[row]))[valid]
        if valid.any():
            wanted.append(np.mean(surrogate.policy_terms("spo", ratios, float(batch.advantages[row]))))
    found = policy_loss(surrogate.PRESETS["spo"], logp, batch)[0]
    np.testing.assert_allclose(found, np.mean(wanted), rtol=2e-5)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(surrogate.PaddingIsFree).run(outcome)
    assert outcome.testsRun == 2 and outcome.wasSuccessful(), outcome


def test_a_rule_stops_after_two_good_evaluations_in_a_row():
    rules = {}
    rule.guards_of(rules)
    rows = [{"step": 0, "eval/sums/pass@1": 0.95}, {"step": 1}, {"step": 2, "eval/sums/pass@1": 0.4}]
    rows += [{"step": step, "eval/sums/pass@1": 0.92} for step in (3, 4)]
    memory, stops = {}, []
    for row in rows:
        decision, memory = decide(rules, row, memory)
        stops.append(decision.stop)
    assert stops == [None, None, None, None, 0] and memory == {"good_enough": {"times": 2}}


USES_A_SETTING = """
import dataclasses, json, sys
from jaxrl_llm import cli, config as configs
from jaxrl_llm.rules import GUARD, Rules, guards_of
run = configs.resolved(configs.load_config("smoke")[1])
far = dataclasses.replace(run, rules=Rules(farthest=0.5))
farthest = guards_of(far)["farthest"]
assert [farthest(row, {})[0].stop for row in ({"step": 1}, {"kl": float("nan")}, {"kl": 0.5})] == [None] * 3
decision, _ = farthest({"step": 1, "kl": 0.6}, {})
assert (decision.stop, decision.reason) == (GUARD, "kl is 0.600, above rules.farthest 0.5")
assert "farthest" not in guards_of(run)
assert configs.from_json(json.loads(json.dumps(configs.to_json(far)))) == far
assert all(change.startswith(configs.FREE_TO_CHANGE) for change in configs.changes(run, far))
sys.argv = ["jaxrl-llm", "train", "smoke", "--rules.farthest", "-1"]
cli.main()
"""


def test_a_setting_is_a_flag_that_is_checked_saved_and_read(tmp_path):
    package_with(["setting"], tmp_path)
    ran = subprocess.run([sys.executable, "-c", USES_A_SETTING], cwd=tmp_path, capture_output=True, text=True)
    said = "rules.farthest must be above 0, and finite, got -1.0"
    assert ran.returncode == 2 and said in ran.stderr, ran.stderr


USES_A_FAMILY = """
import json, sys
from pathlib import Path
import numpy as np
from jaxrl_llm.models import load_pretrained, logits
qwen2, seed = map(Path, sys.argv[1:])
seed.mkdir()
(seed / "model.safetensors").symlink_to(qwen2 / "model.safetensors")
config = json.loads((qwen2 / "config.json").read_text()) | {"use_sliding_window": False}
del config["layer_types"], config["sliding_window"], config["max_window_layers"]
other = config | {"model_type": "seed_oss", "head_dim": 8}
del other["use_sliding_window"]
(seed / "config.json").write_text(json.dumps(other))
plain = seed.parent / "plain"
plain.mkdir()
(plain / "model.safetensors").symlink_to(qwen2 / "model.safetensors")
(plain / "config.json").write_text(json.dumps(config))
tokens = np.arange(12)[None]
found, wanted = (logits(load_pretrained(folder)[0], tokens) for folder in (seed, plain))
assert np.array_equal(found, wanted)
"""


def test_a_family_loads_the_tensors_that_it_names(tmp_path):
    package_with(["family"], tmp_path)
    qwen2 = ROOT / "tests" / "fixtures" / "models" / "qwen2"
    command = [sys.executable, "-c", USES_A_FAMILY, str(qwen2), "seed"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_per_token_array_is_computed_by_the_sampler_and_read_by_the_loss():
    _, draws = parts("per_token_array")
    sampling = module_with(draws)
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    logits[:2, 7] += 20.0  # two rows that are sure of a token
    uniforms = jnp.linspace(0.05, 0.95, 4)
    drawn = sampling.draw(jnp.asarray(logits), uniforms, sampling.to_traced(Sampling(temperature=0.7)))
    wanted = jax.nn.log_softmax(logits / 0.7)
    np.testing.assert_allclose(drawn.extras["top_logp"], jnp.max(wanted, axis=-1), rtol=1e-5)
    piece = per_token_array.Hesitant()
    assert piece.reads == ("top_logp",)
    found = jnp.take_along_axis(wanted, drawn.token[:, None], axis=1).T
    extras = {"top_logp": drawn.extras["top_logp"][None]}
    batch = PolicyBatch(jnp.ones(1), jnp.ones((1, 4), bool), sampler_logp=found, extras=extras)
    at = clean_tokens(found, batch, 0.0)._replace(log_ratio=jnp.zeros((1, 4)))
    likeliest = np.asarray(drawn.token) == np.asarray(jnp.argmax(logits, axis=-1))
    assert 0 < likeliest.sum() < 4
    np.testing.assert_allclose(piece(at)[0], np.where(likeliest, 0.0, -1.0), atol=1e-6)


def test_an_objective_trains_a_role_of_its_own():
    optimiser = Optimiser(learning_rate=1e-2)
    length = objective.length_training(optimiser, ComputeOptions(remat="full"))
    mesh = one_device()
    state = create_state(tiny("windows"), build(optimiser), False, mesh, others=[length.begins])
    both = (policy_training(PRESETS["dapo"], optimiser), length)
    losses = []
    for step in range(4):
        state, row = learn(state, groups(rollout()), Learner(), forward_on(mesh, Layout(4, 60, T)), both, {}, step)
        losses.append(row["length/loss"])
    assert losses[-1] < losses[0] and int(state.roles["length"].updates) == 4
    lengths = np.concatenate([np.log1p(s.mask[::-1].cumsum()[::-1][s.mask]) for s in rollout()])
    np.testing.assert_allclose(losses[0], np.mean(lengths**2), rtol=1e-4, err_msg="a fresh head says 0")


def trained(run, directory):
    """(exit code, rows) of a run in this directory."""
    directory.mkdir(exist_ok=True)
    code = train(run, directory, lambda line: None)
    return code, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_ingredient_trains_if_its_setting_says_so(tmp_path):
    collect = module_with(parts("ingredient")[0]).Collect
    smoke = resolved(load_config("smoke")[1])
    without, run = (
        dataclasses.replace(smoke, rollout=dataclasses.replace(smoke.rollout, collect=collect(right_answers=coef)))
        for coef in (0.0, 0.1)
    )
    INGREDIENTS[:0] = ingredient.INGREDIENTS
    try:
        assert not list(ingredients_of(without))
        code, rows = trained(dataclasses.replace(run, steps=1), tmp_path / "run")
    finally:
        del INGREDIENTS[: len(ingredient.INGREDIENTS)]
    assert code == 0 and rows[1]["right_answers/loss"] > 0


@pytest.mark.slow
def test_a_backend_draws_what_the_engine_draws(tmp_path):
    (chosen,) = [part for part in parts("backend") if part.code.startswith("build_engine")]
    made = module_with(chosen)
    made.__dict__["Plain"] = backend.Plain
    run = dataclasses.replace(resolved(load_config("smoke")[1]), steps=1)
    code, wanted = trained(run, tmp_path / "engine")
    assert code == 0
    whole = prepare.build_engine
    prepare.build_engine = made.build_engine
    try:
        code, found = trained(run, tmp_path / "plain")
    finally:
        prepare.build_engine = whole
    same = ("reward/mean", "completions/mean_length", "completions/truncated_fraction", "prompts")
    assert code == 0 and [[row.get(name) for name in same] for row in found] == [
        [row.get(name) for name in same] for row in wanted
    ]
    told = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("engine", "plain")]
    said = [[(line["kind"], line["completion"]) for line in map(json.loads, lines)] for lines in told]
    assert said[0] == said[1] and {kind for kind, _ in said[0]} == {"training", "evaluation"}


@pytest.mark.slow
def test_a_stage_trains_and_resumes(tmp_path):
    smoke = resolved(load_config("smoke")[1])
    fields = {field.name: getattr(smoke, field.name) for field in dataclasses.fields(smoke)}
    run = stage.Copying(**fields | {"steps": 4})
    STAGES[stage.Copying] = stage.__name__
    try:
        code, whole = trained(run, tmp_path / "whole")
        losses = [row["loss"] for row in whole if row["step"]]
        assert code == 0 and len(losses) == 4 and min(losses) < losses[0] - 1
        shutil.copytree(tmp_path / "whole", tmp_path / "broken")
        shutil.rmtree(tmp_path / "broken" / "checkpoints" / "4")  # as if it had been broken off after the step before
        code, broken = trained(run, tmp_path / "broken")
        assert code == 0 and [row["loss"] for row in broken if row["step"]] == losses
        assert [row["step"] for row in broken if "event/resumed" in row] == [3]
    finally:
        del STAGES[stage.Copying]


OWN_RUN = """
import dataclasses
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.surrogates import Hesitant
from jaxrl_llm.config import load_config
from jaxrl_llm.rules.settings import Rules
smoke = load_config("smoke")[1]
rollout = dataclasses.replace(smoke.rollout, collect=dataclasses.replace(smoke.rollout.collect, right_answers=0.1))
algorithm = dataclasses.replace(PRESETS["spo"], surrogate=Hesitant())
recipe = dataclasses.replace(smoke.recipe, algorithm=algorithm)
config = dataclasses.replace(smoke, steps=1, rollout=rollout, recipe=recipe, rules=Rules(farthest=9.0))
"""
OWN_STAGE = """
from jaxrl_llm.config import load_config
from jaxrl_llm.config.run import Copying
config = Copying(**vars(load_config("smoke")[1]) | {"steps": 1})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "metrics"),
    [(OWN_RUN, {"loss", "length/loss", "right_answers/loss"}), (OWN_STAGE, {"loss"})],
    ids=["run", "stage"],
)
def test_the_command_line_trains_with_all_examples_in_their_files(tmp_path, config, metrics):
    package_with([path.stem for path in EXAMPLES], tmp_path)
    (tmp_path / "own.py").write_text(config)
    command = [sys.executable, "-m", "jaxrl_llm", "train", "own.py", "--run_dir", "run"]
    sooner = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=sooner, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics <= rows[-1].keys() and rows[-1]["step"] == 1
