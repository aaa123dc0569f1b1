"""Hostile input: all that reads what strangers wrote gives a value or an ``InputError``, soon, and executes nothing."""

import json
import os
import random
from pathlib import Path

import pytest
from campaigns.chats import Fuzz, stops_of, with_control_tokens
from campaigns.extent import PATIENCE_S, SEED, TIMES
from campaigns.readers import TARGETS
from commands import ROOT, forked
from environments.chat_templates import TEMPLATES, byte_tokenizer

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(PATIENCE_S)]
INPUTS = 300
EPISODES = 100
OURS = [name for name in TEMPLATES if name != "deepseek"]
"""That one writes no calls of a message with an empty text."""
PUBLISHED = sorted(Path(os.environ.get("CAMPAIGN_TEMPLATES", "/nowhere")).glob("*.jinja"))
"""Chat templates in a folder, as the wheel of TRL 1.16.0 has them."""


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_are_read_or_refused(name):
    program = "import runpy; runpy.run_module('campaigns.fuzzing', run_name='__main__')"
    place = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    answer = forked(program, "", ROOT, [name, str(INPUTS * TIMES), str(SEED)], PYTHONPATH=place)
    assert answer.code == 0, answer.err
    refused, findings = json.loads(answer.out.splitlines()[-1])
    assert findings == []
    assert refused < INPUTS * TIMES, "not even sound input is read"


@pytest.mark.parametrize("name", [*OURS, *map(str, PUBLISHED)])
def test_every_sampled_token_of_an_episode_is_kept_and_all_else_is_the_templates(name):
    if name in TEMPLATES:
        (template, stops), tokenizer = TEMPLATES[name], byte_tokenizer()
    else:
        template, stops = Path(name).read_text(), stops_of(Path(name).stem)
        tokenizer = with_control_tokens(byte_tokenizer(), template, stops)
    fuzz = Fuzz(template, stops, tokenizer)
    for number in range(EPISODES * TIMES):
        fuzz.episode(random.Random(f"{SEED} {number}"))
    wrong = ["changed", "unfed", "unlike", "untailed", "control", "misread", "misheard"]
    wrong += ["joined"] * (name in TEMPLATES)  # others write their own characters around contents
    assert {kind: fuzz.counts[kind] for kind in wrong} == dict.fromkeys(wrong, 0)
    assert fuzz.counts["replies"] > EPISODES and fuzz.counts["contents"] > EPISODES
