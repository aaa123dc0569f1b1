"""Chats in pieces of text, and what ends the assistant's turn: for whoever learns it, or scores it.

A piece is tokenised where it stands: its ids are those that it adds to those of the text before it, of which the last
characters are enough. Where a token would lie across the border, the piece is tokenised by itself, as a policy writes
it that goes on after the text before.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import THOUGHTS
from jaxrl_llm.tasks.template import Wording, rendered, template_text, worded
from jaxrl_llm.types import Completion, Message

_MARKS = 64  # characters by which a template marks a thought, or what follows it, at most
_NEAR = 64  # characters before a piece that tokenizers may look at; what they cut text into first is shorter
_ASKED = [{"role": "user", "content": "Is it so?"}]
_ANSWER = {"role": "assistant", "content": "Yes."}


class Pieces:
    """Chats as texts, and texts as token ids, piece by piece.

    Args:
      wording: how chats are written.
      tokenizer: of the model.
      options: what the template is told beside the messages.
    """

    def __init__(self, wording: Wording, tokenizer: Any, options: Mapping[str, Any]):
        self.plain = wording.template == "plain"
        self.tokenizer = tokenizer
        self._wording = wording
        self._options = options

    def check_read(self, name: str, what: str) -> None:
        """Refuse what the template would pass over.

        Raises:
          InputError: it does not name it.
        """
        text = "" if self.plain else template_text(self._wording, self.tokenizer)
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise InputError(f"{what} {name}, which the chat template does not read; leave it out, or give another one")

    def chat(self, messages: Iterable[Message]) -> list[Message]:
        """The messages with the wording's own system message and suffix."""
        return worded(messages, self._wording)

    def rendered(self, messages: list[Message], asks: bool = True) -> str:
        """The text of a chat; with ``asks`` up to where the assistant goes on."""
        return rendered(messages, self._wording, self.tokenizer, asks, self._options)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, none added."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def after(self, before: str, *pieces: str) -> list[list[int]]:
        """The ids of each of some pieces of text that follow a prompt's text one after the other."""
        found = []
        for piece in pieces:
            near = before[-_NEAR:]
            known, whole = self.ids(near), self.ids(near + piece)
            found.append(whole[len(known) :] if whole[: len(known)] == known else self.ids(piece))
            before += piece
        return found


class Endings:
    """What ends a text, and the assistant's turn in a chat.

    Args:
      pieces: how chats are written.
      stop_ids: tokens at which the model's completions end.
    """

    def __init__(self, pieces: Pieces, stop_ids: Sequence[int]):
        self._pieces = pieces
        self._stop_ids = tuple(stop_ids)

    @functools.cached_property
    def text(self) -> int:
        """The token that ends a text, at which the model's completions end.

        Raises:
          InputError: there is none.
        """
        own = self._pieces.tokenizer.eos_token_id
        found = [own] if own is not None and own in (self._stop_ids or (own,)) else list(self._stop_ids)
        if not found:
            raise InputError("neither the tokenizer nor the model's configuration names a token that ends a text")
        return found[0]

    def once(self, text: str) -> str:
        """The text without ends of its own, and what white space follows them: one end will be written behind it.

        Raises:
          InputError: nothing else is in it.
        """
        found = self._own.sub("", text)
        if found != text and not found.strip():
            raise InputError(f"{text[:40]!r} is empty but for its end; complete the row or leave it out")
        return found

    @functools.cached_property
    def _own(self) -> re.Pattern[str]:
        tokenizer = self._pieces.tokenizer
        ids = {*self._stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in sorted(ids)]
        some = "|".join(re.escape(text) for text in texts if text.strip())
        return re.compile(rf"(?:(?:{some})\s*)+\Z" if some else r"(?!)")

    @property
    def turn(self) -> list[int]:
        """What ends the assistant's turn: as the template writes it, up to the first of the model's stop tokens; where
        it writes none of them, the token that ends a text.
        """
        return self._written[1] or [self.text]

    def count(self, glue: str, ids: list[int]) -> int:
        """How many of the ids after what the assistant said, ``glue``, end its turn."""
        text, _ = self._written
        if not text or not glue.lstrip().startswith(text.lstrip()):
            return 0
        return next((at + 1 for at, token in enumerate(ids) if token in self._stop_ids), 0)

    @functools.cached_property
    def closing(self) -> list[int] | None:
        """All that a chat template writes after what the assistant says last, such as a stop token and a line end.

        None of ``plain``, which writes nothing there, and of a template that does not repeat what was said.
        """
        pieces = self._pieces
        whole = "" if pieces.plain else pieces.rendered([*pieces.chat(_ASKED), _ANSWER], asks=False)
        _, said, closing = whole.rpartition(_ANSWER["content"])
        return pieces.ids(closing) if said else None

    @functools.cached_property
    def _written(self) -> tuple[str, list[int]]:
        """Text and ids up to the first stop token after a turn of the assistant; empty where there is none."""
        pieces = self._pieces
        if pieces.plain:
            return "", []
        asked = pieces.chat(_ASKED)
        before, whole = pieces.rendered(asked), pieces.rendered([*asked, _ANSWER, *_ASKED])
        said = said_of(before, _ANSWER, whole)
        if said is None:
            return "", []
        ids = pieces.ids(whole[len(before) + len(said) :].partition(_ASKED[0]["content"])[0])
        stops = [at for at, token in enumerate(ids) if token in self._stop_ids]
        if not stops:
            return "", []
        ids = ids[: stops[0] + 1]
        return pieces.tokenizer.decode(ids, clean_up_tokenization_spaces=False), ids


def closing_of(wording: Wording, tokenizer: Any) -> list[int] | None:
    """``Endings.closing`` of chats that are written so."""
    return Endings(Pieces(wording, tokenizer, {}), ()).closing


def closed(completion: Completion, closing: Sequence[int] | None) -> np.ndarray:
    """The tokens of a completion, int32[t], that has ended by itself with the end that a template writes.

    Its stop token is part of that end, or gives way to it; what was cut off stays as it is.

    Args:
      completion: what a policy wrote.
      closing: see ``Endings.closing``; None leaves all completions as they are.
    """
    tokens = completion.tokens
    if closing is None or completion.finish_reason != "stop":
        return tokens
    ends = [size for size in range(1, min(len(closing), len(tokens)) + 1) if [*tokens[-size:]] == [*closing[:size]]]
    return np.concatenate([tokens[: len(tokens) - max(ends, default=1)], np.asarray(closing, np.int32)])


def thought_of(message: Message) -> str:
    """What the assistant thought before it said this; empty where the message does not say."""
    return next((message[name] for name in THOUGHTS if name in message), "")


def said_of(before: str, message: Message, whole: str) -> str | None:
    """What stands in ``whole`` after ``before`` for what the assistant thought and said; None where that is something
    else. Between its thought and its answer, and before them, stands what the template marks them with."""
    if not whole.startswith(before):
        return None
    content, thought = message["content"], thought_of(message)
    if thought:
        marked = rf".{{0,{_MARKS}}}?"
        pattern = marked + re.escape(thought.strip()) + marked + re.escape(content.strip())
        found = re.compile(pattern, re.DOTALL).match(whole, len(before))
        return found and found[0]
    if whole.startswith(content, len(before)):
        return content
    found = re.compile(r"\s*" + re.escape(content.strip())).match(whole, len(before))
    return found and found[0]
