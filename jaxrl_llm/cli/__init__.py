"""usage: jaxrl-llm COMMAND ...

  train CONFIG     train a model; run it again to resume      jaxrl-llm train quickstart
  eval RUN         test a run or a model on its task          jaxrl-llm eval runs/quickstart
  collect RUN      write its verified answers as data         jaxrl-llm collect runs/quickstart --out answers.jsonl
  generate MODEL   a chat, or one answer with --prompt        jaxrl-llm generate smollm2-135m
  export RUN       write a run's policy for transformers      jaxrl-llm export runs/quickstart --out model
  reset RUN        make its policy its reference, by hand     jaxrl-llm reset runs/quickstart
  report RUN       one page: curves, findings, completions    jaxrl-llm report runs/quickstart
  plan CONFIG      will it fit a machine, how fast is it      jaxrl-llm plan quickstart --topology v5e:2x2
  list             configurations, tasks, recipes, models     jaxrl-llm list
  completion SHELL a script for tab completion, bash or zsh   jaxrl-llm completion bash --help

jaxrl-llm COMMAND --help shows more.
"""

import contextlib
import gc
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from jaxrl_llm import __version__
from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.system.paths import NO_ROOM, prepare_libraries
from jaxrl_llm.system.signals import BETWEEN_STEPS, PREEMPTED, answering, let_go, listen, quit_now, while_read

DONE, WRONG_INPUT = 0, 2
COMMANDS = {
    "train": "train:train_command",
    "eval": "eval:eval_command",
    "collect": "collect:collect_command",
    "generate": "generate:generate_command",
    "export": "export:export_command",
    "reset": "runs:reset_command",
    "report": "runs:report_command",
    "plan": "plan:plan_command",
    "list": "names:list_names",
    "completion": "names:completion",
}
"""Module and function of each command, imported on demand."""


def main() -> None:
    """Run ``jaxrl-llm``, the entry point. Exit code 0 done, 2 wrong input, 3 stopped by a guard, 75 preempted, 130
    (143, 129) quit by Ctrl-C (SIGTERM, SIGHUP).
    """
    listen()
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show is replaced. One that took the place of a file behind Python's back refuses.
        with contextlib.suppress(OSError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
    if sys.stderr is not None:
        sys.stderr = while_read(sys.stderr)
    if sys.stdout is not None and sys.stdout.isatty():  # a pipe that nobody reads ends a command
        sys.stdout = while_read(sys.stdout)
    # Thresholds of Python's garbage collector: nearly all objects that JAX traces stay, so it should run seldom.
    gc.set_threshold(50_000, 10, 10)
    sys.unraisablehook = _report
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code == WRONG_INPUT:
        # Background writers of a checkpoint that failed would only repeat at exit what is already said.
        os._exit(code)
    sys.exit(code)


def _report(unraisable: Any) -> None:
    """Report an unraisable exception, except TensorStore's about an event loop that Orbax closed after a failure."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def run(arguments: Sequence[str]) -> int:
    """Run one command; wrong input, a full disk and too little memory are one line on stderr."""
    try:
        return dispatch(list(arguments))
    except SystemExit as stop:  # of a command that was asked for its help
        if stop.code:
            raise
        return DONE
    except InputError as error:
        return refuse(str(error), error.code)
    except BrokenPipeError:
        let_go(sys.stdout.fileno())
        return DONE
    except Exception as error:
        reason = explain(error, arguments[0])
        if reason is None:
            raise
        return refuse(reason)


def explain(error: BaseException | None, command: str) -> str | None:
    """Return one line for a failure of the machine that a person can mend; None for any other. Errors of Orbax and JAX
    wrap the cause, so the chain and their texts are searched; first for a full disk, RESOURCE_EXHAUSTED to TensorStore.
    """
    no_room = ("No space left on device", "Disk quota exceeded", "File too large")
    no_right = ("Permission denied", "Read-only file system", "Operation not permitted")
    no_memory = ("RESOURCE_EXHAUSTED", "Out of memory")
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    where = {id(link): getattr(link, "filename", None) or "while writing" for link in chain}
    for link in chain:
        if getattr(link, "errno", None) in NO_ROOM or any(mark in str(link) for mark in no_room):
            return f"the disk is full ({where[id(link)]}): free some space and run the same command again"
    for link in chain:
        # JAX refuses the value of an environment variable when it is imported.
        if isinstance(link, ValueError) and re.search(r"for environment 'JAX_|for JAX flag ", str(link)):
            return f"{link}: correct it, or unset it"
    for link, mark in itertools.product(chain, no_right):
        if mark in str(link):
            remedy = "make it readable and writable, and run the same command again"
            return f"{mark.lower()} ({where[id(link)]}): {remedy}"
    if any(isinstance(link, MemoryError) or any(mark in str(link) for mark in no_memory) for link in chain):
        remedies = {
            "train": "lower --learner.compute.microbatch_rows (learning) or --rollout.engine.slots (sampling)",
            **dict.fromkeys(("eval", "collect"), "lower --slots or --max_new_tokens"),
            "generate": "lower --max_new_tokens",
        }
        return f"out of memory: {remedies.get(command, 'use a larger machine')}"
    return None


def refuse(message: str, code: int = WRONG_INPUT) -> int:
    """Print one line on stderr and return the exit code."""
    from jaxrl_llm.system.storage import shown
    from jaxrl_llm.system.text import harmless

    print(f"jaxrl-llm: {harmless(' '.join(shown(message).split()))}", file=sys.stderr)
    return code


def dispatch(arguments: list[str]) -> int:
    """Find the command and pass the remaining arguments to it."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return DONE
    name, *rest = arguments
    if name == "--version":
        print(__version__)
        return DONE
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"there are {', '.join(COMMANDS)}")
        raise InputError(f"no command {name!r}: {hint}")
    module, _, function = COMMANDS[name].partition(":")
    prepare_libraries()
    with contextlib.ExitStack() as stack:
        if name == "train":
            stack.enter_context(answering(lambda number: quit_now(PREEMPTED, BETWEEN_STEPS)))
        # Commands that may execute code that a run brings: those with ``--trust``.
        if name in ("train", "eval", "collect", "reset", "plan"):
            from jaxrl_llm.cli.flags import take
            from jaxrl_llm.config import trusting

            stack.enter_context(trusting(take(rest, "--trust", False)))
        return getattr(importlib.import_module(f"jaxrl_llm.cli.{module}"), function)(rest)
