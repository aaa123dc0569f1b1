"""Chats that a template rewrites: where a new row begins, and what it begins with."""

import json

import pytest
from environments.chat_templates import _CALLS, ADD, FORGETFUL, HERMES, LLAMA, byte_tokenizer
from environments.test_episode_format import CALL, CALLED, MORE, RESULT, USER, ids

from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.messages import tool_call

THINKING = (
    "{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
) + HERMES.replace(
    "{{ m.content }}" + _CALLS,
    "{% if m.reasoning_content and loop.index0 > last.user %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}" + _CALLS,
)
"""Drops reasoning once a user has spoken again, as Qwen3's."""


@pytest.mark.parametrize(("template", "after_result"), [(THINKING, False), (FORGETFUL, True)])
def test_a_new_row_begins_where_history_changes_and_is_what_the_template_writes(template, after_result):
    tokenizer = byte_tokenizer("<|im_end|>")
    form = EpisodeFormat(tokenizer, Task([], template=template, suffix="!"), [ADD], history="fork")
    kept = EpisodeFormat(tokenizer, Task([], template=template, suffix="!"), [ADD])
    assert form.note.endswith("a new row begins where it does (fork)") and kept.note.endswith("(append_only)")
    asked, turns = [USER], [USER | {"content": "1 + 2?!"}]
    thought = "<think>\nHm <|im_end|>.\n</think>\n\n"
    for number, (said, message) in enumerate([
        (f"{thought}{CALLED['hermes']}", RESULT), (f"{thought}It is 3.<|im_end|>", MORE), ("So.<|im_end|>", MORE),
    ]):  # fmt: skip
        sampled = [*ids(thought[:11], tokenizer), *ids(said[11:], tokenizer)] if number < 2 else ids(said, tokenizer)
        turns.append(form.parse(sampled).message)
        found = form.fork(asked, turns, [message])
        assert bool(found) == (number == 1 or (number == 0 and after_result))
        assert not kept.fork(asked, turns, [message])
        turns.append(message)
        if found:
            told = json.loads(json.dumps(turns).replace("<|im_end|>", "<~im_end|>"))
            for one in told if template == FORGETFUL else ():
                if "reasoning_content" in one:
                    one["content"] = f"<think>\n{one['reasoning_content']}\n</think>\n\n{one['content']}"
            wanted = tokenizer.apply_chat_template(
                told, tools=[ADD], chat_template=template, tokenize=False, add_generation_prompt=True
            )
            assert tokenizer.decode(found).replace("Hm <|", "Hm <~") == wanted
            assert found.count(ids("<|im_end|>", tokenizer)[0]) == wanted.count("<|im_end|>"), "spelled out, it is text"


def test_a_template_that_takes_one_call_cannot_write_two_anew():
    tokenizer = byte_tokenizer("<|eot_id|>")
    template = LLAMA.replace("<|head|>user", "<|head|>user {{ messages | length // 3 }}")
    form = EpisodeFormat(tokenizer, Task([], template=template), [ADD], history="fork")
    twice = CALL | {"tool_calls": [tool_call(0, "add", {"a": 1}), tool_call(1, "add", {"a": 2})]}
    results = [RESULT, RESULT | {"tool_call_id": "call00001"}]
    with pytest.raises(InputError, match=r"1 call for each reply.* set --rollout.episode.history append_only"):
        form.fork([USER], [USER, twice], results)
    assert "<|head|>user 1<" in tokenizer.decode(form.fork([USER], [USER, CALL], [RESULT]))
