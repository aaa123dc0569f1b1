"""From a problem to the token ids that the policy continues."""

import datetime
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.types import Message, Problem

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")


class Prompts:
    """The prompts of a task's problems as token ids, each encoded once.

    Args:
      task: how they are templated.
      tokenizer: of the model.
    """

    def __init__(self, task: Task, tokenizer: Any):
        self.task = task
        self._tokenizer = tokenizer
        self._known: dict[str, np.ndarray] = {}

    def __getitem__(self, problem: Problem) -> np.ndarray:
        """int32[T]; see ``encode``. Problems of one task are told apart by their ids."""
        if problem.id not in self._known:
            self._known[problem.id] = encode(problem, self.task, self._tokenizer)
        return self._known[problem.id]

    def longest(self, problems: Iterable[Problem]) -> int:
        """Tokens of the longest; 0 where there is none."""
        return max((len(self[problem]) for problem in problems), default=0)


def encode(problem: Problem, task: Task, tokenizer: Any) -> np.ndarray:
    """The prompt's token ids, int32[T], up to where the answer begins.

    A template that asks for the date is told the task's; the clock's where it has none.

    A chat template writes its own special tokens, so none are added to its text. ``plain`` joins the contents with
    blank lines and begins with the tokenizer's BOS token where that tokenizer begins every text so.

    Raises:
      InputError: no tokenizer or no chat template, an unknown template, or a template that refuses the messages.
    """
    if tokenizer is None:
        raise InputError("the model's directory has no tokenizer; add its tokenizer files, or give another model")
    messages = _messages(problem, task)
    if task.template == "plain":
        text = "\n\n".join(message["content"] for message in messages)
        start = _bos(text, tokenizer)
    else:
        text = _render(messages, _on_the_day(_template(task, tokenizer), task.date), tokenizer)
        start = []
    return np.asarray(start + tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _messages(problem: Problem, task: Task) -> list[Message]:
    messages = [dict(message) for message in problem.prompt]
    if task.system is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": task.system}, *rest]
    last_user = [message for message in messages if message["role"] == "user"][-1]
    last_user["content"] += task.suffix
    return messages


def _template(task: Task, tokenizer: Any) -> str:
    if task.template == "tokenizer":
        if tokenizer.chat_template is None:
            raise InputError("the tokenizer has no chat template; add --task.template plain (or chatml, or Jinja text)")
        return tokenizer.get_chat_template()
    if task.template == "chatml":
        return CHATML
    if "{" not in task.template:
        raise InputError(f"template {task.template!r} is unknown; choose tokenizer, chatml, plain or give a Jinja text")
    return task.template


def _render(messages: list[Message], template: str, tokenizer: Any) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except jinja2.TemplateError as error:
        raise InputError(
            f"the chat template refuses the messages ({error}); change --task.system or --task.template"
        ) from error


@functools.lru_cache(maxsize=8)
def _on_the_day(template: str, day: str | None) -> str:
    """The template with the day in place of what it asks the clock; transformers hands no function to a template."""
    if day is None:
        return template
    today = datetime.datetime.fromisoformat(day)
    told = _CLOCK.sub(lambda asked: json.dumps(today.strftime(asked["format"]), ensure_ascii=False), template)
    if "strftime_now(" in told:
        raise InputError(
            "the chat template reads the clock by a format that it computes, so that no date can be set "
            "for it; give another with --task.template"
        )
    return told


def _bos(text: str, tokenizer: Any) -> list[int]:
    """``[bos]`` where the tokenizer puts it before a text, and the text does not hold it already; else ``[]``."""
    begins = tokenizer("")["input_ids"][:1]
    if begins != [tokenizer.bos_token_id] or text.startswith(tokenizer.bos_token):
        return []
    return begins
