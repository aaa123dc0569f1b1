"""From chats to the token ids that are learned.

A chat is written in pieces (``endings.Pieces``): the prompt as ``encode`` writes it, what the assistant says, the token
that ends its turn, what the template writes until its next turn.

What the assistant says stands there word for word, but for white space around it, which is as the template writes it;
what a template adds to the last turn only is left out. The end of a turn is learned where the template ends turns with
a token at which the model's completions stop; else only that of the last, by the token that ends a text.

What scores an answer may read on to the end of what the template writes, ``Endings.closing``: no policy learns that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import OPTIONS, THOUGHTS, WEIGHT, shared
from jaxrl_llm.tasks.endings import Endings, Pieces, said_of, thought_of
from jaxrl_llm.tasks.template import Wording, bos, check_tokenizer
from jaxrl_llm.types import Message


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
            said = said_of(before, chat[at], whole)
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
            said = said_of(before, chat[-1], self.pieces.rendered(chat, asks=False))
            thought = thought_of(chat[-1])
            if said is None and thought:
                raise InputError(
                    f"the chat template does not write the thought {thought[:40]!r} of the assistant where it answers; "
                    "leave it out, or give another template"
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


def _why(content: str, plain: bool) -> str:
    """Why a chat of several turns cannot be learned."""
    if plain:
        return "template plain marks no turns, and the assistant has several; give a chat template, such as chatml"
    return (
        f"the chat template rewrites the assistant's earlier turn {content[:40]!r}, which can then not be learned "
        "in place; give another template, or a row for each turn"
    )
