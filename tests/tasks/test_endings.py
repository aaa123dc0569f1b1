"""Answers as what scores them reads them: to the end of what the chat template writes after them."""

import numpy as np
import pytest
from tasks.test_turns import BRACKETS, FORGETS, STOP, TALK, TINY, UNMARKED, says

from jaxrl_llm.data import Pairs, load_texts
from jaxrl_llm.tasks import Table, Task
from jaxrl_llm.tasks.chats import ChatEncoder, close_completion
from jaxrl_llm.tasks.template import CHATML, template_fingerprint
from jaxrl_llm.types import Completion

TAILED = "{% for m in messages %}{{ m['content'] }}{{ eos_token }} ;{% endfor %}"


def completion(tokens, reason):
    size = len(tokens)
    return Completion(np.asarray(tokens, np.int32), np.zeros(size), reason, np.ones(size, bool), np.zeros(size))


@pytest.mark.parametrize("template", ["chatml", "tokenizer", BRACKETS, UNMARKED, TAILED, FORGETS])
def test_an_answer_that_is_scored_ends_as_transformers_writes_the_messages(template):
    text = {"chatml": CHATML, "tokenizer": None}.get(template, template)
    answers = ["two", "2!", "<think>1</think>a" if template == FORGETS else "a\nb"]
    row = {"prompt": TALK[:3], "completions": answers, "rejected_cut_off": True}
    before, closed_ones = (
        load_texts(Pairs([row], template=template), TINY, STOP, closes=closes).train[0] for closes in (False, True)
    )
    assert closed_ones.prompt.tolist() == before.prompt.tolist()
    assert closed_ones.completions[-1].tolist() == before.completions[-1].tolist(), (
        "cut off, so nothing is written after"
    )
    closing = ChatEncoder(Task(Table("none.jsonl"), template=template), TINY, (), {}).closing
    for said, usual, tokens in zip(answers[:2], before.completions, closed_ones.completions, strict=False):
        whole = TINY.apply_chat_template([*TALK[:3], says(said)], chat_template=text, return_dict=False)
        if template == FORGETS:  # what a template puts before the last answer only is left out of it
            whole = TINY(TINY.decode(whole).replace("<think></think>", ""))["input_ids"]
        assert [*closed_ones.prompt, *tokens] == whole
        answer = tokens[: len(tokens) - len(closing)]
        stops = (STOP[0], TINY.convert_tokens_to_ids("<|im_start|>"))
        for ids in (usual, *([*answer, stop] for stop in stops)):
            assert [*before.prompt, *close_completion(completion(ids, "stop"), closing)] == whole
        assert [*close_completion(completion(answer, "length"), closing)] == [*answer]


def test_a_plain_answer_that_is_scored_ends_with_the_text():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    found = [load_texts(Pairs([row], template="plain"), TINY, STOP, closes=closes).train[0] for closes in (False, True)]
    assert [[*tokens] for tokens in found[0].completions] == [[*tokens] for tokens in found[1].completions]
    assert [*found[1].prompt, *found[1].completions[0]] == TINY("qa<|im_end|>")["input_ids"]
    made = completion(found[0].completions[0], "stop")
    assert (
        close_completion(made, ChatEncoder(Task(Table("none.jsonl"), template="plain"), TINY, (), {}).closing)
        is made.tokens
    )


def test_templates_have_equal_fingerprints_where_they_write_chats_alike():
    dated = "{{ strftime_now('%Y') }}" + CHATML
    computed = "{% set how = '%Y' %}{{ strftime_now(how) }}"
    alike = [template_fingerprint(text, TINY) for text in ("chatml", "tokenizer", CHATML, CHATML + "{# said #}")]
    others = [template_fingerprint(text, TINY) for text in ("plain", BRACKETS, UNMARKED, FORGETS, dated, computed)]
    assert len(set(alike)) == 1 and len({*alike, *others}) == 7
    assert template_fingerprint(computed + " ", TINY) != others[-1], "what cannot be written is known by its text"
    assert template_fingerprint(dated, TINY) == others[-2]
