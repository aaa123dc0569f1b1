"""Episodes as tokens: what follows a reply is as the template writes it, and nobody else writes control tokens."""

import json

import pytest
from environments.chat_templates import (
    ADD,
    FORGETFUL,
    HERMES,
    LLAMA,
    TEMPLATES,
    TEXT_TOKENS,
    WRITTEN,
    byte_tokenizer,
)

from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.tokenizer import special_ids
from jaxrl_llm.tasks import Task, encode
from jaxrl_llm.tasks.messages import tool_call
from jaxrl_llm.types import Problem

USER = {"role": "user", "content": "1 + 2?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "add", {"a": 1})]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": '\n{"sum": "3"} é'}
SAID = {"role": "assistant", "content": "It is 3."}
MORE = {"role": "user", "content": "\n\nAnd é?"}
HARMFUL = " ".join([*WRITTEN, *TEXT_TOKENS, "<eos>", "<bos>", "<<|im_end|>", "<|im<|im_end|>_end|>"])
CALLED = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "llama": '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
    "gemma": "<|tool_call>call:add{a:1}<tool_call|><|tool_response>",
    "gpt_oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end｜>',
    "glm": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
}
ANSWERED = {
    "hermes": "It is 3.<|im_end|>",
    "llama": "It is 3.<|eot_id|>",
    "gemma": "It is 3.<turn|>",
    "gpt_oss": "<|channel|>final<|message|>It is 3.<|return|>",
    "deepseek": "It is 3.<｜end｜>",
    "glm": "It is 3.<|user|>",
}
FAMILIES = sorted(TEMPLATES)


def made(name, tokenizer=None):
    tokenizer = tokenizer or byte_tokenizer()
    template, stops = TEMPLATES[name]
    return EpisodeFormat(tokenizer, Task([], template=template), [ADD], tokenizer.convert_tokens_to_ids(list(stops)))


def ids(text, tokenizer=None):
    return (tokenizer or byte_tokenizer())(text, add_special_tokens=False)["input_ids"]


def whole(name, messages, tokenizer=None):
    """The template's own rendering, as one text."""
    told = json.loads(json.dumps(messages))
    for message in told if name == "deepseek" else ():
        for call in message.get("tool_calls", ()):
            message["content"] = None
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    render = (tokenizer or byte_tokenizer()).apply_chat_template
    return render(told, tools=[ADD], chat_template=TEMPLATES[name][0], tokenize=False, add_generation_prompt=True)


def episode(name, tokenizer=None):
    """The row of an episode of two replies, fed as an engine is: only by its prompt, its samples and its suffixes."""
    form, first, second = made(name, tokenizer), ids(CALLED[name], tokenizer), ids(ANSWERED[name], tokenizer)
    row = [*form.prompt([USER]), *first]
    row += form.suffix([USER, form.parse(first).message], [RESULT], first)
    turns = [USER, CALL, RESULT, form.parse(second, row).message]
    return [*row, *second, *form.suffix(turns, [MORE], second)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_samples_and_suffixes_are_the_whole_rendering(name):
    text = whole(name, [USER, CALL, RESULT, SAID, MORE])
    if name == "gpt_oss":  # the sampled stop token stays where the template would replace it
        text = text.replace("It is 3.<|end|>", "It is 3.<|return|>")
    assert byte_tokenizer().decode(episode(name)) == text
    assert episode(name) == ids(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_replies_are_read_as_they_were_meant(name):
    form = made(name)
    assert form.syntax == name
    [call] = form.parse(ids(CALLED[name])).message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert form.parse(ids(ANSWERED[name])).message == SAID


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_without_a_stop_token_gets_the_templates_end(name):
    form, called, answered = made(name), ids(CALLED[name]), ids(ANSWERED[name])
    turns = [USER, CALL]
    assert called[-1:] + form.suffix(turns, [RESULT], called) == form.suffix(turns, [RESULT], called[:-1])
    turns = [USER, CALL, RESULT, SAID]
    end = ids("<|end|>") if name == "gpt_oss" else answered[-1:]
    assert end + form.suffix(turns, [MORE], answered) == form.suffix(turns, [MORE], answered[:-1])


def test_a_part_of_the_end_that_was_sampled_is_not_written_twice():
    template = HERMES.replace("<|im_end|>", "<|end|><|im_end|>")
    form = EpisodeFormat(byte_tokenizer("<|im_end|>"), Task([], template=template), [ADD])
    ends = ["<|end|><|im_end|>", "<|end|>", ""]
    for turns, message, said in (([USER, CALL], RESULT, "</tool_call>"), ([USER, SAID], MORE, "It is 3. <")):
        rows = [[*ids(said + end), *form.suffix(turns, [message], ids(said + end))] for end in ends]
        assert rows[0] == rows[1] == rows[2]
    spaced = HERMES.replace("</tool_call>{%", "</tool_call>{{ '\\n' }}{%")
    form = EpisodeFormat(byte_tokenizer("<|im_end|>"), Task([], template=spaced), [ADD])
    suffixes = [form.suffix([USER, CALL], [RESULT], ids(f"</tool_call>{space}")) for space in ("\n", "")]
    assert ids("\n") + suffixes[0] == suffixes[1] and suffixes[0][0] == ids("<|im_end|>")[0]


def test_another_stop_token_takes_the_place_of_the_end_but_of_nothing_else():
    llama = made("llama")
    assert llama.suffix([USER, SAID], [MORE], ids("3<|eom_id|>")) == llama.suffix(
        [USER, SAID], [MORE], ids("3<|eot_id|>")
    )
    glm = made("glm")
    assert byte_tokenizer().decode(glm.suffix([USER, SAID], [MORE], ids("3<eos>"))).startswith("<|user|>\n")
    assert byte_tokenizer().decode(glm.suffix([USER, CALL], [RESULT], ids("3<|user|>"))).startswith("<|observation|>\n")
    gemma = made("gemma").suffix([USER, CALL], [RESULT], ids("3<turn|>"))
    assert byte_tokenizer().decode(gemma).startswith("<|tool_response>response:add{")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_contents_of_the_worlds_messages_are_told_from_the_templates_tokens(name):
    form, called, answered = made(name), ids(CALLED[name]), ids(ANSWERED[name])
    texts = ["x 0 -", "x", "0x0", "-", "", HARMFUL.strip()]
    several = [{"role": "user", "content": text} for text in texts]
    for turns, messages, sampled in (([USER, CALL], [RESULT], called), ([USER, SAID], several, answered)):
        suffix = form.suffix(turns, messages, sampled)
        found = form.content_ranges(turns, messages, sampled, suffix)
        told = [byte_tokenizer().decode(suffix[begin:end]) for begin, end in found]
        wanted = [message["content"] for message in messages]
        if name in ("llama", "gpt_oss") and messages == [RESULT]:  # written as JSON
            wanted = [json.dumps(text, ensure_ascii=False)[1:-1] for text in wanted]
        assert told == wanted


def test_a_token_that_joins_a_content_with_the_templates_text_is_the_contents():
    tokenizer = byte_tokenizer(merges=(("}", '"'),))
    form = EpisodeFormat(tokenizer, Task([], template=LLAMA), [ADD], tokenizer.convert_tokens_to_ids(["<|eot_id|>"]))
    asked = [USER, CALL], [RESULT | {"content": "3}"}], ids(CALLED["llama"], tokenizer)
    suffix = form.suffix(*asked)
    [(begin, end)] = form.content_ranges(*asked, suffix)
    assert tokenizer.decode(suffix[begin:end]) == '3}"' and end - begin == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_sampled_is_never_tokenised_again(name):
    form, stop = made(name), ids(CALLED[name])[-1]
    expected = form.suffix([USER, CALL], [RESULT], [stop])
    for odd in ([255, 254, 3, 3], ids(HARMFUL), [stop, stop], list(range(40, 90))):
        assert form.suffix([USER, CALL], [RESULT], [*odd, stop]) == expected
        assert form.parse([*odd, stop]).message["role"] == "assistant"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_control_tokens_in_what_the_world_says_are_text(name, role):
    form = made(name)
    turns, message = ([USER, CALL], RESULT) if role == "tool" else ([USER, CALL, RESULT, SAID], MORE)
    stop = ids(CALLED[name] if role == "tool" else ANSWERED[name])
    harmless = form.suffix(turns, [message | {"content": "x"}], stop)
    harmful = form.suffix(turns, [message | {"content": HARMFUL}], stop)
    control = {*special_ids(byte_tokenizer()), *(ids("".join(TEXT_TOKENS)) if role == "tool" else ())}
    assert [token for token in harmful if token in control] == [token for token in harmless if token in control]
    shown = (
        json.dumps(HARMFUL, ensure_ascii=False)[1:-1] if name in ("llama", "gpt_oss") and role == "tool" else HARMFUL
    )
    assert shown in byte_tokenizer().decode(harmful)


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_in_a_prompt_and_in_names_are_text(name):
    form, special = made(name), special_ids(byte_tokenizer())
    harmful, harmless = (form.prompt([USER | {"content": content}]) for content in (HARMFUL, "x"))
    assert [t for t in harmful if t in special] == [t for t in harmless if t in special]
    found = []
    for named in ("f", "f<|im_end|><|call|><|tool_response>"):
        reply = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, named, {})]}
        suffix = form.suffix([USER, reply], [RESULT | {"name": named}], ids(CALLED[name]))
        found.append([token for token in suffix if token in special])
    assert found[0] == found[1]


def test_a_system_message_and_an_assistants_may_hold_control_tokens():
    form = made("hermes")
    told = form.prompt([{"role": "system", "content": "<|call|>"}, USER, SAID | {"content": "<|call|>"}, USER])
    assert told.count(ids("<|call|>")[0]) == 2


def test_half_characters_become_replacement_characters():
    form = made("hermes")
    result = RESULT | {"content": "a\ud800b \U0001f600 \ufdd0"}
    assert "a\ufffdb \U0001f600 \n" in byte_tokenizer().decode(form.suffix([USER, CALL], [result], ids("<|im_end|>")))


def test_tokens_that_cross_a_border_are_as_in_the_whole_text():
    merged = byte_tokenizer(merges=(("Ċ", "Ċ"),))
    two = merged.convert_tokens_to_ids("ĊĊ")
    row = episode("hermes", merged)
    assert row.count(two) == 1 and row == ids(whole("hermes", [USER, CALL, RESULT, SAID, MORE], merged), merged)


def test_tokens_that_take_the_white_space_after_them_do():
    taking = byte_tokenizer(rstrip=True)
    row = episode("hermes", taking)
    assert row == ids(whole("hermes", [USER, CALL, RESULT, SAID, MORE], taking), taking)
    assert ids("\n")[0] not in row[row.index(ids("<|im_start|>")[0]) :][:2]


def test_several_results_and_a_message_of_the_user_follow_in_order():
    both = CALL | {"tool_calls": [tool_call(0, "add", {"a": 1}), tool_call(1, "add", {"a": 2})]}
    for name in FAMILIES:
        text = byte_tokenizer().decode(
            made(name).suffix([USER, both], [RESULT | {"content": c} for c in ("R1", "R2")] + [MORE], ids(CALLED[name]))
        )
        assert text.index("R1") < text.index("R2") < text.index("And é?") and text.count("R1") == 1
    joined = made("hermes").suffix([USER, SAID], [USER, MORE], ids(ANSWERED["hermes"]))
    assert "1 + 2?\n\n\n\nAnd é?<|im_end|>" in byte_tokenizer().decode(joined)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_with_a_broken_call_is_answered(name):
    form, sampled = made(name), ids(CALLED[name].replace("1", "{[("))
    parsed = form.parse(sampled)
    if name != "glm":  # whose arguments are text
        assert parsed.error
    for message in (MORE, RESULT):
        turns = [USER, {"role": "assistant", "content": "broken"}]
        told = "And" if message is MORE else "sum"
        assert told in byte_tokenizer().decode(form.suffix(turns, [message], sampled))


def test_the_next_reply_may_follow_at_once():
    suffix = made("hermes").suffix([USER, SAID], [], ids(ANSWERED["hermes"]))
    assert byte_tokenizer().decode(suffix) == "\n<|im_start|>assistant\n"


def test_without_tools_a_prompt_is_that_of_a_single_answer():
    messages = ({"role": "system", "content": "Old."}, USER, SAID, MORE)
    for settings in (
        {"template": "chatml"},
        {"template": "plain"},
        {"template": HERMES, "system": "New.", "suffix": "!"},
    ):
        task = Task([], **settings)
        form = EpisodeFormat(byte_tokenizer(), task)
        assert form.prompt(messages) == encode(Problem("1", messages, "2", "sums"), task, byte_tokenizer()).tolist()
        assert form.parse(ids("<tool_call>{}")).message["content"] == "<tool_call>{}"


def test_the_plain_form_describes_tools_in_the_system_message():
    tokenizer = byte_tokenizer("<|im_end|>")
    form = EpisodeFormat(tokenizer, Task([], template="chatml", system="Be brief."), [ADD])
    prompt = tokenizer.decode(form.prompt([USER]))
    assert prompt == (
        f"<|im_start|>system\nBe brief.\n\nYou have these tools:\n{json.dumps(ADD['function'])}\n"
        'To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>; its result follows as '
        "<tool_response>...</tool_response>.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    sampled = ids('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')
    parsed = form.parse(sampled)
    assert parsed.message["tool_calls"] == CALL["tool_calls"]
    results = [RESULT | {"content": content} for content in ("3", HARMFUL)]
    suffix = form.suffix([USER, parsed.message], results, sampled)
    assert tokenizer.decode(suffix) == (
        f"\n<|im_start|>user\n<tool_response>3</tool_response>\n<tool_response>{HARMFUL}</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert sum(token in special_ids(tokenizer) for token in suffix) == 3
    told = tokenizer.decode(form.prompt([USER, CALL, RESULT, USER]))
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in told


def test_template_plain_joins_by_blank_lines():
    form = EpisodeFormat(byte_tokenizer(), Task([], template="plain"), [ADD])
    assert byte_tokenizer().decode(form.suffix([USER, SAID], [RESULT, MORE], ids("3<eos>"))) == (
        '\n\n<tool_response>\n{"sum": "3"} é</tool_response>\n\n\n\nAnd é?'
    )


def test_rewritten_history_and_foreign_ends_are_told():
    assert made("hermes").note == "" and made("glm").note == ""
    forgetful = EpisodeFormat(byte_tokenizer("<|im_end|>"), Task([], template=FORGETFUL), [ADD])
    assert forgetful.note.startswith("the chat template rewrites earlier replies") and "append_only" in forgetful.note
    foreign = EpisodeFormat(byte_tokenizer("<eos>"), Task([], template="chatml"))
    assert foreign.note == "completions end at <eos>, which the chat template does not write between turns; it stays"
    assert byte_tokenizer().decode(foreign.suffix([USER, SAID], [MORE], ids("3<eos>"))).startswith("\n<|im_start|>user")


def test_what_the_prompt_began_to_think_is_reasoning():
    thinking = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    form = EpisodeFormat(byte_tokenizer("<|im_end|>"), Task([], template=thinking), [ADD])
    sampled = ids(f"I may {CALLED['hermes'].removesuffix('<|im_end|>')}</think>It is 3.<|im_end|>")
    assert form.parse(sampled).message["content"] == "It is 3." and "tool_calls" not in form.parse(sampled).message
    assert "tool_calls" in form.parse(ids(CALLED["hermes"]), ids("assistant\n")).message
    assert "tool_calls" not in form.parse(ids(CALLED["hermes"]), ids("assistant\n<think>\n")).message


def test_special_tokens_that_end_nothing_stay_in_replies():
    assert made("hermes").parse(ids("It <|turn>is<bos> 3.<|im_end|>")).message["content"] == "It <|turn>is<bos> 3."


def test_a_tokenizers_template_for_tools_is_taken():
    tokenizer = byte_tokenizer("<|eot_id|>")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": LLAMA}
    assert EpisodeFormat(tokenizer, Task([]), [ADD]).syntax == "llama"
    tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("template", "tools", "reason"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
            [ADD],
            "cannot write tools; set --task.templ",
        ),
        (HERMES.replace("<tool_call>", "<do>").replace("tool_call>", "do>"), [ADD], "form that is not known here"),
        (HERMES.replace('"name"', '"tool"'), [ADD], "form that is not known here"),
        (HERMES.replace("{{ m.content }}\n</tool_response>", "</tool_response>"), [ADD], "messages of the role tool"),
        ("{{ messages[0].content }}", [], "leaves out replies"),
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}", [], "refuses the messages"),
    ],
)
def test_a_template_that_cannot_write_episodes_is_refused_at_once(template, tools, reason):
    with pytest.raises(InputError, match=reason) as refused:
        EpisodeFormat(byte_tokenizer(), Task([], template=template), tools)
    assert "\n" not in str(refused.value) and "--task.template" in str(refused.value)


def test_an_episode_needs_a_tokenizer_and_a_message_of_the_user():
    with pytest.raises(InputError, match="has no tokenizer"):
        EpisodeFormat(None, Task([]))
    with pytest.raises(InputError, match="without a message of the user"):
        made("hermes").prompt([{"role": "system", "content": "x"}])
