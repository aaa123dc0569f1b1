"""From a problem to the token ids that the policy continues."""

import copy
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.task import Task, check_template
from jaxrl_llm.types import Message, Problem

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LONGEST_REASON = 200
"""Characters of what a template says where it raises."""
_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")


class Prompts:
    """The prompts of problems as token ids, each encoded once.

    Args:
      tasks: how they are templated: one task, or several, whose labels their problems have.
      tokenizer: of the model.
    """

    def __init__(self, tasks: Task | Sequence[Task], tokenizer: Any):
        self.tasks = (tasks,) if isinstance(tasks, Task) else tuple(tasks)
        self._by_label = {task.label: task for task in self.tasks}
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, str], np.ndarray] = {}

    def __getitem__(self, problem: Problem) -> np.ndarray:
        """int32[T]; see ``encode``. Problems of one task are told apart by their ids."""
        key = (problem.task, problem.id)
        if key not in self._known:
            self._known[key] = encode(problem, self.task(problem.task), self._tokenizer)
        return self._known[key]

    def end_of(self, problem: Problem) -> str:
        """The last words of a prompt, with what the template writes after its messages."""
        return self._tokenizer.decode(self[problem][-16:])

    def task(self, label: str) -> Task:
        """The task of this label; the only one, whatever it is called."""
        return self._by_label[label] if len(self.tasks) > 1 else self.tasks[0]

    def longest(self, problems: Iterable[Problem]) -> int:
        """Tokens of the longest; 0 where there is none."""
        return max((len(self[problem]) for problem in problems), default=0)


class Wording(Protocol):
    """How prompts are written; the attributes are those of ``Task``."""

    @property
    def template(self) -> str:
        """Name or text of the template."""

    @property
    def system(self) -> str | None:
        """The system message."""

    @property
    def suffix(self) -> str:
        """Ends the last user message."""

    @property
    def date(self) -> str | None:
        """What the template sees as today."""


def encode(problem: Problem, task: Wording, tokenizer: Any) -> np.ndarray:
    """The prompt's token ids, int32[T], up to where the answer begins.

    A template that asks for the date is told the task's; the clock's where it has none.

    A chat template writes its own special tokens, so none are added to its text. ``plain`` joins the contents with
    blank lines and begins with the tokenizer's BOS token where that tokenizer begins every text so.

    Raises:
      InputError: no tokenizer or no chat template, an unknown template, or a template that refuses the messages.
    """
    check_tokenizer(tokenizer)
    try:
        text = rendered(worded(problem.prompt, task), task, tokenizer)
    except InputError as error:
        row = problem.metadata.get("row")
        raise InputError(f"{row}: {error}" if row else str(error)) from error
    start = bos(text, tokenizer) if task.template == "plain" else []
    return np.asarray(start + tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def check_tokenizer(tokenizer: Any, name: str = "the model's directory") -> None:
    """Refuse a model without a tokenizer; ``name``: what has none.

    Raises:
      InputError: there is none.
    """
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: put tokenizer.json and tokenizer_config.json beside its weights")


def worded(prompt: Iterable[Message], wording: Wording) -> list[Message]:
    """A prompt's messages with the system message and the suffix in place."""
    messages = [dict(message) for message in prompt]
    if wording.system is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": wording.system}, *rest]
    last_user = [message for message in messages if message["role"] == "user"][-1]
    last_user["content"] += wording.suffix
    return messages


def rendered(
    messages: Sequence[Message],
    wording: Wording,
    tokenizer: Any,
    asks: bool = True,
    options: Mapping[str, Any] = types.MappingProxyType({}),
) -> str:
    """The text of worded messages; where it ``asks``, up to where the assistant's next one begins.

    ``options``: what the template is told beside the messages.

    Raises:
      InputError: no chat template, an unknown template, or one that refuses the messages.
    """
    if wording.template == "plain":
        return "\n\n".join(message["content"] for message in messages)
    template = _on_the_day(template_text(wording, tokenizer), wording.date, _option(wording, "template"))
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=asks, **options
        )
    except Exception as error:  # a template is a program, and raises whatever it likes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
        settings = " or ".join(_option(wording, name) for name in ("system", "template"))
        told = f", or what the row tells the template ({', '.join(options)})" if options else ""
        raise InputError(f"the chat template refuses the messages ({reason}); change {settings}{told}") from error


@dataclasses.dataclass(frozen=True)
class _Bare:
    """A template by itself, on a day that never changes."""

    template: str
    system: str | None = None
    suffix: str = ""
    date: str | None = "2000-01-01"


_SAID = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("user", "c"))]
_CHATS = (_SAID[:1], _SAID[:2], _SAID, [{"role": "system", "content": "d"}, *_SAID[:1]])


def template_fingerprint(template: str, tokenizer: Any) -> str:
    """16 hex digits, equal for templates that write chats alike; ``template`` is that of a ``Task``.

    Of a template that writes none of a few chats, such as one that reads the clock in its own way, the text counts.
    """
    wording = _Bare(template)
    found: list[str | None] = []
    for chat, asks in itertools.product(_CHATS, (True, False)):
        try:
            found.append(rendered(chat, wording, tokenizer, asks))
        except InputError:
            found.append(None)
    if not any(found):
        found = [str(tokenizer.chat_template) if template == "tokenizer" else template]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def _option(wording: Wording, name: str) -> str:
    """What a setting is called: a flag, where it is a task's."""
    return f"--task.{name}" if isinstance(wording, Task) else f"{type(wording).__name__}.{name}"


def template_text(wording: Wording, tokenizer: Any) -> str:
    """The Jinja text that a wording names, of one that is not ``plain``.

    Raises:
      InputError: there is none of that name.
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


def with_template(tokenizer: Any, template: str) -> Any:
    """A tokenizer that writes chats with this template of a ``Task``; the same one with "tokenizer" or "plain"."""
    if template in ("tokenizer", "plain"):
        return tokenizer
    other = copy.deepcopy(tokenizer)
    other.chat_template = CHATML if template == "chatml" else template
    return other


@functools.lru_cache(maxsize=8)
def _on_the_day(template: str, day: str | None, option: str) -> str:
    """The template with the day in place of what it asks the clock; transformers hands no function to a template."""
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
    """``[bos]`` where the tokenizer puts it before a text, and the text does not hold it already; else ``[]``."""
    begins = tokenizer("")["input_ids"][:1]
    if begins != [tokenizer.bos_token_id] or text.startswith(tokenizer.bos_token):
        return []
    return begins
