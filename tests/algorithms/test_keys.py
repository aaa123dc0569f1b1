"""No published number goes unread: every key is in a test, or here with the reason why not."""

import ast
from pathlib import Path

from oracles import NUMBERS

UNREAD = {
    "ARPO_reward": "a reward of tool use, which belongs to a task",
    "Kimi_prior_sampling": "choosing prompts is the trainer's",
    "Kimi_long2short_dpo": "choosing pairs from samples is the data's",
}
"""Keys that no piece of the algorithms computes."""


def read_keys():
    """Keys that string constants of the other test files name, alone or as the head of a path."""
    for path in Path(__file__).parents[1].rglob("*.py"):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value.partition("/")[0]


def test_every_key_is_tested_or_listed():
    read = set(read_keys()) & set(NUMBERS)
    assert not set(UNREAD) - set(NUMBERS), "keys that the file does not hold"
    assert set(NUMBERS) - read == set(UNREAD)
