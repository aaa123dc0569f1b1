"""Tool calls in the model's replies."""

import ast
import dataclasses
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.messages import LONGEST_NAME, ToolCall, json_value, parse_calls, tool_call, validate_call
from jaxrl_llm.types import Message

Types = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters by the tool's name."""
_PYTHON = {"True": True, "False": False, "None": None}


@dataclasses.dataclass(frozen=True)
class Syntax:
    """One way to write calls.

    Attributes:
      template_marks: a template that holds one of these texts teaches this syntax.
      opens: text before a call, or before a list of calls.
      closes: text after it; empty if the end of the turn closes it.
      read: ``read(body, types)``, the calls of the text between; ValueError says what is wrong with it.
      around: further marks around the calls; they are part of no content.
    """

    template_marks: tuple[str, ...]
    opens: str
    closes: str
    read: Callable[[str, Types], list[ToolCall]]
    around: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the syntax, longest first."""
        marks = [mark for mark in (self.opens, self.closes, *self.around) if mark]
        return tuple(sorted(marks, key=len, reverse=True))


def read_json_calls(body: str, types: Types) -> list[ToolCall]:
    """Read ``{"name": "f", "arguments": {...}}``, or a list of such objects."""
    return parse_calls(json_value(body))


def read_llama(body: str, types: Types) -> list[ToolCall]:
    """Read ``{"name": "f", "parameters": {...}}``; several are separated by semicolons or commas."""
    calls = []
    while body := body.lstrip(" \t\r\n;,"):
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError):
            value, end = json_value(body), len(body)
        calls += parse_calls(value)
        body = body[end:]
    if not calls:
        raise ValueError("the call is empty")
    return calls


def read_mistral(body: str, types: Types) -> list[ToolCall]:
    """Read a JSON list of calls, or ``name[ARGS]{...}``."""
    name, mark, arguments = body.partition("[ARGS]")
    if not mark:
        return read_json_calls(body, types)
    return [validate_call(name.partition("[CALL_ID]")[0], json_value(arguments))]


def read_deepseek(body: str, types: Types) -> list[ToolCall]:
    """Read ``function<｜tool▁sep｜>name`` with a block of JSON, or ``name<｜tool▁sep｜>{...}``."""
    first, mark, second = body.partition("<｜tool▁sep｜>")
    if not mark:
        raise ValueError("the call has no <｜tool▁sep｜> after its name")
    name, block, fence = second.partition("```json")
    if block:
        return [validate_call(name, json_value(fence.rstrip().removesuffix("```")))]
    return [validate_call(first, json_value(second))]


def read_kimi(body: str, types: Types) -> list[ToolCall]:
    """Read ``functions.name:0<|tool_call_argument_begin|>{...}``."""
    name, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    if not mark:
        raise ValueError("the call has no <|tool_call_argument_begin|> after its name")
    return [validate_call(re.sub(r":\d+\s*\Z", "", name.strip()).removeprefix("functions."), json_value(arguments))]


def read_pythonic(body: str, types: Types) -> list[ToolCall]:
    """Read ``[f(x=1, y='a'), g()]``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the text
            tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("the calls are not a list like [name(argument=value)]") from error
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    if not calls:
        raise ValueError("the list of calls is empty")
    return [_python_call(call) for call in calls]


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("the calls are not a list like [name(argument=value)]")
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"the arguments of {name[:LONGEST_NAME]} need names, as in name(argument=value)")
    values = {}
    for keyword in call.keywords:
        for part in ast.walk(keyword.value):
            for field, child in ast.iter_fields(part):
                if isinstance(child, list):
                    setattr(part, field, [_json_constant(item) for item in child])
                elif isinstance(child, ast.Name):
                    setattr(part, field, _json_constant(child))
        try:
            values[keyword.arg] = ast.literal_eval(_json_constant(keyword.value))
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"the arguments of {name[:LONGEST_NAME]} are not plain values") from error
    return validate_call(name, values)


def _json_constant(node: Any) -> Any:
    """Replace JSON's true, false and null, which templates write inside objects."""
    constants = {"true": True, "false": False, "null": None}
    return ast.Constant(constants[node.id]) if isinstance(node, ast.Name) and node.id in constants else node


def gemma_reader(quote: str) -> Callable[[str, Types], list[ToolCall]]:
    """Return a reader of ``call:f{x:1,y:"a"}`` with this mark in place of quotation marks."""

    def read(body: str, types: Types) -> list[ToolCall]:
        name, brace, values = body.strip().partition("{")
        if not name.startswith("call:") or not brace:
            raise ValueError("the call is not like call:name{argument:value}")
        parts = ("{" + values).split(quote)
        for index, part in enumerate(parts):  # every second part is text
            if index % 2:
                parts[index] = json.dumps(part)
            else:
                keyed = re.sub(r"([{,]\s*)([^\W\d][\w.-]*)(\s*:)", r'\1"\2"\3', part)
                constants = r"(?<=[:,\[])(?:None|True|False)(?=[,\]}])"  # templates write JSON's and Python's
                parts[index] = re.sub(constants, lambda match: json.dumps(_PYTHON[match[0]]), keyed)
        return [validate_call(name.removeprefix("call:"), json_value("".join(parts)))]

    return read


def read_xml(body: str, types: Types) -> list[ToolCall]:
    """Read ``<function=f>`` with a ``<parameter=x>`` for each argument, its value on lines of its own."""
    calls = []
    for name, inner in _elements(body, "<function=", ">", "</function>"):
        schemas = types.get(name.strip(), {})
        values = {}
        for key, value in _elements(inner, "<parameter=", ">", "</parameter>"):
            values[key.strip()] = _argument_value(value.removeprefix("\n").removesuffix("\n"), schemas.get(key.strip()))
        calls.append(validate_call(name, values))
    if not calls:
        raise ValueError("the call has no <function=name>")
    return calls


def read_glm(body: str, types: Types) -> list[ToolCall]:
    """Read the name, then an ``<arg_key>`` and an ``<arg_value>`` for each argument."""
    name, mark, rest = body.partition("<arg_key>")
    schemas = types.get(name.strip(), {})
    values = {}
    for key, value in _elements(mark + rest, "<arg_key>", "</arg_key>", "</arg_value>"):
        text = value.lstrip()
        if not text.startswith("<arg_value>"):
            raise ValueError(f"the argument {key.strip()[:LONGEST_NAME]} has no <arg_value>")
        values[key.strip()] = _argument_value(text.removeprefix("<arg_value>"), schemas.get(key.strip()))
    return [validate_call(name, values)]


def _elements(text: str, opens: str, separator: str, closes: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each element; ValueError for other text between them."""
    while text := text.strip():
        name, mark, rest = text.removeprefix(opens).partition(separator)
        content, end, remaining = rest.partition(closes)
        if not text.startswith(opens) or not mark or not end:
            raise ValueError(f"the call has text other than {opens}...{closes}, or one of them is not closed")
        yield name, content
        text = remaining


def _argument_value(text: str, schema: Any) -> Any:
    """Return a value written as text: JSON, unless its schema says that it is text or it is not JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return _PYTHON[text] if text in _PYTHON else json_value(text)
    except ValueError:
        return text


_HERMES = Syntax(("<tool_call>",), "<tool_call>", "</tool_call>", read_json_calls)

SYNTAXES: Mapping[str, Syntax] = {
    "xml": Syntax(("<function=",), "<tool_call>", "</tool_call>", read_xml),
    "glm": Syntax(("<arg_key>",), "<tool_call>", "</tool_call>", read_glm),
    "deepseek": Syntax(
        ("<｜tool▁call▁begin｜>",), "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_deepseek,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    ),
    "kimi": Syntax(
        ("<|tool_call_argument_begin|>",), "<|tool_call_begin|>", "<|tool_call_end|>", read_kimi,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
    ),
    "gemma": Syntax(
        ("<|tool_call>",), "<|tool_call>", "<tool_call|>", gemma_reader('<|"|>'), ('<|"|>',)
    ),
    "functiongemma": Syntax(
        ("<start_function_call>",), "<start_function_call>", "<end_function_call>", gemma_reader("<escape>"),
        ("<escape>",),
    ),
    "pythonic": Syntax(
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
        "<|tool_call_start|>", "<|tool_call_end|>", read_pythonic,
    ),
    "mistral": Syntax(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", read_mistral, ("[ARGS]", "[CALL_ID]")),
    "cohere": Syntax(("<|START_ACTION|>",), "<|START_ACTION|>", "<|END_ACTION|>", read_json_calls),
    "phi": Syntax(("<|/tool_call|>",), "<|tool_call|>", "<|/tool_call|>", read_json_calls),
    "granite": Syntax(("<|tool_call|>",), "<|tool_call|>", "", read_json_calls),
    "hermes": _HERMES,
    "llama": Syntax(('"parameters": dictionary', '"parameters": '), "", "", read_llama, ("<|python_tag|>",)),
    "plain": dataclasses.replace(_HERMES, template_marks=()),
}  # fmt: skip
"""Syntaxes by name, the most special first. ``gpt_oss`` is read apart: its calls are messages of the turn."""

THOUGHTS: Sequence[tuple[str, str]] = (
    ("<think>", "</think>"),
    ("<|channel>", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)
"""Marks around a model's reasoning."""


NO_CALLS = ""
"""Syntax of replies without tools: only the reasoning is separated."""
HARMONY = "gpt_oss"
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ADDRESSED = re.compile(r"to=functions\.([^\s<]+)")


@dataclasses.dataclass(frozen=True)
class ParsedReply:
    """One reply of the model as a message; if a call is unreadable, ``error`` says why and no call is kept."""

    message: Message
    error: str = ""


def syntax_of(template: str) -> str:
    """Return the name of the syntax of calls that a chat template teaches; ``plain`` if it knows no tools."""
    if not re.search(r"\btools\b", template):
        return "plain"
    if "<|channel|>commentary" in template:
        return HARMONY
    for name, syntax in SYNTAXES.items():
        if any(text in template for text in syntax.template_marks):
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


def parse_reply(text: str, syntax: str, tools: Sequence[Mapping[str, Any]] = (), thinking: bool = False) -> ParsedReply:
    """Separate a reply's calls and reasoning from its text; calls inside the reasoning are no calls.

    >>> parse_reply('Wait. <tool_call>{"name": "now", "arguments": {}}</tool_call>', "plain").message["content"]
    'Wait.'

    Args:
      text: of the reply, without the token that ended it; special tokens that belong to calls are part of it.
      syntax: see ``syntax_of``; ``NO_CALLS`` where the model has no tools.
      tools: JSON schemas; they tell text from numbers in syntaxes that do not quote text.
      thinking: whether the reply continues reasoning that the prompt began.
    """
    types = {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}
    form = SYNTAXES.get(syntax)
    pieces = list(_harmony_pieces(text) if syntax == HARMONY else _marked_pieces(text, form, types, thinking))
    error = next((piece.error for piece in pieces if piece.error), "")
    kinds = ("text", "call") if error else ("text",)
    content = "".join(piece.text for piece in pieces if piece.kind in kinds)
    message: Message = {"role": "assistant", "content": content if content == text else content.strip()}
    thoughts = [piece.text.strip() for piece in pieces if piece.kind == "thought"]
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    calls = [call for piece in pieces for call in piece.calls]
    if calls and not error:
        message["tool_calls"] = [tool_call(index, *call) for index, call in enumerate(calls)]
    return ParsedReply(message, error)


class _Piece(NamedTuple):
    """A part of a reply; ``kind`` is text, thought or call."""

    kind: str
    text: str
    calls: Sequence[ToolCall] = ()
    error: str = ""


def _marked_pieces(text: str, form: Syntax | None, types: Types, thinking: bool) -> Iterator[_Piece]:
    """Yield the parts of a reply whose calls stand between marks, from left to right."""
    closing = dict(THOUGHTS)
    opens = [*closing, *([form.opens] if form and form.opens else [])]
    begins = re.compile("|".join(map(re.escape, opens)))
    at = _end_of_first_thought(text, begins, thinking)
    if at:
        yield _Piece("thought", _remove_marks(text[:at], [mark for pair in THOUGHTS for mark in pair]))
    llama_call = re.compile(r'\s*(?:<\|python_tag\|>|\{\s*"(?:name|parameters)"\s*:|\[\s*\{\s*"name"\s*:)')
    if form and not form.opens and llama_call.match(text, at):
        yield _read_call(text[at:], _remove_marks(text[at:], form.around), form, types)
        return
    while match := begins.search(text, at):
        yield _Piece("text", _remove_marks(text[at : match.start()], form.around if form else ()))
        mark = match[0]
        if mark in closing:
            inner, _, _ = text[match.end() :].partition(closing[mark])
            at = match.end() + len(inner) + len(closing[mark])
            yield _Piece("thought", inner.removeprefix("thought\n"))  # gemma names its channel
        else:
            assert form is not None
            piece = _closed_call(text, match, form, types, begins)
            at = match.start() + len(piece.text)
            yield piece
    yield _Piece("text", _remove_marks(text[at:], form.around if form else ()))


def _end_of_first_thought(text: str, begins: re.Pattern[str], thinking: bool) -> int:
    """Return where reasoning ends that began before the text; 0 if there is none."""
    ends = [(text.find(closes), closes) for _, closes in THOUGHTS if closes in text]
    first = begins.search(text)
    if not ends:
        return len(text) if thinking else 0
    at, mark = min(ends)
    return at + len(mark) if thinking or first is None or at < first.start() else 0


def _closed_call(text: str, opening: re.Match[str], form: Syntax, types: Types, begins: re.Pattern[str]) -> _Piece:
    """Read the call that begins here, up to the first mark that closes it; its arguments may hold that mark, too."""
    closing = re.compile(re.escape(form.closes)) if form.closes else begins
    ends = (end.start() for end in closing.finditer(text, opening.end()))
    first: _Piece | None = None
    # Several closing marks are tried, since the arguments may hold one.
    for end in (*itertools.islice(ends, 8), len(text)):
        raw = text[opening.start() : end + len(form.closes)]
        piece = _read_call(raw, text[opening.end() : end], form, types)
        if not piece.error:
            return piece
        first = first or piece
    assert first is not None
    return first


def _read_call(raw: str, body: str, form: Syntax, types: Types) -> _Piece:
    try:
        return _Piece("call", raw, form.read(body, types))
    except RecursionError:
        return _Piece("call", raw, error="the call is nested too deep")
    except ValueError as error:
        return _Piece("call", raw, error=str(error))


def _remove_marks(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _harmony_pieces(text: str) -> Iterator[_Piece]:
    """Yield the parts of a reply of gpt-oss: messages of their own for reasoning, calls and the answer."""
    at = 0
    parts = r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)"
    for match in re.finditer(parts, text, re.DOTALL):
        at = match.end()
        recipient = _ADDRESSED.search(match["head"])
        if recipient:
            try:
                yield _Piece("call", match[0], [validate_call(recipient[1], json_value(match["body"]))])
            except ValueError as error:
                yield _Piece("call", match[0], error=str(error))
        else:
            yield _Piece("thought" if "analysis" in match["head"] else "text", match["body"])
    if _ADDRESSED.search(text, at):
        yield _Piece("call", text[at:], error="the call has no <|message|> with its arguments")
    else:
        yield _Piece("text", _remove_marks(text[at:], _HARMONY_MARKS))
