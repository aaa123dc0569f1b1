"""``jaxrl-llm list``: configurations, tasks, recipes and models by name; ``jaxrl-llm completion``: a script of them."""

import ast
import itertools
import re
import shutil
import textwrap
from pathlib import Path

from jaxrl_llm.cli.flags import USUAL, first
from jaxrl_llm.errors import did_you_mean, require

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
    words = ", ".join(topics)
    require(len(arguments) <= 1, f"list takes one of {words}, got {' '.join(arguments)}")
    for topic in arguments:
        hint = did_you_mean(topic, topics, f"there are {words}")
        require(topic in topics, f"list does not know {topic!r}: {hint}")
    sections = {name: topics[name](bool(arguments)) for name in arguments or topics}
    print("\n\n".join("\n".join([name, *format_rows(rows)]) for name, rows in sections.items()))
    return 0


def format_rows(rows: Rows) -> list[str]:
    """Format names and descriptions in two columns, wrapped to the terminal's width: at least 60, 80 without one."""
    columns = max(60, shutil.get_terminal_size((80, 24)).columns)
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        begin = "  " + (f"{name:<{width}}" if name else "")
        wrapped = textwrap.wrap(
            text, columns, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        lines += wrapped or [begin.rstrip()]
    return lines


def configs(full: bool) -> Rows:
    """List each shipped configuration with the first line of its docstring, without executing it."""
    from jaxrl_llm.system.paths import config_folder, config_names

    texts = {name: (config_folder() / f"{name}.py").read_text() for name in config_names()}
    return [(name, (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]) for name, text in texts.items()]


def tasks(full: bool) -> Rows:
    """List the kinds of tasks; with ``full`` every name of reasoning-gym."""
    if not full:
        return [*KINDS_OF_TASK, ("", "jaxrl-llm list tasks names all of reasoning-gym's")]
    from reasoning_gym.factory import DATASETS

    return [*KINDS_OF_TASK, ("", ""), ("", " ".join(sorted(DATASETS)))]


def recipes(full: bool) -> Rows:
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


def models(full: bool) -> Rows:
    """List the built-in models, and the families that can be loaded from a path."""
    from jaxrl_llm.models.families import FAMILIES
    from jaxrl_llm.models.pretrained import BUILTIN

    return [
        *((name, builtin.description) for name, builtin in BUILTIN.items()),
        ("PATH", "a Hugging Face directory (config.json, safetensors, tokenizer), a PEFT adapter, or a .gguf file"),
        ("OWNER/MODEL", "a model of the hub"),
        ("", f"families: {' '.join(sorted(FAMILIES))}"),
    ]


COMPLETION_USAGE = """usage: jaxrl-llm completion bash|zsh

Prints a script for tab completion: commands, configurations, recipes, models and the usual flags; else files.
bash: jaxrl-llm completion bash > ~/.local/share/bash-completion/completions/jaxrl-llm, and open a new terminal
zsh:  jaxrl-llm completion zsh > ~/.jaxrl_llm.zsh; echo 'source ~/.jaxrl_llm.zsh' >> ~/.zshrc"""
SHELLS = ("bash", "zsh")
SCRIPT = """_jaxrl_llm() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
        --recipe) words="{recipes}" ;;
        --model) words="{models}" ;;
        --config) words="{configs}" ;;
        *) case "$COMP_CWORD ${{COMP_WORDS[1]}} $word" in
            1\\ *) words="{commands}" ;;
            2\\ train\\ [^-]*|2\\ plan\\ [^-]*|2\\ train\\ |2\\ plan\\ ) words="{configs}" ;;
            2\\ list\\ *) words="configs tasks recipes models" ;;
            2\\ completion\\ *) words="{shells}" ;;
{flags}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jaxrl_llm jaxrl-llm"""


def completion(arguments: list[str]) -> int:
    """Run ``completion bash|zsh``; return the exit code."""
    shell = first(arguments, COMPLETION_USAGE, "completion needs a shell: jaxrl-llm completion bash (or zsh)", True)
    hint = did_you_mean(shell, SHELLS, f"there are {' and '.join(SHELLS)}")
    require(shell in SHELLS, f"completion does not know {shell!r}: {hint}")
    require(not arguments, f"completion takes one shell, got {' '.join(arguments)}")
    # Loads what reads bash's scripts in zsh.
    load = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    print((load if shell == "zsh" else "") + completion_script())
    return 0


def completion_script() -> str:
    """Return the script for bash; its words are those of this version. Flags are read from the texts of usage of the
    commands, whose modules are not imported.
    """
    from jaxrl_llm import cli
    from jaxrl_llm.config import config_names
    from jaxrl_llm.models.pretrained import BUILTIN
    from jaxrl_llm.recipes import RECIPES

    rows = []
    for command, place in cli.COMMANDS.items():
        tree = ast.parse((Path(__file__).parent / f"{place.partition(':')[0]}.py").read_text())
        texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        usage = " ".join(text for text in texts if text.startswith(f"usage: jaxrl-llm {command} "))
        flags = set(re.findall(r"--[a-z][a-z_.]*[a-z]", usage)) - {"--field"}
        flags |= {f"--{name}" for name in USUAL} if command in ("train", "plan") else set()
        rows.append(f'            *\\ {command}\\ -*) words="{" ".join(sorted(flags | {"--help"}))}" ;;')
    words = {"recipes": RECIPES, "models": BUILTIN, "configs": config_names(), "commands": cli.COMMANDS}
    joined_words = {name: " ".join(values) for name, values in words.items()}
    return SCRIPT.format(**joined_words, shells=" ".join(SHELLS), flags="\n".join(rows))
