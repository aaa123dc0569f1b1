"""Tool calls in the model's replies."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.environments.call_syntaxes import SYNTAXES, THOUGHTS, Syntax, Types
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.messages import Call, checked, json_value, tool_call
from jaxrl_llm.types import Message

NO_CALLS = ""
"""Syntax of replies without tools: only the reasoning is separated."""
HARMONY = "gpt_oss"
_HARMONY_TAUGHT = "<|channel|>commentary"
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HARMONY = re.compile(r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL)
_ADDRESSED = re.compile(r"to=functions\.([^\s<]+)")
_LLAMA_BEGINS = re.compile(r'\s*(?:<\|python_tag\|>|\{\s*"(?:name|parameters)"\s*:|\[\s*\{\s*"name"\s*:)')
_MOST_TRIES = 8  # closing marks tried for one call, since its arguments may hold the mark


@dataclasses.dataclass(frozen=True)
class Parsed:
    """One reply of the model.

    Attributes:
      message: role assistant, content (the text without the calls and the reasoning), ``tool_calls`` if there are any,
        ``reasoning_content`` if the model reasoned.
      error: why a call cannot be parsed; empty if all can. No call of such a reply is kept.
    """

    message: Message
    error: str = ""


def syntax_of(template: str) -> str:
    """Return the name of the syntax of calls that a chat template teaches; ``plain`` if it knows no tools.

    Raises:
      InputError: the template knows tools, and its syntax is not known here.
    """
    if not re.search(r"\btools\b", template):
        return "plain"
    if _HARMONY_TAUGHT in template:
        return HARMONY
    for name, syntax in SYNTAXES.items():
        if any(text in template for text in syntax.taught):
            return name
    raise InputError(
        "the chat template writes tool calls in a form that is not known here; set --task.template chatml, "
        "with which calls are plain text"
    )


def end_of_calls(text: str, syntax: str) -> int:
    """Return where the calls end whose last argument ends at the start of this text."""
    form = SYNTAXES.get(syntax)
    if form is None or not form.closes:
        return len(text) - len(text.lstrip("\"'}])`"))
    at = text.find(form.closes) + len(form.closes) if form.closes in text else 0
    while mark := next((mark for mark in form.around if text.startswith(mark, at)), ""):
        at += len(mark)
    return at


def parse_reply(text: str, syntax: str, tools: Sequence[Mapping[str, Any]] = (), thinking: bool = False) -> Parsed:
    """Separate a reply's calls and reasoning from its text; calls inside the reasoning are no calls.

    >>> parse_reply('Wait. <tool_call>{"name": "now", "arguments": {}}</tool_call>', "plain").message["content"]
    'Wait.'

    Args:
      text: of the reply, without the token that ended it; special tokens that belong to calls are part of it.
      syntax: see ``syntax_of``; ``NO_CALLS`` where the model has no tools.
      tools: JSON schemas; they tell text from numbers in syntaxes that do not quote text.
      thinking: whether the reply continues reasoning that the prompt began.
    """
    types = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}
    pieces = list(_harmony(text) if syntax == HARMONY else _marked(text, SYNTAXES.get(syntax), types, thinking))
    error = next((piece.error for piece in pieces if piece.error), "")
    shown = ("text", "call") if error else ("text",)
    said = "".join(piece.text for piece in pieces if piece.kind in shown)
    message: Message = {"role": "assistant", "content": said if said == text else said.strip()}
    thoughts = [piece.text.strip() for piece in pieces if piece.kind == "thought"]
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    calls = [call for piece in pieces for call in piece.calls]
    if calls and not error:
        message["tool_calls"] = [tool_call(index, *call) for index, call in enumerate(calls)]
    return Parsed(message, error)


class _Piece(NamedTuple):
    """A part of a reply; ``kind`` is text, thought or call."""

    kind: str
    text: str
    calls: Sequence[Call] = ()
    error: str = ""


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters", {}).get("properties", {})


def _marked(text: str, form: Syntax | None, types: Types, thinking: bool) -> Iterator[_Piece]:
    """Yield the parts of a reply whose calls stand between marks, from left to right."""
    closing = dict(THOUGHTS)
    opens = [*closing, *([form.opens] if form and form.opens else [])]
    begins = re.compile("|".join(map(re.escape, opens)))
    at = _end_of_first_thought(text, begins, thinking)
    if at:
        yield _Piece("thought", _without(text[:at], [mark for pair in THOUGHTS for mark in pair]))
    if form and not form.opens and _LLAMA_BEGINS.match(text, at):
        yield _call(text[at:], _without(text[at:], form.around), form, types)
        return
    while found := begins.search(text, at):
        yield _Piece("text", _without(text[at : found.start()], form.around if form else ()))
        mark = found[0]
        if mark in closing:
            inner, _, _ = text[found.end() :].partition(closing[mark])
            at = found.end() + len(inner) + len(closing[mark])
            yield _Piece("thought", inner.removeprefix("thought\n"))  # gemma names its channel
        else:
            assert form is not None
            piece = _closed_call(text, found, form, types, begins)
            at = found.start() + len(piece.text)
            yield piece
    yield _Piece("text", _without(text[at:], form.around if form else ()))


def _end_of_first_thought(text: str, begins: re.Pattern[str], thinking: bool) -> int:
    """Return where reasoning ends that began before the text; 0 if there is none."""
    ends = [(text.find(closes), closes) for _, closes in THOUGHTS if closes in text]
    first = begins.search(text)
    if not ends:
        return len(text) if thinking else 0
    at, mark = min(ends)
    return at + len(mark) if thinking or first is None or at < first.start() else 0


def _closed_call(text: str, found: re.Match[str], form: Syntax, types: Types, begins: re.Pattern[str]) -> _Piece:
    """Read the call that begins here, up to the first mark that closes it; its arguments may hold that mark, too."""
    closing = re.compile(re.escape(form.closes)) if form.closes else begins
    ends = (end.start() for end in closing.finditer(text, found.end()))
    first: _Piece | None = None
    for end in (*itertools.islice(ends, _MOST_TRIES), len(text)):
        raw = text[found.start() : end + len(form.closes)]
        piece = _call(raw, text[found.end() : end], form, types)
        if not piece.error:
            return piece
        first = first or piece
    assert first is not None
    return first


def _call(raw: str, body: str, form: Syntax, types: Types) -> _Piece:
    try:
        return _Piece("call", raw, form.read(body, types))
    except RecursionError:
        return _Piece("call", raw, error="the call is nested too deep")
    except ValueError as error:
        return _Piece("call", raw, error=str(error))


def _without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _harmony(text: str) -> Iterator[_Piece]:
    """Yield the parts of a reply of gpt-oss: messages of their own for reasoning, calls and the answer."""
    at = 0
    for found in _HARMONY.finditer(text):
        at = found.end()
        addressed = _ADDRESSED.search(found["head"])
        if addressed:
            try:
                yield _Piece("call", found[0], [checked(addressed[1], json_value(found["body"]))])
            except ValueError as error:
                yield _Piece("call", found[0], error=str(error))
        else:
            yield _Piece("thought" if "analysis" in found["head"] else "text", found["body"])
    if _ADDRESSED.search(text, at):
        yield _Piece("call", text[at:], error="the call has no <|message|> with its arguments")
    else:
        yield _Piece("text", _without(text[at:], _HARMONY_MARKS))
