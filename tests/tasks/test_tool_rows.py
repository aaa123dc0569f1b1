"""Rows with calls of tools: they are read as the episodes that they tell, and only what the model said is learned."""

import copy
import json

import pytest
from environments.chat_templates import ADD, TEMPLATES, byte_tokenizer
from environments.test_episode_format import ANSWERED, CALL, CALLED, FAMILIES, RESULT, SAID, USER, ids, made

from jaxrl_llm.data import Pairs, Texts, load_texts
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Task

ROW = {"prompt": [USER], "completion": [CALL, RESULT, SAID], "tools": [ADD]}
IN_TEXT = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'


def read(row, template, stops, kind=Texts, **wording):
    tokenizer = byte_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(stops))
    [found] = load_texts(kind([copy.deepcopy(row)], template=template, **wording), tokenizer, ends).train
    return found


def played(form, called, answered):
    """The prompt of an episode, what follows it, and what of that was sampled."""
    first, second = ids(called), ids(answered)
    given = form.suffix([USER, CALL], [RESULT], first)
    mask = [True] * len(first) + [False] * len(given) + [True] * len(second)
    return form.prompt([USER]), [*first, *given, *second], mask


def same(row, prompt, tokens, mask):
    assert (row.prompt.tolist(), row.tokens.tolist(), row.mask.tolist()) == (prompt, tokens, mask)


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"gpt_oss"}))  # whose answers begin with the name of a channel
def test_a_row_is_read_as_the_episode_that_it_tells(name):
    same(read(ROW, *TEMPLATES[name]), *played(made(name), CALLED[name], ANSWERED[name]))


@pytest.mark.parametrize("wording", [{}, {"system": "Be brief.", "suffix": "!"}])
def test_a_template_without_tools_gets_them_as_text(wording):
    stop = byte_tokenizer().convert_tokens_to_ids(["<|im_end|>"])
    form = EpisodeFormat(byte_tokenizer(), Task([], template="chatml", **wording), [ADD], stop)
    same(read(ROW, "chatml", ["<|im_end|>"], **wording), *played(form, IN_TEXT, "It is 3.<|im_end|>"))


@pytest.mark.parametrize("name", ["hermes", "chatml"])
def test_a_call_may_be_the_last_thing_that_is_learned(name):
    template, stops = TEMPLATES.get(name, ("chatml", ["<|im_end|>"]))
    row = read({**ROW, "completion": [CALL]}, template, stops)
    assert row.tokens.tolist() == ids(CALLED.get(name, IN_TEXT)) and row.mask.all()


def test_calls_are_read_in_the_forms_of_other_writers():
    wanted = read(ROW, *TEMPLATES["hermes"])
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    other = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = read({"messages": [USER, other, RESULT, SAID], "tools": [ADD]}, *TEMPLATES["hermes"])
    assert found.tokens.tolist() == wanted.tokens.tolist() and found.mask.tolist() == wanted.mask.tolist()


def test_a_message_that_is_not_learned_may_call():
    row = read({**ROW, "completion": [CALL | {"weight": 0}, RESULT, SAID]}, "chatml", ["<|im_end|>"])
    assert byte_tokenizer().decode(row.tokens[row.mask]) == "It is 3.<|im_end|>"


def test_a_result_and_the_users_words_after_it_are_one_message_as_in_an_episode():
    stop = byte_tokenizer().convert_tokens_to_ids(["<|im_end|>"])
    form = EpisodeFormat(byte_tokenizer(), Task([], template="chatml"), [ADD], stop)
    more = {"role": "user", "content": "And?"}
    given = form.suffix([USER, CALL], [RESULT, more], ids(IN_TEXT))
    row = read({**ROW, "completion": [CALL, RESULT, more, SAID]}, "chatml", ["<|im_end|>"])
    assert row.tokens.tolist() == [*ids(IN_TEXT), *given, *ids("It is 3.<|im_end|>")]


def test_the_end_of_anothers_turn_is_not_learned():
    template = BARE.replace("<|im_end|>", "{% if m.role == 'user' %}<|im_end|>{% endif %}")
    row = read({"prompt": [USER], "completion": [SAID, USER, SAID]}, template, ["<|im_end|>"])
    assert byte_tokenizer().decode(row.tokens[row.mask]) == "It is 3.It is 3.<|im_end|>"


def test_pairs_may_follow_calls():
    sides = {"chosen": [SAID], "rejected": [{"role": "assistant", "content": "It is 4."}]}
    pair = read({"prompt": [USER, CALL, RESULT], "tools": [ADD], **sides}, *TEMPLATES["hermes"], Pairs)
    assert pair.prompt.tolist()[-len(ids("assistant\n")) :] == ids("assistant\n")
    assert byte_tokenizer().decode(pair.completions[0]) == "It is 3.<|im_end|>"


BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(("change", "template", "words"), [
    ({}, BARE, "the row has tools, which the chat template does not read"),
    ({"tools": None}, BARE, "the chat template cannot write these calls of tools"),
    ({"tools": [{"name": "add"}]}, "chatml", "tools is .* it must be a list of JSON schemas"),
    ({"completion": [CALL | {"tool_calls": [{"function": {}}]}, RESULT, SAID]}, "chatml", "a call has no name"),
    ({"completion": [CALL, RESULT]}, "chatml", "completion ends with a message of the tool"),
    ({"completion": [{"role": "assistant", "content": ""}]}, "chatml", "is empty"),
])  # fmt: skip
def test_rows_that_cannot_be_read_are_refused(change, template, words):
    with pytest.raises(InputError, match=words):
        read(ROW | change, template, ["<|im_end|>"])
