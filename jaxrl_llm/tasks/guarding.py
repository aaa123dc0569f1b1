"""Texts of others as token ids: a control token that a text spells out stays text."""

import re
from typing import Any

from jaxrl_llm.models.tokenizer import special_ids
from jaxrl_llm.types import Message

_CUT = "\ufdd0"  # no character, so that no text has it: cuts the spelling of a token in two until the text is encoded
_ANCHOR = "x"
_CLEANED = ("content", "name", "tool_call_id")


class Guard:
    """Encoder of rendered chats whose contents hold no control tokens.

    In messages of tools no added token is kept, in those of users no special one. A system's and an assistant's
    contents may hold them, since the person who writes the task writes these; ``of_world`` is for what an environment
    says in their place, and ``reply`` for what a model wrote.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        special = {*special_ids(tokenizer), *tokenizer.all_special_ids}
        texts = [text for index, text in added.items() if index in special]
        self._special = sorted(texts, key=len, reverse=True)
        self._by_role = {
            "user": _pattern(texts),
            "tool": _pattern(list(added.values())),
        }

    def __call__(self, message: Message) -> Message:
        """Return the message, ready to be rendered; half characters become replacement characters."""
        pattern = self._by_role.get(message["role"])
        if pattern is None:
            return message
        texts = {key: message[key] for key in _CLEANED if isinstance(message.get(key), str)}
        return message | {key: _cut(text, pattern) for key, text in texts.items()}

    def of_world(self, message: Message) -> Message:
        """Return an environment's message, ready to be rendered: whatever its role, it holds no control token."""
        return self(message) if message["role"] in self._by_role else self.reply(message)

    def without(self, pattern: re.Pattern[str], text: str) -> str:
        """Return a text in which the tokens that a pattern finds stay text."""
        return pattern.sub(lambda found: f"{found[0][:1]}{_CUT}{found[0][1:]}", text)

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
        return _cut(value, pattern) if isinstance(value, str) and pattern else value

    def name(self, text: str) -> str:
        """Return a name that the model wrote, ready to be rendered."""
        pattern = self._by_role["tool"]
        return _cut(text, pattern) if pattern else text

    def first_token(self, text: str) -> str:
        """Return the special token at which a text begins, after white space; empty if there is none."""
        return next((token for token in self._special if text.lstrip().startswith(token)), "")

    def has_token(self, text: str) -> bool:
        """Whether a text holds a special token."""
        return any(token in text for token in self._special)

    def ids(self, text: str, before: str = "") -> list[int]:
        """Return the ids of a rendered text that follows this text."""
        first, *rest = text.split(_CUT)
        found = self._after(before, first)
        for piece in rest:
            found += self._after(_ANCHOR, piece)
        return found

    def _after(self, before: str, text: str) -> list[int]:
        """Return the ids that a text adds to those of the text before it."""
        known = self._ids(before)
        whole = self._ids(before + text)
        return whole[len(known) :] if whole[: len(known)] == known else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def _pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of each text and asserts the others."""
    longer = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    parts = (f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in longer)
    return re.compile("|".join(parts)) if longer else None


def _cut(text: str, pattern: re.Pattern[str]) -> str:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace(_CUT, "")
    return pattern.sub(lambda found: found[0] + _CUT, whole)
