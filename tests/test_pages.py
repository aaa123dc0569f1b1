"""The pages build without a warning or a network, and what they say of the code is so."""

import dataclasses
import importlib
import inspect
import math
import re
import subprocess
import sys
import typing
import xml.etree.ElementTree as ET
from functools import reduce
from pathlib import Path

import pytest
from end_to_end.test_resume import documented

import jaxrl_llm
from jaxrl_llm.cli import COMMANDS
from jaxrl_llm.config import config_names, load_config, validate
from jaxrl_llm.diagnosis.detectors import RULES
from jaxrl_llm.models.families import FAMILIES, our_shape, tensors_of
from jaxrl_llm.plan.programs import find_model_config, published_configs
from jaxrl_llm.recipes import RECIPES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages: a link that leads nowhere is a warning, and a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    program = [sys.executable, str(ROOT / "tools" / "site_pages.py"), "--out", str(folder)]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "No issues found" in done.stdout + done.stderr, done.stdout + done.stderr
    return folder / "site"


def test_every_page_and_notebook_is_there(site):
    names = {path.stem for path in DOCS.glob("*.md")} | {"contributing", "changelog", "configs"}
    notebooks = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")} == names | notebooks | {"404"}
    navigation = (site / "index.html").read_text()
    assert all(re.search(rf'href="(\./)?{name}\.html"', navigation) for name in names | notebooks)


def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*href=[\"']?(?:https?:)?//"
    )
    sheets = [path.read_text() for path in site.rglob("*.css")]
    assert sheets and not [sheet for sheet in sheets if re.search(r"url\([\"']?(?:https?:)?//|@import", sheet)]
    for path in site.rglob("*.html"):
        assert not loads.search(path.read_text()), path.name


def test_notebooks_show_pictures_and_formulas(site):
    page = (site / "notebooks" / "objectives.html").read_text()
    assert 'src="data:image/png;base64,' in page and "<math" in page and r"\pi" not in page


def test_search_works_from_disk(site):
    page = (site / "index.html").read_text()
    assert "iframe-worker.js" in page and "unpkg" not in page
    assert (site / "search.js").read_text().startswith("var __index = {")


def test_docstrings_are_on_the_api_page(site):
    page = (site / "api.html").read_text()
    assert 'id="jaxrl_llm.algorithms.loss.policy_loss"' in page and "Return the scalar loss to minimise" in page
    assert all(f'id="jaxrl_llm.recipes.{name.upper()}"' in page for name in RECIPES)


def test_names_of_the_api_page_can_be_imported():
    rows = re.findall(r"^\| `(jaxrl_llm[\w.]*)` \| (.*) \|$", (DOCS / "api.md").read_text(), re.MULTILINE)
    names = {module: re.findall(r"`(\w+)`", cell) for module, cell in rows}
    assert sorted(names["jaxrl_llm"]) == jaxrl_llm.__all__ and len(names) == 11
    for module, of in names.items():
        assert all(hasattr(importlib.import_module(module), name) for name in of), module


def found(name):
    """What a dotted name below the package is."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(["jaxrl_llm", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[cut:], module)
    raise AttributeError(name)


def annotations(thing):
    """What a function takes and gives, or the types of a value's fields, as text."""
    if not inspect.isclass(thing):
        signature = inspect.signature(thing)
        gives = signature.return_annotation
        called = str(inspect.signature(gives.__call__)) if "__call__" in getattr(gives, "__dict__", ()) else ""
        return str([parameter.annotation for parameter in signature.parameters.values()]), f"{gives} {called}"
    return str(typing.get_type_hints(thing)), ""


def picture(kind):
    """Elements of the picture of the data's way."""
    texts = ET.parse(DOCS / "concepts.svg").iter(f"{SVG}text")
    return [text for text in texts if text.get("class") == kind]


@pytest.mark.parametrize("text", picture("name"), ids=lambda text: text.text)
def test_a_name_in_the_picture_is_one_of_the_code_and_takes_and_gives_what_the_arrows_say(text):
    takes, gives = annotations(found(text.text))
    for given, where in ((text.get("data-takes", ""), takes), (text.get("data-gives", ""), gives)):
        for value in given.split():
            assert inspect.isclass(found(value))
            assert re.search(rf"\b{value.split('.')[-1]}\b", where), f"{text.text}: {value} is not in {where}"


def test_the_values_on_the_arrows_are_taken_and_given():
    names = picture("name")
    handed = {value for text in names for way in ("data-takes", "data-gives") for value in text.get(way, "").split()}
    values = {text.get("data-name"): text.text for text in picture("value")}
    assert len(names) > 20 and len(values) == 5 and values.keys() <= handed
    assert all(found(name).__name__ == word for name, word in values.items())


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_links_hold_in_the_repository_too(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s#]+)", text) if "://" not in link]
    assert not [link for link in links if not (path.parent / link).exists()]


def test_what_keeps_each_trap_from_happening_is_there():
    page = (DOCS / "faq.md").read_text()
    rows = [
        line
        for line in page[page.index("## Traps") :].splitlines()
        if line.startswith("| ") and "tested by" not in line
    ]
    held = [re.search(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) > 35 and all(held)
    for path, name in (one.groups() for one in held):
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_every_recipe_has_its_evidence_and_its_paper():
    page = (DOCS / "recipes.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", page[page.index("## The evidence") :], re.MULTILINE))
    assert list(rows) == list(RECIPES)
    source = (ROOT / "jaxrl_llm" / "recipes.py").read_text()
    for name in RECIPES:
        docstring = source.split(f"\n{name.upper()} = ")[1].split('"""')[1]
        for paper in re.findall(r"arXiv (\d+\.\d+)", docstring):
            assert f"https://arxiv.org/abs/{paper}" in rows[name], name


def test_curves_that_are_explained_are_measured():
    page = (DOCS / "reading_a_run.md").read_text()
    rows = re.findall(
        r"^\| (`[^|]*`) \|", page[page.index("## What a healthy") : page.index("## Sick runs")], re.MULTILINE
    )
    names = re.findall(r"`([^`]+)`", " ".join(rows))
    known = list(documented())
    assert len(names) > 10
    assert not [
        name for name in names if not any(re.fullmatch(pattern, name.replace("<task>", "x")) for pattern in known)
    ]


def test_every_kind_of_trouble_is_explained():
    page = (DOCS / "reading_a_run.md").read_text()
    kinds = re.findall(r"^\| `(\w+)` \|", page[page.index("## Sick runs") :], re.MULTILINE)
    assert sorted(kinds) == sorted(RULES)


def configured():
    """Runs that have every part that a setting may be of."""
    runs = [load_config(name)[1] for name in config_names()]
    return runs + [dataclasses.replace(load_config("smoke")[1], recipe=recipe) for recipe in RECIPES.values()]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_settings_and_commands_that_are_named_are_there(path):
    text = path.read_text()
    if path.stem == "from_verl":
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)  # verl's own names
    runs = configured()
    parts = {name for run in runs for name in vars(run)}
    dotted = re.findall(r"(?:--|`)([a-z]+(?:\.[a-z]\w*)+)(?=[ `=)])", text)
    for name in [name for name in dotted if name.split(".")[0] in parts]:
        field = name.replace(".no_", ".")  # of a switch
        assert any(has(run, field.split(".")) for run in runs), name
    commands = {
        word for line in re.findall(r"^(?:\$ )?jaxrl-llm (.*)$", text, re.MULTILINE) for word in line.split()[:1]
    }
    assert commands <= COMMANDS.keys()


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_commands_of_one_block_run_one_after_the_other(path):
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
        trained = {}
        for name, flags in re.findall(r"jaxrl-llm train (\S+)([^\n#|]*)", block.replace("\\\n", " ")):
            folder = re.search(r"--run_dir (\S+)", flags)
            settings = re.sub(r"--(steps|distributed\.\w+|run_dir) \S+|--(quiet|json|help)\b|[&\s]", "", flags)
            if "--fresh" not in settings:
                first = trained.setdefault((name, folder and folder[1]), settings)
                assert settings == first, f"{path.name}: {name} goes on in one folder with other settings: {flags}"


def has(value, parts):
    """Whether a value has an attribute, by its way there."""
    for part in parts:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_the_configuration_of_a_run_that_is_brought_over_loads(page, tmp_path):
    blocks = re.findall(r"```python\n# (\w+\.py): ([^\n]*)\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    for name, where, text in blocks:
        if not where.startswith("in "):
            (tmp_path / name).write_text(text)
    (run,) = [name for name, where, _ in blocks if where == "here"]
    config = load_config(str(tmp_path / run))[1]
    assert config.rollout.group == 8 and config.model == "Qwen/Qwen2.5-1.5B-Instruct"


def test_the_configurations_of_environments_load(tmp_path):
    blocks = re.findall(r"```python\n# (\w+\.py): .*?\n(.*?)```", (DOCS / "environments.md").read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["calculator.py", "guess.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
        run = load_config(str(tmp_path / name))[1]
        validate(run)
        assert run.task.plays


def test_messages_that_are_explained_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [cell for cell in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) if cell != "..."]
    sources = (path.read_text() for path in (ROOT / "jaxrl_llm").rglob("*.py"))
    texts = "".join(re.sub(r'"\n\s*f?"', "", source) for source in sources)
    assert len(messages) > 40
    assert not [message for message in messages if message not in texts]


def test_parameters_of_models_are_those_of_their_shapes():
    page = (DOCS / "models.md").read_text()
    stated = dict(re.findall(r"^\| `([^`]+/[^`]+)` \| ([\d,]+) \|", page, re.MULTILINE))
    assert set(stated) <= set(published_configs()) and len(stated) > 15
    for name, number in stated.items():
        config = find_model_config(name)[0]
        counted = sum(math.prod(our_shape(tensor, config)) for tensor in tensors_of(config))
        assert counted == int(number.replace(",", "")), name
    types = re.findall(r"^\| [^|`]+ \| `(\w+)` \| `\w+` \|$", page, re.MULTILINE)
    assert sorted(types) == sorted(FAMILIES)
