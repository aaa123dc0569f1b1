"""Data of the supervised stages: rows to learn from, as values, and their encoding as token ids."""

from jaxrl_llm.data.datasets import Collected, Data, Example, Pairs, Ranked, Stepped, Steps, Text, Texts, longest
from jaxrl_llm.data.loading import LoadedTexts, check_collected, check_texts, load_texts

__all__ = [
    "Collected",
    "Data",
    "Example",
    "LoadedTexts",
    "Pairs",
    "Ranked",
    "Stepped",
    "Steps",
    "Text",
    "Texts",
    "check_collected",
    "check_texts",
    "load_texts",
    "longest",
]
