"""What CONTRIBUTING.md says a change takes: its examples, put where the page says, work, in no more files than it
promises.
"""

import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import T, forward_on, groups, one_device, policy_training, rollout
from tiny import tiny

from jaxrl_llm.algorithms import PRESETS, PolicyBatch
from jaxrl_llm.algorithms.tokens import clean_tokens
from jaxrl_llm.config import Run, load_config, resolved
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.learner import Layout, Learner, Optimiser, create_state, learn
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.rules import decide
from jaxrl_llm.stages import STAGES
from jaxrl_llm.stages.rl import prepare
from jaxrl_llm.stages.rl.ingredients import INGREDIENTS
from jaxrl_llm.trainer.loop import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(heading):
    """``(file, code)`` of each example below a heading; the first line of each says its file, and where in it."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = []
    for indent, block in BLOCK.findall(section):
        first, *lines = [line.removeprefix(indent) for line in block.splitlines()]
        path = re.fullmatch(r"# (jaxrl_llm/[\w/]+\.py)(, .*)?", first)
        assert path and (ROOT / path[1]).parent.is_dir(), first
        found.append((path[1], "\n".join(lines)))
    return found


def source_with(path, code, after=None):
    """A module's source as it is once the example stands at its end, or behind the line that begins with ``after``."""
    source = (ROOT / path).read_text()
    if after is None:
        return f"{source}\n\n{code}\n"
    line = next(line for line in source.splitlines() if line.strip().startswith(after))
    indent = line[: len(line) - len(line.lstrip())]
    return source.replace(line, f"{line}\n{textwrap.indent(code, indent)}", 1)


def module_with(path, code, after=None):
    """A module of that source."""
    source = source_with(path, code, after)
    made = types.ModuleType(path.removesuffix(".py").replace("/", "."))
    sys.modules["example_of_contributing"] = made  # dataclasses look their module up
    made.__dict__["__name__"] = "example_of_contributing"
    exec(compile(source, path, "exec"), made.__dict__)
    return made


@pytest.mark.parametrize(
    ("heading", "most"),
    [
        ("Add a setting", 2),
        ("Add a per-token array", 3),
        ("Add an objective", 4),
        ("Add a backend", 4),
        ("Add an ingredient of reinforcement learning", 3),
        ("Add a stage", 2),
    ],
)
def test_a_change_takes_no_more_files_than_promised(heading, most):
    files = {path for path, _ in blocks(heading)}
    assert 0 < len(files) <= most, files


def test_the_example_of_a_rule_works_as_printed():
    ((path, rule),) = blocks("Add a rule")
    guards = module_with(path, rule)
    good = functools.partial(guards.good_enough, accuracy=0.9)
    rows = [{"step": 0, "eval/sums/pass@1": 0.95}, {"step": 1}, {"step": 2, "eval/sums/pass@1": 0.4}]
    rows += [{"step": step, "eval/sums/pass@1": 0.92} for step in (3, 4)]
    memory, stops = {}, []
    for row in rows:
        decision, memory = decide({"good_enough": good}, row, memory)
        stops.append(decision.stop)
    assert stops == [None, None, None, None, 0] and memory == {"good_enough": {"times": 2}}


USES_A_SETTING = """
import dataclasses, json, sys
from jaxrl_llm import cli, config as configs
from jaxrl_llm.rules import GUARD, Rules, guards_of
run = configs.resolved(configs.load_config("smoke")[1])
far = dataclasses.replace(run, rules=Rules(farthest=0.5))
decision, _ = guards_of(far)["farthest"]({"step": 1, "kl": 0.6}, {})
assert (decision.stop, decision.reason) == (GUARD, "kl is 0.600, above rules.farthest 0.5")
assert "farthest" not in guards_of(run)
assert configs.from_json(json.loads(json.dumps(configs.to_json(far)))) == far
assert all(change.startswith(configs.FREE_TO_CHANGE) for change in configs.changes(run, far))
sys.argv = ["jaxrl-llm", "train", "smoke", "--rules.farthest", "-1"]
cli.main()
"""


def test_the_example_of_a_setting_works_in_two_files(tmp_path):
    (settings, field), (guards, line), (same, rule) = blocks("Add a setting")
    assert guards == same
    shutil.copytree(ROOT / "jaxrl_llm", tmp_path / "jaxrl_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    with_line = source_with(guards, line, after='rules = {"not_a_number"')
    imported = (ROOT / settings).read_text().replace("import RECORDED,", "import FREE, RECORDED,")
    (tmp_path / settings).write_text(imported.replace("rollbacks: Annotated", f"{field}\n    rollbacks: Annotated"))
    (tmp_path / guards).write_text(f"{with_line}\n\n{rule}\n")
    ran = subprocess.run([sys.executable, "-c", USES_A_SETTING], cwd=tmp_path, capture_output=True, text=True)
    said = "rules.farthest must be above 0, and finite, got -1.0"
    assert ran.returncode == 2 and said in ran.stderr, ran.stderr


def test_the_example_of_a_per_token_array_works_as_printed():
    (sampler, line), (surrogates, surrogate) = blocks("Add a per-token array")
    sampling = module_with(sampler, line, after='extras = {"entropy"')
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    logits[:2, 7] += 20.0  # two rows that are sure of a token
    uniforms = jnp.linspace(0.05, 0.95, 4)
    drawn = sampling.draw(jnp.asarray(logits), uniforms, sampling.as_rules(Sampling(temperature=0.7)))
    wanted = jax.nn.log_softmax(logits / 0.7)
    np.testing.assert_allclose(drawn.extras["top_logp"], jnp.max(wanted, axis=-1), rtol=1e-5)
    piece = module_with(surrogates, surrogate).Hesitant()
    assert piece.reads == ("top_logp",)
    found = jnp.take_along_axis(wanted, drawn.token[:, None], axis=1).T
    extras = {"top_logp": drawn.extras["top_logp"][None]}
    batch = PolicyBatch(jnp.ones(1), jnp.ones((1, 4), bool), sampler_logp=found, extras=extras)
    at = clean_tokens(found, batch, 0.0)._replace(log_ratio=jnp.zeros((1, 4)))
    likeliest = np.asarray(drawn.token) == np.asarray(jnp.argmax(logits, axis=-1))
    assert 0 < likeliest.sum() < 4
    np.testing.assert_allclose(piece(at)[0], np.where(likeliest, 0.0, -1.0), atol=1e-6)


def test_the_example_of_an_objective_with_a_role_of_its_own_works_as_printed():
    (objectives, objective), (programs, training) = blocks("Add an objective")
    first = module_with(objectives, objective)
    names = {"TokensLeft": first.TokensLeft}
    source = training.replace("from jaxrl_llm.learner.objectives import TokensLeft\n", "")
    assert source != training
    made = module_with(programs, "")
    exec(source, made.__dict__ | names, names)
    optimiser = Optimiser(learning_rate=1e-2)
    length = names["length_training"]
    length = types.FunctionType(length.__code__, made.__dict__ | names)(optimiser, ComputeOptions(remat="full"))
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


def test_the_example_of_an_ingredient_trains_as_printed(tmp_path):
    (settings, field), (path, code), (table, entry) = blocks("Add an ingredient of reinforcement learning")
    assert table == "jaxrl_llm/stages/rl/ingredients.py" and (ROOT / path).parent == (ROOT / table).parent
    collect = module_with(settings, field, after="replay: Replay | None = None").Collect
    made = module_with(table, "").__dict__ | {"INGREDIENTS": INGREDIENTS}
    exec(compile(code, path, "exec"), made)
    smoke = resolved(load_config("smoke")[1])
    losses = {}
    exec(entry, made)
    for coef in (0.0, 0.1):
        rollout = dataclasses.replace(smoke.rollout, collect=collect(right_answers=coef))
        code, rows, _ = trained(dataclasses.replace(smoke, rollout=rollout, steps=2), tmp_path / str(coef))
        assert code == 0
        losses[coef] = [row.get("right_answers/loss") for row in rows if row["step"]]
    INGREDIENTS.remove(made["RightAnswers"])
    assert losses[0.0] == [None, None] and len(losses[0.1]) == 2 and any(losses[0.1])


@dataclasses.dataclass(frozen=True)
class Copying(Run):
    """The configuration of the example's stage."""


def trained(run, directory):
    """(exit code, rows, what was said) of a run in this directory."""
    directory.mkdir(exist_ok=True)
    said = []
    code = train(run, directory, said.append)
    return code, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()], said


def test_the_example_of_a_backend_draws_what_the_engine_draws(tmp_path):
    (path, code), (programs, chosen) = blocks("Add a backend")
    plain = types.ModuleType(path)
    exec(compile(code, path, "exec"), vars(plain))
    made = module_with(programs, chosen, after="model, dtype, mesh, where, rollout")
    made.__dict__["Plain"] = plain.Plain
    run = dataclasses.replace(resolved(load_config("smoke")[1]), steps=1)
    code, wanted, _ = trained(run, tmp_path / "engine")
    assert code == 0
    whole = prepare.sampling_of
    prepare.sampling_of = made.sampling_of
    try:
        code, found, _ = trained(run, tmp_path / "plain")
    finally:
        prepare.sampling_of = whole
    same = ("reward/mean", "completions/mean_length", "completions/truncated_fraction", "prompts")
    assert code == 0 and [[row.get(name) for name in same] for row in found] == [
        [row.get(name) for name in same] for row in wanted
    ]
    told = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("engine", "plain")]
    said = [[(line["kind"], line["completion"]) for line in map(json.loads, lines)] for lines in told]
    assert said[0] == said[1] and {kind for kind, _ in said[0]} == {"training", "evaluation"}


def test_the_example_of_a_stage_trains_and_is_gone_on_with(tmp_path):
    (init, entry), (path, code) = blocks("Add a stage")
    assert entry == 'STAGES[Copying] = "jaxrl_llm.stages.copying"' and init == "jaxrl_llm/stages/__init__.py"
    assert path == "jaxrl_llm/stages/copying.py"
    exec(entry, {"STAGES": STAGES, "Copying": Copying})
    sys.modules["jaxrl_llm.stages.copying"] = types.ModuleType("jaxrl_llm.stages.copying")
    exec(compile(code, path, "exec"), vars(sys.modules["jaxrl_llm.stages.copying"]))
    smoke = resolved(load_config("smoke")[1])
    fields = {field.name: getattr(smoke, field.name) for field in dataclasses.fields(smoke)}
    run = Copying(**fields | {"steps": 4})
    code, whole, _ = trained(run, tmp_path / "whole")
    losses = [row["loss"] for row in whole if row["step"]]
    assert code == 0 and len(losses) == 4 and min(losses) < losses[0] - 1
    trained(dataclasses.replace(run, steps=2), tmp_path / "parts")
    code, parts, _ = trained(run, tmp_path / "parts")
    assert code == 0 and [row["loss"] for row in parts if row["step"]] == losses
    del STAGES[Copying], sys.modules["jaxrl_llm.stages.copying"]
