"""The house rules of CONTRIBUTING.md that a machine can hold."""

import ast
import dataclasses
import doctest
import functools
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from reads import Reads, fields_of, types_held

from jaxrl_llm.config import config_names, load_config, resolved
from jaxrl_llm.system.setting import Setting

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl_llm"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CHECKED = [
    *(*MODULES, *TESTS),
    *(path for folder in ("bench", "configs", "examples", "tools") for path in sorted((ROOT / folder).rglob("*.py"))),
]

ROOMS = (
    "types",
    "codec",
    "errors",
    "system",
    "sandbox",
    "algorithms",
    "sharding",
    "models",
    "tasks",
    "rewards",
    "environments",
    "data",
    "engine",
    "rollout",
    "learner",
    "diagnosis",
    "rules",
    "checkpoints",
    "telemetry",
    "collection",
    "recipes",
    "config",
    "runs",
    "stages",
    "plan",
    "trainer",
    "cli",
    "__main__",
)
STRANGERS = {
    ("rollout", "learner"),
    ("learner", "rollout"),
    ("learner", "engine"),
    ("engine", "tasks"),
    ("engine", "rewards"),
}


def named(path):
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), str(path))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(line, dotted name) of all that a module imports, also inside functions."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def imported_rooms(path):
    for line, name in imported(path):
        assert not name.startswith("."), f"{named(path)}:{line}: relative import; write the full name"
        parts = name.split(".")
        if parts[0] == "jaxrl_llm" and len(parts) > 1 and not parts[1].startswith("__"):
            yield line, parts[1]


def misplaced_imports(path):
    """Imports of rooms that a module must not know."""
    room = room_of(path)
    for line, other in [(1, room), *imported_rooms(path)]:
        if room == "__init__":
            fine = other == room  # the package itself imports no room
        else:
            fine = (
                {room, other} <= {*ROOMS} and ROOMS.index(other) <= ROOMS.index(room) and (room, other) not in STRANGERS
            )
        if not fine:
            yield f"{named(path)}:{line}: {room} must not import {other}"


def stage_settings(path):
    """What the loop knows of a single stage: its module, or settings that are a stage's affair."""
    if path.parent.name == "trainer":
        for line, name in imported(path):
            if re.match(r"jaxrl_llm\.stages\.(?!stage\.|stage_of$)", name):
                yield f"{named(path)}:{line}: {name} is one stage's; the loop knows stages.stage_of and stages.stage"
        for found in re.findall(r"\brun\.(?:recipe|rollout|task|scoring)\b", path.read_text()):
            yield f"{named(path)}: {found} is read by stages alone"


def banned_words(path):
    """Patches and skips in tests; this file only looks for them."""
    # Names that no test may use: they are looked for here, and nothing in this file patches or skips.
    banned = {"mock", "unittest.mock", "pytest_mock", "monkeypatch", "mocker", "skip", "skipif", "importorskip"}
    for node in ast.walk(parse(path)):
        words = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")}
        for word in {word for word in words if isinstance(word, str)} & banned:
            yield f"{named(path)}:{node.lineno}: {word} has no place in a test"


WITH_SESSIONS = sorted(path for path in MODULES if "    >>> " in path.read_text())


@pytest.mark.parametrize(
    "path", WITH_SESSIONS, ids=lambda path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
)
def test_sessions_in_docstrings_print_what_they_show(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def test_modules_import_only_from_rows_above_theirs_and_tests_use_the_real_thing():
    offenders = [line for path in MODULES for line in (*misplaced_imports(path), *stage_settings(path))]
    offenders += [line for path in TESTS for line in banned_words(path)]
    assert not offenders, "\n".join(offenders)


def test_nothing_overwrites_what_counts_a_sample():
    # Several pieces leave samples out of an objective: each narrows what the others have left.
    setting = [named(path) for path in MODULES if "counted_by=" in path.read_text()]
    assert setting == ["jaxrl_llm/learner/batch.py"], "use Sample.counting"


def test_every_model_is_asked_through_one_driver():
    loops = [named(path) for path in MODULES if re.search(r"\.step\((model|weights)\b", path.read_text())]
    assert loops == ["jaxrl_llm/engine/engine.py", "jaxrl_llm/rollout/generation.py"], "use rollout.generation"
    built = [named(path) for path in MODULES if re.search(r"\bEngine\(", path.read_text())]
    assert not built, f"use engine.engine.backend_for: {built}"


def test_tests_lie_where_the_package_has_what_they_test():
    files = [path.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")]
    folders = {path.parts[0] for path in files if len(path.parts) > 1}
    # Whole runs; faults, attacks and fuzzing; what other folders have.
    own = {"end_to_end", "campaigns", "tools", "examples"}
    assert folders - own <= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    loose = {path.stem.removeprefix("test_") for path in files if len(path.parts) == 1}
    pages = {"bench", "house", "cloud", "contributing", "notebooks", "pages", "errata"}
    assert loose - pages <= {path.stem for path in PACKAGE.glob("*.py")}


def test_the_code_is_as_ruff_wants_it():
    for command in ("check", "format --check"):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command.split(), *(str(path) for path in CHECKED)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_calls_and_names_are_right_in_types():
    ran = subprocess.run([sys.executable, "-m", "ty", "check", PACKAGE], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def settings_of(value):
    """Every class of settings that a configuration holds, by the values that it has when nothing is said."""
    yield type(value)
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        for one in part if isinstance(part, tuple) else (part,):
            if dataclasses.is_dataclass(one):
                yield from settings_of(one)


def kinds_of(base):
    """The dataclasses of the package that extend this class; other tests may have made more."""
    for kind in base.__subclasses__():
        ours = kind.__module__.startswith("jaxrl_llm.")
        there = ours and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
        yield from (kind,) if there and dataclasses.is_dataclass(kind) else ()
        yield from kinds_of(kind)


def unread(kinds, trees):
    configurations = [resolved(load_config(name)[1]) for name in config_names()]
    kinds = {*kinds, *kinds_of(Setting), *(kind for run in configurations for kind in settings_of(run))}
    found = Reads(kinds, types_held(kinds, configurations), trees).found
    return sorted(f"{kind.__name__}.{name}" for kind in kinds for name in fields_of(kind) if (kind, name) not in found)


def test_every_setting_is_read_somewhere():
    assert len(list(kinds_of(Setting))) > 20

    @dataclasses.dataclass(frozen=True)
    class Phantom:
        group: int = 8  # as ``Rollout`` has one, which is read
        kept: int = 0

    use = ast.parse("def use(phantom: Phantom, collect):\n    return phantom.kept + collect.group")
    assert unread([Phantom], [*map(parse, MODULES), use]) == ["Phantom.group"], "nothing reads these"


def scripts():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()


@pytest.mark.parametrize("module", ["jaxrl_llm", *sorted(script.split(":")[0] for script in scripts())])
def test_the_command_line_answers_before_jax_is_loaded(module):
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    slow = {"jax", "flax", "transformers", "orbax", "datasets", "reasoning_gym", "torch"}
    assert not slow & set(json.loads(run.stdout))


def promised_commands():
    """The commands of README's first two shell blocks: the run, and the tests."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:2]
    return [command.strip() for block in blocks for line in block.splitlines() for command in line.split("&&")]


def test_ci_runs_the_commands_that_readme_promises():
    script = (ROOT / ".ci" / "run").read_text()
    ran = re.findall(r"^(?:timed )?(pip install .*|jaxrl-llm .*|pytest.*)$", script, re.MULTILINE)
    promised = promised_commands()
    assert len(promised) == 4
    for command in promised:
        assert any(line == command or line.startswith(f"{command} ") for line in ran), f".ci/run lacks: {command}"
