"""usage: jaxrl-llm completion bash|zsh

Prints a script for tab completion: commands, configurations, recipes, models and the usual flags; else files.
bash: jaxrl-llm completion bash > ~/.local/share/bash-completion/completions/jaxrl-llm, and open a new terminal
zsh:  jaxrl-llm completion zsh > ~/.jaxrl_llm.zsh; echo 'source ~/.jaxrl_llm.zsh' >> ~/.zshrc"""

import ast
import re
from pathlib import Path

from jaxrl_llm.cli.flags import USUAL, first
from jaxrl_llm.errors import did_you_mean, require

SHELLS = ("bash", "zsh")
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""Loads what reads bash's scripts in zsh."""
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
    shell = first(arguments, __doc__, "completion needs a shell: jaxrl-llm completion bash (or zsh)", True)
    hint = did_you_mean(shell, SHELLS, f"there are {' and '.join(SHELLS)}")
    require(shell in SHELLS, f"completion does not know {shell!r}: {hint}")
    require(not arguments, f"completion takes one shell, got {' '.join(arguments)}")
    print((ZSH if shell == "zsh" else "") + script())
    return 0


def script() -> str:
    """Return the script for bash; its words are those of this version."""
    from jaxrl_llm import cli
    from jaxrl_llm.config import config_names
    from jaxrl_llm.models.pretrained import BUILTIN
    from jaxrl_llm.recipes import RECIPES

    rows = []
    for command, place in cli.COMMANDS.items():
        flags = documented(place.partition(":")[0], command)
        flags |= {f"--{name}" for name in USUAL} if command in ("train", "plan") else set()
        rows.append(f'            *\\ {command}\\ -*) words="{" ".join(sorted(flags | {"--help"}))}" ;;')
    words = {"recipes": RECIPES, "models": BUILTIN, "configs": config_names(), "commands": cli.COMMANDS}
    told = {name: " ".join(values) for name, values in words.items()}
    return SCRIPT.format(**told, shells=" ".join(SHELLS), flags="\n".join(rows))


def documented(module: str, command: str) -> set[str]:
    """Return the flags in a command's text of usage in its module, which is not imported."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    usage = " ".join(text for text in texts if text.startswith(f"usage: jaxrl-llm {command} "))
    return set(re.findall(r"--[a-z][a-z_.]*[a-z]", usage)) - {"--field"}
