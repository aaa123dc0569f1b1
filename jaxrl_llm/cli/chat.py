"""``jaxrl-llm generate`` on a terminal: a chat with the whole conversation in each prompt."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence

from jaxrl_llm.cli.asking import Policy
from jaxrl_llm.cli.generate import encode, say
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.signals import answering, on_exit, quit_now
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.template import worded
from jaxrl_llm.types import Message

PROMPT = "> "
GREETING = "a chat: type a message and press Enter; /help tells more, Ctrl-D ends"
UNMARKED = "the model has no chat template: what was said is told apart by blank lines only"
FORGOTTEN = "a new chat: what was said is forgotten"
HELP = """/new (or /clear)   forget what was said and begin anew
/bye (or /exit)    end; so does Ctrl-D
/help              these lines
Ctrl-C ends an answer before its end; pressed again, or where no answer is being given, it ends the program."""
NEW, BYE, HELPS = ("/new", "/clear", "/reset"), ("/bye", "/exit", "/quit"), ("/help", "/?")
UNBRACKETED = b"\x1b[?2004l"
"""Escape sequence that turns off a terminal's marks around pasted text."""
_COMMAND = re.compile(r"/[a-z?]+")


def chat(policy: Policy, task: Task, sampling: Sampling, seed: int) -> None:
    """Answer message after message; the n-th of all is sampled with ``seed`` + n, counted from 0.

    ``task``: gives the wording of prompts.
    """
    history: tuple[Message, ...] = ()
    note(GREETING)
    if task.template == "plain":
        note(UNMARKED)
    for line in typed():
        if line in BYE:
            return
        if line in NEW:
            history = ()
            note(FORGOTTEN)
        elif line in HELPS:
            note(HELP)
        elif _COMMAND.fullmatch(line):
            note(f"there is no command {line}; /help tells those there are")
        else:
            try:
                history = turn(policy, (*history, {"role": "user", "content": line}), task, sampling, seed)
            except InputError as error:  # of this message: what was said before it stays
                note(f"jaxrl-llm: {error}")
            seed += 1


def turn(policy: Policy, messages: Sequence[Message], task: Task, sampling: Sampling, seed: int) -> tuple[Message, ...]:
    """Answer the last message; return the chat with the answer, or the earlier chat if the answer is empty.


    Raises:
      InputError: the message alone leaves no room for an answer, or the chat template refuses the chat.
    """
    tokens, kept = fitted(policy, messages, task, sampling.max_new_tokens)
    if len(kept) < len(messages):
        note(
            f"the chat is longer than the model was made for ({policy.model.config.attention.max_positions} tokens): "
            "its beginning is left out"
        )
    asked: list[int] = []

    def interrupted(number: int) -> None:  # the first Ctrl-C ends the answer, the second the program
        if asked or number != signal.SIGINT:
            quit_now(128 + number, "interrupted")
        asked.append(number)

    with answering(interrupted):
        done = say(policy, tokens, seed, sampling, lambda: bool(asked))
    said = len(done.tokens)
    if done.finish_reason == "length":
        why = "--max_new_tokens allows no more" if said == sampling.max_new_tokens else "the model was made for no more"
        note(f"cut off after {said} tokens: {why}")
    if not said:
        return tuple(kept[:-1])
    return (*worded(kept, task), {"role": "assistant", "content": done.text})


def fitted(
    policy: Policy, messages: Sequence[Message], task: Task, longest: int
) -> tuple[Sequence[int], Sequence[Message]]:
    """Return the token ids of a chat, and the chat, without its first turns as needed to leave room for an answer.

    The room is ``longest`` tokens, or a quarter of the model's positions where that is less. The system message and the
    last message stay.
    """
    positions = policy.model.config.attention.max_positions
    room = positions - min(longest, positions // 4)
    kept = list(messages)
    while len(tokens := encode(policy, kept, task)) > room:
        first = 1 if kept[0]["role"] == "system" else 0
        if len(kept) - first < 3:  # a turn is what a person says and the answer
            break
        del kept[first : first + 2]
    return tokens, kept


def typed() -> Iterator[str]:
    """Yield the non-empty lines that a person types, up to Ctrl-D."""
    import termios

    with contextlib.suppress(ImportError):
        import readline  # from here on lines can be edited, and earlier ones found again

        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message, line breaks and all

    def put_back(*reason: object) -> None:
        os.write(sys.stdin.fileno(), UNBRACKETED)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)

    while True:
        mode = termios.tcgetattr(sys.stdin)  # which readline changes
        try:
            with on_exit(put_back):
                if sys.stdout.isatty():
                    line = input(PROMPT)
                else:  # answers go elsewhere than to the terminal
                    print(PROMPT, end="", file=sys.stderr, flush=True)
                    if not (line := sys.stdin.readline()):
                        raise EOFError
        except EOFError:
            note("")
            return
        if line.strip():
            yield line.strip()


def note(text: str) -> None:
    """Print a notice on stderr, apart from the answers."""
    print(text, file=sys.stderr, flush=True)
