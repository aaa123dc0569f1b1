"""Templates: turn chats into text. Chat templates of strangers, in a process with limits: a template is a program that
may never end. Jinja's own sandbox keeps it from files and objects; it bounds neither time nor memory. The program of
the process is ``main``: over one connection it gets the arguments of ``render``, and answers in JSON.
"""

import contextlib
import datetime
import functools
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.codec import digest
from jaxrl_llm.errors import InputError, one_line
from jaxrl_llm.models.pretrained import CHATML
from jaxrl_llm.system.signals import interpreter
from jaxrl_llm.tasks.task import Task, check_template_name
from jaxrl_llm.types import Message

SECONDS = 2.0
"""Processor time that a template may take for one chat."""
MEMORY = 512 * 1024**2
"""Bytes of memory that it may take."""
LONGEST = 4 * 1024**2
"""Characters that it may write: a tokenizer takes some 100 bytes of memory for each."""


class Renderer:
    """Owner of the process, started when first needed; any thread may render."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: Any = None
        self._connection: Any = None
        self._endless: dict[str, str] = {}  # by template: why it is not tried again

    def render(
        self, template: str, messages: Sequence[Message], options: Mapping[str, Any], asks: bool, tokenizer: Any
    ) -> str:
        """Return the text of a chat, up to the start of the next reply if ``asks``; ``options`` go to the template."""
        smollm2 = "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
        if template == CHATML or digest(template, 64) == smollm2:  # they are known, and need no other process
            return _apply_template(tokenizer, template, messages, options, asks)
        with self._lock:
            if template in self._endless:
                raise InputError(self._endless[template])
            try:
                self._start().send((template, [*messages], {**tokenizer.special_tokens_map, **options}, asks))
                text, reason = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                reason = self._endless[template] = self._end()
            except BaseException:  # an answer still on its way would be taken for that of the next chat
                self._end()
                raise
        if reason:
            raise InputError(reason)
        return text

    def _start(self) -> Any:
        """Return the connection to the process."""
        if self._process is None or self._process.poll() is not None:
            self._connection, theirs = multiprocessing.Pipe()
            command = interpreter("jaxrl_llm.tasks.template", str(theirs.fileno()))
            with contextlib.closing(theirs):
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            weakref.finalize(self, _kill, self._process, os.getpid())
        return self._connection

    def _end(self) -> str:
        """End the process; return why it did."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        _kill(self._process, os.getpid())
        self._process = None
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s"
        return "the process that renders it ended" + ("" if code is None else f" with {code}")


def _kill(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner and process.poll() is None:
        process.kill()
        process.wait()


RENDERER = Renderer()
"""Renders the templates of this process."""


def _apply_template(
    tokenizer: Any, template: str, messages: Sequence[Message], options: Mapping[str, Any], asks: bool
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [*messages], chat_template=template, tokenize=False, add_generation_prompt=asks, **options
        )
        text.encode()  # half a surrogate pair has no tokens
        return text
    except MemoryError:
        raise InputError(f"it takes more than {MEMORY >> 20} MiB") from None
    except Exception as error:  # a template is a program, and raises whatever it likes
        raise InputError(one_line(error, 200)) from error


def main(handle: str) -> None:
    """Render chats until the parent closes the connection; the kernel ends a template that takes too long."""
    from transformers import PreTrainedTokenizerBase

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # libtpu ignores it, and what its process starts begins so
    connection = Connection(int(handle))
    tokenizer = PreTrainedTokenizerBase()
    statm = Path("/proc/self/statm")
    if statm.exists():
        most, hard = (
            int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY,
            resource.getrlimit(resource.RLIMIT_AS)[1],
        )
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            template, messages, options, asks = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                text, reason = _apply_template(tokenizer, template, messages, options, asks), ""
                if len(text) > LONGEST:
                    text, reason = "", f"it writes more than {LONGEST} characters"
            except InputError as error:
                text, reason = "", str(error)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(json.dumps([text, reason]).encode())


_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")


class Wording(Protocol):
    """Settings that say how prompts are written; the attributes are those of ``Task``."""

    @property
    def template(self) -> str:
        """The name of the chat template."""

    @property
    def system(self) -> str | None:
        """The system message."""

    @property
    def suffix(self) -> str:
        """Text after the last message."""

    @property
    def date(self) -> str | None:
        """The date for templates that ask for it."""


def check_tokenizer(tokenizer: Any, name: str = "the model's directory") -> None:
    """Refuse a model without a tokenizer; ``name`` says in the message which model it is."""
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: put tokenizer.json and tokenizer_config.json next to its weights")


def word_prompt(prompt: Iterable[Message], wording: Wording) -> list[Message]:
    """Return a prompt's messages with the system message and the suffix in place."""
    messages = [dict(message) for message in prompt]
    if wording.system is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": wording.system}, *rest]
    last_user = [message for message in messages if message["role"] == "user"][-1]
    last_user["content"] += wording.suffix
    return messages


def render_chat(
    messages: list[Message], wording: Wording, tokenizer: Any, asks: bool = True, options: dict[str, Any] | None = None
) -> str:
    """Render worded messages as text, up to the start of the next reply if ``asks``; ``options`` go to the template."""
    if wording.template == "plain":
        return "\n\n".join(message["content"] for message in messages)
    template = _with_date(template_text(wording, tokenizer), wording.date, _option(wording, "template"))
    try:
        return RENDERER.render(template, messages, options or {}, asks, tokenizer)
    except InputError as error:
        settings = " or ".join(_option(wording, name) for name in ("system", "template"))
        row_options = f", or the row's template options ({', '.join(options)})" if options else ""
        raise InputError(f"the chat template refuses the messages ({error}); change {settings}{row_options}") from error


def template_fingerprint(template: str, tokenizer: Any) -> str:
    """Return 16 hex digits, equal for templates that write chats alike; ``template`` is that of a ``Task``. If a
    template can write none of a few chats, such as one that reads the clock in its own way, its text is hashed.
    """
    wording = Task([], template=template, date="2000-01-01")
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chats = (messages[:1], messages[:2], messages, [{"role": "system", "content": "d"}, *messages[:1]])
    texts: list[str | None] = []
    for chat, asks in itertools.product(chats, (True, False)):
        try:
            texts.append(render_chat(chat, wording, tokenizer, asks))
        except InputError:
            texts.append(None)
    if not any(texts):
        texts = [str(tokenizer.chat_template) if template == "tokenizer" else template]
    return digest(texts)


def _option(wording: Wording, name: str) -> str:
    """Return the name of a setting in messages: a flag if it is a task's."""
    return f"--task.{name}" if isinstance(wording, Task) else f"{type(wording).__name__}.{name}"


def template_text(wording: Wording, tokenizer: Any) -> str:
    """Return the Jinja text that a wording names; the wording is not ``plain``."""
    if wording.template == "tokenizer":
        if tokenizer.chat_template is None:
            option = _option(wording, "template")
            raise InputError(f"the tokenizer has no chat template; set {option} plain (or chatml, or Jinja text)")
        return tokenizer.get_chat_template()
    if wording.template == "chatml":
        return CHATML
    check_template_name(wording.template)
    return wording.template


@functools.lru_cache(maxsize=8)
def _with_date(template: str, day: str | None, option: str) -> str:
    """Return the template with the day in place of its calls of the clock; transformers passes it no function."""
    if day is None:
        return template
    today = datetime.datetime.fromisoformat(day)
    dated = _CLOCK.sub(lambda call: json.dumps(today.strftime(call["format"]), ensure_ascii=False), template)
    if "strftime_now(" in dated:
        raise InputError(
            "the chat template reads the clock by a format that it computes, so that no date can be set "
            f"for it; give another with {option}"
        )
    return dated


def bos(text: str, tokenizer: Any) -> list[int]:
    """Return ``[bos]`` if the tokenizer puts it before a text and this text does not begin with it; else ``[]``."""
    begins = tokenizer("")["input_ids"][:1]
    if begins != [tokenizer.bos_token_id] or text.startswith(tokenizer.bos_token):
        return []
    return begins
