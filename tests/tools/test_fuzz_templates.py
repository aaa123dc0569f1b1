"""The fuzz over chat templates: nothing is wrong with ours, and a format that errs is found out."""

import random
import sys
from pathlib import Path

import pytest
from environments.chat_templates import TEMPLATES, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from fuzz_templates import Fuzz

pytestmark = pytest.mark.slow

WRONG = ("changed", "unfed", "unlike", "untailed", "control", "misread", "joined", "misheard")


def ran(name, episodes, form=lambda form: form):
    template, stops = TEMPLATES[name]
    fuzz = Fuzz(template, stops, byte_tokenizer())
    fuzz.form = form(fuzz.form)
    for seed in range(episodes):
        fuzz.episode(random.Random(seed))
    return fuzz.counts


@pytest.mark.parametrize("name", ["gemma", "glm", "hermes", "llama"])
def test_nothing_is_wrong(name):
    counts = ran(name, 8)
    assert {kind: counts[kind] for kind in WRONG} == dict.fromkeys(WRONG, 0)
    assert counts["episodes"] == 8 and counts["calls"] > 5 and counts["whole"] > 2 and counts["contents"] > 10


class Erring:
    """A format that adds the tokenizer's control token to suffixes, misses contents, and reads no calls."""

    def __init__(self, form):
        self.form, self.prompt, self.syntax = form, form.prompt, form.syntax

    def suffix(self, turns, messages, sampled):
        harmless = {message["content"] for message in messages} == {"x"}
        return [*self.form.suffix(turns, messages, sampled), *([] if harmless else [1])]

    def said(self, turns, messages, sampled, suffix):
        return [(begin + 5, end) for begin, end in self.form.said(turns, messages, sampled, suffix)]

    def parse(self, tokens, before):
        return self.form.parse(tokens[:2], before)


def test_what_is_wrong_is_counted():
    counts = ran("hermes", 8, Erring)
    assert (
        all(counts[kind] for kind in ("unlike", "untailed", "control", "misread", "misheard")) and counts["anew"] == 8
    )
