"""The command line. Nothing slow is imported before the arguments are known to be sound."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.cli.flags import let_go, suggest
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import NO_ROOM
from jaxrl_llm.signals import answering, between_steps, listen, while_read

USAGE = """usage: jaxrl-llm COMMAND ...

  train CONFIG     teach a model; run it again to go on       jaxrl-llm train quickstart
  eval RUN         test a run or a model on its task          jaxrl-llm eval runs/quickstart
  collect RUN      write its verified answers as data         jaxrl-llm collect runs/quickstart --out answers.jsonl
  generate MODEL   a chat, or one answer with --prompt        jaxrl-llm generate smollm2-135m
  export RUN       write a run's policy for transformers      jaxrl-llm export runs/quickstart --out model
  reset RUN        make its policy its reference, by hand     jaxrl-llm reset runs/quickstart
  report RUN       one page: curves, findings, completions    jaxrl-llm report runs/quickstart
  plan CONFIG      will it fit a machine, how fast is it      jaxrl-llm plan quickstart --topology v5e:2x2
  list             configurations, tasks, recipes, models     jaxrl-llm list

jaxrl-llm COMMAND --help tells more."""

DONE, WRONG_INPUT = 0, 2
MARKS_OF_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
MARKS_OF_NO_RIGHT = ("Permission denied", "Read-only file system", "Operation not permitted")
MARKS_OF_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
LESS_MEMORY = {
    "train": "--learner.microbatch_rows (learning) or --rollout.slots (sampling)",
    "eval": "--slots or --max_new_tokens",
    "collect": "--slots or --max_new_tokens",
    "generate": "--max_new_tokens",
}
"""What to lower, by command."""
SELDOM = (50_000, 10, 10)
"""How many new objects make Python look for garbage: of those that JAX traces, nearly all stay."""


def main() -> None:
    """Entry point of ``jaxrl-llm``.

    Exit code 0 done, 2 wrong input, 3 stopped by a guard, 75 preempted, 130 (143, 129) quit by Ctrl-C (SIGTERM,
    SIGHUP).
    """
    listen()
    if sys.stderr is not None:
        sys.stderr = while_read(sys.stderr)
    if sys.stdout is not None and sys.stdout.isatty():  # a pipe that nobody reads ends a command
        sys.stdout = while_read(sys.stdout)
    gc.set_threshold(*SELDOM)
    sys.unraisablehook = _report
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code == WRONG_INPUT:
        # Background writers of a checkpoint that failed would only repeat at exit what is already said.
        os._exit(code)
    sys.exit(code)


def _report(unraisable: Any) -> None:
    """Python's own report, without what TensorStore's threads tell an event loop that Orbax has "
    "closed after a failure."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def run(arguments: Sequence[str]) -> int:
    """Run one command; wrong input, a full disk and too little memory are one line on stderr."""
    try:
        return dispatch(list(arguments))
    except InputError as error:
        return refuse(str(error))
    except BrokenPipeError:
        let_go(sys.stdout)
        return DONE
    except Exception as error:
        reason = explain(error, arguments[0])
        if reason is None:
            raise
        return refuse(reason)


def explain(error: BaseException | None, command: str) -> str | None:
    """One line for a failure that the machine causes and a person can mend; None for any other.

    Orbax and JAX wrap the cause in errors of their own, so the chain is searched, and their texts too. A full disk
    comes first: TensorStore calls that RESOURCE_EXHAUSTED as well.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for link in chain:
        if getattr(link, "errno", None) in NO_ROOM or any(mark in str(link) for mark in MARKS_OF_NO_ROOM):
            where = getattr(link, "filename", None) or "while writing"
            return f"the disk is full ({where}): free some space and run the same command again"
    for link in chain:
        mark = next((mark for mark in MARKS_OF_NO_RIGHT if mark in str(link)), None)
        if mark is not None:
            where = getattr(link, "filename", None) or "while writing"
            return f"{mark.lower()} ({where}): make it readable and writable, and run the same command again"
    for link in chain:
        if isinstance(link, MemoryError) or any(mark in str(link) for mark in MARKS_OF_NO_MEMORY):
            return (
                f"out of memory: lower {LESS_MEMORY[command]}"
                if command in LESS_MEMORY
                else "out of memory: use a larger machine"
            )
    return None


def refuse(message: str) -> int:
    """One line on stderr; exit code 2."""
    print(f"jaxrl-llm: {' '.join(message.split())}", file=sys.stderr)
    return WRONG_INPUT


def dispatch(arguments: list[str]) -> int:
    """Find the command and hand it the rest."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return DONE
    name = arguments[0]
    rest = arguments[1:]
    if name == "--version":
        from jaxrl_llm import __version__

        print(__version__)
        return DONE
    if name not in COMMANDS:
        raise InputError(f"no command {name!r}: {suggest(name, list(COMMANDS))}")
    return COMMANDS[name](rest)


def _train(arguments: list[str]) -> int:
    with answering(between_steps):
        from jaxrl_llm.cli.train import train

        return train(arguments)


def _eval(arguments: list[str]) -> int:
    from jaxrl_llm.cli.eval import evaluate

    return evaluate(arguments)


def _collect(arguments: list[str]) -> int:
    from jaxrl_llm.cli.collect import collect

    return collect(arguments)


def _generate(arguments: list[str]) -> int:
    from jaxrl_llm.cli.generate import generate

    return generate(arguments)


def _export(arguments: list[str]) -> int:
    from jaxrl_llm.cli.export import export

    return export(arguments)


def _reset(arguments: list[str]) -> int:
    from jaxrl_llm.cli.reset import reset

    return reset(arguments)


def _report_page(arguments: list[str]) -> int:
    from jaxrl_llm.cli.report import report

    return report(arguments)


def _plan(arguments: list[str]) -> int:
    from jaxrl_llm.cli.plan import plan

    return plan(arguments)


def _list(arguments: list[str]) -> int:
    from jaxrl_llm.cli.names import list_names

    return list_names(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "collect": _collect,
    "generate": _generate,
    "export": _export,
    "reset": _reset,
    "report": _report_page,
    "plan": _plan,
    "list": _list,
}
