"""Templates: turn chats into text."""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from jaxrl_llm.codec import digest
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import CHATML
from jaxrl_llm.tasks.rendering import RENDERER
from jaxrl_llm.tasks.task import Task, check_template
from jaxrl_llm.types import Message

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
    """Refuse a model without a tokenizer; ``name`` says in the message which model it is.

    Raises:
      InputError: the tokenizer is None.
    """
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: put tokenizer.json and tokenizer_config.json next to its weights")


def worded(prompt: Iterable[Message], wording: Wording) -> list[Message]:
    """Return a prompt's messages with the system message and the suffix in place."""
    messages = [dict(message) for message in prompt]
    if wording.system is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": wording.system}, *rest]
    last_user = [message for message in messages if message["role"] == "user"][-1]
    last_user["content"] += wording.suffix
    return messages


def rendered(
    messages: list[Message], wording: Wording, tokenizer: Any, asks: bool = True, options: dict[str, Any] | None = None
) -> str:
    """Render worded messages as text; if ``asks``, up to the start of the assistant's next message.

    ``options``: passed to the template in addition to the messages.

    Raises:
      InputError: no chat template, an unknown template, or one that refuses the messages or goes beyond a limit of
        ``rendering``.
    """
    if wording.template == "plain":
        return "\n\n".join(message["content"] for message in messages)
    template = _on_the_day(template_text(wording, tokenizer), wording.date, _option(wording, "template"))
    try:
        return RENDERER.render(template, messages, options or {}, asks, tokenizer)
    except InputError as error:
        settings = " or ".join(_option(wording, name) for name in ("system", "template"))
        told = f", or the row's template options ({', '.join(options)})" if options else ""
        raise InputError(f"the chat template refuses the messages ({error}); change {settings}{told}") from error


_SAID = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("user", "c"))]
_CHATS = (_SAID[:1], _SAID[:2], _SAID, [{"role": "system", "content": "d"}, *_SAID[:1]])


def template_fingerprint(template: str, tokenizer: Any) -> str:
    """Return 16 hex digits, equal for templates that write chats alike; ``template`` is that of a ``Task``.

    If a template can write none of a few chats, such as one that reads the clock in its own way, its text is hashed.
    """
    wording = Task([], template=template, date="2000-01-01")
    found: list[str | None] = []
    for chat, asks in itertools.product(_CHATS, (True, False)):
        try:
            found.append(rendered(chat, wording, tokenizer, asks))
        except InputError:
            found.append(None)
    if not any(found):
        found = [str(tokenizer.chat_template) if template == "tokenizer" else template]
    return digest(found)


def _option(wording: Wording, name: str) -> str:
    """Return the name of a setting in messages: a flag if it is a task's."""
    return f"--task.{name}" if isinstance(wording, Task) else f"{type(wording).__name__}.{name}"


def template_text(wording: Wording, tokenizer: Any) -> str:
    """Return the Jinja text that a wording names; the wording is not ``plain``.

    Raises:
      InputError: the name is unknown, or the tokenizer has no template.
    """
    if wording.template == "tokenizer":
        if tokenizer.chat_template is None:
            option = _option(wording, "template")
            raise InputError(f"the tokenizer has no chat template; set {option} plain (or chatml, or Jinja text)")
        return tokenizer.get_chat_template()
    if wording.template == "chatml":
        return CHATML
    check_template(wording.template)
    return wording.template


@functools.lru_cache(maxsize=8)
def _on_the_day(template: str, day: str | None, option: str) -> str:
    """Return the template with the day in place of its calls of the clock; transformers passes no function to a
    template.
    """
    if day is None:
        return template
    today = datetime.datetime.fromisoformat(day)
    told = _CLOCK.sub(lambda asked: json.dumps(today.strftime(asked["format"]), ensure_ascii=False), template)
    if "strftime_now(" in told:
        raise InputError(
            "the chat template reads the clock by a format that it computes, so that no date can be set "
            f"for it; give another with {option}"
        )
    return told


def bos(text: str, tokenizer: Any) -> list[int]:
    """Return ``[bos]`` if the tokenizer puts it before a text and this text does not begin with it; else ``[]``."""
    begins = tokenizer("")["input_ids"][:1]
    if begins != [tokenizer.bos_token_id] or text.startswith(tokenizer.bos_token):
        return []
    return begins
