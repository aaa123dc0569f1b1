"""What is learned of a chat: its prompt is a task's, and what the assistant says ends where a completion would."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data import Pairs, Steps, Texts, load_texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.tasks import Table, Task, encode
from jaxrl_llm.types import Problem

TINY = tiny_tokenizer()
STOP = (TINY.eos_token_id,)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'system' %}<<{{ m['content'] }}>>"
    "{% else %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def says(content):
    return {"role": "assistant", "content": content}


TALK = [user("q"), says("a"), user("r"), says("b")]


def one(rows, stop=STOP, tokenizer=TINY, kind=Texts, **settings):
    (row,) = load_texts(kind([rows], **settings), tokenizer, stop).train
    return row


def shown(row, tokenizer=TINY):
    """Prompt, all that follows, and what is learned of it, as text."""
    return tokenizer.decode(row.prompt), tokenizer.decode(row.tokens), tokenizer.decode(row.tokens[row.mask])


@pytest.mark.parametrize("wording", [
    {}, {"template": "chatml", "system": "Be brief."}, {"template": "plain", "suffix": " Think."},
    {"template": BRACKETS, "system": "S", "suffix": "!"},
    {"template": "{{ strftime_now('%Y') }} {{ messages[-1]['content'] }}:", "date": "2024-02-29"},
])  # fmt: skip
@pytest.mark.parametrize("prompt", [[user("1 + 1?")], [{"role": "system", "content": "Own."}, *TALK[:3]]])
def test_a_prompt_is_written_as_that_of_a_task_with_the_same_settings(wording, prompt):
    asked = encode(Problem("1", tuple(prompt), "2", "sums"), Task(Table("none.jsonl"), **wording), TINY)
    learned = one({"prompt": prompt, "completion": "two"}, **wording)
    pair = one({"prompt": prompt, "chosen": "two", "rejected": "2"}, kind=Pairs, **wording)
    steps = one({"prompt": prompt, "completions": ["two"], "labels": [1]}, kind=Steps, **wording)
    for row in (learned, pair, steps):
        assert row.prompt.dtype == "int32" and row.prompt.tolist() == asked.tolist()
    said = " two " if wording.get("template") == BRACKETS else "two"
    for tokens in (learned.tokens, pair.completions[0]):
        assert tokens.dtype == "int32" and tokens.tolist() == [*TINY(said)["input_ids"], *STOP]
    assert learned.mask.dtype == bool and learned.mask.all()


def test_a_text_prompt_is_a_message_of_the_user():
    plain, chat = one({"prompt": "q", "completion": "a"}), one({"prompt": [user("q")], "completion": [says("a")]})
    both = one({"messages": TALK[:2]})
    assert shown(plain) == shown(chat) == shown(both) and plain.id == chat.id == both.id


def test_every_turn_of_the_assistant_is_learned_with_its_end():
    row = one({"messages": TALK})
    prompt, follows, learned = shown(row)
    assert prompt == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert learned == "a<|im_end|>b<|im_end|>"
    whole = TINY.apply_chat_template(TALK, tokenize=False)
    assert prompt + follows + "\n" == whole
    assert [*row.prompt, *row.tokens, *TINY("\n")["input_ids"]] == TINY(whole)["input_ids"]
    turn = len("a") + 1
    glue = TINY("\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert row.mask.tolist() == [True] * turn + [False] * len(glue) + [True] * turn
    more = one({"messages": [*TALK, user("s"), says("c")]})
    assert more.mask.tolist() == row.mask.tolist() + [False] * len(glue) + [True] * turn


def test_turns_before_the_completion_are_not_learned():
    assert shown(one({"prompt": TALK[:3], "completion": TALK[3:]}))[2] == "b<|im_end|>"
    assert shown(one({"prompt": TALK[:1], "completion": TALK[1:]})) == shown(one({"messages": TALK}))


def test_what_the_assistant_says_before_it_is_asked_belongs_to_the_prompt():
    prompt, _, learned = shown(one({"messages": [says("Hi."), *TALK]}))
    assert prompt.startswith("<|im_start|>assistant\nHi.<|im_end|>") and learned == "a<|im_end|>b<|im_end|>"


def test_system_and_suffix_are_those_of_the_prompt():
    prompt, follows, _ = shown(one({"messages": TALK}, template=BRACKETS, system="S", suffix="!"))
    assert prompt == "<<S>>[INST] q! [/INST]" and "[INST] r [/INST]" in follows


def test_white_space_and_the_end_of_a_turn_are_as_the_template_writes_them():
    chat = [user("q"), says("a \n"), user("r"), says(" b")]
    assert shown(one({"messages": chat}, template=BRACKETS)) == (
        "[INST] q [/INST]", " a <|im_end|>[INST] r [/INST] b <|im_end|>", " a <|im_end|> b <|im_end|>",
    )  # fmt: skip
    assert shown(one({"messages": chat}))[2] == "a \n<|im_end|> b<|im_end|>"
    assert one({"prompt": "q", "completion": " a \n"}).tokens.tolist() == [*TINY(" a \n")["input_ids"], *STOP]
    lines = "{% for m in messages %}{{ m['content'] | trim }}\n{{ eos_token }}{% endfor %}"
    talk = [user("q"), says("a\n"), user("r"), says("b")]
    assert shown(one({"messages": talk}, template=lines))[2] == "a\n<|im_end|>b\n<|im_end|>"


def test_a_turn_ends_with_a_token_at_which_completions_stop():
    row = {"prompt": "q", "completion": "a"}
    other = TINY.convert_tokens_to_ids("<|im_start|>")
    written = "{% for m in messages %}{{ m['content'] }}<|im_start|>{% endfor %}"
    asked = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}<|im_end|>{% endif %}{% endfor %}"
    for stop, template, end in [
        (STOP, "chatml", STOP[0]), ((other, *STOP), "chatml", STOP[0]), ((other, *STOP), written, other),
        (STOP, written, STOP[0]), ((other,), "plain", other), ((other, *STOP), "plain", STOP[0]),
        ((), "chatml", STOP[0]), (STOP, asked, STOP[0]),
    ]:  # fmt: skip
        assert one(row, stop, template=template).tokens.tolist() == [*TINY("a")["input_ids"], end]


def test_a_template_that_ends_turns_with_no_stop_token_teaches_only_the_last_end():
    prompt, follows, learned = shown(one({"messages": TALK}, template=UNMARKED))
    assert (prompt, follows) == ("[user]q[assistant]", "a[user]r[assistant]b<|im_end|>")
    assert learned == "ab<|im_end|>"


def test_what_a_template_adds_to_the_last_turn_only_is_left_out():
    assert shown(one({"messages": TALK}, template=FORGETS))[2] == "a<|im_end|>b<|im_end|>"
    thought = "<think>2</think>b"
    assert shown(one({"prompt": "q", "completion": thought}, template=FORGETS))[2] == f"{thought}<|im_end|>"


def test_a_template_that_rewrites_an_earlier_turn_is_refused():
    chat = [user("q"), says("<think>1</think>a"), *TALK[2:]]
    with pytest.raises(InputError, match=r"rows\[0\]: the chat template rewrites .* '<think>1</think>a'") as caught:
        one({"messages": chat}, template=FORGETS)
    assert "\n" not in str(caught.value)
    counts = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    with pytest.raises(InputError, match=r"rows\[0\]: the chat template rewrites .* 'a'"):
        one({"messages": TALK}, template=counts)
    assert shown(one({"messages": TALK[:2]}, template=counts)) == ("1q<|im_end|>", "a<|im_end|>", "a<|im_end|>")
    with pytest.raises(InputError, match=r"rows\[0\]: template plain marks no turns"):
        one({"messages": TALK}, template="plain")
    with pytest.raises(InputError, match=r"rows\[0\]: the chat template refuses .*change Texts.system or Texts.temp"):
        one({"messages": TALK}, template="{{ raise_exception('no') }}")


def test_a_template_that_raises_whatever_it_likes_is_refused_with_the_row():
    for template, reason in (("{{ messages + 1 }}", "TypeError: can only"), ("{{ 1 / 0 }}", "ZeroDivisionError: ")):
        with pytest.raises(InputError, match=rf"rows\[0\]: the chat template refuses the messages .{reason}") as caught:
            one({"messages": TALK}, template=template)
        assert "\n" not in str(caught.value)
    task = Task(Table("none.jsonl"), template="{{ messages + 1 }}")
    asked = Problem("1", tuple(TALK[:1]), "2", "sums", metadata={"row": "sums.jsonl:3"})
    with pytest.raises(InputError, match=r"sums.jsonl:3: the chat template refuses .*TypeError.*change --task.system"):
        encode(asked, task, TINY)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' and m['reasoning_content'] %}"
    "<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Writes the last thought only, as Qwen3's does."""


def test_a_thought_is_learned_as_the_template_writes_it():
    thinks = says("b") | {"reasoning_content": "t"}
    assert shown(one({"messages": [*TALK[:3], thinks]}, template=THINKS))[2] == (
        "a<|im_end|><think>\nt\n</think>\n\nb<|im_end|>"
    )
    pair = one({"prompt": "q", "chosen": [thinks], "rejected": "b"}, kind=Pairs, template=THINKS)
    assert [TINY.decode(tokens) for tokens in pair.completions] == [
        "<think>\nt\n</think>\n\nb<|im_end|>",
        "b<|im_end|>",
    ]
    with pytest.raises(InputError, match=r"rows\[0\]: the chat template rewrites the assistant's earlier turn 'b'"):
        one({"messages": [TALK[0], thinks, *TALK[2:]]}, template=THINKS)
    row = {"prompt": "q", "completion": [thinks], "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(InputError, match=r"rows\[0\]: the chat template does not write the thought 't'"):
        one(row, template=THINKS)


def test_what_a_row_tells_the_template_is_in_its_prompt():
    row = {"prompt": "q", "completion": "a"}
    usual, told = (
        shown(one(row | {"chat_template_kwargs": options}, template=THINKS))
        for options in (None, {"enable_thinking": False, "other": None})
    )
    assert told[0] == usual[0] + "<think>\n\n</think>\n\n" and told[1:] == usual[1:]
    with pytest.raises(InputError, match=r"multiple values .*the row's template options .add_generation_prompt"):
        one(row | {"chat_template_kwargs": {"add_generation_prompt": False}}, template=THINKS)


def test_a_message_without_weight_is_not_learned():
    weighted = [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 1}]
    row, usual = one({"messages": weighted}), one({"messages": TALK})
    assert shown(row) == (*shown(usual)[:2], "b<|im_end|>") and row.id == usual.id
    with pytest.raises(InputError, match="a message has weight 0, and learn 'all' learns all"):
        one({"messages": weighted}, learn="all")


@pytest.mark.parametrize("learn", ["completion", "all", "trl"])
@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_an_end_is_never_learned_twice(learn, template):
    for bare, ended in (
        ({"text": "ab"}, {"text": "ab<|im_end|>"}),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a<|im_end|>\n<|im_end|>"}),
        ({"messages": TALK[:2]}, {"messages": [user("q"), says("a<|im_end|> ")]}),
    ):
        row, usual = (one(each, learn=learn, template=template) for each in (ended, bare))
        assert [*row.prompt, *row.tokens] == [*usual.prompt, *usual.tokens]
    if template == "chatml":
        ended = [TALK[0], says("a<|im_end|>"), TALK[2], says("b<|im_end|>")]
        assert shown(one({"messages": ended}, learn=learn)) == shown(one({"messages": TALK}, learn=learn))
    kinds = {"chosen": "a<|im_end|>", "rejected": "b"}, {"completions": ["a", "b<|im_end|>"], "labels": [1, 1]}
    for kind, columns in zip((Pairs, Steps), kinds, strict=True):
        row = one({"prompt": "q"} | columns, kind=kind, template=template)
        assert list(row.completions[0] if kind is Pairs else row.tokens).count(STOP[0]) == 1


def test_the_reading_of_trl_is_that_of_its_trainer():
    # by hand, as SFTTrainer's tokenize_fn does it
    row = one({"messages": TALK}, learn="trl")
    assert [*row.prompt, *row.tokens] == TINY.apply_chat_template(TALK, return_dict=False)
    assert len(row.prompt) == 1 and row.mask.all() and row.id == one({"messages": TALK}).id
    row = one({"prompt": TALK[:1], "completion": TALK[1:2]}, learn="trl")
    asked = TINY.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    assert row.prompt.tolist() == asked and row.mask.all()
    assert [*asked, *row.tokens] == TINY.apply_chat_template(TALK[:2], return_dict=False)
    row = one({"prompt": "q:", "completion": " a"}, learn="trl")
    assert row.prompt.tolist() == TINY("q:")["input_ids"] and row.tokens.tolist() == [*TINY(" a")["input_ids"], *STOP]
    # where a token lies across the border the completion begins with it
    tokenizer = words(["▁a:", "▁b", "▁a:b", "a:", "b", "▁c"], begin=True)
    row = one({"prompt": "a:", "completion": "b"}, stop=(1,), tokenizer=tokenizer, learn="trl")
    assert tokenizer.convert_ids_to_tokens(row.prompt) == ["<s>"]
    assert tokenizer.convert_ids_to_tokens(row.tokens) == ["▁a:b", "</s>"]
    with pytest.raises(InputError, match="template plain marks no turns"):
        one({"messages": TALK}, learn="trl", template="plain")


def test_a_plain_text_is_learned_from_its_second_token_to_its_end():
    for settings in ({}, {"template": "plain"}, {"template": UNMARKED, "learn": "all"}):
        row = one({"text": "abc"}, **settings)
        assert shown(row) == ("a", "bc<|im_end|>", "bc<|im_end|>") and row.length == 4


def test_all_of_a_row_is_learned_on_demand():
    row, usual = one({"messages": TALK}, learn="all"), one({"messages": TALK})
    assert [*row.prompt, *row.tokens] == [*usual.prompt, *usual.tokens]
    assert len(row.prompt) == 1 and row.mask.all() and row.id == usual.id


def words(pieces, begin=False):
    """A tokenizer of whole pieces of text; one that begins each text with <s> where it is to."""
    tokenizer = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(["<s>", "</s>", *pieces])}, "<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_plain_begins_with_bos_and_ends_with_eos():
    tokenizer = words(["▁a", "▁b"], begin=True)
    row = one({"prompt": "a", "completion": " b"}, stop=(1,), tokenizer=tokenizer, template="plain")
    assert (row.prompt.tolist(), row.tokens.tolist()) == ([0, 2], [3, 1])
    row = one({"text": "a b"}, stop=(1,), tokenizer=tokenizer)
    assert (row.prompt.tolist(), row.tokens.tolist()) == ([0], [2, 3, 1])


def test_a_piece_is_tokenised_where_it_stands():
    # a text of its own begins with a space here, what follows another text does not
    tokenizer = words(["▁a:", "▁b", "▁a:b", "a:", "b", "▁c"])
    spaced = one({"prompt": "a:", "completion": " b"}, stop=(1,), tokenizer=tokenizer, template="plain")
    assert tokenizer.convert_ids_to_tokens(spaced.tokens) == ["▁b", "</s>"]
    # after a special token there is no such space
    marked = "{% for m in messages %}{{ m['content'] }}{{ '<s>' if m['role'] == 'user' else '</s>' }}{% endfor %}"
    follows = one({"prompt": "a:", "completion": "b"}, stop=(1,), tokenizer=tokenizer, template=marked)
    assert tokenizer.convert_ids_to_tokens([*follows.prompt, *follows.tokens]) == ["▁a:", "<s>", "b", "</s>"]
    # the piece and the text before it are one token together: it is tokenised by itself
    joined = one({"prompt": "a:", "completion": "b"}, stop=(1,), tokenizer=tokenizer, template="plain")
    assert tokenizer.convert_ids_to_tokens([*joined.prompt, *joined.tokens]) == ["▁a:", "▁b", "</s>"]
    row = {"prompt": "a:", "completions": ["a:", "b"], "labels": [1, 1]}
    steps = one(row, stop=(1,), tokenizer=tokenizer, kind=Steps, template=marked, separator="")
    assert tokenizer.convert_ids_to_tokens(steps.tokens) == ["a:", "▁b", "</s>"]


def test_steps_end_with_their_separators_and_the_last_before_the_end_of_the_turn():
    row = one({"prompt": "q", "completions": ["1 + 1", "= 2", "so 2"], "labels": [True, 0.25, 0]}, kind=Steps)
    assert TINY.decode(row.tokens) == "1 + 1\n= 2\nso 2<|im_end|>"
    assert row.ends.dtype == "int32" and row.ends.tolist() == [5, 9, 13] and len(row.tokens) == 15
    assert row.labels.dtype == "float32" and row.labels.tolist() == [1.0, 0.25, 0.0]
    other = one({"prompt": "q", "completions": ["1", "2"], "labels": [1, 0]}, kind=Steps, separator=" ##\n")
    assert TINY.decode(other.tokens) == "1 ##\n2<|im_end|>" and other.ends.tolist() == [4, 5]
    none = one({"prompt": "q", "completions": ["1", "2"], "labels": [1, 0]}, kind=Steps, separator="")
    assert none.ends.tolist() == [0, 1]


def test_a_model_that_cannot_be_written_for_is_refused():
    bare = words(["▁a"])
    for tokenizer, stop, settings, message in [
        (None, STOP, {}, "no tokenizer"),
        (bare, (1,), {}, r"rows\[0\]: the tokenizer has no chat template; set Texts.template plain"),
        (bare, (1,), {"template": "chatlm"}, "template 'chatlm' is unknown"),
        (PreTrainedTokenizerFast(tokenizer_object=bare.backend_tokenizer), (), {"template": "plain"}, "names a token"),
    ]:
        with pytest.raises(InputError, match=message):
            one({"prompt": "a", "completion": "a"}, stop=stop, tokenizer=tokenizer, **settings)
