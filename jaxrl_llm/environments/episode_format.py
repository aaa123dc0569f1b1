"""Episodes as token ids: the prompt, and what follows each reply; sampled tokens are never made anew.

What follows a reply is a difference of two renderings: the chat template writes a history of the episode's shape, with
stand-ins for its contents, and the world's messages. The text after the last reply's stand-in follows the sampled
tokens.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.calls import Parsed, end_of_calls, parse_reply
from jaxrl_llm.environments.renderings import (
    ASKED,
    OTHER,
    REPLIED,
    After,
    Renderings,
    end_of_turns,
    rewrites_history,
    shared,
)
from jaxrl_llm.errors import require
from jaxrl_llm.models.tokenizer import special_ids, text_of
from jaxrl_llm.tasks.chats import Guard
from jaxrl_llm.tasks.template import Wording, bos, check_tokenizer, worded
from jaxrl_llm.types import Message

_LAST = 16  # tokens before a reply that tell whether it continues reasoning
_THINKING = ("<think>", "<|channel>thought", "<|channel>", "<|START_THINKING|>", "[THINK]")
_OTHERS = ("x", "0", "-")  # contents to compare with: one of them begins and ends otherwise than any given text
_REWRITES = "the chat template rewrites earlier replies, as by dropping their reasoning; "
_HISTORY = {
    "append_only": "every token is kept as it was sampled (append_only)",
    "fork": "a new row begins where it does (fork)",
}


class EpisodeFormat:
    """Token ids of the episodes of one task.

    Args:
      tokenizer: of the model.
      wording: the task, or other settings of the prompt's text. With ``template`` plain or chatml, tools are described
        in the system message, and calls and results are text.
      tools: JSON schemas.
      stop_ids: tokens at which the model's completions end; empty means the tokenizer's own.
      history: see ``Limits``.
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
        own = tokenizer.eos_token_id
        self._stops = tuple(stop_ids) or (() if own is None else (own,))
        self._guard = Guard(tokenizer)
        self._renderings = Renderings(wording, tokenizer, self.tools, self._guard, options)
        self._plain = wording.template == "plain"
        self._history = history
        self._control = frozenset((*special_ids(tokenizer), *self._stops))  # tokens that are no text
        self.syntax = self._renderings.syntax()
        self._end = "" if self._plain else end_of_turns(self._renderings, self._guard)
        _check_turns(self)
        rewrites = not self._plain and rewrites_history(self._renderings)
        ends = (
            "" if self._plain else _note_on_ends(self._renderings, [text_of(tokenizer, [one]) for one in self._stops])
        )
        self.note = "; ".join(filter(None, [_REWRITES + _HISTORY[history] if rewrites else "", ends]))

    def prompt(self, messages: Sequence[Message], theirs: int = 0) -> list[int]:
        """Return the ids of an episode's first messages, up to the start of the first reply.

        Control tokens in the contents of users, of tools, and of the last ``theirs`` messages, which are the
        environment's, are text.

        Raises:
          InputError: no message is a user's, or the template refuses them.
        """
        require(
            any(message["role"] == "user" for message in messages),
            "an episode begins without a message of the user; let the row or the environment's reset give one",
        )
        text = self._renderings.text(self._worded(messages, theirs), True)
        return (bos(text, self.tokenizer) if self._plain else []) + self._guard.ids(text)

    def suffix(self, turns: Sequence[Message], messages: Sequence[Message], sampled: Sequence[int]) -> list[int]:
        """Return the ids between a reply and the next one: the rest of its turn, the messages, the next one's start.

        A stop token that the template does not write stays in place of the template's own end of the turn.

        Args:
          turns: the episode so far; the last is the parsed reply.
          messages: of the world. Control tokens in their contents are text.
          sampled: ids of the reply, its stop token included if it has one.

        Raises:
          InputError: the template refuses the messages, or leaves them out.
        """
        following = [self._guard.of_world(message) for message in messages]
        last = text_of(self.tokenizer, sampled[-1:]) if len(sampled) and sampled[-1] in self._control else ""
        if self._plain:
            contents = [message["content"] for message in self._renderings.said(following)]
            return self._guard.ids("".join(f"\n\n{content}" for content in contents), last)
        after = self._renderings.after(turns, following)
        return self._guard.ids(after.text[self._cut(after, sampled, last) :], last)

    def _worded(self, messages: Sequence[Message], theirs: int) -> list[Message]:
        own = len(messages) - theirs
        guarded = [*map(self._guard, messages[:own]), *map(self._guard.of_world, messages[own:])]
        return worded(guarded, self._renderings.wording)

    def fork(
        self, asked: Sequence[Message], turns: Sequence[Message], messages: Sequence[Message], theirs: int = 0
    ) -> list[int]:
        """Return the ids of the whole chat up to the next reply, if a new row begins there; none if the row goes on.

        It begins where the template by now writes otherwise what the row holds, if ``history`` is "fork".

        Args:
          asked, theirs: what ``prompt`` got.
          turns: the episode so far, with its first messages; the last is the parsed reply.
          messages: of the world.

        Raises:
          InputError: the template refuses the messages, or takes fewer calls in a reply than there are.
        """
        following = [self._guard.of_world(message) for message in messages]
        if self._history != "fork" or self._plain or not self._renderings.rewrites(turns, following):
            return []
        told = self._worded(asked, theirs)
        later = [one if one["role"] == "assistant" else self._guard.of_world(one) for one in turns[len(told) :]]
        return self._guard.ids(self._renderings.chat(told, [*later, *following]))

    def said(
        self, turns: Sequence[Message], messages: Sequence[Message], sampled: Sequence[int], suffix: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the range ``(begin, end)`` of each message's content among the tokens of their suffix.

        It is what changes with the content. A token that joins the end of a content with the template's text counts.

        Args:
          turns, messages, sampled: as ``suffix`` got them.
          suffix: the ids that it returned.
        """
        found = []
        for index, message in enumerate(messages):
            text = message["content"].strip()
            other = next(mark for mark in _OTHERS if mark not in (text[:1], text[-1:]))
            changed = [*messages[:index], {**message, "content": other}, *messages[index + 1 :]]
            ids = self.suffix(turns, changed, sampled)
            begin = shared(suffix, ids)
            end = len(suffix) - shared(suffix[begin:][::-1], ids[::-1])
            found.append((begin, end))
        return found

    def parse(self, tokens: Sequence[int], before: Sequence[int] | None = None) -> Parsed:
        """Return the message of a sampled reply.

        Args:
          tokens: its ids, the stop token included.
          before: ids that it continues; they tell whether it begins inside reasoning. None means those of a prompt.
        """
        text = text_of(self.tokenizer, tokens, self._stops)
        start = self._start if before is None else text_of(self.tokenizer, before[-_LAST:])
        return parse_reply(text, self.syntax, self.tools, start.rstrip().endswith(_THINKING))

    def _cut(self, after: After, sampled: Sequence[int], last: str) -> int:
        """Return where the suffix begins in the text after a reply; ``last``: its last token if that is special."""
        region = after.region
        stopped = bool(last) and sampled[-1] in self._stops
        if stopped and last in region:
            return region.index(last) + len(last)
        at = end_of_calls(region, self.syntax) if after.inside else 0
        rest = region[at:].lstrip()
        begins = len(region) - len(rest)
        for end in (last, self._end if stopped else ""):
            if end and rest.startswith(end):
                return begins + len(end)
        return begins if text_of(self.tokenizer, sampled[-_LAST:]).endswith(region[at:begins]) else at

    @functools.cached_property
    def _start(self) -> str:
        """The text of a prompt."""
        return self._renderings.text([ASKED], True)


def _check_turns(form: EpisodeFormat) -> None:
    """Refuse a template that cannot write a second turn."""
    if not form.tools:
        form.suffix([ASKED, REPLIED], [ASKED], ())
        return
    name = form.tools[0]["function"]["name"]
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    form.suffix([ASKED, reply], [{"role": "tool", "name": name, "tool_call_id": "call00000", "content": OTHER}], ())


def _note_on_ends(renderings: Renderings, stops: Sequence[str]) -> str:
    region = renderings.after([ASKED, REPLIED], [ASKED]).region
    if not stops or any(stop in region for stop in stops):
        return ""
    return f"completions end at {' or '.join(stops)}, which the chat template does not write between turns; it stays"
