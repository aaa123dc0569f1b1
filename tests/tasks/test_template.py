"""Prompts become token ids: each template's own text, and one BOS at most."""

import datetime
import signal

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.config import dated
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Table, Task, encode
from jaxrl_llm.tasks.template import RENDERER
from jaxrl_llm.types import Problem

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SUM = Problem("1", ({"role": "user", "content": "1 + 1?"},), "2", "sums")
CHAT = Problem(
    "2",
    (
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ),
    "2",
    "sums",
)


def byte_tokenizer(chat_template=None, bos=True, eos=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    single = ("<bos> " if bos else "") + "$A" + (" <eos>" if eos else "")
    tokenizer.post_processor = processors.TemplateProcessing(single, None, [("<bos>", 0), ("<eos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    )


def text_of(problem, tokenizer, **task):
    return tokenizer.decode(encode(problem, Task(Table("none.jsonl"), **task), tokenizer))


def test_the_tokenizers_own_template_writes_one_bos():
    tokens = encode(SUM, Task(Table("none.jsonl")), byte_tokenizer(WITH_BOS))
    assert tokens.dtype == "int32" and list(tokens).count(0) == 1 and tokens[0] == 0
    assert byte_tokenizer().decode(tokens) == "<bos>[user]1 + 1?[assistant]"


def test_chatml_adds_no_system_message():
    text = text_of(SUM, byte_tokenizer(WITH_BOS), template="chatml")
    assert text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_plain_is_the_contents_after_one_bos():
    assert text_of(SUM, byte_tokenizer(), template="plain") == "<bos>1 + 1?"
    assert text_of(SUM, byte_tokenizer(bos=False), template="plain") == "1 + 1?"
    assert text_of(CHAT, byte_tokenizer(bos=False), template="plain") == "Own.\n\na\n\nb\n\nc"


def test_plain_ends_where_the_answer_begins():
    assert text_of(SUM, byte_tokenizer(eos=True), template="plain") == "<bos>1 + 1?"


def test_plain_does_not_double_a_bos_that_the_text_holds():
    problem = Problem("1", ({"role": "user", "content": "<bos>1"},), "2", "sums")
    assert text_of(problem, byte_tokenizer(), template="plain") == "<bos>1"


def test_jinja_text_is_a_template():
    assert text_of(SUM, byte_tokenizer(), template="Q: {{ messages[0]['content'] }} A:") == "Q: 1 + 1? A:"


def test_system_replaces_and_suffix_follows_the_last_user_message():
    text = text_of(CHAT, byte_tokenizer(bos=False), template="plain", system="New.", suffix=" Box it.")
    assert text == "New.\n\na\n\nb\n\nc Box it."
    assert CHAT.prompt[-1]["content"] == "c"
    assert text_of(SUM, byte_tokenizer(bos=False), template="plain", system="New.") == "New.\n\n1 + 1?"


CLOCK = """{% if strftime_now is defined %}{% set day = strftime_now( '%d %B %Y') %}{% endif %}
{{- day }}, {{ strftime_now("%H:%M") }}"""


def test_a_template_that_reads_the_clock_is_told_the_tasks_date():
    assert text_of(SUM, byte_tokenizer(CLOCK, bos=False), date="2024-02-29") == "29 February 2024, 00:00"
    assert text_of(SUM, byte_tokenizer(bos=False), template=CLOCK, date="2024-02-29") == "29 February 2024, 00:00"
    assert text_of(SUM, byte_tokenizer(CLOCK, bos=False)).startswith(f"{datetime.date.today():%d %B %Y}")
    with pytest.raises(InputError, match="reads the clock by a format that it computes"):
        text_of(SUM, byte_tokenizer("{% set f = '%d' %}{{ strftime_now(f) }}"), date="2024-02-29")


def test_a_task_that_says_its_date_keeps_it():
    assert dated(Task(Table("none.jsonl")), "2025-07-01").date == "2025-07-01"
    assert dated(Task(Table("none.jsonl"), date="2024-02-29"), "2025-07-01").date == "2024-02-29"


@pytest.mark.parametrize(
    ("tokenizer", "template", "message"),
    [
        (None, "tokenizer", "no tokenizer"),
        (byte_tokenizer(), "tokenizer", "no chat template; set --task.template plain"),
        (byte_tokenizer(), "chatlm", "template 'chatlm' is unknown"),
        (byte_tokenizer(), "{% for %}", "the chat template refuses"),
        (byte_tokenizer("{{ raise_exception('no system role') }}"), "tokenizer", "refuses .*no system role"),
    ],
)
def test_what_cannot_be_templated_is_refused(tokenizer, template, message):
    with pytest.raises(InputError, match=message):
        encode(SUM, Task(Table("none.jsonl"), template=template), tokenizer)


@pytest.fixture(scope="module")
def ignored():
    """The process that renders begins here, as where libtpu is loaded, which ignores the signal of a timer.

    It stays ignored: where libtpu has set that timer, its signal would end the process.
    """
    RENDERER.__init__()
    signal.signal(signal.SIGPROF, signal.SIG_IGN)


FAN = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
DOUBLED = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FAN, "it takes more than 2 s"),
        (DOUBLED, "it takes more than 512 MiB"),
        ("{{ 'x' * 10 ** 9 }}", "it takes more than 512 MiB"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "it writes more than 4194304 characters"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError: 'utf-8' codec can't encode"),
    ],
)
def test_a_template_that_would_not_end_or_fill_the_memory_is_refused_and_the_next_one_is_rendered(
    template, reason, ignored
):
    for _ in range(2):  # at once the second time
        with pytest.raises(InputError, match=rf"^the chat template refuses the messages \({reason}") as refused:
            encode(SUM, Task(Table("none.jsonl")), byte_tokenizer(template))
    assert str(refused.value).endswith("change --task.system or --task.template")
    assert text_of(SUM, byte_tokenizer(WITH_BOS)) == "<bos>[user]1 + 1?[assistant]"
