"""Copies of a run's own code: what is copied, what a run alone executes, and how a difference is told."""

import contextlib
import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import started

from jaxrl_llm import config as configs
from jaxrl_llm.config import Origin, Scoring, changed_code, own_code, write_code
from jaxrl_llm.config import code as code_module
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Function
from jaxrl_llm.rewards.pool import Pool, RewardCall
from jaxrl_llm.system.copies import COPIES
from jaxrl_llm.tasks.filters import resolve

SMOKE = configs.load_config("smoke")[1]
CONFIG = """
import dataclasses
{imports}
from jaxrl_llm.config import Scoring, load_config
config = dataclasses.replace(load_config("smoke")[1], scoring=Scoring(({rewards}),))
"""
REWARD = "def score(problem, completion):\n    return {value}\n"


@pytest.fixture
def project(tmp_path):
    """Makes the files of a project, with the test's own names; returns the settings that its ``mine_`` gives."""
    folder = tmp_path / "project"
    modules, path, names = set(sys.modules), list(sys.path), dict(COPIES)

    def make(files, imports="", rewards="'a:score'", config="mine"):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / f"{config}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{config}.py").write_text(CONFIG.format(imports=imports, rewards=rewards))
        importlib.invalidate_caches()
        return configs.find_config(str(folder / f"{config}.py"))

    yield make
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path
    COPIES.clear()
    COPIES.update(names)


def saved(found, directory, copy=1):
    """The config.json of a run with these settings, as a start leaves it."""
    origin, code = own_code(found.run, found.origin, found.directory)
    origin = dataclasses.replace(origin, copy=copy)
    directory.mkdir(parents=True, exist_ok=True)
    write_code(directory, origin, code)
    configs.write(directory / "config.json", configs.to_json(found.run) | origin.to_json())
    return directory / "config.json"


def forget(*names):
    """As in a new process."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] in names or name.startswith("jaxrl_llm_config")
    ]:
        del sys.modules[name]
    COPIES.clear()


def copied(directory, number=1):
    folder = directory / "code" / str(number)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


BY_NAME = "Function('{}:score')"
LAYOUTS = {
    "the configuration alone": ({}, "", "", "mine", ["mine.py"]),
    "what it imports": (
        {"ya1.py": "import yb1, json, numpy", "yb1.py": "", "other.py": "", "data.json": "{}"},
        "import ya1", "", "mine", ["ya1.py", "yb1.py", "mine.py"],
    ),
    "what functions import, and what is imported in turns": (
        {"ya2.py": "def f():\n    from yb2 import f as g", "yb2.py": "import ya2"}, "import ya2", "", "mine",
        ["ya2.py", "yb2.py", "mine.py"],
    ),
    "rewards by name": ({"ya3.py": "import yb3\n" + REWARD, "yb3.py": "value = 1"}, "", "ya3", "mine",
                        ["ya3.py", "yb3.py", "mine.py"]),
    "packages, and relative imports": (
        {"yp4/__init__.py": "", "yp4/a.py": "from . import b\nfrom .q.c import x", "yp4/b.py": "",
         "yp4/q/__init__.py": "", "yp4/q/c.py": "from ..d import *\nx = 1", "yp4/d.py": "", "yp4/not_used.py": ""},
        "import yp4.a", "", "mine",
        ["mine.py", "yp4/__init__.py", "yp4/a.py", "yp4/b.py", "yp4/d.py", "yp4/q/__init__.py", "yp4/q/c.py"],
    ),
    "folders without __init__": ({"yn5/a.py": "import yn5.b", "yn5/b.py": ""}, "import yn5.a", "", "mine",
                                 ["mine.py", "yn5/a.py", "yn5/b.py"]),
    "a configuration in a package": (
        {"yp6/__init__.py": "", "yp6/a.py": REWARD, "yp6/runs/__init__.py": ""}, "import yp6.a", "", "yp6/runs/mine",
        ["mine.py", "yp6/__init__.py", "yp6/a.py"],
    ),
    "what cannot be read as Python": (
        {"ya7.py": "print 1"}, "try:\n    import ya7\nexcept SyntaxError:\n    pass", "", "mine", ["ya7.py", "mine.py"]
    ),
    "names that are none": ({}, "", "tag", "mine", ["mine.py"]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_configuration_and_what_it_imports_beside_it_are_copied(project, tmp_path, layout):
    files, imports, reward, config, expected = LAYOUTS[layout]
    sys.path.append(str(tmp_path / "project"))
    rewards = f"__import__('jaxrl_llm.rewards').rewards.{BY_NAME.format(reward)}," if reward else ""
    found = project(files, imports, rewards, config)
    saved(found, tmp_path / "run")
    assert copied(tmp_path / "run") == sorted(expected)


def test_packages_under_src_links_large_files_and_installed_ones(project, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("secret = 1")
    src = tmp_path / "project" / "src"
    files = {
        f"src/s_{tmp_path.name}/__init__.py": "",
        f"src/s_{tmp_path.name}/a.py": "import yl8, ybig8, yi8\n" + REWARD,
    }
    files |= {"lib/site-packages/yi8.py": "", "ybig8.py": "#" * code_module.MOST_COPIED}
    sys.path[:0] = [str(src), str(tmp_path / "project/lib/site-packages")]
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "yl8.py").symlink_to(outside)
    package = f"s_{tmp_path.name}"
    found = project(files, f"import {package}.a", "")
    saved(found, tmp_path / "run")
    assert copied(tmp_path / "run") == ["mine.py", f"{package}/__init__.py", f"{package}/a.py"]
    # Rewards of an installed package of one's own, beside the folder of configurations.
    other = dataclasses.replace(found, origin=Origin("/nowhere", str(tmp_path / "configs" / "mine.py")))
    shutil.copytree(tmp_path / "project" / "src", tmp_path / "src")
    (tmp_path / "configs").mkdir()
    shutil.copy(tmp_path / "project" / "mine.py", tmp_path / "configs")
    named = dataclasses.replace(found.run, scoring=Scoring((Function(f"{package}.a:score"),)))
    assert f"{package}.a" in own_code(named, other.origin, None)[0].code


def test_a_run_alone_executes_its_copy_and_the_configuration_what_lies_there(project, tmp_path):
    text = "from yb9 import value\nfrom pathlib import Path\nWORDS = Path(__file__).with_name('words').read_text\n"
    files = {"ya9.py": text + REWARD.format(value="value"), "yb9.py": "value = 1.0", "words": "ours"}
    reward = f"__import__('jaxrl_llm.rewards').rewards.{BY_NAME.format('ya9')},"
    folder, directory = tmp_path / "project", tmp_path / "run"
    found = project(files, "", reward)
    saved(found, directory)
    score = lambda: resolve("ya9:score")(None, None)
    (folder / "yb9.py").write_text("value = 22.0")
    forget("ya9", "yb9")
    configs.find_config(str(folder / "mine.py"))
    assert score() == 22.0
    run = configs.find_config(str(directory))  # in the same process
    assert score() == 1.0 and run.run.scoring == found.run.scoring
    module = sys.modules["ya9"]
    assert module.__file__ == str(folder / "ya9.py") and module.WORDS() == "ours"
    with contextlib.closing(Pool(1)) as pool:
        (outcomes,) = (future.result() for future in pool.submit([RewardCall("ya9:score", [(None, None)])]))
    assert [one.value for one in outcomes] == [1.0], outcomes
    again, _ = own_code(run.run, run.origin, run.directory)
    assert not changed_code(run.origin, again), "a run alone has the code that it had"
    configs.find_config(str(folder / "mine.py"))
    assert score() == 22.0
    shutil.rmtree(folder)
    forget("ya9", "yb9")
    moved = Path(shutil.move(directory, tmp_path / "moved"))
    assert json.loads((moved / "config.json").read_text())["origin"]["modules"]["ya9"] == str(folder / "ya9.py")
    configs.find_config(str(moved))
    assert sys.modules.get("ya9") is None
    (moved / "code/1/words").write_text("")
    assert score() == 1.0 and sys.modules["ya9"].__file__ == str(moved / "code/1/ya9.py")


NOT_MADE_HERE = r"uses code of its own \(ya10:score in .*code/1/ya10.py\), and was not made by you on this machine"
ATTACKS = {
    "another text": lambda run, copy: copy.write_text(copy.read_text().replace("1.0", "2.0")),
    "a module that it imports": lambda run, copy: (run / "code/1/yb10.py").write_text("value = 2.0"),
    "no copy, and another file where it was": lambda run, copy: copy.unlink(),
    "a link": lambda run, copy: (copy.rename(copy.with_name("x")), copy.symlink_to("x")),
    "a linked folder": lambda run, copy: (copy.parent.rename(run / "x"), copy.parent.symlink_to(run / "x")),
    "another copy": lambda run, copy: _edited(run, lambda origin: origin.update(copy=0)),
    "another fingerprint": lambda run, copy: _edited(run, lambda origin: origin["code"].update(ya10="0" * 64)),
    "code that is not copied": lambda run, copy: _edited(run, lambda origin: origin.update(code={})),
    "a file elsewhere": lambda run, copy: _edited(run, lambda origin: origin["modules"].update(ya10="/etc/passwd")),
}


def _edited(run, change):
    data = json.loads((run / "config.json").read_text())
    change(data["origin"])
    (run / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_copy_that_somebody_else_changed_is_not_executed(project, tmp_path, attack):
    mark = tmp_path / "ran"
    files = {"ya10.py": "import yb10\n" + REWARD.format(value="1.0"), "yb10.py": "value = 1.0"}
    found = project(files, "", f"__import__('jaxrl_llm.rewards').rewards.{BY_NAME.format('ya10')},")
    path = saved(found, tmp_path / "run")
    assert configs.read(path).run.scoring == found.run.scoring
    forget("ya10", "yb10")
    for name in ("ya10", "yb10"):
        (tmp_path / f"project/{name}.py").write_text(f"open({str(mark)!r}, 'w')")
    ATTACKS[attack](tmp_path / "run", tmp_path / "run/code/1/ya10.py")
    with pytest.raises(InputError, match=NOT_MADE_HERE.replace("code/1/", ".*")):
        configs.read(path)
    assert not mark.exists() and "ya10" not in COPIES


def test_only_the_bytes_that_were_looked_at_are_executed(project, tmp_path, capsys):
    found = project({"ya11.py": REWARD.format(value="1.0")}, "", f"__import__('jaxrl_llm.rewards').rewards."
                    f"{BY_NAME.format('ya11')},")  # fmt: skip
    path = saved(found, tmp_path / "run")
    copy = tmp_path / "run/code/1/ya11.py"
    forget("ya11")
    configs.read(path)
    trusted = copy.read_text()
    copy.write_text(trusted.replace("1.0", "3.0"))
    with pytest.raises(InputError, match=r"ya11.py has changed while the run was loaded"):
        resolve("ya11:score")
    (copy.parent / "__pycache__").mkdir()
    with configs.trusting():  # whoever edits a copy says so
        again = configs.find_config(str(path.parent))
        assert resolve("ya11:score")(None, None) == 3.0
    told = capsys.readouterr().err
    assert f"executes code of its own: ya11:score in {copy}; {copy.with_name('mine.py')}" in told
    origin, code = own_code(again.run, again.origin, again.directory)
    assert changed_code(again.origin, origin) == ["code/ya11.py changed"] and not list(
        (copy.parent / "__pycache__").iterdir()
    )
    forget("ya11")
    configs.write(path, configs.to_json(again.run) | dataclasses.replace(origin, copy=2).to_json())
    with pytest.raises(InputError, match=r"code/2/ya11\.py"):
        configs.read(path)
    write_code(path.parent, dataclasses.replace(origin, copy=2), code)
    configs.read(path)
    copy.write_text(trusted)
    _edited(path.parent, lambda origin: origin.update(folder="/elsewhere"))
    with configs.trusting():
        configs.read(path)
    assert "code/2/ya11.py (changed since copy 1)" in capsys.readouterr().err


def test_bytes_that_are_swapped_after_they_were_looked_at_are_not_signed(project, tmp_path):
    rewards = f"__import__('jaxrl_llm.rewards').rewards.{BY_NAME.format('ya13')},"
    found = project({"ya13.py": REWARD.format(value="1.0")}, "", rewards)
    path = saved(found, tmp_path / "run")
    run = configs.find_config(str(path.parent))
    (tmp_path / "run/code/1/ya13.py").write_text(REWARD.format(value="13.0"))
    origin, code = own_code(run.run, run.origin, run.directory)
    assert b"13.0" not in b"".join(code.values()) and "ya13" not in origin.code
    (tmp_path / "project" / "mine.py").unlink()  # as a file that was only for a while
    assert "jaxrl_llm_config_mine" not in own_code(found.run, found.origin, None)[0].code


def test_nothing_is_written_through_a_link_nor_outside(project, tmp_path):
    found = project({"ya12.py": ""}, "import ya12", "")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    for link in ("code", "code/1"):
        (tmp_path / "run" / link).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / link).symlink_to(outside)
        with pytest.raises(InputError, match="is a symbolic link"):
            saved(found, tmp_path / "run")
        (tmp_path / "run" / link).unlink()
    assert not list(outside.iterdir())
    path = saved(found, tmp_path / "run")
    (outside / "key.py").write_text("secret")
    _edited(path.parent, lambda origin: origin["code"].update({".../.../outside/key": "0", "x": "0"}))
    _edited(path.parent, lambda origin: origin["modules"].update(x=str(outside / "key.py")))
    stranger = configs.find_config(str(path.parent))
    assert "secret" not in str(own_code(stranger.run, stranger.origin, stranger.directory)[1])


def test_differences_are_told_by_file():
    files = {"a": "/p/a.py", "q": "/p/q/__init__.py", "q.b": "/p/q/b.py", "jaxrl_llm_config_mine": "/p/mine.py"}
    before = Origin("", modules=files, code=dict.fromkeys(files, "0"), copy=3)
    for change, told in [
        ({}, []),
        ({"a": "1", "jaxrl_llm_config_mine": "1"}, ["code/a.py changed", "code/mine.py changed"]),
        ({"q": None, "q.b": "1"}, ["code/q/__init__.py removed", "code/q/b.py changed"]),
    ]:
        code = {name: digest for name, digest in (dict(before.code) | change).items() if digest}
        assert changed_code(before, dataclasses.replace(before, code=code, copy=4)) == told
    assert changed_code(Origin(""), dataclasses.replace(before, code={"a": "0"})) == ["code/a.py added"]
    moved = {name: file.replace("/p", "/elsewhere") for name, file in files.items()}
    assert not changed_code(before, dataclasses.replace(before, modules=moved)), "files are compared, not places"


def test_a_notebooks_cells_and_a_program_have_copies(tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(
        "import dataclasses, linecache, sys\nfrom jaxrl_llm import config as configs\n"
        "smoke = configs.load_config('smoke')[1]\nof = lambda f: configs.own_code(\n"
        "    dataclasses.replace(smoke, scoring=configs.Scoring((f,))), configs.Origin(''), None)\n"
        "origin, code = of(lambda problem, completion: 1.0)\n"
        "print(origin.modules, [*code.values()] == [open(__file__, 'rb').read()])\n"
        "del __file__\n"
        "for value in (1, 2):\n"
        "    text = f'def graded(problem, completion):\\n    return {value}\\n'\n"
        "    linecache.cache['<cell>'] = (len(text), None, text.splitlines(True), '<cell>')\n"
        "    exec(compile(text, '<cell>', 'exec'))\n"
        "    print(of(graded)[1])\n"
    )
    done = started("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", "", tmp_path, [str(program)])
    first, one, two = done.out.splitlines()
    assert first == f"{{'__main__': {str(program)!r}}} True"
    assert [eval(line) for line in (one, two)] == [
        {"__main__": f"def graded(problem, completion):\n    return {value}\n".encode()} for value in (1, 2)
    ]
