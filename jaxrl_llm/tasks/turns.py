"""From chats to the token ids that are learned.

A chat is written in pieces: the prompt as ``encode`` writes it, what the assistant says, the token that ends its turn,
what the template writes until its next turn. Each piece is tokenised where it stands: its ids are those that it adds to
those of the text before it, of which the last characters are enough. Where a token would lie across the border, the
piece is tokenised by itself, as a policy writes it that goes on after the text before.

What the assistant says stands there word for word, but for white space around it, which is as the template writes it;
what a template adds to the last turn only is left out. The end of a turn is learned where the template ends turns with
a token at which the model's completions stop; else only that of the last, by the token that ends a text.

What scores an answer may read on to the end of what the template writes, ``Endings.closing``: no policy learns that.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import OPTIONS, THOUGHTS, WEIGHT, shared
from jaxrl_llm.tasks.template import Wording, bos, check_tokenizer, rendered, template_text, worded
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
        said = _said(before, _ANSWER, whole)
        if said is None:
            return "", []
        ids = pieces.ids(whole[len(before) + len(said) :].partition(_ASKED[0]["content"])[0])
        stops = [at for at, token in enumerate(ids) if token in self._stop_ids]
        if not stops:
            return "", []
        ids = ids[: stops[0] + 1]
        return pieces.tokenizer.decode(ids, clean_up_tokenization_spaces=False), ids


class Writer:
    """Writes prompts and what follows them as token ids.

    Args:
      wording: how prompts are written.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end.
      options: what the template is told beside the messages.
      closes: whether the last turn ends as the template writes it, not where the model's completions do.

    Attributes:
      pieces: texts and their ids.
      ends: what ends a text and a turn.

    Raises:
      InputError: there is no tokenizer, or the template does not read one of the options.
    """

    def __init__(
        self,
        wording: Wording,
        tokenizer: Any,
        stop_ids: Sequence[int],
        options: Mapping[str, Any],
        closes: bool = False,
    ):
        check_tokenizer(tokenizer)
        self.pieces = Pieces(wording, tokenizer, options)
        self.ends = Endings(self.pieces, stop_ids)
        for name in options:
            self.pieces.check_read(name, f"{OPTIONS} has")
        self._closes = closes

    @property
    def ending(self) -> list[int]:
        """What ends the last turn of an answer or a chat."""
        closing = self.ends.closing if self._closes else None
        return self.ends.turn if closing is None else closing

    def prompt(self, messages: Iterable[Message]) -> tuple[str, np.ndarray]:
        """A prompt's text up to where the answer begins, and its ids, int32[p]: those of ``encode``."""
        pieces = self.pieces
        text = pieces.rendered(self._worded(messages))
        begins = bos(text, pieces.tokenizer) if pieces.plain else []
        return text, np.asarray(begins + pieces.ids(text), np.int32)

    def text(self, text: str) -> np.ndarray:
        """int32[t]: a plain text from its beginning to its end, after BOS where the tokenizer begins every text so."""
        text = self.ends.once(text)
        begins = bos(text, self.pieces.tokenizer)
        return np.asarray(begins + self.pieces.ids(text) + [self.ends.text], np.int32)

    def answer(self, prompt: Sequence[Message], before: str, answer: Message) -> np.ndarray:
        """int32[t]: what the assistant says after a prompt, whose text is given too, and the end of its turn."""
        chat = [*self._worded(prompt), *self._ended([answer])]
        return np.asarray(self._last(chat, before), np.int32)

    def turns(self, prompt: Sequence[Message], rest: Sequence[Message]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A chat whose assistant speaks first and last in ``rest``: the prompt's ids, int32[p], those that follow,
        int32[t], and which of them the assistant says, bool[t], the end of each turn included; not those of a message
        that is not learned.

        Raises:
          InputError: the template does not go on from what it wrote.
        """
        pieces = self.pieces
        before, asked = self.prompt(prompt)
        begins = self._worded(prompt)
        chat = [*begins, *self._ended(rest)]
        speaks = [at for at in range(len(begins), len(chat)) if chat[at]["role"] == "assistant"]
        tokens: list[int] = []
        mask: list[bool] = []
        for at, following in zip(speaks[:-1], speaks[1:], strict=True):
            whole = pieces.rendered(chat[:following])
            said = _said(before, chat[at], whole)
            if said is None or pieces.plain:
                raise InputError(_why(chat[at]["content"], pieces.plain))
            glue = whole[len(before) + len(said) :]
            learned, others = pieces.after(before, said, glue)
            ends = self.ends.count(glue, others)
            tokens += learned + others
            mask += [WEIGHT not in chat[at]] * (len(learned) + ends) + [False] * (len(others) - ends)
            before = whole
        last = self._last(chat, before)
        mask += [WEIGHT not in chat[-1]] * len(last)
        return asked, np.asarray(tokens + last, np.int32), np.asarray(mask, bool)

    def joined(self, prompt: Sequence[Message], rest: Sequence[Message], plain: bool) -> tuple[np.ndarray, int]:
        """A prompt with what follows as TRL's ``SFTTrainer`` writes it: ids of the whole, tokenised in one piece, up to
        what the template writes behind the last turn, int32[t]; and how many first ones are those of the prompt.

        ``plain``: both are single texts, which no template wraps, and one end of a text follows.

        Raises:
          InputError: several turns, and no template to mark them.
        """
        pieces = self.pieces
        if pieces.plain and len(rest) > 1:
            raise InputError(_why("", plain=True))
        if plain or pieces.plain:
            texts = [message["content"] for message in self._worded(prompt)]
            before = "\n\n".join(texts)
            whole = before + "\n\n".join(message["content"] for message in self._ended(rest))
            begins = bos(before, pieces.tokenizer)
            asked, ids = begins + pieces.ids(before), [*begins, *pieces.ids(whole), self.ends.text]
        else:
            chat = self._worded(prompt)
            asked = pieces.ids(pieces.rendered(chat))
            ids = pieces.ids(pieces.rendered([*chat, *self._ended(rest)], asks=False))
        return np.asarray(ids, np.int32), len(shared(asked, ids))

    def _last(self, chat: list[Message], before: str) -> list[int]:
        """What the assistant says in the last message, after the text before it, and the end of its turn."""
        content = chat[-1]["content"]
        if not self.pieces.plain:
            said = _said(before, chat[-1], self.pieces.rendered(chat, asks=False))
            if said is None and _thought(chat[-1]):
                raise InputError(
                    f"the chat template does not write the thought {_thought(chat[-1])[:40]!r} of the assistant where "
                    "it answers; leave it out, or give another template"
                )
            content = said or content
        return [*self.pieces.after(before, content)[0], *self.ending]

    def _worded(self, messages: Iterable[Message]) -> list[Message]:
        return self.pieces.chat(self._ended(messages))

    def _ended(self, messages: Iterable[Message]) -> list[Message]:
        """The messages, without ends of turns that the assistant's bring with them.

        Raises:
          InputError: one has a field that the template does not read, or nothing but its end.
        """
        found = [dict(message) for message in messages]
        for message in found:
            for name in THOUGHTS:
                if name in message:
                    self.pieces.check_read(name, "a message has")
            if message["role"] == "assistant":
                message["content"] = self.ends.once(message["content"])
        return found


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


def _why(content: str, plain: bool) -> str:
    """Why a chat of several turns cannot be learned."""
    if plain:
        return "template plain marks no turns, and the assistant has several; give a chat template, such as chatml"
    return (
        f"the chat template rewrites the assistant's earlier turn {content[:40]!r}, which can then not be learned "
        "in place; give another template, or a row for each turn"
    )


def _thought(message: Message) -> str:
    """What the assistant thought before it said this; empty where the message does not say."""
    return next((message[name] for name in THOUGHTS if name in message), "")


def _said(before: str, message: Message, whole: str) -> str | None:
    """What stands in ``whole`` after ``before`` for what the assistant thought and said; None where that is something
    else. Between its thought and its answer, and before them, stands what the template marks them with."""
    if not whole.startswith(before):
        return None
    content, thought = message["content"], _thought(message)
    if thought:
        marked = rf".{{0,{_MARKS}}}?"
        pattern = marked + re.escape(thought.strip()) + marked + re.escape(content.strip())
        found = re.compile(pattern, re.DOTALL).match(whole, len(before))
        return found and found[0]
    if whole.startswith(content, len(before)):
        return content
    found = re.compile(r"\s*" + re.escape(content.strip())).match(whole, len(before))
    return found and found[0]
