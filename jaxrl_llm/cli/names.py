"""``jaxrl-llm list``: configurations, tasks, recipes and models by name."""

import ast
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.cli.flags import suggest
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.paths import prepare_libraries

LONGEST_NOTE = 110
INDENT = "  "
KINDS_OF_TASK = [
    ("--task.source.name NAME", "where the source is ReasoningGym or HubDataset: another of its kind"),
    ('Table("file.jsonl")', 'your own problems: one JSON object a line with "prompt" and "answer"; .parquet too'),
    (
        "HubDataset(NAME, ...)",
        'a data set of the Hugging Face hub: HubDataset("openai/gsm8k", subset="main", answer_extractor="last_number")',
    ),
    (
        "ReasoningGym(NAME, ...)",
        'generated problems with verifiers of their own: ReasoningGym(NAME, {"option": value})',
    ),
    ("Mixture((Part(...), ...))", "several tasks at once: shares of the prompts, rewards of their own"),
    ("Instructions(...)", "generated prompts with instructions to follow: extractor whole, verifier instructions"),
]
"""Kinds of tasks in a configuration, each with a description."""


def list_names(arguments: list[str]) -> int:
    """Run ``list [configs|tasks|recipes|models]``; return the exit code."""
    topics: dict[str, Callable[[bool], list[str]]] = {
        "configs": configs,
        "tasks": tasks,
        "recipes": recipes,
        "models": models,
    }
    if {"-h", "--help"} & set(arguments):
        print(f"usage: jaxrl-llm list [{'|'.join(topics)}]")
        return 0
    if len(arguments) > 1:
        raise InputError(f"list takes one of {', '.join(topics)}, got {' '.join(arguments)}")
    if arguments and arguments[0] not in topics:
        raise InputError(f"list does not know {arguments[0]!r}: {suggest(arguments[0], list(topics))}")
    prepare_libraries()
    chosen = arguments or list(topics)
    print(
        "\n\n".join(
            "\n".join([name, *(f"{INDENT}{line}" for line in topics[name](bool(arguments)))]) for name in chosen
        )
    )
    return 0


def configs(whole: bool) -> list[str]:
    """List each shipped configuration with the first line of its docstring, without executing it."""
    from jaxrl_llm.config import config_folder, config_names

    return _table([(name, first_line(config_folder() / f"{name}.py")) for name in config_names()])


def first_line(path: Path) -> str:
    """Return the first line of a Python file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0]


def tasks(whole: bool) -> list[str]:
    """List the kinds of tasks; with ``whole`` every name of reasoning-gym."""
    if not whole:
        return [*_table(KINDS_OF_TASK), "jaxrl-llm list tasks names all of reasoning-gym's"]
    from reasoning_gym.factory import DATASETS

    return [*_table(KINDS_OF_TASK), "", *_wrapped(" ".join(sorted(DATASETS)), _columns())]


def recipes(whole: bool) -> list[str]:
    """List each recipe with the first sentence of its docstring in recipes.py."""
    from jaxrl_llm import recipes as module

    body = ast.parse(Path(module.__file__).read_text()).body
    notes = {}
    for node, note in itertools.pairwise(body):
        documented = isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and documented:
            sentence = re.split(r"\.\s", str(note.value.value), maxsplit=1)[0].rstrip(".")
            notes[node.targets[0].id] = textwrap.shorten(sentence, LONGEST_NOTE, placeholder=" ...")
    values = {id(recipe): name for name, recipe in vars(module).items() if isinstance(recipe, module.Recipe)}
    return _table([(name, notes.get(values[id(recipe)], "")) for name, recipe in module.RECIPES.items()])


def models(whole: bool) -> list[str]:
    """List the built-in models, and the families that can be loaded from a path."""
    from jaxrl_llm.models.builtin import BUILTIN
    from jaxrl_llm.models.families import FAMILIES

    paths = [
        ("PATH", "a Hugging Face directory (config.json, safetensors, tokenizer) or a .gguf file"),
        ("OWNER/MODEL", "a model of the hub"),
    ]
    rows = _table([(name, builtin.description) for name, builtin in BUILTIN.items()] + paths)
    return [*rows, *_wrapped(f"families: {' '.join(sorted(FAMILIES))}", _columns())]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Format names with their descriptions, wrapped in a second column."""
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        first, *others = _wrapped(text, _columns() - width) or [""]
        lines += [f"{name:<{width}}{first}".rstrip(), *(" " * width + line for line in others)]
    return lines


def _columns() -> int:
    """Return the terminal's columns without the indent: at least 60, and 80 without a terminal."""
    return max(60, shutil.get_terminal_size((80, 24)).columns) - len(INDENT)


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
