"""``jaxrl-llm list``: configurations, tasks, recipes and models by name."""

import ast
import itertools
import re
import shutil
import textwrap
from pathlib import Path

from jaxrl_llm.errors import did_you_mean, require

INDENT = "  "
KINDS_OF_TASK = [
    ("--task.source.name NAME", "where the source is ReasoningGym or HubDataset: another of its kind"),
    (
        'Table("file.jsonl")',
        'your own problems: one JSON object a line with "prompt" and "answer"; .json, .csv, .parquet too',
    ),
    (
        "HubDataset(NAME, ...)",
        'a data set of the Hugging Face hub: HubDataset("openai/gsm8k", subset="main", answer_extractor="last_number")',
    ),
    (
        "ReasoningGym(NAME, ...)",
        'generated problems with verifiers of their own: ReasoningGym(NAME, {"option": value})',
    ),
    ("Mixture((Part(...), ...))", "several tasks at once: shares of the prompts, rewards of their own"),
    ("Programs(...)", "generated programming problems of three levels, with tests: extractor whole, verifier code"),
    ("Instructions(...)", "generated prompts with instructions to follow: extractor whole, verifier instructions"),
]
"""Kinds of tasks in a configuration, each with a description."""


Rows = list[tuple[str, str]]
"""Names, each with a description; without a name a text of its own."""


def list_names(arguments: list[str]) -> int:
    """Run ``list [configs|tasks|recipes|models]``; return the exit code."""
    topics = {topic.__name__: topic for topic in (configs, tasks, recipes, models)}
    if {"-h", "--help"} & set(arguments):
        print(f"usage: jaxrl-llm list [{'|'.join(topics)}]")
        return 0
    known = ", ".join(topics)
    require(len(arguments) <= 1, f"list takes one of {known}, got {' '.join(arguments)}")
    for topic in arguments:
        hint = did_you_mean(topic, topics, f"there are {known}")
        require(topic in topics, f"list does not know {topic!r}: {hint}")
    found = {name: topics[name](bool(arguments)) for name in arguments or topics}
    print("\n\n".join("\n".join([name, *formatted(rows)]) for name, rows in found.items()))
    return 0


def formatted(rows: Rows) -> list[str]:
    """Format names with their descriptions, wrapped in a second column.

    The width is the terminal's, at least 60 columns, and 80 without a terminal.
    """
    columns = max(60, shutil.get_terminal_size((80, 24)).columns)
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        begin = INDENT + (f"{name:<{width}}" if name else "")
        wrapped = textwrap.wrap(
            text,
            columns,
            initial_indent=begin,
            subsequent_indent=" " * len(begin),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += wrapped or [begin.rstrip()]
    return lines


def configs(whole: bool) -> Rows:
    """List each shipped configuration with the first line of its docstring, without executing it."""
    from jaxrl_llm.system.paths import config_folder, config_names

    texts = {name: (config_folder() / f"{name}.py").read_text() for name in config_names()}
    return [(name, (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]) for name, text in texts.items()]


def tasks(whole: bool) -> Rows:
    """List the kinds of tasks; with ``whole`` every name of reasoning-gym."""
    if not whole:
        return [*KINDS_OF_TASK, ("", "jaxrl-llm list tasks names all of reasoning-gym's")]
    from reasoning_gym.factory import DATASETS

    return [*KINDS_OF_TASK, ("", ""), ("", " ".join(sorted(DATASETS)))]


def recipes(whole: bool) -> Rows:
    """List each recipe with the first sentence of its docstring in recipes.py."""
    from jaxrl_llm import recipes as module

    body = ast.parse(Path(module.__file__).read_text()).body
    notes = {}
    for node, note in itertools.pairwise(body):
        documented = isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and documented:
            sentence = re.split(r"\.\s", str(note.value.value), maxsplit=1)[0].rstrip(".")
            notes[node.targets[0].id] = textwrap.shorten(sentence, 110, placeholder=" ...")
    values = {id(recipe): name for name, recipe in vars(module).items() if isinstance(recipe, module.Recipe)}
    return [(name, notes.get(values[id(recipe)], "")) for name, recipe in module.RECIPES.items()]


def models(whole: bool) -> Rows:
    """List the built-in models, and the families that can be loaded from a path."""
    from jaxrl_llm.models.builtin import BUILTIN
    from jaxrl_llm.models.families import FAMILIES

    return [
        *((name, builtin.description) for name, builtin in BUILTIN.items()),
        ("PATH", "a Hugging Face directory (config.json, safetensors, tokenizer), a PEFT adapter, or a .gguf file"),
        ("OWNER/MODEL", "a model of the hub"),
        ("", f"families: {' '.join(sorted(FAMILIES))}"),
    ]
