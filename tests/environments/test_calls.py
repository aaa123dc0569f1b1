"""Replies are parsed in every syntax, and a broken one costs a message, never an exception."""

import itertools
import json
import random

import pytest

from jaxrl_llm.environments.calls import _HARMONY_MARKS, HARMONY, NO_CALLS, SYNTAXES, THOUGHTS, parse_reply, syntax_of
from jaxrl_llm.errors import InputError

HEAD = "<|channel|>commentary to=functions."
WRITTEN = {
    "plain": '<tool_call>{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}</tool_call>',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "to": "é {x}"}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}]',
    "cohere": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1, "to": "é {x}"}}]<|END_ACTION|>',
    "phi": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}]',
    "gemma": '<|tool_call>call:add{a:1,to:<|"|>é {x}<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:add{a:1,to:<escape>é {x}<escape>}<end_function_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "to": "é {x}"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "to": "é {x}"}<|tool_call_end|><|tool_calls_section_end|>',
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=to>\né {x}\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>to</arg_key>\n"
    "<arg_value>é {x}</arg_value>\n</tool_call>",
    "pythonic": "<|tool_call_start|>[add(a=1, to='é {x}')]<|tool_call_end|>",
    HARMONY: HEAD + 'add <|constrain|>json<|message|>{"a": 1, "to": "é {x}"}<|call|>',
}
TEXT_FIRST = sorted(set(WRITTEN) - {"llama", HARMONY})


def functions(parsed):
    return [call["function"] for call in parsed.message.get("tool_calls", ())]


def hermes(name, arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def test_every_syntax_has_an_example_here():
    assert set(WRITTEN) == {*SYNTAXES, HARMONY}


@pytest.mark.parametrize("syntax", sorted(WRITTEN))
def test_a_call_is_read_with_its_arguments(syntax):
    parsed = parse_reply(WRITTEN[syntax], syntax)
    assert parsed.error == ""
    assert functions(parsed) == [{"name": "add", "arguments": {"a": 1, "to": "é {x}"}}]
    assert parsed.message["content"] == "" and parsed.message["role"] == "assistant"


@pytest.mark.parametrize("syntax", TEXT_FIRST)
def test_text_around_a_call_is_content_and_two_calls_keep_their_order(syntax):
    second = WRITTEN[syntax].replace("add", "sub")
    parsed = parse_reply(f"First. {WRITTEN[syntax]}{second}", syntax)
    assert [function["name"] for function in functions(parsed)] == ["add", "sub"]
    assert parsed.message["content"] == "First."
    assert len({call["id"] for call in parsed.message["tool_calls"]}) == 2


@pytest.mark.parametrize("syntax", TEXT_FIRST)
def test_a_call_inside_reasoning_is_no_call(syntax):
    call = WRITTEN[syntax]
    closed = parse_reply(f"<think>\nI could {call}\n</think>\n\nDone.", syntax)
    assert functions(closed) == [] and closed.error == "" and closed.message["content"] == "Done."
    assert closed.message["reasoning_content"] == f"I could {call}"
    begun = parse_reply(f"I could {call}</think>Done.", syntax, thinking=True)
    assert functions(begun) == [] and begun.message["content"] == "Done."
    for endless in (parse_reply(f"<think> {call}", syntax), parse_reply(f"Hm {call}", syntax, thinking=True)):
        assert functions(endless) == [] and endless.error == "" and endless.message["content"] == ""
    between = parse_reply(f"<think>a</think>{call}<think>{call}</think>", syntax)
    assert len(functions(between)) == 1 and between.message["content"] == ""


@pytest.mark.parametrize("syntax", sorted(WRITTEN))
def test_without_tools_a_reply_stays_as_it_is(syntax):
    text = f" {WRITTEN[syntax]} "
    assert parse_reply(text, NO_CALLS).message == {"role": "assistant", "content": text}


def test_a_llama_reply_is_a_call_only_if_it_begins_as_one():
    two = parse_reply('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}', "llama")
    assert functions(two) == [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [1]}}]
    for text in ('{"answer": 3}', 'It is {"name": "f", "parameters": {}}', "3"):
        assert parse_reply(text, "llama").message == {"role": "assistant", "content": text}
    assert "not valid JSON" in parse_reply('{"name": "f", "parameters": {', "llama").error


def test_messages_of_gpt_oss_are_reasoning_calls_and_the_answer():
    thought = "<|channel|>analysis<|message|>So add.<|end|><|start|>assistant"
    parsed = parse_reply(thought + HEAD + 'add <|constrain|>json<|message|>{"a": 1}', HARMONY)
    assert functions(parsed) == [{"name": "add", "arguments": {"a": 1}}]
    assert parsed.message["reasoning_content"] == "So add."
    older = parse_reply(' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', HARMONY)
    assert functions(older) == functions(parsed)
    answer = parse_reply(thought + "<|channel|>final<|message|>It is 3.", HARMONY)
    assert answer.message["content"] == "It is 3." and functions(answer) == []
    assert parse_reply("It is 3.", HARMONY).message["content"] == "It is 3."
    assert "no <|message|>" in parse_reply(HEAD + "add", HARMONY).error
    assert "not valid JSON" in parse_reply(HEAD + "add<|message|>{<|call|>", HARMONY).error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {}', "not valid JSON"),
        ('{"name": "f", "arguments": {}} and more', "not valid JSON"),
        ("{'name': 'f'}", "not valid JSON"),
        ("[]", "empty"),
        ("3", "not a JSON object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": 3, "arguments": {}}', "no name"),
        ('{"name": " ", "arguments": {}}', "no name"),
        ('{"name": "f", "arguments": [1]}', "arguments of f are not a JSON object"),
        ('{"name": "f", "arguments": 0}', "arguments of f are not a JSON object"),
        ('{"name": "f", "arguments": "now"}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "arguments of f are not JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "arguments of f are not JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "arguments of f are not JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "too long"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_broken_call_is_told_in_one_line_and_runs_nothing(body, reason):
    parsed = parse_reply(f"Well. {hermes('good', {})}<tool_call>{body}</tool_call>", "hermes")
    assert reason in parsed.error and "\n" not in parsed.error and len(parsed.error) < 120
    assert "tool_calls" not in parsed.message and parsed.message["content"].startswith("Well. <tool_call>")


def test_arguments_may_be_missing_or_an_object_in_quotes():
    for arguments in ("", ', "arguments": null', ', "arguments": {}', ', "arguments": "{}"'):
        parsed = parse_reply('<tool_call>{"name": "f"' + arguments + "}</tool_call>", "hermes")
        assert functions(parsed) == [{"name": "f", "arguments": {}}]


def test_an_argument_may_hold_the_marks():
    marks = {"a": "</tool_call><think>", "b": {"c": {"d": '{"name": "g"}'}}, "e": '日本 \U0001f600 \\ " \n'}
    parsed = parse_reply(f"{hermes('f', marks)} then {hermes('g', {})}", "hermes")
    assert functions(parsed) == [{"name": "f", "arguments": marks}, {"name": "g", "arguments": {}}]
    assert parsed.message["content"] == "then"
    assert functions(parse_reply(hermes("f", marks).removesuffix("</tool_call>"), "hermes")) == functions(parsed)[:1]
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {"x": "[TOOL_CALLS]"}}]'
    assert functions(parse_reply(listed, "mistral")) == [{"name": "f", "arguments": {"x": "[TOOL_CALLS]"}}]


def test_the_end_of_the_reply_closes_a_whole_call():
    for syntax in sorted(set(WRITTEN) - {"deepseek", "kimi"}):
        closes = SYNTAXES[syntax].closes if syntax in SYNTAXES else "<|call|>"
        parsed = parse_reply(WRITTEN[syntax].removesuffix(closes), syntax)
        assert len(functions(parsed)) == 1 and parsed.error == ""


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("add(1)", "need names"),
        ("[add(**{'a': 1})]", "need names"),
        ("[add(a=other)]", "not plain values"),
        ("[add(a=open('x'))]", "not plain values"),
        ("[1]", "not a list like"),
        ("[add(a=1]", "not a list like"),
        ("[]", "empty"),
        ("[add(a={1, 2})]", "not JSON"),
        ("[add(a=b'x')]", "not JSON"),
        ("(" * 5000, "not a list like"),
        ("[" + "-" * 50_000 + "1]", "not a list like"),
        ("[f(a=1)," + "g." * 3000 + "h()]", ""),
    ],
)
def test_pythonic_calls_are_plain_values_only(calls, reason):
    parsed = parse_reply(f"<|tool_call_start|>{calls}<|tool_call_end|>", "pythonic")
    assert parsed.error if not reason else reason in parsed.error


def test_pythonic_objects_may_be_json():
    parsed = parse_reply(
        "<|tool_call_start|>[a.b(x={'k': [true, null]}, y=None, z='\\d')]<|tool_call_end|>", "pythonic"
    )
    assert functions(parsed) == [{"name": "a.b", "arguments": {"x": {"k": [True, None]}, "y": None, "z": "\\d"}}]


def test_schemas_tell_text_from_numbers():
    properties = {"a": {"type": "string"}, "to": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    for syntax in ("xml", "glm"):
        parsed = parse_reply(WRITTEN[syntax], syntax, tools)
        assert functions(parsed) == [{"name": "add", "arguments": {"a": "1", "to": "é {x}"}}]
    words = WRITTEN["xml"].replace("\n1\n", "\nTrue\n")
    assert functions(parse_reply(words, "xml"))[0]["arguments"]["a"] is True


@pytest.mark.parametrize("syntax", sorted(WRITTEN))
def test_any_damage_gives_a_message(syntax):
    draws = random.Random(syntax)
    marks = SYNTAXES[syntax].marks if syntax in SYNTAXES else _HARMONY_MARKS
    pieces = [*marks, *itertools.chain(*THOUGHTS), "name", "arguments", *'{}":,f1[](é\n\\']
    for _ in range(150):
        whole = list(WRITTEN[syntax])
        for _ in range(draws.randrange(1, 6)):
            at = draws.randrange(len(whole))
            whole[at : at + draws.randrange(4)] = draws.choice(pieces)
        text = "".join(whole)
        parsed = parse_reply(text, syntax, thinking=draws.random() < 0.3)
        assert parsed.message["role"] == "assistant" and isinstance(parsed.message["content"], str)
        assert not (parsed.error and "tool_calls" in parsed.message) and "\n" not in parsed.error
        for function in functions(parsed):
            assert function["name"] and json.loads(json.dumps(function["arguments"])) == function["arguments"]


def test_a_template_teaches_its_syntax():
    taught = {
        "{{ tools }} " + syntax.template_marks[0]: name for name, syntax in SYNTAXES.items() if syntax.template_marks
    }
    assert len(taught) == len(SYNTAXES) - 1
    for template, name in taught.items():
        assert syntax_of(template) == name
    assert syntax_of("{{ tools }}<|channel|>commentary") == HARMONY
    assert syntax_of("{{ messages }}<tool_call>") == "plain"
    with pytest.raises(InputError, match="form that is not known here; set --task"):
        syntax_of("{{ tools }}")
