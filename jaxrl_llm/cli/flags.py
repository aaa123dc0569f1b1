"""Parsing of flags into values by tyro, with help of their own; any error becomes one line with a suggestion."""

import argparse
import contextlib
import difflib
import functools
import io
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.system.paths import local

OUTPUTS = ("--out", "--json", "--plot", "--dump")
"""Flags with a file or folder to write."""
USUAL = (
    "model run_dir steps learner.optimiser.learning_rate rollout.prompts rollout.group rollout.max_new_tokens "
    "rollout.temperature batch.rows batch.max_tokens learner.lora.rank evaluation.every output.checkpoint_every"
).split()
"""Settings that most people change, which help shows first; some are of other kinds of runs."""
SHORT = {"run_dir": "output.run_dir"}
"""Settings with a short name on the command line."""


def parse(kind: type, arguments: list[str], program: str, description: str, default: Any = None) -> Any:
    """Parse flags into a value of the dataclass ``kind``, starting from ``default``; ``--help`` prints and exits.

    ``description``: the text of the help above the settings; one that begins with ``usage:`` is shown as it is.

    Raises:
      InputError: an unknown flag (the nearest one is named) or a value of the wrong type.
    """
    import tyro

    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if (name := flag[2:].replace("-", "_")) in SHORT:
            arguments[index] = f"--{SHORT[name]}{equals}{value}"
    pieces = {}
    # Pieces are imported if a flag may be of one, or may be mistaken: as most of the recipe's are, and all that follow.
    by_class = any(
        argument in ("-h", "--help") or argument.startswith(("--recipe", "--rules")) for argument in arguments
    )
    if by_class and hasattr(default, "recipe"):
        from jaxrl_llm.cli.pieces import flags, set_by_class, with_pieces

        chosen = {}
        for name in set_by_class():
            while (value := take(arguments, f"--{name}", True)) is not None:
                chosen[name] = value
        default = with_pieces(default, chosen)
        pieces = flags(default)
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands,), "use_underscores": True, "add_help": False}
    options |= {} if default is None else {"default": default}
    captured = io.StringIO()
    with warnings.catch_warnings():
        # A class of one's own stands where the annotation names those that come with the package.
        warnings.filterwarnings("ignore", category=UserWarning, module="tyro")
        parser = tyro.extras.get_parser(kind, **options)  # ty: ignore[deprecated]  nothing else lists the flags
        known = {flag: action for action in parser._actions for flag in action.option_strings}
        fields = {flag[2:].replace("-", "_") for flag in known if flag.startswith("--")} | pieces.keys()
        if asked := [index for index, argument in enumerate(arguments) if argument in ("-h", "--help")]:
            topic = "".join(arguments[asked[0] + 1 : asked[0] + 2])
            topic = "" if topic.startswith("-") else topic
            print(help_text([*known.values(), *pieces.values()], topic, program, description))
            raise SystemExit
        named = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("--") or "=" in argument]
        if unknown := [name for name in named if name[2:].replace("-", "_") not in fields]:
            refuse_unknown(arguments, unknown, default, fields, program)
        try:
            with contextlib.redirect_stderr(captured):
                found, surplus = tyro.cli(kind, args=arguments, return_unknown_args=True, **options)
        except SystemExit as stop:
            if not stop.code:
                raise
            raise InputError(flatten(captured.getvalue()) or f"see {program} --help") from None
    if surplus:
        name = surplus[0]
        raise InputError(
            f"{name} belongs to no option: write --option value; a switch stands alone (--x.name, --x.no_name)"
        )
    return found


def help_text(actions: Iterable[Any], topic: str, program: str, description: str) -> str:
    """Return the help of a command: ``description``, then flags.

    Args:
      actions: tyro's, one for each flag.
      topic: empty for the usual settings and those that belong to no part, ``all``, or a part, such as ``rollout``.
      program: the command, for the line that tells of the other settings.
      description: the text before.

    Raises:
      InputError: there is no such part.
    """
    flags = {action.option_strings[0].removeprefix("--"): action for action in actions if action.option_strings}
    parts = sorted({name.partition(".")[0] for name in flags if "." in name})
    known = f"there are all, {', '.join(parts)}"
    require(
        topic in ("", "all", *parts),
        f"no part {topic!r} of the settings: {did_you_mean(topic, ['all', *parts], known)}",
    )
    names = {name: name for name in flags if topic in ("all", name.partition(".")[0])}
    if not topic:
        usual = {name: SHORT.get(name, name) for name in USUAL}
        names = {name: now for name, now in usual.items() if now in flags}
        names |= {name: name for name in flags if "." not in name and name not in names}
    width = min(120, max(60, shutil.get_terminal_size((80, 24)).columns))
    layout = functools.partial(argparse.HelpFormatter, max_help_position=34, width=width)
    table = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=layout)
    group = table.add_argument_group("settings" if topic else "usual settings")
    for name, now in names.items():
        told = " ".join(str(flags[now].help or "").replace("``", "").replace("%", "%%").split())
        if flags[now].nargs == 0:
            group.add_argument(*flags[now].option_strings, help=told, action="store_true")
        else:
            group.add_argument(f"--{name}", help=told, metavar=str(flags[now].metavar).replace("{None}", "None"))
    more = f"{program} --help all lists all {len(flags)}, --help PART those of one part: {', '.join(parts)}."
    usage = f"usage: {program} [--option value ...]\n\n{textwrap.fill(description, width)}"
    texts = [description if description.startswith("usage:") else usage, table.format_help().strip()]
    return "\n\n".join(texts + [textwrap.fill(more, width)] * (len(names) < len(flags)))


def refuse_unknown(arguments: list[str], unknown: list[str], default: Any, fields: set[str], program: str) -> None:
    """Refuse options that there are not, with those that may be meant; arguments that only look like one may pass.

    Raises:
      InputError: there is such an option.
    """
    from jaxrl_llm.cli.foreign import NOTES, refuse_foreign

    if hasattr(default, "recipe"):
        from jaxrl_llm.cli.pieces import set_by_class

        fields = fields | set_by_class().keys()
    refuse_foreign(arguments, fields)
    for flag in unknown:
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name in fields:
            continue
        # A field is often named without the part that it belongs to, or with another.
        last = name.rpartition(".")[2]
        close = sorted(known for known in fields if f".{known}".endswith(f".{last}"))
        note = "" if close else NOTES.get(last, "")
        close = close or difflib.get_close_matches(name, sorted(fields), 1, 0.5)
        near = f"did you mean {' or '.join(f'--{known}' for known in close)}?" if close else f"see {program} --help"
        raise InputError(f"no option {flag}: {note or near}")


def flatten(box: str) -> str:
    """Shorten the text of one of tyro's boxes to one line: ``--steps: expected INT, got 'x'`` where possible."""
    lines = [re.sub(r"[│╰╯─]+|-{4,}", " ", line).strip() for line in box.splitlines() if not line.startswith("╭")]
    text = " ".join(line for line in lines if line and not line.startswith("For full helptext"))
    if choice := re.search(r"invalid choice ('.*?') for argument '(--\S+)'\. Expected one of \((.*?)\)", text):
        known = choice[3].replace("'", "")
        return f"{choice[2]}: expected one of {known}, got {choice[1]}"
    if lacking := re.search(r"Missing value for argument '(--\S+)'", text):
        return f"{lacking[1]} needs a value"
    if refused := re.search(r"Error parsing (\w[\w.]*): (.*)", text):
        named = re.match(r"[A-Z]\w*\.", refused[2])  # the class's own name stands before the field
        return refused[2] if named else f"{refused[1]}.{refused[2]}"
    value = re.search(r"Error parsing (--\S+?):? (.*?) Argument helptext: .*?(?:\1|^--\S+) (\S+)", text)
    if value is None:
        return re.sub(r" Argument helptext:.*", "", text)
    given = re.findall(r"'([^']*)'", value[2])
    return f"{value[1]}: expected {value[3]}{f', got {given[-1]!r}' if given else f': {value[2]}'}"


def take(arguments: list[str], flag: str, value: bool) -> Any:
    """Remove ``flag`` (and its value) from the arguments; return the value, or whether the flag was given.

    Raises:
      InputError: the value is missing or unexpected, or an address to write to.
    """
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if not name.startswith("--") or name[2:].replace("-", "_") != flag[2:]:
            continue
        del arguments[index]
        if not value:
            require(not equals, f"{argument}: {flag} stands alone, without a value")
            return True
        if inline:
            return local(inline, flag) if flag in OUTPUTS else inline
        follows = not equals and index < len(arguments) and not arguments[index].startswith("--")
        require(follows, f"{flag} needs a value")
        given = arguments.pop(index)
        return local(given, flag) if flag in OUTPUTS else given
    return None if value else False


def first(arguments: list[str], usage: str | None, missing: str, whole_help: bool = False) -> str:
    """Remove and return the leading argument; ``--help`` in its place prints ``usage`` and exits.

    ``whole_help``: ``usage`` is all the help that the command has, so it answers ``--help`` in any place.

    Raises:
      InputError: the argument is missing (the message is ``missing``).
    """
    if {"-h", "--help"} & set(arguments if whole_help else arguments[:1]):
        print(usage)
        raise SystemExit
    require(bool(arguments) and not arguments[0].startswith("-"), missing)
    return arguments.pop(0)


def status(text: str) -> None:
    """Show the current activity in place of the last one, on a terminal; in a log or a pipe it would only be noise."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
