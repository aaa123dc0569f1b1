"""Chats as token ids: prompts of problems, the mask of learned tokens, and the ends of turns for models that score.

A chat is written in pieces: the prompt as ``encode`` writes it, the assistant's text, the token that ends its turn, the
template's text up to its next turn. A piece is tokenised in place: its ids are those that it adds to the ids of the
text before it (the last characters of which suffice). If a token would cross the border, the piece is tokenised by
itself, as a policy writes it that continues the text before.

The assistant's text appears word for word, but for surrounding white space, which is as the template writes it; text
that a template adds to the last turn only is left out. The end of a turn is learned if the template ends turns with a
token at which the model's completions stop; else only that of the last turn, by the token that ends a text.

A model that scores an answer may read on to the end of the template's text, which no policy learns
(``ChatEncoder.closing``).
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import special_ids, text_of
from jaxrl_llm.tasks.messages import (
    CALLS,
    OPTIONS,
    THOUGHTS,
    TOOLS,
    WEIGHT,
    as_text,
    common_prefix,
    join_messages,
    tool_call,
    with_tools,
)
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.tasks.template import Wording, bos, check_tokenizer, render_chat, template_text, word_prompt
from jaxrl_llm.types import Completion, Message, Problem

_CUT = "\ufdd0"  # no character, so that no text has it: cuts the spelling of a token in two until the text is encoded


class Guard:
    """Encoder of rendered chats whose contents hold no control tokens: in messages of tools no added token is kept, in
    those of users no special one. A system's and an assistant's may hold them, as the task's author writes these;
    ``of_world`` is for what an environment says in their place, and ``reply`` for what a model wrote.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        special = {*special_ids(tokenizer), *tokenizer.all_special_ids}
        texts = [text for index, text in added.items() if index in special]
        self._special = sorted(texts, key=len, reverse=True)
        self._by_role = {"user": _pattern(texts), "tool": _pattern(list(added.values()))}

    def __call__(self, message: Message) -> Message:
        """Return the message, ready to be rendered; half characters become replacement characters."""
        pattern = self._by_role.get(message["role"])
        if pattern is None:
            return message
        texts = {key: message[key] for key in ("content", "name", "tool_call_id") if isinstance(message.get(key), str)}
        return message | {key: _cut_tokens(text, pattern) for key, text in texts.items()}

    def of_world(self, message: Message) -> Message:
        """Return an environment's message, ready to be rendered: whatever its role, it holds no control token."""
        return self(message) if message["role"] in self._by_role else self.reply(message)

    def spelled(self, text: str) -> list[int]:
        """Return the ids of a rendered text in which the control tokens that its contents spell are control tokens."""
        return self._ids(text.replace(_CUT, ""))

    def reply(self, value: Any) -> Any:
        """Return JSON values that a model wrote, ready to be rendered: no special token is kept."""
        if isinstance(value, dict):
            return {key: self.reply(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.reply(item) for item in value]
        pattern = self._by_role["user"]
        return _cut_tokens(value, pattern) if isinstance(value, str) and pattern else value

    def name(self, text: str) -> str:
        """Return a name that the model wrote, ready to be rendered."""
        pattern = self._by_role["tool"]
        return _cut_tokens(text, pattern) if pattern else text

    def first_token(self, text: str) -> str:
        """Return the special token at which a text begins, after white space; empty if there is none."""
        return next((token for token in self._special if text.lstrip().startswith(token)), "")

    def has_token(self, text: str) -> bool:
        """Whether a text holds a special token."""
        return any(token in text for token in self._special)

    def ids(self, text: str, prefix: str = "") -> list[int]:
        """Return the ids of a rendered text that follows this text."""
        first, *rest = text.split(_CUT)
        ids = self._after(prefix, first)
        for piece in rest:
            ids += self._after("x", piece)
        return ids

    def _after(self, prefix: str, text: str) -> list[int]:
        """Return the ids that a text adds to those of the text before it."""
        prefix_ids = self._ids(prefix)
        ids = self._ids(prefix + text)
        return ids[len(prefix_ids) :] if ids[: len(prefix_ids)] == prefix_ids else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def _pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of each text and asserts the others."""
    longer = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    parts = (f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in longer)
    return re.compile("|".join(parts)) if longer else None


def _cut_tokens(text: str, pattern: re.Pattern[str]) -> str:
    plain_text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace(_CUT, "")
    return pattern.sub(lambda match: match[0] + _CUT, plain_text)


OPENS_A_THOUGHT = re.compile(r"<(\w*(?:think|thought|reason)\w*)>\s*\Z", re.IGNORECASE)
"""The end of a prompt after which a model begins to think."""
_STAND_IN = "\ufdd1"  # no character, so that no text has it
_ASKED = [{"role": "user", "content": "Is it so?"}]
_ANSWER = {"role": "assistant", "content": "Yes."}
_NO_TURNS = "template plain marks no turns, and the assistant has several; give a chat template, such as chatml"


def close_completion(completion: Completion, closing: Sequence[int] | None) -> np.ndarray:
    """Return the tokens of a completion, int32[t]; one that ended by itself gets the end that a template writes.
    ``closing``: see ``ChatEncoder.closing``; None leaves all completions as they are. A stop token is part of that end,
    or is replaced by it; truncated completions stay.
    """
    tokens = completion.tokens
    if closing is None or completion.finish_reason != "stop":
        return tokens
    ends = [size for size in range(1, min(len(closing), len(tokens)) + 1) if [*tokens[-size:]] == [*closing[:size]]]
    return np.concatenate([tokens[: len(tokens) - max(ends, default=1)], np.asarray(closing, np.int32)])


def thought_of(message: Message) -> str:
    """Return the assistant's reasoning before this message; empty if the message has none."""
    return next((message[name] for name in THOUGHTS if name in message), "")


def assistant_text(prefix: str, message: Message, chat: str) -> str | None:
    """Return the reasoning and answer in ``chat`` after ``prefix``, with the template's marks; None for other text."""
    if not chat.startswith(prefix):
        return None
    content, thought = message["content"], thought_of(message)
    if not thought and chat.startswith(content, len(prefix)):
        return content
    mark = r".{0,64}?"  # a template's marks around a thought
    begins = mark + re.escape(thought.strip()) + mark if thought else r"\s*(?:</\w+>\s*)?"
    match = re.compile(begins + re.escape(content.strip()), re.DOTALL).match(chat, len(prefix))
    return match and match[0]


class ChatEncoder:
    """Encoder of chats and texts as token ids, piece by piece, with the ends of texts and turns. InputError: the
    tokenizer is missing, or the template does not read one of the options.

    Args:
      wording: settings of the prompt's text.
      stop_ids: tokens at which the model's completions end.
      options: passed to the template in addition to the messages, such as the schemas of tools. With ``template`` plain
        or chatml tools are described in the system message, and calls and results are text.
      closes: whether the last turn ends as the template writes it, not as the model's completions do.
    """

    def __init__(
        self, wording: Wording, tokenizer: Any, stop_ids: Sequence[int], options: dict[str, Any], closes: bool = False
    ):
        check_tokenizer(tokenizer)
        self.plain = wording.template == "plain"
        self._as_text = wording.template in ("plain", "chatml")
        self._tools = options.get(TOOLS, []) if self._as_text else []
        options = {name: value for name, value in options.items() if name != TOOLS or not self._as_text}
        self.tokenizer = tokenizer
        self._wording = wording
        self._stop_ids = tuple(stop_ids)
        self._options = options
        self._closes = closes
        ids = {*stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        texts = [text_of(tokenizer, [token]) for token in sorted(ids)]
        end_pattern = "|".join(re.escape(text) for text in texts if text.strip()) or r"(?!)"
        self._end_token = re.compile(end_pattern)
        self._ends = re.compile(rf"(?:(?:{end_pattern})\s*)+\Z")  # end tokens at the end of a text
        self._guard = Guard(tokenizer)
        for name in options:
            self._check_read(name, "the row has" if name == TOOLS else f"{OPTIONS} has")

    def _check_read(self, name: str, what: str) -> None:
        """Refuse an option or field that the template would ignore."""
        text = "" if self.plain else template_text(self._wording, self.tokenizer)
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise InputError(f"{what} {name}, which the chat template does not read; leave it out, or give another one")

    def render(self, messages: list[Message], asks: bool = True) -> str:
        """Return the text of a chat; with ``asks`` up to where the assistant continues."""
        messages = with_tools(messages, self._tools) if self._tools else messages
        return render_chat(messages, self._wording, self.tokenizer, asks, self._options)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without further special tokens."""
        return self._guard.ids(text)

    def ids_after(self, prefix: str, *pieces: str) -> list[list[int]]:
        """Return the ids of each of several pieces of text that follow a prompt's text one after the other."""
        ids_of_pieces = []
        for piece in pieces:
            near = prefix[-64:]  # tokenizers look no further back: what they cut text into first is shorter
            near_ids, ids = self.ids(near), self.ids(near + piece)
            ids_of_pieces.append(ids[len(near_ids) :] if ids[: len(near_ids)] == near_ids else self.ids(piece))
            prefix += piece
        return ids_of_pieces

    @functools.cached_property
    def end_id(self) -> int:
        """Id of the token that ends a text and stops the model's completions."""
        eos = self.tokenizer.eos_token_id
        ends = [eos] if eos is not None and eos in (self._stop_ids or (eos,)) else list(self._stop_ids)
        require(bool(ends), "neither the tokenizer nor the model's configuration names a token that ends a text")
        return ends[0]

    def without_end(self, text: str) -> str:
        """Return the text without its own end tokens and the white space after them: one end will be added to it."""
        stripped = self._ends.sub("", text)
        if stripped != text and not stripped.strip():
            raise InputError(f"{text[:40]!r} is empty but for its end; complete the row or leave it out")
        return stripped

    @functools.cached_property
    def closing(self) -> list[int] | None:
        """Ids of all that a chat template writes after the assistant's last text, such as a stop token and a line end.
        None for ``plain``, which writes nothing there, and for a template that does not repeat the text.
        """
        text = "" if self.plain else self.render([*word_prompt(_ASKED, self._wording), _ANSWER], asks=False)
        _, content, closing = text.rpartition(_ANSWER["content"])
        return self.ids(closing) if content else None

    @property
    def turn_end(self) -> list[int]:
        """Ids that end the assistant's turn: the template's up to the first stop token, or the end of a text."""
        return self._turn_stop[1] or [self.end_id]

    @property
    def ending_ids(self) -> list[int]:
        """Ids that end the last turn of an answer or a chat."""
        closing = self.closing if self._closes else None
        return self.turn_end if closing is None else closing

    @functools.cached_property
    def _turn_stop(self) -> tuple[str, list[int]]:
        """Text and ids up to the first stop token after a turn of the assistant; empty without one."""
        if self.plain:
            return "", []
        prompt = word_prompt(_ASKED, self._wording)
        prefix, text = self.render(prompt), self.render([*prompt, _ANSWER, *_ASKED])
        reply = assistant_text(prefix, _ANSWER, text)
        if reply is None:
            return "", []
        ids = self.ids(text[len(prefix) + len(reply) :].partition(_ASKED[0]["content"])[0])
        stops = [at for at, token in enumerate(ids) if token in self._stop_ids]
        if not stops:
            return "", []
        ids = ids[: stops[0] + 1]
        return text_of(self.tokenizer, ids), ids

    def encode_prompt(self, messages: Iterable[Message]) -> tuple[str, np.ndarray]:
        """Return a prompt's text up to the start of the answer, or to the end of a last message of the assistant, which
        begins it; and its ids, int32[p]: those of ``encode``.
        """
        chat = self._word_prompt(messages)
        text = self._prefill_text(chat) if chat[-1]["role"] == "assistant" and not self.plain else self.render(chat)
        begins = bos(text, self.tokenizer) if self.plain else []
        return text, np.asarray(begins + self.ids(text), np.int32)

    def _prefill_text(self, chat: list[Message]) -> str:
        """Return the text of a chat up to the end of its last message, which is not closed."""
        content = chat[-1]["content"]
        begins = bool(content.strip()) and CALLS not in chat[-1]
        require(begins, "the assistant's last message in the prompt begins no text; leave it out")
        chat = [*chat[:-1], chat[-1] | {"content": _STAND_IN}]
        header, stand_in, _ = self.render(chat, asks=False).rpartition(_STAND_IN)
        require(bool(stand_in), "the chat template leaves out the beginning of the answer; give another template")
        return header + content

    def without_opening(self, prefix: str, content: str, answer: str = "") -> str:
        """Return an answer without the mark that opens its thought if the prompt has it; ``answer``: all of it."""
        opening = OPENS_A_THOUGHT.search(prefix)
        if not opening:
            return content
        mark = f"<{opening[1]}>"
        inner = content.lstrip()
        if inner.startswith(mark):
            inner = inner.removeprefix(mark)
            content = inner.lstrip() if prefix[-1].isspace() else inner
        require(
            f"</{opening[1]}>" in (answer or content),
            f"the chat template's prompt opens {mark}, and the answer has no </{opening[1]}>: give it its thought, or "
            "take another template, or one of its options in chat_template_kwargs, such as enable_thinking",
        )
        return content

    def encode_text(self, text: str) -> np.ndarray:
        """Encode a plain text with its end, int32[t], after BOS if the tokenizer begins every text with it."""
        text = self.without_end(text)
        begins = bos(text, self.tokenizer)
        return np.asarray(begins + self.ids(text) + [self.end_id], np.int32)

    def encode_answer(self, prompt: Sequence[Message], prefix: str, answer: Message) -> np.ndarray:
        """Encode the assistant's answer to a prompt with the text ``prefix``, and the end of its turn, int32[t]."""
        chat = [*self._word_prompt(prompt), *self._without_ends([answer])]
        return np.asarray(self._last(chat, prefix), np.int32)

    def encode_turns(self, prompt: Sequence[Message], rest: Sequence[Message]) -> tuple[np.ndarray, ...]:
        """Encode a chat with the assistant first and last in ``rest``: return the prompt's ids, int32[p], those that
        follow, int32[t], and their mask, bool[t]: True for the assistant's text and the ends of its turns, except in
        messages that are not learned.
        """
        prefix, prompt_ids = self.encode_prompt(prompt)
        begins = self._word_prompt(prompt)
        chat = [*begins, *self._without_ends(rest)]
        speaks = [at for at in range(len(begins), len(chat)) if chat[at]["role"] == "assistant"]
        require(not self.plain or len(speaks) < 2, _NO_TURNS)
        tokens: list[int] = []
        mask: list[bool] = []
        for at, following in itertools.pairwise(speaks):
            text = self.render(chat[:following])
            reply, stops = self._assistant_text(prefix, chat[: at + 1], text)
            if reply is None:
                raise InputError(
                    f"the chat template rewrites the assistant's earlier turn {chat[at]['content'][:40]!r}, which can "
                    "then not be learned in place; give another template, or a row for each turn"
                )
            glue = text[len(prefix) + len(reply) :]
            reply_ids, glue_ids = self.ids_after(prefix, reply, glue)
            ends = next((place + 1 for place, token in enumerate(glue_ids) if token in self._stop_ids), 0) * stops
            tokens += reply_ids + glue_ids
            mask += [WEIGHT not in chat[at]] * (len(reply_ids) + ends) + [False] * (len(glue_ids) - ends)
            prefix = text
        last = self._last(chat, prefix)
        mask += [WEIGHT not in chat[-1]] * len(last)
        return prompt_ids, np.asarray(tokens + last, np.int32), np.asarray(mask, bool)

    def encode_as_trl(self, prompt: Sequence[Message], rest: Sequence[Message], plain: bool) -> tuple[np.ndarray, int]:
        """Encode a prompt and its answer as TRL's ``SFTTrainer`` does: return the ids of the whole, tokenised in one
        piece, with the template's text after the last turn, int32[t]; and the number of first ids that are the
        prompt's. ``plain``: both are single texts, which no template wraps, followed by one end of a text.
        """
        require(not self.plain or len(rest) < 2, _NO_TURNS)
        if plain or self.plain:
            texts = [message["content"] for message in self._word_prompt(prompt)]
            prefix = "\n\n".join(texts)
            text = prefix + "\n\n".join(message["content"] for message in self._without_ends(rest))
            begins = bos(prefix, self.tokenizer)
            prompt_ids, ids = begins + self._guard.spelled(prefix), [*begins, *self._guard.spelled(text), self.end_id]
        else:
            chat = self._word_prompt(prompt)
            prompt_ids = self._guard.spelled(self.render(chat))
            ids = self._guard.spelled(self.render([*chat, *self._without_ends(rest)], asks=False))
        return np.asarray(ids, np.int32), len(common_prefix(prompt_ids, ids))

    def _assistant_text(self, prefix: str, chat: list[Message], text: str) -> tuple[str | None, bool]:
        """Return the text of the chat's last message in ``text`` after ``prefix`` (None for other text), and whether an
        end of its turn at which completions stop comes next.
        """
        if CALLS not in chat[-1]:
            reply = assistant_text(prefix, chat[-1], text)
            end, _ = self._turn_stop
            following = text[len(prefix) + len(reply or "") :]
            return reply, bool(end) and following.lstrip().startswith(end.lstrip())
        alone = self.render(chat, asks=False)
        reply = self._ends.sub("", alone[len(prefix) :])
        if not (alone.startswith(prefix) and text.startswith(prefix + reply)):
            return None, False
        return reply, bool(self._end_token.match(text, len(prefix) + len(reply)))

    def _last(self, chat: list[Message], prefix: str) -> list[int]:
        """Return the ids of the assistant's last message, after the text before it, and the end of its turn."""
        content = chat[-1]["content"]
        if not self.plain:
            reply, _ = self._assistant_text(prefix, chat, self.render(chat, asks=False))
            thought = thought_of(chat[-1])
            if reply is None and thought:
                raise InputError(
                    f"the chat template does not write the thought {thought[:40]!r} of the assistant where it answers; "
                    "leave it out, or give another template"
                )
            content = self.without_opening(prefix, content) if reply is None else reply or content
        return [*self.ids_after(prefix, content)[0], *self.ending_ids]

    def _word_prompt(self, messages: Iterable[Message]) -> list[Message]:
        return word_prompt(self._without_ends(messages), self._wording)

    def _without_ends(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages without end tokens that the assistant's texts contain."""
        chat: list[Any] = [dict(message) if self.plain else self._guard(message) for message in messages]
        if self._as_text and any(CALLS in message or message["role"] == "tool" for message in chat):
            chat = join_messages((), as_text(chat), "\n\n")
        for message in chat:
            for name in THOUGHTS:
                if name in message:
                    self._check_read(name, "a message has")
            if message["role"] == "assistant":
                text = self.without_end(message["content"])
                split = lambda match: f"{match[0][:1]}{_CUT}{match[0][1:]}"  # noqa: E731  an end token inside stays text
                message["content"] = self._end_token.sub(split, text)
            if CALLS in message:
                message |= self._write_calls(message["content"], [call["function"] for call in message[CALLS]])
        return chat

    def _write_calls(self, content: str, functions: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a message's content and calls as the template takes them: some take no text, or arguments as text."""
        for no_text, write in itertools.product(("", None), (dict, json.dumps)):
            calls = [tool_call(at, call["name"], write(call["arguments"])) for at, call in enumerate(functions)]
            message: Any = {"role": "assistant", "content": content or no_text, CALLS: calls}
            with contextlib.suppress(InputError):
                text = self.render([*_ASKED, message], asks=False)
                reply = text.partition(_ASKED[0]["content"])[2]
                if all(call["name"] in reply for call in functions):
                    return message
        raise InputError("the chat template cannot write these calls of tools; give another one, such as chatml")


class Prompts:
    """Prompts of problems as token ids, each encoded once; several ``tasks`` are told apart by the problem's label."""

    def __init__(self, tasks: Task | Sequence[Task], tokenizer: Any):
        self.tasks = (tasks,) if isinstance(tasks, Task) else tuple(tasks)
        self._by_label = {task.label: task for task in self.tasks}
        self.tokenizer = tokenizer
        self._encoded: dict[tuple[str, str], np.ndarray] = {}

    def __getitem__(self, problem: Problem) -> np.ndarray:
        """Return the prompt's token ids, int32[T]; see ``encode``. Ids tell the problems of one task apart."""
        key = (problem.task, problem.id)
        if key not in self._encoded:
            self._encoded[key] = encode(problem, self.task(problem.task), self.tokenizer)
        return self._encoded[key]

    def task(self, label: str) -> Task:
        """Return the task of this label; a single task is returned for any label."""
        return self._by_label[label] if len(self.tasks) > 1 else self.tasks[0]

    def longest(self, problems: Iterable[Problem]) -> int:
        """Return the number of tokens of the longest prompt; 0 without problems."""
        return max((len(self[problem]) for problem in problems), default=0)


def encode(problem: Problem, task: Wording, tokenizer: Any) -> np.ndarray:
    """Encode the prompt as token ids, int32[T], up to the start of the answer, or to where a last message of the
    assistant has begun it. The template gets ``problem.options``, and the date of the task or else of the clock. It
    writes its own special tokens: none are added, and control tokens that a user's message spells stay text. ``plain``
    joins the contents with blank lines, after the BOS token if the tokenizer begins every text with it.

    InputError: no tokenizer or chat template, an unknown template, one that refuses the messages or does not read an
    option of the row.
    """
    try:
        wording = (task.template, task.system, task.suffix, task.date)
        encoder = _chat_encoder(wording, type(task), tokenizer, json.dumps(problem.options))
        return encoder.encode_prompt(problem.prompt)[1]
    except InputError as error:
        row = problem.metadata.get("row")
        raise InputError(f"{row}: {error}" if row else str(error)) from error


@functools.lru_cache(maxsize=64)
def _chat_encoder(wording: tuple[Any, ...], kind: type, tokenizer: Any, options: str) -> ChatEncoder:
    template, system, suffix, date = wording
    return ChatEncoder(
        kind([], template=template, system=system, suffix=suffix, date=date), tokenizer, (), json.loads(options)
    )
