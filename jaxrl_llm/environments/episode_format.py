"""Episodes as token ids: the prompt, and what follows each reply; sampled tokens are never made anew.

What follows a reply is a difference of two renderings by the chat template, with stand-ins for the episode's contents:
the text after the last reply's stand-in follows the sampled tokens.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.environments.calls import NO_CALLS, ParsedReply, end_of_calls, parse_reply, syntax_of
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import special_ids, text_of
from jaxrl_llm.tasks.chats import Guard
from jaxrl_llm.tasks.messages import as_text, common_prefix, join_messages, tool_call, with_tools
from jaxrl_llm.tasks.template import Wording, bos, check_tokenizer, render_chat, template_text, word_prompt
from jaxrl_llm.types import Message

REPLY = "Zq0replyZq0"
RESULT = "Zq1resultZq1"
THOUGHT = "Zq2thoughtZq2"
OTHER = "x"
"""Stand-ins for contents, which templates leave as they are."""
USER_MESSAGE: Message = {"role": "user", "content": OTHER}
REPLY_MESSAGE: Message = {"role": "assistant", "content": REPLY}
_CHATML = "set --task.template chatml, with which tools and calls are plain text"
_THOUGHTS: tuple[Callable[[Message, str], Message], ...] = (
    lambda message, thought: message | {"reasoning_content": thought},
    lambda message, thought: message | {"thinking": thought},
    lambda message, thought: message | {"content": f"<think>\n{thought}\n</think>\n\n{message['content'] or ''}"},
)
"""Forms in which templates take a reply's reasoning."""


class _Shape(NamedTuple):
    """A way to hand calls to a template: some take no text, no objects, or no second call."""

    content: str | None
    as_text: bool
    most: int | None


_SHAPES = tuple(
    _Shape(content, as_text, most) for most in (None, 1) for as_text in (False, True) for content in ("", None)
)


class FollowingText(NamedTuple):
    """Text after a reply, up to the next one; ``region``: its part up to the first content that follows, which the
    template alone writes; ``inside``: whether it begins inside the last argument of the reply's last call.
    """

    region: str
    text: str
    inside: bool


class Renderings:
    """Texts of a chat template; ``guard`` makes contents harmless, ``options`` go to the template."""

    def __init__(
        self,
        wording: Wording,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        guard: Guard,
        options: Mapping[str, Any] | None = None,
    ):
        self.plain_form = bool(tools) and wording.template in ("plain", "chatml")
        self._native = bool(tools) and not self.plain_form
        self._tools = [dict(tool) for tool in tools]
        self._own_options = dict(options or {})
        self._options = self._own_options | ({"tools": self._tools} if self._native else {})
        self._tokenizer = tokenizer
        self._guard = guard
        self._regions: dict[Hashable, tuple[_Shape | None, str]] = {}
        if self._native and wording.template == "tokenizer" and isinstance(tokenizer.chat_template, dict):
            tool_template = tokenizer.get_chat_template(tools=self._tools)  # some models have a template for tools
            wording = dataclasses.replace(wording, template=tool_template)  # ty: ignore[invalid-argument-type]
        self.wording = wording

    def text(self, messages: Sequence[Message], asks: bool) -> str:
        """Return the text of messages with the tools; with ``asks`` up to the start of the next reply."""
        if self.plain_form:
            messages = with_tools(as_text(messages), self._tools)
        return render_chat([*messages], self.wording, self._tokenizer, asks, self._options)

    def world_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the world's messages as the template gets them."""
        return join_messages((), as_text(messages) if self.plain_form else messages, "\n\n")

    def after(self, turns: Sequence[Message], messages: Sequence[Message]) -> FollowingText:
        """Return the text after the last of the turns, which is a reply, with these messages of the world."""
        shape, region = self._region(turns, messages)
        history = _stand_ins(turns, messages, shape, self._guard)
        text = self.text([*history, *self.world_messages(messages)], True).partition(REPLY)[2]
        return FollowingText(common_prefix(region, text), text, bool(history[-1].get("tool_calls")))

    def _region(self, turns: Sequence[Message], messages: Sequence[Message]) -> tuple[_Shape | None, str]:
        """Return a shape that the template takes, and the text after the last reply up to the content that follows."""
        key = (*map(_message_key, turns), None, *map(_message_key, messages))
        cached = self._regions.get(key)
        if cached is None:
            if len(self._regions) >= 512:
                self._regions.clear()
            cached = self._regions[key] = self._new_region(turns, messages)
        return cached

    def _new_region(self, turns: Sequence[Message], messages: Sequence[Message]) -> tuple[_Shape | None, str]:
        stand_ins = [message | {"content": OTHER if index else RESULT} for index, message in enumerate(messages)]
        refusal = InputError(f"the chat template leaves out replies; {_CHATML}")
        for shape in (*_SHAPES, None) if self._native else (None,):
            try:
                history = _stand_ins(turns, messages, shape, self._guard)
                _, mark, region = self.text([*history, *self.world_messages(stand_ins)], True).partition(REPLY)
            except InputError as error:
                refusal = error
                continue
            if mark:
                break
        else:
            raise refusal
        if messages:
            region, mark, _ = region.partition(RESULT)
            require(bool(mark), f"the chat template leaves out messages of the role {messages[0]['role']}; {_CHATML}")
        return shape, region

    def rewrites(self, turns: Sequence[Message], messages: Sequence[Message]) -> bool:
        """Whether the template rewrites turns before the last reply as these messages follow, or drops its thought."""
        shape, _ = self._region(turns, messages)
        thoughts = [OTHER if "reasoning_content" in turn else "" for turn in turns]
        last = thoughts[-1] = THOUGHT if thoughts[-1] else ""
        stand_ins = zip(_stand_ins(turns, messages, shape, self._guard), thoughts, strict=True)
        history = [self._thought(stand_in, thought) if thought else stand_in for stand_in, thought in stand_ins]
        earlier, later = self.text(history[:-1], True), self.text([*history, *self.world_messages(messages)], True)
        return not later.startswith(earlier) or last not in later

    def chat(self, prompt: Sequence[Message], turns: Sequence[Message]) -> str:
        """Return the text of a whole chat, up to the start of the next reply, as the template writes it now:
        ``prompt``, ready to be rendered, and ``turns``, the replies and what the world said to each.
        """
        last = max(index for index, turn in enumerate(turns) if turn["role"] == "assistant") + 1
        shape, _ = self._region([*prompt, *turns[:last]], turns[last:])
        history = list(prompt)
        for is_reply, group in itertools.groupby(turns, lambda turn: turn["role"] == "assistant"):
            if not is_reply:
                history += self.world_messages(list(group))
                continue
            for message in group:
                reply, thought = _prepare_reply(message, shape, self._guard)
                history.append(self._thought(reply, thought) if thought else reply)
        return self.text(history, True)

    @functools.cached_property
    def _thought(self) -> Callable[[Message, str], Message]:
        """The form in which the template takes reasoning: the first that it writes in a last reply."""
        for form in _THOUGHTS:
            try:
                if THOUGHT in self.text([USER_MESSAGE, form(REPLY_MESSAGE, THOUGHT)], False):
                    return form
            except InputError:
                continue
        return _THOUGHTS[0]

    def syntax(self) -> str:
        if not self._native:
            return "plain" if self.plain_form else NO_CALLS
        names = [tool["function"]["name"] for tool in self._tools]
        text = self.text([USER_MESSAGE], True)
        without_tools = render_chat([USER_MESSAGE], self.wording, self._tokenizer, options=self._own_options)
        writes_tools = text != without_tools and all(name in text for name in names)
        require(writes_tools, f"the chat template cannot write tools; {_CHATML}, or give a template that can")
        syntax = syntax_of(template_text(self.wording, self._tokenizer))
        reply = self._written_call(names[0], syntax)
        message = parse_reply(reply, syntax).message
        functions = [call["function"] for call in message.get("tool_calls", ())]
        readable = not reply or functions == [{"name": names[0], "arguments": {"q": REPLY}}]
        require(readable, f"the chat template writes tool calls in a form that is not known here; {_CHATML}")
        return syntax

    def _written_call(self, name: str, syntax: str) -> str:
        """Return what the template writes for a reply that calls a tool; empty if it writes none."""
        turns = [USER_MESSAGE, {"role": "assistant", "tool_calls": [tool_call(0, name, {})]}]
        for shape in _SHAPES:
            try:
                text = self.text(_stand_ins(turns, (), shape, self._guard), False)
                start = re.sub(r"[<\[][^<>\[\]]*\Z", "", common_prefix(text, self.text([USER_MESSAGE], True)))
            except InputError:
                continue
            head, mark, tail = text.partition(REPLY)
            if mark:
                return text[len(start) : len(head) + len(REPLY) + end_of_calls(tail, syntax)]
        return ""


def end_of_turns(renderings: Renderings, guard: Guard) -> str:
    """Return the token that the template writes after each reply; empty if the next message begins with it."""
    try:
        last = renderings.text([USER_MESSAGE, REPLY_MESSAGE], False).partition(REPLY)[2]
        between = renderings.after([USER_MESSAGE, REPLY_MESSAGE], [USER_MESSAGE]).region
    except InputError:
        return ""
    end = guard.first_token(between)
    follows = end and guard.has_token(between.partition(end)[2])
    return end if follows and guard.first_token(last) else ""


def rewrites_history(renderings: Renderings) -> bool:
    """Whether the template writes an earlier reply otherwise than it was sampled, as by dropping its reasoning."""
    start = renderings.text([USER_MESSAGE], True)
    for form in _THOUGHTS:
        reply = form(REPLY_MESSAGE, THOUGHT)
        try:
            last = renderings.text([USER_MESSAGE, reply], False)
            later = renderings.text([USER_MESSAGE, reply, USER_MESSAGE], True)
        except InputError:
            continue
        if not later.startswith(start) or (THOUGHT in last and THOUGHT not in later):
            return True
    return False


def _prepare_reply(message: Message, shape: _Shape | None, guard: Guard) -> tuple[Message, str]:
    """Return a reply with all that the model wrote, ready to be rendered, and its reasoning."""
    guarded = guard.reply({name: message[name] for name in ("content", "reasoning_content") if name in message})
    calls = message.get("tool_calls", ())
    reply = {"role": "assistant", "content": guarded["content"]}
    if calls and shape is not None:
        fits = shape.most is None or len(calls) <= shape.most
        remedy = "set --rollout.episode.history append_only"
        require(fits, f"the chat template writes {shape.most} call for each reply, and there are more; {remedy}")
        functions = guard.reply([call["function"] for call in calls])
        if shape.as_text:
            functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
        reply["tool_calls"] = [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
        reply["content"] = guarded["content"] or shape.content
    elif calls:
        reply["tool_calls"] = [*calls]
    return reply, guarded.get("reasoning_content", "")


def _stand_ins(
    turns: Sequence[Message], messages: Sequence[Message], shape: _Shape | None, guard: Guard
) -> list[Message]:
    """Return stand-ins for the turns; the last one's content, or its last call's argument, is REPLY."""
    history: list[Message] = []
    following = [*turns[1:], *messages[:1], USER_MESSAGE]
    for index, message in enumerate(turns):
        value = REPLY if index == len(turns) - 1 else OTHER
        stand_in: Message = {"role": message["role"], "content": value}
        if message["role"] == "assistant" and shape is not None:
            stand_in |= _stand_in_calls(message, following[index], shape, value, guard)
        elif message["role"] == "tool":
            stand_in = guard(message) | stand_in
        history.append(stand_in)
    return history


def _stand_in_calls(message: Message, following: Message, shape: _Shape, value: str, guard: Guard) -> Message:
    """Return the content and calls of a stand-in; a result without a call, such as an unreadable one, gets one."""
    calls = message.get("tool_calls", ())
    if not calls and following["role"] == "tool":
        calls = [tool_call(0, following.get("name", "tool"), {})]
    stand_ins = []
    for index, call in enumerate(calls[: shape.most], 1):
        arguments = {"q": value if index == len(calls[: shape.most]) else OTHER}
        function = {
            "name": guard.name(call["function"]["name"]),
            "arguments": json.dumps(arguments) if shape.as_text else arguments,
        }
        stand_ins.append({**call, "function": function})
    return {"content": shape.content, "tool_calls": stand_ins} if stand_ins else {}


def _message_key(message: Message) -> Hashable:
    """Return all of a message that stand-ins keep."""
    calls = tuple((call.get("id"), call["function"]["name"]) for call in message.get("tool_calls", ()))
    return message["role"], message.get("name"), message.get("tool_call_id"), calls


_LAST = 16  # tokens before a reply that tell whether it continues reasoning


class EpisodeFormat:
    """Token ids of the episodes of one task, whose ``history`` is as in ``Limits``.

    Args:
      wording: the task, or other settings of the prompt's text. With ``template`` plain or chatml, tools are described
        in the system message, and calls and results are text.
      stop_ids: tokens at which the model's completions end; empty means the tokenizer's own.
      options: what the template gets in addition to messages and tools, such as ``enable_thinking``.

    Attributes:
      syntax: of the calls in replies, see ``calls.syntax_of``.
      note: a line on how the template writes earlier turns if that is not as they were sampled; else empty.

    Raises:
      InputError: the tokenizer is missing, or the template cannot write the tools, their results or a second turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        wording: Wording,
        tools: Sequence[Mapping[str, Any]] = (),
        stop_ids: Sequence[int] = (),
        history: str = "append_only",
        options: Mapping[str, Any] | None = None,
    ):
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        eos = tokenizer.eos_token_id
        self._stops = tuple(stop_ids) or (() if eos is None else (eos,))
        self._guard = Guard(tokenizer)
        self._renderings = Renderings(wording, tokenizer, self.tools, self._guard, options)
        self._plain = wording.template == "plain"
        self._history = history
        self._control = frozenset((*special_ids(tokenizer), *self._stops))  # tokens that are no text
        self.syntax = self._renderings.syntax()
        self._end = "" if self._plain else end_of_turns(self._renderings, self._guard)
        # Refuse a template that cannot write a second turn.
        reply, answer = REPLY_MESSAGE, USER_MESSAGE
        if self.tools:
            call = tool_call(0, self.tools[0]["function"]["name"], {})
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            answer = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": OTHER}
        self.suffix([USER_MESSAGE, reply], [answer], ())
        notes = []
        if not self._plain and rewrites_history(self._renderings):
            tokens = "a new row begins where it does (fork)"
            if history == "append_only":
                tokens = "every token is kept as it was sampled (append_only)"
            notes.append(f"the chat template rewrites earlier replies, as by dropping their reasoning; {tokens}")
        ends = [text_of(tokenizer, [stop]) for stop in self._stops]
        region = "" if self._plain else self._renderings.after([USER_MESSAGE, REPLY_MESSAGE], [USER_MESSAGE]).region
        if not self._plain and ends and not any(end in region for end in ends):
            absent = "which the chat template does not write between turns; it stays"
            notes.append(f"completions end at {' or '.join(ends)}, {absent}")
        self.note = "; ".join(notes)

    def prompt(self, messages: Sequence[Message], theirs: int = 0) -> list[int]:
        """Return the ids of an episode's first messages, up to the start of the first reply. Control tokens in the
        contents of users, of tools, and of the environment's messages, the last ``theirs``, are text.
        """
        require(
            any(message["role"] == "user" for message in messages),
            "an episode begins without a message of the user; let the row or the environment's reset give one",
        )
        text = self._renderings.text(self._worded(messages, theirs), True)
        return (bos(text, self.tokenizer) if self._plain else []) + self._guard.ids(text)

    def suffix(self, turns: Sequence[Message], messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """Return the ids between a reply and the next one: the end of its turn, the world's messages, the next start. A
        stop token that the template does not write stays in place of the template's own end of the turn. The last of
        ``turns`` is the parsed reply, ``sampled`` its ids with any stop token; control tokens in messages are text.
        """
        guarded = [self._guard.of_world(message) for message in messages]
        last = text_of(self.tokenizer, sampled[-1:]) if len(sampled) and sampled[-1] in self._control else ""
        if self._plain:
            contents = [message["content"] for message in self._renderings.world_messages(guarded)]
            return self._guard.ids("".join(f"\n\n{content}" for content in contents), last)
        following = self._renderings.after(turns, guarded)
        return self._guard.ids(following.text[self._cut(following, sampled, last) :], last)

    def _worded(self, messages: Sequence[Message], theirs: int) -> list[Message]:
        row_count = len(messages) - theirs
        guarded = [*map(self._guard, messages[:row_count]), *map(self._guard.of_world, messages[row_count:])]
        return word_prompt(guarded, self._renderings.wording)

    def fork(
        self, prompt: Sequence[Message], turns: Sequence[Message], messages: Sequence[Message], theirs: int = 0
    ) -> list[int]:
        """Return the ids of the whole chat up to the next reply, if a new row begins there: where the template by now
        writes otherwise what the row holds, if ``history`` is "fork"; empty if the row goes on. ``prompt`` and
        ``theirs`` are those of ``prompt``; the last of ``turns`` is the parsed reply; ``messages`` are the world's.
        """
        guarded = [self._guard.of_world(message) for message in messages]
        if self._history != "fork" or self._plain or not self._renderings.rewrites(turns, guarded):
            return []
        first_messages = self._worded(prompt, theirs)
        later = turns[len(first_messages) :]
        later = [turn if turn["role"] == "assistant" else self._guard.of_world(turn) for turn in later]
        return self._guard.ids(self._renderings.chat(first_messages, [*later, *guarded]))

    def content_ranges(
        self, turns: Sequence[Message], messages: Sequence[Message], sampled: Sequence[int], suffix: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the range ``(begin, end)`` of each message's content among the tokens of their ``suffix``, made of the
        same arguments: those that change with the content, also where one joins its end with the template's text.
        """
        ranges = []
        for index, message in enumerate(messages):
            text = message["content"].strip()
            stand_in = next(mark for mark in ("x", "0", "-") if mark not in (text[:1], text[-1:]))
            changed_messages = [*messages[:index], {**message, "content": stand_in}, *messages[index + 1 :]]
            ids = self.suffix(turns, changed_messages, sampled)
            begin = len(common_prefix(suffix, ids))
            end = len(suffix) - len(common_prefix(suffix[begin:][::-1], ids[::-1]))
            ranges.append((begin, end))
        return ranges

    def parse(self, tokens: Sequence[int], before: Sequence[int] | None = None) -> ParsedReply:
        """Return the message of a sampled reply, from its ids with the stop token. ``before``: ids that it continues,
        which tell whether it begins inside reasoning; None means those of a prompt.
        """
        text = text_of(self.tokenizer, tokens, self._stops)
        start = self._start if before is None else text_of(self.tokenizer, before[-_LAST:])
        opens = ("<think>", "<|channel>thought", "<|channel>", "<|START_THINKING|>", "[THINK]")
        return parse_reply(text, self.syntax, self.tools, start.rstrip().endswith(opens))

    def _cut(self, following: FollowingText, sampled: Sequence[int], last: str) -> int:
        """Return where the suffix begins in the text after a reply; ``last``: its last token if that is special."""
        region = following.region
        stopped = bool(last) and sampled[-1] in self._stops
        if stopped and last in region:
            return region.index(last) + len(last)
        at = end_of_calls(region, self.syntax) if following.inside else 0
        rest = region[at:].lstrip()
        begins = len(region) - len(rest)
        for end in (last, self._end if stopped else ""):
            if end and rest.startswith(end):
                return begins + len(end)
        return begins if text_of(self.tokenizer, sampled[-_LAST:]).endswith(region[at:begins]) else at

    @functools.cached_property
    def _start(self) -> str:
        return self._renderings.text([USER_MESSAGE], True)
