"""Data of the supervised stages: rows to learn from, as values, and their encoding as token ids."""

from jaxrl_llm.data.datasets import (
    Collected,
    Judged,
    Pairs,
    Ranked,
    Stepped,
    Steps,
    Text,
    Texts,
    Unpaired,
    check_collected,
    load_texts,
    longest,
)
